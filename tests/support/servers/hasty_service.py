"""`kvsight`, whose service gives up silent connections and bodies that stop sooner than usual.

Usage: `python -m tests.support.servers.hasty_service serve ...`, or `ServiceProcess(folder, module=HASTY)`.
"""

from api.fast import http_limits, tls_handshakes
from kvsight.__main__ import main

HASTY = "tests.support.servers.hasty_service"

if __name__ == "__main__":
    http_limits.HEAD_S = tls_handshakes.HEAD_S = 3.0
    http_limits.STEP_S = 1.0
    main()
