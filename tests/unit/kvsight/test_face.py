"""The public names: they are complete, imported lazily, and correctly described."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvsight
from kvsight.schemas.events import FeedEvent


@pytest.mark.parametrize("name", kvsight.__all__)
def test_every_public_name_is_there(name: str) -> None:
    found = getattr(kvsight, name)
    assert found is FeedEvent if name == "FeedEvent" else found.__name__ == name
    assert name in dir(kvsight)


def test_a_name_that_is_none_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'RadixTree'"):
        _ = kvsight.RadixTree


@pytest.mark.parametrize(
    ("names", "not_loaded"),
    [
        ("", "numba numpy pydantic aiokafka fastapi torch"),
        ("EventPublisher", "fastapi torch indexer engine_cache"),
        ("RadixCache", "fastapi torch aiokafka indexer publisher"),
        ("Client AsyncClient best_worker", "fastapi numba pydantic aiokafka indexer publisher engine_cache"),
    ],
)
def test_only_what_is_asked_for_is_loaded(names: str, not_loaded: str) -> None:
    program = f"import sys, kvsight; [getattr(kvsight, n) for n in {names.split()!r}]; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not set(not_loaded.split()) & set(done.stdout.split())
