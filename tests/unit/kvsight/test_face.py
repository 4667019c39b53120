"""The public names: they are complete, imported lazily, and correctly described."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import kvsight
from kv_events.http.events import FeedEvent
from kvsight import PublisherSettings


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


SETTINGS = PublisherSettings(model="m", worker="w", block_size=4)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (kvsight.Client, "url"),
        (kvsight.AsyncClient, "url"),
        (lambda wrong: kvsight.Client(token=wrong), "token"),
        (lambda wrong: kvsight.Client(timeout_s=str(wrong)), "timeout_s"),  # type: ignore[arg-type]
        (lambda wrong: kvsight.Client(timeout_s=-wrong), "timeout_s"),
        (lambda wrong: kvsight.Client(retry=wrong), "retry"),
        (lambda wrong: kvsight.Client().query(wrong, [1]), "model"),
        (lambda wrong: kvsight.RetryPolicy(attempts=str(wrong)), "attempts"),  # type: ignore[arg-type]
        (lambda wrong: kvsight.RetryPolicy(longest_pause_s=str(wrong)), "longest_pause_s"),  # type: ignore[arg-type]
        (kvsight.best_worker, "answer"),
        (lambda wrong: kvsight.EventPublisher(wrong, kvsight.FileSink("log")), "settings"),
        (lambda wrong: kvsight.EventPublisher(SETTINGS, wrong), "sink"),
        (kvsight.KafkaSink, "settings"),
        (kvsight.ZmqSink, "settings"),
        (kvsight.FileSink, "folder"),
        (lambda wrong: PublisherSettings(model=wrong, worker="w", block_size=4), "model"),
        (lambda wrong: kvsight.RadixCache(page_size=4, allocator=wrong), "allocator"),
        (lambda wrong: kvsight.RadixCache(page_size=str(wrong), allocator=None), "page_size"),  # type: ignore[arg-type]
        (lambda wrong: kvsight.sequence_hashes(wrong, 4), "tokens"),
        (lambda wrong: kvsight.sequence_hashes([1], str(wrong)), "block_size"),  # type: ignore[arg-type]
    ],
)
def test_an_argument_of_a_wrong_type_is_named(call: Callable[[Any], object], field: str) -> None:
    with pytest.raises(kvsight.InvalidValueError, match=r"got .+, expected") as refused:
        call(5)
    assert refused.value.field.lower().removeprefix("kvsight_") == field


def test_an_address_of_a_wrong_type_does_not_show_its_password() -> None:
    for wrong in ({"url": b"http://u:secret@h"}, {"token": b"secret"}):
        with pytest.raises(kvsight.InvalidValueError, match="got 'bytes', expected text") as refused:
            kvsight.Client(**wrong)  # type: ignore[arg-type]
        assert "secret" not in str(refused.value)
