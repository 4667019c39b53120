"""The methods of both clients as people and editors see them."""

from __future__ import annotations

import inspect
import typing
from pathlib import Path

import griffe
import pytest

import kvsight
from kvsight import AsyncClient, Client, PeerAnswer, WorkerChoice, calls

ROOT = Path(__file__).resolve().parents[3]
METHODS = [name for name, member in vars(Client).items() if inspect.isfunction(member) and not name.startswith("_")]
CALLS = [name for name in METHODS if name not in ("send", "events", "close")]


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


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_every_method_shows_its_parameters(client: type) -> None:
    for name in METHODS if client is Client else [name for name in METHODS if name != "close"]:
        method = getattr(client, name)
        signature = inspect.signature(method)
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}, name
        assert next(iter(signature.parameters)) == "self"
        assert signature.return_annotation is not inspect.Signature.empty
        assert (method.__name__, method.__qualname__) == (name, f"{client.__name__}.{name}")
        assert method.__doc__


def test_a_query_names_its_options() -> None:
    assert list(inspect.signature(Client.query).parameters) == [
        "self", "model", "token_ids", "lora_name", "cache_salt", "is_eagle", "tenant", "tier_weights",
    ]  # fmt: skip
    assert typing.get_type_hints(Client.query)["return"] is kvsight.PeerAnswer


@pytest.mark.parametrize("name", CALLS)
def test_both_clients_have_the_same_methods(name: str) -> None:
    assert inspect.signature(getattr(Client, name)) == inspect.signature(getattr(AsyncClient, name))
    assert inspect.iscoroutinefunction(getattr(AsyncClient, name))
    assert hasattr(calls, name)


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


if typing.TYPE_CHECKING:

    async def type_checkers_know_the_methods(client: Client, other: AsyncClient) -> None:
        typing.assert_type(client.query("m", [1], tenant="t"), PeerAnswer)
        typing.assert_type(await other.query("m", [1], tenant="t"), PeerAnswer)
        typing.assert_type(await other.best_worker("m", [1], load={"w": 1.0}), WorkerChoice | None)
        client.query("m", [1], tenants="t")  # type: ignore[call-arg]
        await other.view(5)  # type: ignore[arg-type]
