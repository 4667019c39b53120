"""The shape of the house: short class hierarchies, no import circles, and tiers that a cache has or has not."""

import ast
import importlib
import inspect
import pkgutil
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


def modules(package):
    pytest.importorskip("torch")
    top = importlib.import_module(package)
    names = [module.name for module in pkgutil.walk_packages(top.__path__, f"{package}.")]
    return [top, *(importlib.import_module(name) for name in names if not name.endswith("__main__"))]


@pytest.mark.torch
@pytest.mark.parametrize("package", PACKAGES)
def test_no_class_has_more_than_four_classes_of_the_project_in_its_hierarchy(package):
    classes = {each for module in modules(package) for each in vars(module).values() if inspect.isclass(each)}
    depths = {
        each: [base for base in each.__mro__ if base.__module__.partition(".")[0] in PACKAGES] for each in classes
    }
    too_deep = {
        each: bases
        for each, bases in depths.items()
        if len(bases) > MOST_CLASSES_IN_A_HIERARCHY and not each.__module__.startswith("engine_cache.pools.")
    }
    assert too_deep == {}


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
