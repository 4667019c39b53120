"""Frames of the engines' protocol."""

from __future__ import annotations

import pytest

from kv_events.engine_wire import (
    FrameError,
    parse_replay,
    parse_replay_request,
    parse_topic,
    replay_request,
)

SEQ = (258).to_bytes(8, "big")
END = b"\xff" * 8


@pytest.mark.parametrize("frames", [[b"", SEQ, b"data"], [b"", b"topic", SEQ, b"data"], [SEQ, b"data"]])
def test_replayed_batches_of_both_layouts_are_read(frames: list[bytes]) -> None:
    message = parse_replay(frames)
    assert (message.seq, message.payload, message.is_end) == (258, b"data", False)


@pytest.mark.parametrize("frames", [[b"", END, b""], [b"", b"", END, b""]])
def test_the_end_marker_of_both_layouts_is_known(frames: list[bytes]) -> None:
    assert parse_replay(frames).is_end


@pytest.mark.parametrize("frames", [[], [b""], [b"", b"\0", b""], [b""] * 5])
def test_an_answer_of_other_frames_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(FrameError):
        parse_replay(frames)


def test_a_request_names_its_start_behind_an_empty_frame() -> None:
    assert replay_request(258) == [b"", SEQ]
    assert parse_replay_request(replay_request(258)) == 258


@pytest.mark.parametrize("frames", [[], [b""], [SEQ], [b"", SEQ[1:]], [b"", SEQ, b""]])
def test_a_request_of_other_frames_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(FrameError):
        parse_replay_request(frames)


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
