"""What pages state is what the code and the benchmarks say: figures, messages, addresses and programs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from api.settings import ApiSettings
from benchmarks import paper
from indexer.index import OverlapIndex
from kv_events.schema import NUM_MEDIA

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("api", "bridge", "indexer", "kv_events", "kvsight", "publisher")
PLACEHOLDER = re.compile(r"\.\.\.|\b[NM]\b|: ")
_ROW = re.compile(r"^\| (?P<name>[^|]+?) \| (?P<median>[\d.,]+) \|.*?\| (?P<unit>[A-Za-z/]+) \|", re.MULTILINE)
_SHOWN = re.compile(r"^\| (?P<name>[^|]+?) \| (?P<figure>[\d.,]+) (?P<unit>[A-Za-z/]+) \|$", re.MULTILINE)


def page(path: str) -> str:
    return (ROOT / path).read_text()


def test_figures_of_the_readme_are_those_of_the_benchmarks_rounded_to_two_digits() -> None:
    rows = _ROW.finditer(page("benchmarks/README.md"))
    measured = {row["name"]: (float(row["median"].replace(",", "")), row["unit"]) for row in rows}
    shown = list(_SHOWN.finditer(page("README.md")))
    assert len(shown) >= 5
    for row in shown:
        assert row["name"] in measured, f"benchmarks/README.md has no row {row['name']!r}"
        median, unit = measured[row["name"]]
        assert (float(row["figure"]), row["unit"]) == (float(f"{median:.2g}"), unit), row["name"]


def test_messages_that_the_troubleshooting_page_quotes_exist() -> None:
    source = "\n".join(path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    cells = [line.split("|")[1] for line in page("docs/troubleshooting.md").splitlines() if line.startswith("| ")]
    messages = [quote for cell in cells for quote in re.findall("`([^`]+)`", cell) if " " in quote]
    assert len(messages) > 10
    parts = {part.strip(" ,:") for message in messages for part in PLACEHOLDER.split(message)}
    assert [part for part in sorted(parts) if part not in source and not part.startswith("KVSIGHT_")] == []


def test_the_small_router_is_shown_whole() -> None:
    assert f"```python\n{page('examples/small_router.py')}```\n" in page("docs/routers.md")


@pytest.mark.parametrize("path", ["examples/router.py", "examples/small_router.py", "docs/routers.md"])
def test_routers_look_for_kvsight_where_kvsight_serves(path: str) -> None:
    said = re.findall(r"KVSIGHT_URL=http://127\.0\.0\.1:(\d+)", page(path))
    assert {int(each) for each in said} == {ApiSettings.ignoring_environment().port}


def test_the_tables_of_scale_are_what_the_benchmarks_calculate() -> None:
    lines = page("docs/scale.md").splitlines()
    wanted = paper.tables()
    assert len(wanted) > 30
    assert [line for line in wanted if line.rstrip(".") not in {each.rstrip(".") for each in lines}] == []


def test_a_constant_that_is_not_measured_is_an_error() -> None:
    with pytest.raises(LookupError, match="no row 'answers by magic'"):
        paper.measured("answers by magic")


def test_more_load_needs_more() -> None:
    few, many = paper.FLEETS[1], paper.FLEETS[2]
    for mode in (paper.by_namespace, paper.by_partition):
        assert mode(few).processes < mode(many).processes
        assert mode(many).applying <= paper.BUSY
    assert paper.replicas(many).processes == 0  # one core cannot apply everything


@pytest.mark.parametrize("streams", [64, 100, 1000])
def test_a_holder_set_is_as_large_as_in_the_index(streams: int) -> None:
    index = OverlapIndex(max_pages=1024, max_streams=1024)
    for _ in range(streams):
        index.add_stream()
    assert index.most_streams * NUM_MEDIA // 8 == paper.set_bytes(streams)
