"""The real LiteLLM, in an environment of its own with what kvsight's client needs: 900 MB."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import yaml

from tests.support.engines.released_packages import environment
from tests.support.servers.child_process import ChildProcess, free_port

VERSION = "1.108.7"
ROOT = Path(__file__).resolve().parents[3]
_KEY = "sk-0123456789abcdef0123456789abcdef"
HEADERS = {"Authorization": f"Bearer {_KEY}"}
MODEL = "chat"


def litellm_python() -> Path:
    """Return a Python with LiteLLM. Skips the test if it cannot be installed."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return environment(f"litellm-{VERSION}", [*needed, f"litellm[proxy]=={VERSION}"])


def variables(kvsight: str) -> dict[str, str]:
    """Return variables for a process of LiteLLM. The last one keeps it from asking the network for prices."""
    return {"PYTHONPATH": str(ROOT), "KVSIGHT_URL": kvsight, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def model_list(engines: Sequence[str]) -> list[dict[str, Any]]:
    """Return a deployment for each address of an engine."""
    params = ({"model": "hosted_vllm/m", "api_base": f"{url}/v1", "api_key": "none"} for url in engines)
    return [{"model_name": MODEL, "litellm_params": each} for each in params]


class LiteLLMProxy:
    """`with LiteLLMProxy(folder, kvsight, engines) as proxy:`"""

    def __init__(self, folder: Path, kvsight: str, engines: Sequence[str], more: Any = None) -> None:
        """more: replaces parts of examples/litellm.yaml."""
        config, self.log = folder / "config.yaml", folder / "litellm.log"
        example = yaml.safe_load((ROOT / "examples" / "litellm.yaml").read_text())
        config.write_text(yaml.safe_dump(example | {"model_list": model_list(engines)} | (more or {})))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        words: list[str | Path] = [
            "-m",
            "litellm.proxy.proxy_cli",
            "--config",
            config,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        environment = variables(kvsight) | {"LITELLM_MASTER_KEY": _KEY}
        self._process = ChildProcess([litellm_python(), *words], self.log, environment)
        self._process.wait_for_port(port, 150)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
