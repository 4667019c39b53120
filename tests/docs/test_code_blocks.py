"""The documentation is correct: code blocks run, commands exist, settings parse, links are valid."""

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from api.access.tokens import TokenRegistry
from api.settings import ApiSettings
from bridge.settings import parse_engine, read_engines
from indexer.tenants import TenantLimits
from kvsight.cli.main import app
from kvsight.plugins import PUBLISHER
from tests.rigs.api import listening
from tests.support.commands import invoke
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream
from tests.support.pages import PAGES, ROOT, blocks, commands

RUN_WHOLE = ("docs/hashing.md", "docs/routers.md")
"""Pages whose Python blocks need only an API on port 8000. Complete examples have separate tests."""
EXAMPLES = {file.read_text() for file in (ROOT / "examples").glob("*.py")}
GIVEN = {
    ("docs/caches.md", 4): "from docs_caches_1 import PAGE, TOKENS, prompt\nswa_kv_pool: object\n",
    ("docs/caches.md", 5): "from docs_caches_1 import cache, identity\nfrom engine_cache import StoragePolicy\n",
    ("docs/engine.md", 2): "from docs_engine_1 import publisher\n",
    ("docs/hashing.md", 2): "from kv_events.hashing import local_hashes, token_array\n",
    ("docs/engines/tensorrt_llm.md", 1): "from typing import Any\nllm: Any\nserving: bool\n",
}
"""What a block takes from the text around it, by page and number."""
VLLM_KEYS = {
    "enable_kv_cache_events",
    "publisher",
    "endpoint",
    "replay_endpoint",
    "buffer_steps",
    "hwm",
    "max_queue_size",
    "topic",
}

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", RUN_WHOLE)
async def test_python_blocks_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = (block.text for block in blocks("python") if block.page == page)
    program = "\n".join(text for text in shown if text not in EXAMPLES)
    assert program
    fed = HandFed()
    async with listening(fed.consumer) as url:
        await fed.hold(Stream("engine-0", model="my-model"), list(range(1, 17)))
        await asyncio.to_thread(exec, program.replace("http://127.0.0.1:8000", url), {"__name__": page})
    if "best_worker" in program:
        assert "engine-1 None 0" in capsys.readouterr().out  # 16 cached tokens do not outweigh 1200 queued ones


def test_python_blocks_compile() -> None:
    for block in blocks("python"):
        compile(block.text, block.page, "exec")


def test_data_blocks_parse() -> None:
    for block in blocks("json"):
        json.loads(block.text)
    for block in blocks("yaml"):
        assert set(yaml.safe_load(block.text)["kv_cache_config"]["kv_events_config"]) <= VLLM_KEYS


def test_lists_of_engines_are_what_the_bridge_reads(tmp_path: Path) -> None:
    listed = [block for block in blocks("toml") if "[[engines]]" in block.text]
    assert {Path(block.page).stem for block in listed} == {"vllm", "sglang", "mooncake"}
    for block in listed:
        file = tmp_path / "engines.toml"
        file.write_text(block.text)
        assert len(read_engines(file)) == 1
    named = {("kvsight", "bridge"), ("kvsight", "serve")}
    found = [words for _, words in commands() if tuple(words[:2]) in named and "--engine" in words]
    engines = [parse_engine(words[words.index("--engine") + 1], words[words.index("--model") + 1]) for words in found]
    assert {engine.worker for engine in engines} == {"engine-0", "pool-a", "10.0.0.1:8000"}


def test_files_of_tokens_and_limits_are_what_the_service_reads(tmp_path: Path) -> None:
    tokens, tenants = tmp_path / "tokens.toml", tmp_path / "tenants.toml"
    for file, word in ((tokens, "scopes ="), (tenants, "worker_streams =")):
        (block,) = (block for block in blocks("toml") if word in block.text)
        file.write_text(block.text)
    caller = TokenRegistry(ApiSettings(api_tokens_file=tokens)).caller(b"Bearer b1946ac92492d2347c6235b4d2611184")
    assert caller is not None
    assert caller.scopes == {"read", "decisions"}
    limits = TenantLimits(tenants)
    assert (limits.of("team-a").pages, limits.of("another").pages) == (8_000_000, 500_000)


def test_event_settings_of_engines_are_json_with_keys_that_exist() -> None:
    found = [
        json.loads(words[words.index("--kv-events-config") + 1])
        for _, words in commands()
        if "--kv-events-config" in words
    ]
    assert sorted(settings["publisher"] for settings in found) == [PUBLISHER, "zmq", "zmq", "zmq"]
    for settings in found:
        assert set(settings) <= VLLM_KEYS


def test_commands_of_kvsight_exist_with_their_options() -> None:
    known = typer.main.get_group(app).commands
    seen = set()
    for page, words in commands():
        if words[:1] != ["kvsight"]:
            continue
        assert words[1] in known, f"{page}: kvsight {words[1]}"
        found = known[words[1]]
        found = getattr(found, "commands", {}).get("".join(words[2:3]), found)  # such as `kvsight log info`
        options = {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)}
        unknown = {word.partition("=")[0] for word in words[2:] if word.startswith("--")} - options - {"--help"}
        assert not unknown, f"{page}: kvsight {words[1]} {unknown}"
        seen.add(words[1])
    assert "query" in seen


def test_the_readme_lists_the_commands_as_the_help_does() -> None:
    shown = re.findall(r"^\| `kvsight (\S+)` \| (.*) \|$", (ROOT / "README.md").read_text(), re.M)
    known = typer.main.get_group(app).commands
    assert shown == [(name, each.get_short_help_str(200)) for name, each in known.items() if not each.hidden]


def test_what_show_hashes_is_shown_to_print_is_what_it_prints() -> None:
    shown = [text.partition("\n") for page, _, text in blocks("console") if "--show-hashes" in text]
    assert len(shown) == 2
    for line, _, output in shown:
        done = invoke(*shlex.split(line.removeprefix("$ kvsight ")))
        assert done.exit_code == 0
        assert [each.strip() for each in done.stdout.splitlines()][: len(output.splitlines())] == [
            each.strip() for each in output.splitlines()
        ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}, target


def modules() -> dict[str, str]:
    """Return the blocks as modules: name -> text. A complete example is checked as a file of its own."""
    found: dict[str, str] = {}
    count: dict[str, int] = {}
    for block in blocks("python"):
        if block.text not in EXAMPLES:
            number = count[block.page] = count.get(block.page, 0) + 1
            name = block.page.removesuffix(".md").replace("/", "_")
            found[f"{name}_{number}"] = GIVEN.get((block.page, number), "") + block.text
    return found


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_python_blocks_are_typed(tmp_path: Path) -> None:
    for name, text in modules().items():
        (tmp_path / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", ROOT / "pyproject.toml", *tmp_path.glob("*.py")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"MYPYPATH": f"{tmp_path}:{ROOT}"},
    )
    assert done.returncode == 0, done.stdout
