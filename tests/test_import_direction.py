"""Which package may import which, and what must load without torch, FastAPI or Kafka."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "kv_events": set(),
    "engine_cache": {"kv_events"},
    "publisher": {"kv_events"},
    "bridge": {"kv_events", "publisher"},
    "indexer": {"kv_events"},
    "analysis": {"kv_events", "indexer", "kvsight"},
    "api": {"kv_events", "indexer", "analysis", "bridge", "kvsight"},
    "simulation": {"kv_events", "engine_cache", "publisher", "indexer", "analysis"},
    "kvsight": {"kv_events", "engine_cache", "publisher", "bridge", "indexer", "analysis", "api", "simulation"},
}
ROOMS = {
    "analysis.audit": {"bins"},
    "analysis.explain": set(),
    "analysis.html": {"audit", "bins"},
    "api.hot_lane": {
        "answer_kernels",
        "answer_layouts",
        "answer_writer",
        "answers",
        "bounded_protocol",
        "decoding",
        "large_bodies",
        "metrics",
        "problems",
        "query_kernel",
        "questions",
        "rate_limits",
        "request_heads",
        "settings",
        "tenant_queries",
        "tokens",
        "traced_requests",
    },
    "api.page": {"decoding", "hot", "served_views", "openapi", "problems", "registrations", "worker_list"},
    "api.past": {
        "browsers",
        "auth",
        "daemon_threads",
        "docs_page",
        "documented",
        "dump",
        "explain",
        "hot",
        "metrics",
        "openapi",
        "page",
        "problems",
        "request_log",
        "settings",
        "tokens",
        "workers",
    },
    "api.shards": {
        "answers",
        "decoding",
        "encoded_answers",
        "hot",
        "hot_lane",
        "large_bodies",
        "openapi",
        "problems",
        "query_requests",
        "questions",
        "settings",
        "tenant_queries",
    },
    "bridge.decoding": set(),
    "bridge.naming": {"decoding", "counters"},
    "bridge.plugins": {"decoding", "naming", "counters", "settings"},
    "bridge.stream": {
        "decoding",
        "naming.identity",
        "registry",
        "worker_stream",
        "worker_threads",
        "counters",
        "settings",
    },
    "engine_cache.components": {
        "tree",
        "base",
        "errors",
        "pools.allocators",
        "pools.entry",
        "pools.swa_allocator",
        "storage.base",
        "storage.operations",
        "types",
    },
    "engine_cache.pools": {"errors", "settings", "storage.base", "types"},
    "engine_cache.storage": {"errors", "settings", "tree.key", "tree.node", "types"},
    "engine_cache.tiers": {
        "components",
        "tree",
        "base",
        "errors",
        "pools",
        "rules",
        "storage",
        "types",
    },
    "engine_cache.tree": {"errors", "types"},
    "indexer.decisions": set(),
    "indexer.kernels": set(),
    "indexer.replay": {
        "applier",
        "dead_letters",
        "freshness",
        "index",
        "kernels.batches",
        "namespaces",
        "settings",
        "snapshots",
        "until",
        "views",
    },
    "indexer.recording": {"slices", "sources", "until"},
    "indexer.snapshots": {"errors", "index", "lateness", "namespaces", "position", "settings", "slices", "views"},
    "indexer.shards": {
        "applier",
        "errors",
        "index",
        "lateness",
        "namespaces",
        "progress",
        "settings",
        "slices",
        "snapshots",
        "sources",
        "views",
    },
    "indexer.sources": {"errors", "settings"},
    "publisher.sinks": {"settings"},
}
"""Sub-packages, and what each may import of its own package besides itself."""
SCHEMAS = "kvsight.schemas"
"""All that `analysis` and `api` may import of `kvsight`, and what imports nothing of the project."""
OURS = {*MAY_IMPORT, "tests", "benchmarks"}
NEEDS_AN_EXTRA = (
    "kv_events.kafka_topic_ids",
    "engine_cache.tiers.cuda",
    "engine_cache.pools.device",
    "engine_cache.pools.host",
    "engine_cache.pools.mamba",
    "engine_cache.storage.directory",
)


def imported_names(source: str) -> Iterator[tuple[int, str]]:
    """(line, top package) of every absolute import, those inside functions and type-checking blocks too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.lineno, node.module.partition(".")[0]


