"""What is declared in pyproject.toml is what the packages import, and the wheel holds them and nothing else."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import files, packages_distributions
from pathlib import Path
from typing import Any

import pytest

from kvsight.extras import SERVE

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = (
    "kv_events",
    "engine_cache",
    "publisher",
    "bridge",
    "indexer",
    "selection",
    "analysis",
    "api",
    "simulation",
    "kvsight",
)
EXTRAS_OF = {
    "engine_cache": ("engine", "mooncake"),
    "kv_events": ("otel",),
    "publisher": ("serve",),
    "bridge": ("serve",),
    "indexer": ("serve",),
    "analysis": ("analysis",),
    "api": ("serve", "tokenizers"),
    "kvsight": ("serve", "envoy"),
}
"""The extras that some modules of a package import: in `publisher`, `bridge` and `kvsight` only for metrics."""
FOUND_BY_NAME = {"cramjam", "opentelemetry-exporter-otlp-proto-http"}
"""Declared, and loaded by aiokafka or as an entry point."""
DISTRIBUTIONS = packages_distributions()
"""Those that bring a top package."""
FRAGILE = {"aiokafka": "0.15", "llvmlite": "0.51", "numba": "0.69", "ray": "2.61"}
"""Private parts of these are used, so an unknown minor version is not accepted."""


def declared(*extras: str) -> set[str]:
    """Distributions of the base install and of some extras."""
    lines = [*PROJECT["dependencies"], *(line for e in extras for line in PROJECT["optional-dependencies"][e])]
    return {re.split(r"[\[<>=~! ]", line)[0].lower() for line in lines} - {"kvsight"}


def imported(package: str) -> set[str]:
    """Distributions that a package imports anywhere, also inside functions."""
    names: set[str] = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                names.add(node.module)
    ours = set(sys.stdlib_module_names) | set(PACKAGES)
    foreign = {name for name in names if name.partition(".")[0] not in ours}
    return {found.lower().replace("_", "-") for name in foreign if (found := distribution_of(name)) is not None}


def distribution_of(module: str) -> str | None:
    """The distribution that holds a module, or None if it is not installed. Several may share a top package."""
    found = DISTRIBUTIONS.get(module.partition(".")[0], [])
    if len(set(found)) <= 1:
        return found[0] if found else None
    places = {f"{module.replace('.', '/')}.py", f"{module.replace('.', '/')}/__init__.py"}
    return next((name for name in found if places & {str(file) for file in files(name) or ()}), None)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_its_install_brings(package: str) -> None:
    extras = EXTRAS_OF.get(package, ())
    assert imported(package) <= declared(*extras)


def test_nothing_is_declared_that_no_package_imports() -> None:
    everything = set().union(*map(imported, PACKAGES))
    extras = ("serve", "engine", "mooncake", "compression", "otel", "tokenizers", "envoy")
    assert declared(*extras) - everything == FOUND_BY_NAME


def test_every_dependency_has_an_upper_bound() -> None:
    extras = ("serve", "engine", "mooncake", "compression", "otel", "tokenizers", "envoy", "litellm", "ray", "verl")
    lines = [*PROJECT["dependencies"], *(line for e in extras for line in PROJECT["optional-dependencies"][e])]
    foreign = [line for line in lines if not line.startswith("kvsight[")]
    assert [line for line in foreign if not re.search(r",<\d", line)] == []
    for name, bound in FRAGILE.items():
        assert any(line.startswith(name) and line.endswith(f",<{bound}") for line in foreign)


def test_the_extra_of_a_router_brings_no_other_router() -> None:
    routers = {"envoy": "grpcio", "litellm": "litellm", "ray": "ray", "verl": "verl"}
    assert {extra: declared(extra) & set(routers.values()) for extra in routers} == {e: {r} for e, r in routers.items()}


def test_the_commands_check_for_all_of_the_extra_that_they_need() -> None:
    assert {module.replace("_", "-") for module in SERVE} == declared("serve") - declared() - {"starlette"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the files that git does not ignore."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, tracked.stdout.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir")
    command: list[str | Path] = [sys.executable, "-m", "pip", "wheel", *options, target, source]
    subprocess.run(command, capture_output=True, check=True)
    (built,) = target.iterdir()
    return built


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == set(PACKAGES)
    kinds = {name.rpartition(".")[2] for name in names if ".dist-info/" not in name}
    assert kinds <= {"css", "html", "js", "py", "svg", "typed"}
    modules = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert modules <= set(names)
    templates = {str(path.relative_to(ROOT)) for path in (ROOT / "analysis/html/templates").iterdir()}
    assert templates <= set(names)
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_base_install_has_the_client_and_the_publisher_and_no_web_server(wheel: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)

    venv.create(tmp_path / "venv", with_pip=True)
    python, kvsight = tmp_path / "venv/bin/python", tmp_path / "venv/bin/kvsight"
    installed = run(python, "-m", "pip", "install", "--quiet", wheel)
    assert installed.returncode == 0, installed.stderr
    program = """
from pathlib import Path
from kv_events.kernels.load import progress
from kv_events.log.event_log import EventLogReader
from kvsight import BlockStored, Client, EventPublisher, FileSink, KafkaSink, KvsightConnectionError, PublisherSettings
from kvsight import RadixCache, RetryPolicy, StorageMedium, ZmqSink
with EventPublisher(PublisherSettings(model="m", worker="w", block_size=2), FileSink(Path("log"))) as publisher:
    publisher.publish([BlockStored([1], None, [1, 2], 2, None, StorageMedium.GPU)])
assert publisher.stats().pages["held"] == 1
assert EventLogReader(Path("log")).next_index >= 1
progress()  # imports every module of kernels
try:
    Client("http://127.0.0.1:9", retry=RetryPolicy(attempts=1)).workers()
except KvsightConnectionError as error:
    print(error)
"""
    used = run(python, "-c", program)
    assert used.returncode == 0, used.stderr
    assert used.stdout.startswith("http://127.0.0.1:9/workers")
    refused = run(kvsight, "serve")
    missing = "aiohttp, fastapi, fastapi_offline, httptools, prometheus_client, redis, uvicorn, yarl"
    line = f"kvsight serve needs {missing}: pip install 'kvsight[serve]'\n"
    assert (refused.returncode, refused.stdout, refused.stderr) == (2, "", line)
