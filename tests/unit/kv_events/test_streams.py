"""Names of streams and of groups."""

from __future__ import annotations

import pytest

from kv_events.errors import InvalidValueError
from kv_events.streams import MAMBA_GROUP, Group, StreamId, group_model, parse_group, split_group, swa_group


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


@pytest.mark.parametrize(
    ("group", "name"),
    [
        (Group("mamba"), "mamba"), (Group("swa", 127), "swa:127"), (Group("swa", 127, 64), "swa:127/64"),
        (Group("chunk", 8192), "chunk:8192"), (Group("step", 64), "step:64"), (Group("eagle"), "eagle"),
        (Group("nofull"), "nofull"),
    ],
)  # fmt: skip
def test_a_groups_name_is_read_back(group: Group, name: str) -> None:
    assert (group.name, parse_group(name)) == (name, group)
    assert split_group(group_model("m", name)) == ("m", name)


@pytest.mark.parametrize(
    "group", [Group("kv"), Group("swa"), Group("mamba", 3), Group("step", 4, 4), Group("eagle", 1)]
)
def test_groups_that_make_no_sense_have_no_name(group: Group) -> None:
    with pytest.raises(InvalidValueError, match="group: got"):
        _ = group.name


def test_a_text_that_is_no_group_cannot_be_read() -> None:
    with pytest.raises(InvalidValueError, match="group: got"):
        parse_group("kv")


def test_a_group_stream_has_a_key_of_its_own() -> None:
    stream = StreamId(group_model("m", MAMBA_GROUP), "default", "w", 0)
    assert stream.key != StreamId("m", "default", "w", 0).key
