"""The help of every command on 80 columns, and that the documentation lists the commands and flags that there are."""

import json
import re
from pathlib import Path

import pytest
import typer

from kv_events.runtime.variables import FLAGS
from kvsight.cli.app import MOVED
from kvsight.cli.main import app
from kvsight.cli.shared.console import UsageError
from tests.support.commands import invoke

DOCS = Path(__file__).resolve().parents[2] / "docs"
COMMANDS = {name: each for name, each in typer.main.get_group(app).commands.items() if not each.hidden}
LEAVES = {
    words: leaf
    for name, each in COMMANDS.items()
    for words, leaf in (
        {f"{name} {sub}": leaf for sub, leaf in getattr(each, "commands", {}).items()} or {name: each}
    ).items()
}
"""Words of a command line -> command, subcommands included."""
WHEN = re.compile(r"\b(if|for|to|with|until|without)\b|: debug to see more")


@pytest.mark.parametrize("name", LEAVES)
def test_help_fits_and_every_command_has_the_common_options(name: str) -> None:
    shown = invoke(*name.split(), "-h").stdout
    assert max(map(len, shown.splitlines())) <= 80
    text = " ".join(shown.split())
    for parameter in LEAVES[name].params:
        assert " ".join(str(getattr(parameter, "help", None) or "").split()) in text, parameter.name
    assert {"-v", "--version"} <= {flag for parameter in LEAVES[name].params for flag in parameter.opts}
    assert invoke(*name.split(), "--version").stdout.startswith("kvsight ")


def test_the_list_of_commands_has_a_whole_sentence_for_each() -> None:
    for group, names in (("", COMMANDS), ("log", COMMANDS["log"].commands)):  # type: ignore[attr-defined]
        lines = invoke(*group.split(), "-h").stdout.splitlines()
        for name in names:
            (line,) = [line for line in lines if line.startswith(f"  {name} ")]
            assert re.search(r"[^.]\.$", line), line
    assert "kvsight" in json.loads(invoke("--version", "--json").stdout)


@pytest.mark.parametrize(("words", "new"), [*MOVED.items(), ("log cat LOG --limit 3", MOVED["log cat"])])
def test_a_command_of_the_version_before_names_its_new_form(words: str, new: str) -> None:
    error = invoke(*words.split()).exception
    assert isinstance(error, UsageError)
    assert str(error) == f"`kvsight {words.partition(' LOG')[0]}` is now: kvsight {new}"
    assert new.split()[0] in COMMANDS or new.startswith("--")


def test_the_help_of_a_setting_says_when_to_set_it() -> None:
    options = [option for name in ("serve", "bridge", "doctor", "record") for option in LEAVES[name].params]
    said = {each.name: str(each.help) for each in options if each.envvar or each.name in FLAGS}
    assert len(said) > 50
    assert [text for text in said.values() if not WHEN.search(text)] == []


def test_the_page_of_commands_has_every_command_and_no_flag_that_does_not_exist() -> None:
    page = (DOCS / "commands.md").read_text()
    titles = " ".join(re.findall(r"^## (.*`.*)$", page, re.MULTILINE))
    assert set(re.findall(r"`(?:kvsight )?([\w-]+)`", titles)) == COMMANDS.keys()
    options = {flag for leaf in LEAVES.values() for each in leaf.params for flag in (*each.opts, *each.secondary_opts)}
    of_engines = {"--enable-prompt-tokens-details", "--enable-cache-report"}
    assert set(re.findall(r"`(--[a-z-]+)", page)) - options - {"--version"} == of_engines
