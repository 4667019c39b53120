"""Apps before engines that run in the real Ray, in an environment of its own: 900 MB."""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from tests.support.engines.released_packages import environment, files_of
from tests.support.servers.child_process import ChildProcess, free_port
from tests.support.waiting import wait_until

VERSION, VERL_VERSION = "2.60.0", "0.9.1"
_VERL_FILES = ("verl/utils/import_utils.py", "verl/workers/rollout/router.py")
"""Those that its load balancer imports. The others need torch and more."""
ROOT = Path(__file__).resolve().parents[3]


def ray_python() -> Path:
    """Return a Python with Ray Serve, and with what the routers of Ray LLM and verl import.

    Skips the test if pip cannot get it.
    """
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return environment(f"ray-{VERSION}", [*needed, f"ray[serve]=={VERSION}", "pyarrow>=17", "cachetools", "omegaconf"])


class RayApp(ChildProcess):
    """`with RayApp(name, engines=..., router=...) as app:`"""

    def __init__(self, name: str, *paths: Path, **given: Any) -> None:
        """name: of a module in `tests/support/engines`. paths: of more modules. given: what the module takes."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._folder = TemporaryDirectory(prefix="ray")  # its path must be short
        given |= {"port": port, "folder": self._folder.name}
        path = ":".join(map(str, [ROOT, *paths]))
        variables = {"PYTHONPATH": path, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        words = ["-m", f"tests.support.engines.{name}", json.dumps(given)]
        super().__init__([ray_python(), *words], Path(self._folder.name) / "log", variables)

    def __enter__(self) -> Self:
        wait_until(lambda: "is ready at" in self.log.read_text() or not self.running, 150, "the app")
        assert self.running, self.log.read_text()
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._folder.cleanup()


def ray_serve(
    engines: Sequence[str], kvsight: str | None, name: str = "ray.KvsightRouter", *, room: int = 100, events: Any = ()
) -> RayApp:
    """Return an app of Ray Serve. kvsight: its address. None: Ray's default router. name: of a router."""
    given = {"request_router_class": f"kvsight.routers.{name}", "request_router_kwargs": {"url": kvsight}}
    return RayApp("ray_app", engines=engines, router=given if kvsight else {}, room=room, events=events)


def verl_balancer(engines: Sequence[str], kvsight: str | None) -> RayApp:
    """Return a load balancer of verl. kvsight: its address. None: verl's default balancer."""
    return RayApp("verl_app", files_of("verl", VERL_VERSION, _VERL_FILES), engines=engines, kvsight=kvsight)
