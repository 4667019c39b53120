"""The `kvsight` command, and `python -m kvsight`."""

import signal


def main() -> None:
    """Entry point. Ctrl-C during the imports ends the process without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvsight.cli.main import run

    run()


if __name__ == "__main__":
    main()
