"""The structure of the code: short class hierarchies, no import cycles, and optional tiers."""

import ast
from pathlib import Path

import pytest

import engine_cache
from engine_cache import (
    HiMambaRadixCache,
    HiRadixCache,
    KVCacheEventMixin,
    MambaRadixCache,
    PagedTokenToKVPoolAllocator,
    RadixCache,
    UnifiedRadixCache,
)

ROOT = Path(engine_cache.__file__).parent.parent
PACKAGES = ("kv_events", "engine_cache", "publisher", "bridge", "indexer", "api", "simulation", "kvsight")
CACHES = (RadixCache, HiRadixCache, MambaRadixCache, HiMambaRadixCache, UnifiedRadixCache)
MOST_CLASSES_IN_A_HIERARCHY = 4


def base_classes():
    """Return the full names of the bases of every class in the project, by full name, without imports."""
    found = {}
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        body = ast.parse(path.read_text())
        imports = [node for node in ast.walk(body) if isinstance(node, ast.ImportFrom)]
        known = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
        for node in (node for node in ast.walk(body) if isinstance(node, ast.ClassDef)):
            names = [ast.unparse(base).partition("[")[0] for base in node.bases]
            found[f"{module}.{node.name}"] = [known.get(name, f"{module}.{name}") for name in names]
    return found


def hierarchy(name, bases):
    """Return the class and all classes of the project that it derives from."""
    return {name, *(each for base in bases[name] if base in bases for each in hierarchy(base, bases))}


def test_no_class_has_more_than_four_classes_of_the_project_in_its_hierarchy():
    bases = base_classes()
    assert "engine_cache.cache.TreeCache" in hierarchy("engine_cache.presets.UnifiedRadixCache", bases)
    hierarchies = [hierarchy(name, bases) for name in bases]
    assert [each for each in hierarchies if len(each) > MOST_CLASSES_IN_A_HIERARCHY] == []


@pytest.mark.parametrize("kind", CACHES)
def test_events_come_from_the_one_mixin(kind):
    assert kind.take_events is KVCacheEventMixin.take_events


def test_a_tier_that_is_absent_is_absent():
    cache = RadixCache(page_size=1, allocator=PagedTokenToKVPoolAllocator(4, 1))
    assert (cache.host, cache.store, cache.states) == (None, None, None)


def sources():
    return sorted((ROOT / "engine_cache").rglob("*.py"))


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_object_is_reset_by_its_constructor(path):
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert [call.lineno for call in calls if ast.unparse(call.func) == "self.__init__"] == []


@pytest.mark.parametrize("room", ["tree", "components", "tiers"])
def test_no_import_of_trees_and_tiers_is_hidden_from_the_interpreter(room):
    found = [path.name for path in (ROOT / "engine_cache" / room).glob("*.py") if "TYPE_CHECKING" in path.read_text()]
    assert found == []
