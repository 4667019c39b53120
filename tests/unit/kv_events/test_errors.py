"""Messages stay short and cheap, whatever the value."""

from __future__ import annotations

from typing import Any

import pytest

from kv_events.errors import InvalidValueError, shorten


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", [5, -1.5, None, True, "text", b"bytes", [], [1, 2], {"a": 1}, (1, "b"), [None]])
def test_a_small_value_is_shown_as_it_is(value: object) -> None:
    assert shorten(value) == repr(value)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (nested(100_000), "list of length 1"),
        ([0] * 1000, "list of length 1000"),
        ({str(n): n for n in range(99)}, "dict of length 99"),
        (["x" * 999], "list of length 1"),
        ("x" * 999, "'" + "x" * 80 + "'... (length 999)"),
        (10**5000, "int"),
    ],
    ids=["nested", "list", "dict", "list of text", "text", "integer"],
)
def test_a_large_value_is_named_or_cut(value: object, shown: str) -> None:
    assert shorten(value) == shown
    assert str(InvalidValueError("field", value, "less")) == f"field: got {shown}, expected less"
