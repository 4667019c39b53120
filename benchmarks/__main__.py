"""All benchmarks, one after the other: `python -m benchmarks [--json FILE] [NAME ...]`"""

import argparse
import json
from importlib import import_module
from pathlib import Path

from benchmarks.report import Figure, as_json, show

NAMES = (
    "index",
    "replay",
    "restart",
    "explain",
    "publish",
    "radix",
    "tiers",
    "unified",
    "storage",
    "bridge",
    "http",
    "select",
    "hostile",
    "page",
    "end_to_end",
    "freshness",
    "scale",
    "simulation",
)


def main() -> None:
    """Run the named benchmarks, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(NAMES)}")
    arguments = parser.parse_args()
    figures: dict[str, list[Figure]] = {}
    for name in arguments.names or NAMES:
        if name not in NAMES:
            parser.error(f"NAME: got {name!r}, expected some of {', '.join(NAMES)}")
        figures[name] = import_module(f"benchmarks.bench_{name}").run()
        show(name, figures[name])
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(figures), indent=2) + "\n")


if __name__ == "__main__":
    main()
