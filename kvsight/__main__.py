"""The `kvsight` command, and `python -m kvsight`."""

import os
import signal


def main() -> None:
    """Entry point. Signals during the imports end the process without a traceback."""
    is_first_of_container = os.getpid() == 1  # for which the kernel has no default action
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end if is_first_of_container else signal.SIG_DFL)
    from kvsight.cli.main import run

    run()


def _end(number: int, _: object) -> None:
    os._exit(128 + number)


if __name__ == "__main__":
    main()
