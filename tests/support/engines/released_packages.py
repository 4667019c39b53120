"""Released packages of other projects for tests. They are cached in `~/.cache/kvsight`."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.made_once import locked, made_once

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvsight"
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
_DOWNLOAD_S = 90
_INSTALL_S = 400  # of hundreds of MB


def files_of(package: str, version: str, names: Sequence[str]) -> Path:
    """Return a folder with some files of a wheel. The wheel itself, often hundreds of MB, is not kept.

    Skips the test if pip cannot download it.
    """
    folder = CACHE / f"{package}-{version}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        if not all((folder / name).is_file() for name in names):
            with tempfile.TemporaryDirectory() as place:
                command = (*_PIP, "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:", "-d", place)
                _run_pip([*command, f"{package}=={version}"], f"{package} {version}")
                with zipfile.ZipFile(next(Path(place).glob("*.whl"))) as wheel:
                    for name in names:
                        wheel.extract(name, folder)
    return folder


def installed(package: str, version: str) -> Path:
    """Return a folder with a package installed without dependencies. Skips the test if pip cannot download it."""

    def install(staging: Path) -> Path:
        target = staging / "installed"
        command = (*_PIP, "install", "--no-deps", "--no-compile", "--target", str(target))
        _run_pip([*command, f"{package}=={version}"], f"{package} {version}")
        return target

    return made_once(CACHE / f"{package}-{version}", install)


def environment(name: str, requirements: Sequence[str]) -> Path:
    """Return the Python of a new environment with some packages and all that they need.

    name: of its folder. Skips the test if pip cannot install them.
    """
    folder = CACHE / name
    python, is_complete = folder / "bin" / "python", folder / "complete"
    CACHE.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        if not is_complete.exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            command = (str(python), *_PIP[1:], "install", *requirements)
            _run_pip(command, name, limit_s=_INSTALL_S)
            is_complete.touch()
    return python


def load_module(path: Path, name: str) -> ModuleType:
    """Import one file as a module of that name, outside its package."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run_pip(command: Sequence[str], what: str, limit_s: float = _DOWNLOAD_S) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=limit_s)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"pip cannot get {what}: {error.stderr.strip().splitlines()[-1:]}")
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip did not get {what} within {limit_s:g} s")
