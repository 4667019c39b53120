"""One list of environment variables: the settings classes, the commands, the documentation and the warning agree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from api.settings import ApiSettings, RegistrationSettings
from bridge.settings import BridgeSettings
from engine_cache.settings import HICACHE_HOST_MEMORY_RESERVE_BYTES, HOST_MEMORY_RESERVE, MooncakeSettings
from indexer.settings import IndexerSettings
from indexer.shards.settings import GroupSettings
from kv_events.hash_seed import SEED_VARIABLE
from kv_events.kafka.settings import KafkaSettings
from kv_events.runtime.settings import KvsightSettings
from kv_events.runtime.variables import FLAGS, PREFIX, SETTINGS, variable
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
    HOST_MEMORY_RESERVE: HICACHE_HOST_MEMORY_RESERVE_BYTES,
    "KVSIGHT_URL": "http://127.0.0.1:8000",
    "--log-level": "info",
    "--log-format": "text",
}
"""Settings that no settings class reads, with their defaults."""
_ROW = re.compile(r"^\| `([A-Z_]+|--[a-z-]+)` \| (.+?) \| .+ \|$", re.MULTILINE)
_UNITS = {"MiB": 2**20, "GiB": 2**30}


def defaults() -> dict[str, Any]:
    """Return the default of every variable and flag. Required variables have `...`."""
    fields = {name: field for settings in CLASSES for name, field in settings.model_fields.items()}
    defaults = {name: ... if field.is_required() else field.default for name, field in fields.items()}
    return {variable(name): defaults[name] for name in defaults if variable(name) != name} | WITHOUT_CLASS


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


def test_the_lists_have_every_setting() -> None:
    assert {variable(name) for name in SETTINGS | FLAGS} == {name for name in defaults() if "MOONCAKE" not in name}


def test_there_are_few() -> None:
    assert len(SETTINGS) <= 45


def test_flags_have_the_names_of_their_variables() -> None:
    assert options()
    for flag, name in options():
        field = flag.removeprefix("--").replace("-", "_")
        assert name == f"{PREFIX}{field.upper()}"
        assert variable(field) in defaults()


def test_a_setting_without_a_variable_is_a_flag_of_a_service() -> None:
    service = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    assert {variable(name) for name in FLAGS} <= {flag for option in service.params for flag in option.opts}


def test_the_documentation_has_every_setting_with_its_default() -> None:
    rows = _ROW.findall((ROOT / "docs" / "settings.md").read_text())
    assert {name for name, _ in rows} == set(defaults())
    for name, cell in rows:
        assert documented(cell) == defaults()[name], name


def run(program: str, **variables: str) -> str:
    """Run a program in a process with only these variables of kvsight. Returns stderr."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVSIGHT_")} | variables
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=100
    )
    return done.stderr


COMMAND = "import sys; from kvsight.cli.main import run; sys.argv[1:] = ['version']; run()"
SETTINGS_OF_A_PROGRAM = "from kv_events.kafka.settings import KafkaSettings; KafkaSettings(); KafkaSettings()"


@pytest.mark.parametrize("program", [COMMAND, SETTINGS_OF_A_PROGRAM])
def test_an_unknown_variable_is_an_error_with_the_nearest_name(program: str) -> None:
    said = run(program, KVSIGHT_REDDIS="secret", KVSIGHT_TENANT="t")
    assert said.splitlines()[-1].endswith("KVSIGHT_REDDIS is not a setting; the nearest name is KVSIGHT_REDIS")
    assert "secret" not in said
    assert run(program, KVSIGHT_KAFKA="h:1") == ""


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("KVSIGHT_RECORD", "folder", "is the flag --record now"),
        ("KVSIGHT_MOONCAKE_MASTER", "h:1", "is MOONCAKE_MASTER now"),
        ("KVSIGHT_COMPRESSION", "lz4", "is gone"),
    ],
)
def test_a_variable_of_the_version_before_is_answered_with_one_line(name: str, value: str, sentence: str) -> None:
    for program in (COMMAND, SETTINGS_OF_A_PROGRAM):
        [line] = run(program, **{name: value}).splitlines()
        assert f"{name} {sentence}" in line


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVSIGHT_SERVE_SERVICE_HOST", "10.0.0.1"),
        ("KVSIGHT_SERVE_PORT_8000_TCP_ADDR", "10.0.0.1"),
        ("KVSIGHT_SERVE_PORT", "tcp://10.0.0.1:8000"),
    ],
)
def test_what_kubernetes_says_of_a_service_is_no_setting(name: str, value: str) -> None:
    assert run(COMMAND, **{name: value}) == ""
    assert "KVSIGHT_SERVE_PORT is not a setting" in run(COMMAND, KVSIGHT_SERVE_PORT="8000")


def test_a_variable_of_the_version_before_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSIGHT_TLS_CERT_FILE", "cert")
    monkeypatch.setenv("KVSIGHT_MOONCAKE_PROTOCOL", "rdma")
    assert ApiSettings().tls_cert_file == Path("cert")
    assert MooncakeSettings().mooncake_protocol == "rdma"


def test_the_report_loads_no_kvsight_package_but_the_contract() -> None:
    program = "import sys, kv_events.runtime.variables; print(*sys.modules, file=sys.stderr)"
    assert not {"indexer", "publisher", "bridge", "api", "engine_cache", "numpy", "pydantic"} & set(
        run(program).split()
    )
