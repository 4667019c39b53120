"""Names and frames on the wire: streams, groups, ZMQ addresses, the engines' protocol; and values in messages."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kv_events.engine_wire import (
    FrameError,
    endpoint_of_rank,
    has_wildcard,
    parse_replay,
    parse_replay_request,
    parse_topic,
    replay_request,
)
from kv_events.errors import InvalidValueError, shorten
from kv_events.streams import MAMBA_GROUP, Group, StreamId, group_model, parse_group, split_group

# --- groups of layers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "name"),
    [
        (Group("mamba"), MAMBA_GROUP), (Group("swa", 1), "swa:1"),
        (Group("swa", 999_999_999), "swa:999999999"), (Group("swa", 127, 64), "swa:127/64"),
        (Group("chunk", 8192), "chunk:8192"), (Group("step", 64), "step:64"), (Group("eagle"), "eagle"),
        (Group("nofull"), "nofull"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("model", ["m", "org/m", "m#v2", "m#", "#", "m#mamba", "m#swa:4", "a\nb"])
def test_a_group_and_the_model_of_its_streams_are_read_back(model: str, group: Group, name: str) -> None:
    assert (group.name, parse_group(name)) == (name, group)
    assert group_model(model, name) == f"{model}#{name}"
    assert split_group(f"{model}#{name}") == (model, name)


@pytest.mark.parametrize(
    "model", ["m", "", "m#", "m#mamba2", "m#Mamba", "mamba", "#mamba", "m#swa", "m#swa:", "m#swa:0", "m#swa:08",
              "m#swa:-1", "m#swa:1e3", "m#swa:1234567890", "m#swa:4 ", "m#mamba\n", "m#swa:٣", "m#mamba#"]
)  # fmt: skip
def test_a_name_that_only_looks_like_a_group_is_a_models_own(model: str) -> None:
    assert split_group(model) == (model, None)


@pytest.mark.parametrize(
    "call",
    [
        *[partial(group_model, "m", group) for group in ("kv", "", "swa:0", "x#mamba")],
        *[partial(group_model, "", "mamba"), partial(parse_group, "kv")],
        *[partial(getattr, Group("swa", window), "name") for window in (0, -1, 1_000_000_000)],
        *[partial(getattr, Group(*fields), "name") for fields in (("kv",), ("mamba", 3), ("step", 4, 4), ("eagle", 1))],
    ],
)
def test_groups_that_make_no_sense_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(InvalidValueError, match="group: got"):
        call()


def test_a_key_cannot_imitate_another_stream() -> None:
    assert StreamId("m", "default", "a/b", 0).key != StreamId("m/a", "default", "b", 0).key
    assert StreamId("m#mamba", "default", "w", 0).key != StreamId("m", "default", "w", 0).key
    assert StreamId("x/y", "ü", "a/b%", 2).key == "%C3%BC/x%2Fy/a%2Fb%25/2"


# --- addresses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557"])
def test_an_address_with_a_wildcard_is_found(address: str) -> None:
    assert has_wildcard(address)
    assert not has_wildcard(address.replace("*", "10.0.0.1").replace("0.0.0.0", "*.x").replace("[::]", "[fe80::1]"))
    assert not has_wildcard("ipc:///run/kv")
    assert not has_wildcard("inproc://*:1")


def test_ranks_count_ports_up() -> None:
    assert endpoint_of_rank("tcp://h:5557", 0) == "tcp://h:5557"
    assert endpoint_of_rank("tcp://h:5557", 3) == "tcp://h:5560"
    assert endpoint_of_rank("inproc://kv", 2) == "inproc://kv_dp2"
    for without_room in ("tcp://h:65535", "ipc:///run/kv"):
        with pytest.raises(InvalidValueError, match="endpoint"):
            endpoint_of_rank(without_room, 1)


# --- frames of the engines' protocol --------------------------------------------------------------------------------

SEQ = (258).to_bytes(8, "big")
END = b"\xff" * 8


@pytest.mark.parametrize("frames", [[b"", SEQ, b"data"], [b"", b"topic", SEQ, b"data"], [SEQ, b"data"]])
def test_replayed_batches_and_their_end_are_read_in_both_layouts(frames: list[bytes]) -> None:
    assert parse_replay(frames) == (258, b"data")
    assert parse_replay([END if frame == SEQ else frame for frame in frames]) is None


def test_a_request_names_its_start_behind_an_empty_frame() -> None:
    assert replay_request(258) == [b"", SEQ]
    assert parse_replay_request(replay_request(258)) == 258


@pytest.mark.parametrize(
    ("parse", "frames"),
    [
        *[(parse_replay, frames) for frames in ([], [b""], [b"", b"\0", b""], [b""] * 5)],
        *[(parse_replay_request, frames) for frames in ([], [b""], [SEQ], [b"", SEQ[1:]], [b"", SEQ, b""])],
    ],
)
def test_other_frames_are_refused(parse: Callable[[list[bytes]], object], frames: list[bytes]) -> None:
    with pytest.raises(FrameError):
        parse(frames)


@pytest.mark.parametrize(
    ("topic", "pod", "model"),
    [
        ("kv@10.0.0.1:8000@org/model", "10.0.0.1:8000", "org/model"),
        ("kv@pod@", "pod", None),
        ("kv@a@b@c", "kv@a@b@c", None),
        ("pod-1", "pod-1", None),
    ],
)
def test_a_topic_names_pod_and_model(topic: str, pod: str, model: str | None) -> None:
    assert parse_topic(topic) == (pod, model)


# --- values in messages ---------------------------------------------------------------------------------------------


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", [5, -1.5, None, True, "text", b"bytes", [], [1, 2], {"a": 1}, (1, "b"), [None]])
def test_a_small_value_is_shown_as_it_is(value: object) -> None:
    assert shorten(value) == repr(value)


def test_the_credentials_of_an_address_are_not_shown() -> None:
    assert shorten("http://user:p@ss/w@host:1/a") == "'http://...@host:1/a'"
    assert "secret" not in shorten("http://user:" + "secret" * 99 + "@host", 100)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (nested(100_000), "list of length 1"),
        ([0] * 1000, "list of length 1000"),
        ({str(n): n for n in range(99)}, "dict of length 99"),
        (["x" * 999], "list of length 1"),
        ("x" * 999, "'" + "x" * 80 + "'... (length 999)"),
        (10**5000, "int"),
        (Path("/" + "x" * 999), "'/" + "x" * 999 + "'"),
    ],
    ids=["nested", "list", "dict", "list of text", "text", "integer", "path"],
)
def test_a_large_value_is_named_or_cut(value: object, shown: str) -> None:
    assert shorten(value) == shown
    assert str(InvalidValueError("field", value, "less")) == f"field: got {shown}, expected less"
