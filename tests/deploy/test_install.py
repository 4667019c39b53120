"""An editable install, as `make` makes it."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[2]
BUILD = "import sys, setuptools.build_meta as b; b.build_editable(sys.argv[1], {'editable_mode': sys.argv[2]})"
SCRIPT = """\
import site, sys
site.addsitedir(sys.argv[1])
from kvsight import Client
print(sys.modules["kvsight"].__file__)
"""


def test_a_clone_beside_a_script_does_not_hide_the_installed_package(tmp_path: Path) -> None:
    (mode,) = re.findall(r"editable_mode=(\w+)", (ROOT / "Makefile").read_text())
    project, site, beside = tmp_path / "project", tmp_path / "site", tmp_path / "beside"
    project.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    for name in ("kvsight", "kv_events"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", BUILD, str(tmp_path), mode], cwd=project, check=True, capture_output=True)
    with ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    (beside / "kvsight" / "kvsight").mkdir(parents=True)
    (beside / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")}  # dependencies, without its .pth files
    done = subprocess.run(
        [sys.executable, "-S", str(beside / "script.py"), str(site)], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"{project}/kvsight/__init__.py\n"), done.stderr
