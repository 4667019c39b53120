"""`kvsight version`"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from typing import Annotated

import typer

from kvsight.cli.console import out, print_json


def version(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print the versions of kvsight and its dependencies."""
    versions = {
        "kvsight": installed("kvsight"),
        "python": platform.python_version(),
        **{package: _installed(package) for package in ("numba", "numpy", "aiokafka", "fastapi")},
    }
    if as_json:
        print_json(versions)
    else:
        for name, value in versions.items():
            out.print(f"{name:8} {value}", highlight=False)


def _installed(package: str) -> str:
    try:
        return installed(package)
    except PackageNotFoundError:
        return "not installed"
