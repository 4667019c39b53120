"""One list of environment variables: the settings classes, the commands, the documentation and the warning agree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import typer

from api.settings import ApiSettings, RegistrationSettings
from bridge.settings import BridgeSettings
from engine_cache.settings import DEBUG_POOLS, HICACHE_HOST_MEMORY_RESERVE_BYTES, HOST_MEMORY_RESERVE, MooncakeSettings
from indexer.settings import IndexerSettings
from indexer.shards.settings import GroupSettings
from kv_events.hash_seed import SEED_VARIABLE
from kv_events.kafka.settings import KafkaSettings
from kv_events.runtime.settings import KvsightSettings
from kv_events.runtime.variables import SETTINGS, variable
from kvsight.cli.main import app
from kvsight.plugins import PluginSettings
from publisher.settings import PublisherSettings

ROOT = Path(__file__).resolve().parents[3]
CLASSES: list[type[KvsightSettings]] = [
    KafkaSettings,
    IndexerSettings,
    GroupSettings,
    ApiSettings,
    RegistrationSettings,
    PublisherSettings,
    PluginSettings,
    BridgeSettings,
    MooncakeSettings,
]
WITHOUT_CLASS = {
    SEED_VARIABLE: "dynamo",
    DEBUG_POOLS: 0,
    HOST_MEMORY_RESERVE: HICACHE_HOST_MEMORY_RESERVE_BYTES,
    "KVSIGHT_URL": "http://127.0.0.1:8000",
    "KVSIGHT_LOG_LEVEL": "info",
    "KVSIGHT_LOG_FORMAT": "text",
}
"""Variables that no settings class reads, with their defaults."""
_ROW = re.compile(r"^\| `(KVSIGHT_\w+)` \| (.+?) \| .+ \|$", re.MULTILINE)
_UNITS = {"MiB": 2**20, "GiB": 2**30}


def defaults() -> dict[str, Any]:
    """Return the default of every variable. Required variables have `...`."""
    fields = {name: field for settings in CLASSES for name, field in settings.variables().items()}
    return {name: ... if field.is_required() else field.default for name, field in fields.items()} | WITHOUT_CLASS


def documented(cell: str) -> Any:
    """Return the default that a table cell describes."""
    words = {"none": None, "empty": "", "required": ..., "true": True, "false": False}
    text = cell.strip("`")
    if cell in words:
        return words[cell]
    number, _, unit = text.replace(",", "").partition(" ")
    return float(number) * _UNITS.get(unit, 1) if number.replace(".", "", 1).isdecimal() else text


def options() -> list[tuple[str, str]]:
    """Return the longest flag and the variable of every option that has a variable."""
    commands = list(typer.main.get_command(app).commands.values())  # type: ignore[attr-defined]
    commands += [nested for group in commands for nested in getattr(group, "commands", {}).values()]
    found = [option for command in commands for option in command.params if option.envvar]
    return [(max(option.opts, key=len), str(option.envvar)) for option in found]


def test_the_list_has_every_variable_that_is_read() -> None:
    assert {variable(name) for name in SETTINGS} == set(defaults())


def test_there_are_few() -> None:
    assert len(SETTINGS) <= 90


def test_flags_have_the_names_of_their_variables() -> None:
    assert options()
    for flag, name in options():
        assert variable(flag.removeprefix("--").replace("-", "_")) == name
        assert name in defaults()


def test_the_documentation_has_every_variable_with_its_default() -> None:
    rows = _ROW.findall((ROOT / "docs" / "settings.md").read_text())
    assert {name for name, _ in rows} == set(defaults())
    for name, cell in rows:
        assert documented(cell) == defaults()[name], name


def run(program: str, **variables: str) -> str:
    """Run a program in a process with only these variables of kvsight. Returns stderr."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVSIGHT_")} | variables
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=100
    )
    return done.stderr


def test_a_command_reports_an_unknown_variable_with_the_nearest_name() -> None:
    said = run(
        "import sys; from kvsight.cli.main import run; sys.argv[1:] = ['demo', '--prompt']; run()",
        KVSIGHT_REDDIS="secret",
        KVSIGHT_KAKFA="secret",
        KVSIGHT_TENANT="t",
    )
    lines = [line for line in said.splitlines() if "KVSIGHT_" in line]
    assert len(lines) == 2
    assert "KVSIGHT_KAKFA" in lines[0]
    assert lines[0].endswith("KVSIGHT_KAFKA.")
    assert "KVSIGHT_REDDIS" in lines[1]
    assert lines[1].endswith("KVSIGHT_REDIS.")
    assert "secret" not in said


def test_settings_in_another_program_report_an_unknown_variable_once() -> None:
    program = "from kv_events.kafka.settings import KafkaSettings; KafkaSettings(); KafkaSettings()"
    assert run(program, KVSIGHT_KAFKA_TOPIC="t").count("KVSIGHT_KAFKA_TOPIC") == 1
    assert run(program, KVSIGHT_KAFKA="h:1") == ""


def test_the_report_loads_no_kvsight_package_but_the_contract() -> None:
    program = "import sys, kv_events.runtime.variables; print(*sys.modules, file=sys.stderr)"
    assert not {"indexer", "publisher", "bridge", "api", "engine_cache", "numpy", "pydantic"} & set(
        run(program).split()
    )
