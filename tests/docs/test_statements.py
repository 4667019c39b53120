"""What pages state is what code, tests and benchmarks say: figures, messages, addresses, programs, versions."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version as installed
from pathlib import Path
from textwrap import dedent
from typing import Any

import msgspec
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from api.settings import ApiSettings
from benchmarks import paper
from indexer.freshness import NO_HEARTBEAT
from indexer.index import OverlapIndex
from indexer.resync import OPERATOR, RESYNC_REASONS
from indexer.tenants import TENANT_STREAMS
from indexer.views import INDEX_FULL, RESYNC_CUT_OFF, TENANT_PAGES
from kv_events.codec import decode_batch
from kv_events.records import Channel
from kv_events.remedies import OF_CONNECTIONS, OF_VIEWS, remedy
from kv_events.schema import BATCHES_LOST, CLOSED, ENGINE_UNHEARD, LEDGER_FULL, NUM_MEDIA, REPLAYING
from tests.support.commands import invoke, local_zone, printed
from tests.support.compose import ROOT, SERVICES
from tests.support.engines.released_modules import RELEASES
from tests.support.log.plain_log import read
from tests.support.log.records import records_of
from tests.support.pages import PAGES
from tests.support.waiting import wait_until

PACKAGES = ("api", "bridge", "indexer", "kv_events", "kvsight", "publisher")
PLACEHOLDER = re.compile(r"\.\.\.|\b[NM]\b|: ")
_ROW = re.compile(r"^\| (?P<name>[^|]+?) \| (?P<median>[\d.,]+) \|.*?\| (?P<unit>[A-Za-z/]+) \|", re.MULTILINE)
_SHOWN = re.compile(r"^\| (?P<name>[^|]+?) \| (?P<figure>[\d.,]+) (?P<unit>[A-Za-z/]+) \|$", re.MULTILINE)


def page(path: str) -> str:
    return (ROOT / path).read_text()


def test_the_tables_of_causes_have_the_remedies_that_are_shown() -> None:
    rows = re.findall(
        r"^\| (`.+?) \| (.+) \|$", page("docs/operations.md") + page("docs/troubleshooting.md"), re.MULTILINE
    )
    of_causes = {cause: text for causes, text in rows for cause in re.findall("`(.+?)`", causes)}
    shown = {cause: text for cause, text in of_causes.items() if remedy(cause)}
    assert all(text.startswith(remedy(cause)) for cause, text in shown.items()), shown
    missing = {part for part in (*OF_CONNECTIONS, *OF_VIEWS) if not any(part in cause for cause in shown)}
    assert not missing
    assert remedy("missed batches 13 to 17")
    assert remedy("missed 3 batches 13 to 17")
    reasons = {ENGINE_UNHEARD, BATCHES_LOST, REPLAYING, LEDGER_FULL, CLOSED, NO_HEARTBEAT, INDEX_FULL, TENANT_PAGES}
    assert all(map(remedy, {*reasons, TENANT_STREAMS, RESYNC_CUT_OFF, *RESYNC_REASONS} - {OPERATOR}))


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


def test_files_and_folders_that_pages_name_exist() -> None:
    pages = [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md"))]
    ours = "|".join((*PACKAGES, "analysis", "engine_cache", "simulation", "tests", "deploy", "examples", "benchmarks"))
    named = {path for each in pages for path in re.findall(rf"`((?:{ours}|\.ci)/[\w./-]*)`", each.read_text())}
    assert len(named) > 20
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("path", ["examples/router.py", "examples/small_router.py", "docs/routers.md"])
def test_routers_look_for_kvsight_where_kvsight_serves(path: str) -> None:
    said = re.findall(r"KVSIGHT_URL=http://127\.0\.0\.1:(\d+)", page(path))
    assert {int(each) for each in said} == {ApiSettings.ignoring_environment().port}


def test_the_tables_of_scale_are_what_the_benchmarks_calculate() -> None:
    lines = page("docs/scale.md").splitlines()
    wanted = paper.tables()
    assert len(wanted) > 30
    with pytest.raises(LookupError, match="no row 'answers by magic'"):
        paper.measured("answers by magic")
    assert [line for line in wanted if line.rstrip(".") not in {each.rstrip(".") for each in lines}] == []


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


TITLES = {"vllm": "vLLM", "sglang": "SGLang"}


def versions(engine: str) -> str:
    """Return the section about versions of an engine's page, as one line."""
    page = (ROOT / "docs" / "engines" / f"{engine}.md").read_text()
    return " ".join(page.partition("## Versions\n")[2].partition("\n## ")[0].split())


@pytest.mark.parametrize("engine", TITLES)
def test_the_versions_that_are_called_tested_are_tested(engine: str) -> None:
    said = re.search(rf"is tested with the event modules of {TITLES[engine]} (\S+) and (\d\S*\d)", versions(engine))
    assert said is not None
    assert list(said.groups()) == [number for name, number in RELEASES if name == engine]