def full_names(path: Path) -> set[str]:
    """Dotted names of the modules that a file imports."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    from_imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    parts = {
        f"{node.module}.{alias.name}" for node in from_imports if node.module in MAY_IMPORT for alias in node.names
    }
    return names | parts | {node.module for node in from_imports if node.module and node.module not in MAY_IMPORT}


def modules(package: str) -> list[str]:
    """The package and every module below it, by dotted name, found without importing anything."""
    found = [package]
    folders = [(package, ROOT / package)]
    for parent, folder in folders:
        for module in pkgutil.iter_modules([str(folder)], f"{parent}."):
            found.append(module.name)
            if module.ispkg:
                folders.append((module.name, folder / module.name.rpartition(".")[2]))
    return [name for name in found if not name.endswith("__main__")]


@pytest.mark.parametrize("room", ROOMS)
def test_a_sub_package_imports_only_what_it_builds_on(room: str) -> None:
    package = room.partition(".")[0]
    allowed = (room, *(f"{package}.{name}" for name in ROOMS[room]))
    offences = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / room.replace(".", "/")).rglob("*.py"))
        for name in full_names(path)
        if name.partition(".")[0] == package and not any(f"{name}.".startswith(f"{each}.") for each in allowed)
    ]
    assert offences == []


@pytest.mark.parametrize("package", ["analysis", "api", "bridge", "engine_cache", "indexer", "publisher"])
def test_every_sub_package_has_a_rule(package: str) -> None:
    folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    assert folders == {room.partition(".")[2] for room in ROOMS if room.startswith(f"{package}.")}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_is_below_it(package: str) -> None:
    forbidden = OURS - MAY_IMPORT[package] - {package}
    offences = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, name in imported_names(path.read_text())
        if name in forbidden
    ]
    assert offences == []


def test_the_server_shares_the_schemas_of_answers_and_nothing_else_of_the_client() -> None:
    imported = {
        name
        for package in ("analysis", "api")
        for path in (ROOT / package).rglob("*.py")
        for name in full_names(path)
        if name.startswith("kvsight")
    }
    assert imported
    assert {name for name in imported if not name.startswith(f"{SCHEMAS}.")} == set()
    of_schemas = {name for path in (ROOT / "kvsight/schemas").rglob("*.py") for name in full_names(path)}
    assert {name for name in of_schemas if name.partition(".")[0] in OURS and not name.startswith(SCHEMAS)} == set()


def test_imports_inside_functions_and_type_checking_blocks_count() -> None:
    source = "if TYPE_CHECKING:\n    from api.app import x\ndef f():\n    import kvsight.cli, os\nfrom . import y\n"
    assert sorted(imported_names(source)) == [(2, "api"), (4, "kvsight"), (4, "os")]


@pytest.mark.parametrize(
    ("package", "blocked"),
    [
        ("kv_events", ["torch", "fastapi", "aiokafka", "redis"]),
        ("engine_cache", ["torch", "fastapi", "aiokafka", "redis"]),
        ("publisher", ["torch", "fastapi"]),
        ("bridge", ["torch", "fastapi"]),
        ("indexer", ["torch", "fastapi"]),
        ("analysis", ["torch", "fastapi"]),
        ("api", ["torch"]),
        ("simulation", ["torch", "fastapi"]),
        ("kvsight", ["torch"]),
    ],
)
def test_a_package_loads_without_what_it_must_not_need(package: str, blocked: list[str]) -> None:
    wanted = [name for name in modules(package) if not name.startswith(NEEDS_AN_EXTRA)]
    program = (
        "import importlib, sys\n"
        f"for name in {blocked}: sys.modules[name] = None\n"
        f"for name in {wanted}: importlib.import_module(name)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.timeout(300)  # the first time, kernels are compiled
def test_kernels_that_another_package_compiled_do_not_load_it() -> None:
    """numba reads all signatures of a cached kernel at once, with the classes that they name."""
    programs = ("import bridge", "import sys, publisher.ledger; assert 'bridge' not in sys.modules")
    for program in programs:
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
