"""The command whose service waits three seconds for a head and one for a part of a body, for `HastyService`."""

from api.fast import http_limits
from kvsight.__main__ import main

if __name__ == "__main__":
    http_limits.HEAD_S = 3.0  # type: ignore[attr-defined]
    http_limits.STEP_S = 1.0
    main()