@pytest.mark.parametrize("engine", TITLES)
def test_the_image_of_the_compose_stack_is_new_enough(engine: str) -> None:
    least = [Version(each) for each in re.findall(rf"{TITLES[engine]} (\S+) or newer", versions(engine))]
    tested = [Version(number) for name, number in RELEASES if name == engine]
    image = Version(SERVICES[engine]["image"].rpartition(":v")[2])
    assert least
    assert min(least) == min(tested)  # nothing older is tested
    assert max(least) <= image == max(tested)


def test_hybrid_models_have_a_least_version_of_vllm_and_the_reason() -> None:
    said = versions("vllm")
    assert "need vLLM 0.21 or newer" in said
    assert "github.com/vllm-project/vllm/issues/49537" in said


def test_mooncakes_least_version_is_that_of_the_extra() -> None:
    said = re.search(r"Use Mooncake (\S+) or newer", versions("mooncake"))
    assert said is not None
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (needed,) = [one for one in map(Requirement, extras["mooncake"]) if one.name.startswith("mooncake")]
    assert {str(each) for each in needed.specifier if each.operator == ">="} == {f">={said[1]}"}
    assert installed(needed.name) in needed.specifier
    assert "-DENABLE_KV_EVENTS=ON" in versions("mooncake")


QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()


@pytest.fixture
def events(tmp_path: Path) -> Path:
    """The event log that the program on the page writes."""
    (program,) = re.findall(r"^ *```python\n(.*?)^ *```", QUICKSTART, re.MULTILINE | re.DOTALL)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", dedent(program)]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as publishing:
        assert publishing.stdout is not None
        assert publishing.stdout.readline().startswith("published")
        wait_until(lambda: len(read(tmp_path / "events")) >= 3, what="heartbeats")
        publishing.communicate("\n", timeout=60)
    assert publishing.returncode == 0
    return tmp_path / "events"


def test_the_query_finds_the_tokens_that_are_shown_and_the_views_as_they_were(events: Path) -> None:
    (prompt,) = re.findall(r"echo '(.*?)' \| kvsight query -", QUICKSTART)
    (shown,) = re.findall(r"^ *engine-0 +0 +(\d+)  live", QUICKSTART, re.MULTILINE)
    answer = printed("replay", events, "--at", 3, "--query", "-", stdin=prompt)
    assert answer["instances"]["engine-0"]["gpu"] == int(shown) == 16
    assert [view["worker"] for view in printed("replay", events, "--at", 3)] == ["engine-0"]
    assert "`kvsight replay events --at 3`" in QUICKSTART


EXAMPLES = ROOT / "examples"
ANOMALY = (EXAMPLES / "debug_a_routing_anomaly.md").read_text()
RECORDING = "routing_anomaly"


def shown() -> Iterator[tuple[list[str], list[str]]]:
    """Yield the words of each command, and the lines of its output that the page shows."""
    for block in re.findall(r"^```console\n\$ (.*?)^```", ANOMALY, re.MULTILINE | re.DOTALL):
        command, *lines = block.splitlines()
        yield shlex.split(command), [line for line in lines if line != "..."]


@local_zone("UTC")
def test_five_commands_find_the_cause_as_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(EXAMPLES / RECORDING, tmp_path / RECORDING)
    monkeypatch.chdir(tmp_path)
    commands = list(shown())
    assert len(commands) == 5
    for words, lines in commands:
        done = invoke(*words[1:])
        assert (words[0], done.exit_code) == ("kvsight", 0), done.stderr
        output = done.stdout.splitlines()
        for line in lines:
            begin, is_cut, _ = line.partition("...")
            found = [at for at, real in enumerate(output) if (real.startswith(begin) if is_cut else real == line)]
            assert found, f"{shlex.join(words)} does not print:\n{line}\nbut:\n{done.stdout}"
            output = output[found[0] + 1 :]
    assert "--channel" not in ANOMALY
    batch = msgspec.json.decode(done.stdout)  # of the last command: one record, so no decision is beside it
    removed, stored = batch["events"]
    assert (len(removed["sequence_hashes"]), len(stored["sequence_hashes"])) == (128, 96)
    assert stored["chains"] == [{"start": 0, "parent": 0}]


def test_the_script_makes_the_recording(tmp_path: Path) -> None:
    runpy.run_path(str(EXAMPLES / "record_a_routing_anomaly.py"))["record"](tmp_path)
    assert list(contents(tmp_path)) == list(contents(EXAMPLES / RECORDING))
    assert sum(file.stat().st_size for file in (EXAMPLES / RECORDING).iterdir()) < 200_000


def contents(folder: Path) -> Iterator[tuple[Any, ...]]:
    """Yield each record without the epochs of the publishers, which are those of the run that made them."""
    for record in records_of(folder):
        if record.channel == Channel.EVENTS:
            batch = decode_batch(record.payload)
            steps = [str(step) for step in batch.steps]
            yield record.offset, record.timestamp_ms, batch.stream, batch.seq, steps, batch.digest.tobytes()
        else:
            yield record
