"""One list of settings: the settings classes, the flags, the documentation and the check of variables agree."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from api.settings import ApiSettings, RegistrationSettings
from bridge.settings import BridgeSettings
from engine_cache.settings import HICACHE_HOST_MEMORY_RESERVE_BYTES, HOST_MEMORY_RESERVE, MooncakeSettings
from indexer.settings import IndexerSettings
from indexer.shards.settings import GroupSettings
from kv_events.errors import InvalidValueError, UnknownVariableError
from kv_events.hash_seed import SEED_VARIABLE
from kv_events.kafka.settings import KafkaSettings
from kv_events.runtime.settings import KvsightSettings
from kv_events.runtime.variables import FLAGS, PREFIX, SETTINGS, check_variables, variable
from kvsight.cli import bridge, serve
from kvsight.cli.main import app
from kvsight.cli.shared import flags
from kvsight.plugins import PluginSettings
from publisher.settings import PublisherSettings
from selection.settings import SelectionSettings
from tests.support.programs import run_program

ROOT = Path(__file__).resolve().parents[2]
CLASSES: list[type[KvsightSettings]] = [
    KafkaSettings,
    IndexerSettings,
    GroupSettings,
    ApiSettings,
    RegistrationSettings,
    SelectionSettings,
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
_ROW = re.compile(r"^\| `([A-Z_]+|--[a-z-]+)` \| (.+?) \| (.+) \|$", re.MULTILINE)
WHEN = ("to", "if", "for", "with", "without", "instead", "higher", "before", "inside")
"""First words of a sentence that says when to set something."""
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


def test_the_lists_have_every_setting() -> None:
    assert {variable(name) for name in SETTINGS | FLAGS} == {name for name in defaults() if "MOONCAKE" not in name}


def test_there_are_few() -> None:
    assert len(SETTINGS) <= 45


def test_flags_are_fields_of_settings_with_their_types_and_variables() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    fields = {name: field.annotation for settings in CLASSES for name, field in settings.model_fields.items()}
    tables = (flags.KAFKA, flags.REDIS, flags.HTTP, flags.AWAY, flags.METRICS_PORT, bridge._FLAGS, serve._FLAGS)
    for field, flag in (each for table in tables for each in table.items()):
        kinds = (fields[field], *get_args(fields[field]))
        assert flag.kind in kinds or "Literal" in str(kinds), field
    for option in (option for command in commands.values() for option in command.params if option.envvar):
        assert option.envvar == f"{PREFIX}{max(option.opts, key=len).removeprefix('--').replace('-', '_').upper()}"
        assert variable(option.envvar.removeprefix(PREFIX).lower()) in defaults()
    assert {variable(name) for name in FLAGS} <= {flag for option in commands["serve"].params for flag in option.opts}


def test_the_documentation_has_every_setting_with_its_default_and_when_to_set_it() -> None:
    rows = _ROW.findall((ROOT / "docs" / "settings.md").read_text())
    assert {name for name, *_ in rows} == set(defaults())
    for name, default, when in rows:
        assert documented(default) == defaults()[name], name
        assert when.split()[0].strip(",") in WHEN, name


def said(program: str, **variables: str) -> list[str]:
    """The lines on stderr of a process with only these variables of kvsight."""
    return run_program(program, **variables).stderr.splitlines()


@pytest.mark.parametrize(
    "program",
    [
        "import sys; from kvsight.cli.main import run; sys.argv[1:] = ['demo', '--prompt']; run()",
        "from kv_events.kafka.settings import KafkaSettings; KafkaSettings(); KafkaSettings()",
    ],
)
def test_every_process_checks_its_variables(program: str) -> None:
    lines = said(program, KVSIGHT_REDDIS="secret", KVSIGHT_TENANT="t")
    assert lines[-1].endswith("KVSIGHT_REDDIS is not a setting; the nearest name is KVSIGHT_REDIS")
    assert "secret" not in str(lines)
    [line] = said(program, KVSIGHT_KAFKA="h:1", KVSIGHT_RECORD="folder")
    assert "KVSIGHT_RECORD is the flag --record now" in line


def test_the_check_loads_no_package_but_the_contract() -> None:
    (modules,) = said("import sys, kv_events.runtime.variables; print(*sys.modules, file=sys.stderr)")
    packages = {"indexer", "publisher", "bridge", "api", "engine_cache", "numpy", "pydantic"}
    assert not packages & set(modules.split())


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("KVSIGHT_MOONCAKE_MASTER", "h:1", "KVSIGHT_MOONCAKE_MASTER is MOONCAKE_MASTER now"),
        ("KVSIGHT_COMPRESSION", "lz4", "KVSIGHT_COMPRESSION is gone"),
        ("KVSIGHT_SERVE_SERVICE_HOST", "10.0.0.1", ""),  # what Kubernetes says of a service
        ("KVSIGHT_SERVE_PORT_8000_TCP_ADDR", "10.0.0.1", ""),
        ("KVSIGHT_SERVE_PORT", "tcp://10.0.0.1:8000", ""),
        ("KVSIGHT_SERVE_PORT", "8000", "KVSIGHT_SERVE_PORT is not a setting"),
        ("KVSIGHT_KAFKA", "h:1", ""),
    ],
)
def test_a_variable_that_is_no_setting_is_answered_with_one_line(
    name: str, value: str, line: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, value)
    check_variables.cache_clear()
    try:
        check_variables()
        errors = ""
    except UnknownVariableError as error:
        errors = str(error)
    finally:
        check_variables.cache_clear()
    assert (caplog.text + errors).count("\n") <= 1
    assert line in caplog.text + errors if line else caplog.text + errors == ""


def test_a_variable_of_the_version_before_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSIGHT_TLS_CERT_FILE", "cert")
    monkeypatch.setenv("KVSIGHT_MOONCAKE_PROTOCOL", "rdma")
    assert ApiSettings().tls_cert_file == Path("cert")
    assert MooncakeSettings().mooncake_protocol == "rdma"


def test_an_unknown_protocol_of_mooncake_is_refused_with_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "udp")
    with pytest.raises(InvalidValueError, match="MOONCAKE_PROTOCOL: got 'udp', expected 'tcp' or 'rdma'"):
        MooncakeSettings()
