"""The public names, loaded only where they are used, and the methods of both clients as people and editors see them."""

import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import griffe
import pytest

import kvsight
from kv_events.http.events import FeedEvent
from kvsight import AsyncClient, Client, PeerAnswer, PublisherSettings, WorkerChoice, calls
from tests.support.programs import run_program

ROOT = Path(__file__).resolve().parents[2]
METHODS = [name for name, member in vars(Client).items() if name == getattr(member, "__name__", "")]
CALLS = [name for name in METHODS if name not in ("send", "events", "close", "placed") and not name.startswith("_")]


def returned(client: type) -> set[type]:
    """The classes of this project in the return types of a client's methods."""
    seen: set[type] = set()
    waiting: list[object] = [typing.get_type_hints(getattr(client, name))["return"] for name in (*CALLS, "events")]
    while waiting:
        each = waiting.pop()
        waiting += typing.get_args(each)
        if isinstance(each, type) and each.__module__.startswith(("kvsight", "kv_events.http")) and each not in seen:
            seen.add(each)
            waiting += typing.get_type_hints(each).values()
    return seen


@pytest.mark.parametrize("name", CALLS)
def test_both_clients_have_a_method_for_each_call(name: str) -> None:
    call = getattr(calls, name)
    for client in (Client, AsyncClient):
        method = getattr(client, name)
        self, *parameters = inspect.signature(method).parameters.values()
        assert (self.name, parameters) == ("self", [*inspect.signature(call).parameters.values()])
        assert (method.__name__, method.__qualname__) == (name, f"{client.__name__}.{name}")
        assert method.__doc__ == call.__doc__ is not None
        assert typing.get_type_hints(method)["return"] == typing.get_args(typing.get_type_hints(call)["return"])[0]
        assert inspect.iscoroutinefunction(method) == (client is AsyncClient)


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_every_type_that_a_method_returns_is_public(client: type) -> None:
    found = returned(client)
    assert kvsight.Listener in found
    for each in found:
        assert getattr(kvsight, each.__name__) is each


def test_the_reference_shows_the_methods_with_their_parameters() -> None:
    extensions = griffe.load_extensions(str(ROOT / "docs/client_methods.py"))
    package = griffe.load("kvsight", search_paths=[str(ROOT)], extensions=extensions)
    for client in (Client, AsyncClient):
        for name in CALLS:
            shown, real = package["client"][client.__name__][name], inspect.signature(getattr(client, name))
            assert [parameter.name for parameter in shown.parameters] == list(real.parameters)
            assert str(shown.returns) == real.return_annotation
            assert shown.docstring is not None
            assert ("async" in shown.labels) == (client is AsyncClient)


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
    done = run_program(program)
    assert done.returncode == 0, done.stderr
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


if typing.TYPE_CHECKING:

    async def type_checkers_know_the_methods(client: Client, other: AsyncClient) -> None:
        typing.assert_type(client.query("m", [1], tenant="t"), PeerAnswer)
        typing.assert_type(await other.query("m", [1], tenant="t"), PeerAnswer)
        typing.assert_type(await other.best_worker("m", [1], load={"w": 1.0}), WorkerChoice | None)
        client.query("m", [1], tenants="t")  # type: ignore[call-arg]
        await other.view(5)  # type: ignore[arg-type]
