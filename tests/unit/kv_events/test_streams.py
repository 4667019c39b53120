"""Names of streams and of groups."""

from __future__ import annotations

import pytest

from kv_events.errors import InvalidValueError
from kv_events.streams import MAMBA_GROUP, StreamId, group_model, group_window, split_group, swa_group


@pytest.mark.parametrize("group", [MAMBA_GROUP, swa_group(1), swa_group(4096), swa_group(999_999_999)])
@pytest.mark.parametrize("model", ["m", "org/m", "m#v2", "m#", "#", "m#mamba", "m#swa:4", "a\nb"])
def test_a_groups_model_is_split_into_what_it_was_made_of(model: str, group: str) -> None:
    companion = group_model(model, group)
    assert companion == f"{model}#{group}"
    assert split_group(companion) == (model, group)


@pytest.mark.parametrize(
    "model", ["m", "", "m#", "m#mamba2", "m#Mamba", "mamba", "#mamba", "m#swa", "m#swa:", "m#swa:0", "m#swa:08",
              "m#swa:-1", "m#swa:1e3", "m#swa:1234567890", "m#swa:4 ", "m#mamba\n", "m#swa:٣", "m#mamba#"]
)  # fmt: skip
def test_a_name_that_only_looks_like_a_group_is_a_models_own(model: str) -> None:
    assert split_group(model) == (model, None)


@pytest.mark.parametrize(("model", "group"), [("m", "kv"), ("m", ""), ("m", "swa:0"), ("", "mamba"), ("m", "x#mamba")])
def test_groups_of_unknown_form_are_refused(model: str, group: str) -> None:
    with pytest.raises(InvalidValueError, match="group: got"):
        group_model(model, group)


@pytest.mark.parametrize("window", [0, -1, 1_000_000_000])
def test_windows_out_of_bounds_are_refused(window: int) -> None:
    with pytest.raises(InvalidValueError, match="window: got"):
        swa_group(window)


def test_a_state_needs_one_unit_and_a_window_all_of_its_own() -> None:
    assert (group_window(MAMBA_GROUP), group_window(swa_group(128))) == (1, 128)
    with pytest.raises(InvalidValueError, match="group: got"):
        group_window("kv")


def test_a_group_stream_has_a_key_of_its_own() -> None:
    stream = StreamId(group_model("m", MAMBA_GROUP), "default", "w", 0)
    assert stream.key != StreamId("m", "default", "w", 0).key
