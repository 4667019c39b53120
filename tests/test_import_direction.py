"""Which package may import which, and what must load without torch, FastAPI or Kafka."""

import ast
import pkgutil
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.import_rules import MAY_IMPORT
from tests.support.programs import run_program

ROOT = Path(__file__).resolve().parent.parent
MOST_MODULES = 15
"""In a room: a package or sub-package."""
MOST_LINES = 450
"""In a file."""
LARGER: dict[str, int] = {}
LONGER: dict[str, int] = {}
TANGLED: set[str] = set()
"""What still has to be put in order: rooms, files, and packages whose rooms import each other both ways."""
OURS = {*MAY_IMPORT, "tests", "benchmarks"}
NEEDS_AN_EXTRA = (
    "kv_events.kafka.connection",
    "kv_events.kafka.private_parts",
    "kv_events.kafka.topics",
    "engine_cache.tiers.cuda",
    "engine_cache.pools.device",
    "engine_cache.pools.host",
    "engine_cache.pools.mamba",
    "engine_cache.storage.directory",
    "kvsight.routers.endpoint_picker",
    "kvsight.routers.litellm",
    "kvsight.routers.ray",
    "kvsight.routers.ray_llm",
    "kvsight.routers.verl",
)


LOADS_WITHOUT = {
    ("kv_events", "engine_cache"): ["torch", "fastapi", "aiokafka", "redis"],
    ("publisher", "bridge", "indexer", "selection", "analysis", "simulation"): ["torch", "fastapi"],
    ("api", "kvsight"): ["torch"],
}


def imported_names(source: str) -> Iterator[tuple[int, str]]:
    """(line, top package) of every absolute import, those inside functions and type-checking blocks too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.lineno, node.module.partition(".")[0]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_name(path): path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))}


def imported_modules(path: Path) -> set[str]:
    """Modules of the project that a file imports, those inside functions and type-checking blocks too."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else node.module for name in names}
    return found & FILES.keys()


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """The nodes that no order puts after all that they import."""
    sorter = TopologicalSorter(edges)
    try:
        sorter.prepare()
    except CycleError as error:
        return [error.args[1]]
    return []


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


def test_modules_import_each_other_in_one_direction() -> None:
    assert circles({name: imported_modules(path) - {name} for name, path in FILES.items()}) == []


@pytest.mark.parametrize("package", sorted(MAY_IMPORT.keys() - TANGLED))
def test_rooms_import_each_other_in_one_direction(package: str) -> None:
    rooms: dict[str, set[str]] = {}
    for name, path in FILES.items():
        room = module_name(path.parent)
        if name.startswith(f"{package}.") and room != package:
            imported = {module_name(FILES[other].parent) for other in imported_modules(path)}
            rooms.setdefault(room, set()).update(
                other for other in imported - {room} if other.startswith(f"{package}.")
            )
    assert circles(rooms) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != []
    assert circles({"a": {"b", "c"}, "b": {"c"}}) == []


def test_rooms_and_files_are_small() -> None:
    rooms = Counter(path.parent for path in FILES.values() if path.name != "__init__.py")
    assert {module_name(room): number for room, number in rooms.items() if number > MOST_MODULES} == LARGER
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES.values()}
    assert {name: number for name, number in lines.items() if number > MOST_LINES} == LONGER


def test_kernels_import_nothing_that_their_digest_does_not_cover() -> None:
    """What they are compiled to depends on their rooms and the contract's constants: see `kv_events.kernels.load`."""
    rooms = {name: path for name, path in FILES.items() if path.parent.name == "kernels"}
    covered = {*rooms, *(name for name, path in FILES.items() if path.parent == ROOT / "kv_events")}
    assert {name: other for name, path in rooms.items() if (other := imported_modules(path) - covered)} == {}


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


def test_imports_inside_functions_and_type_checking_blocks_count() -> None:
    source = "if TYPE_CHECKING:\n    from api.app import x\ndef f():\n    import kvsight.cli, os\nfrom . import y\n"
    assert sorted(imported_names(source)) == [(2, "api"), (4, "kvsight"), (4, "os")]


def test_packages_load_without_what_they_must_not_need() -> None:
    program = "import importlib, sys\n"
    for packages, blocked in LOADS_WITHOUT.items():
        wanted = [name for each in packages for name in modules(each) if not name.startswith(NEEDS_AN_EXTRA)]
        program += (
            f"for name in {blocked}: sys.modules[name] = None\n"
            f"for name in {wanted}: importlib.import_module(name)\n"
            f"for name in {blocked}: del sys.modules[name]\n"
        )
    ended = run_program(program)
    assert ended.returncode == 0, ended.stderr
