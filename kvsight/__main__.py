"""`python -m kvsight`"""

from kvsight.cli.main import run

if __name__ == "__main__":
    run()
