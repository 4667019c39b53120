"""The container files and the commands of docs/deployment.md, and checks of command lines and settings."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from typer.main import get_command

from kv_events.runtime.variables import SETTINGS, variable
from kvsight.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
_DEFAULT = re.compile(r"\$\{\w+:-([^}]*)\}")


def command(service: str) -> list[str]:
    """Return the words of a service's command. Variables have their defaults."""
    return [_DEFAULT.sub(r"\1", word) for word in SERVICES[service]["command"]]


def environment(service: str) -> dict[str, str]:
    """Return the variables of a service. Those of the caller have their defaults."""
    return {name: _DEFAULT.sub(r"\1", str(value)) for name, value in SERVICES[service].get("environment", {}).items()}


def documented(section: str) -> list[str]:
    """Return the commands in one section of the deployment page. A section ends at the next heading of any level."""
    page = (ROOT / "docs" / "deployment.md").read_text()
    text = re.split(r"^#{1,6} ", page.partition(f"# {section}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    assert text, f"no section {section}"
    return [line for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL) for line in _commands(block)]


def _commands(block: str) -> list[str]:
    lines = block.replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def check_command_line(words: list[str]) -> None:
    """Fail unless a command line is one that `kvsight` accepts."""
    program, name, *arguments = words
    assert program == "kvsight"
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert name in commands
    commands[name].make_context(name, arguments, resilient_parsing=False)


def unknown_settings(names: Iterable[str]) -> set[str]:
    """Return the `KVSIGHT_*` variables among the names that no process reads."""
    return {name for name in names if name.startswith("KVSIGHT_")} - {variable(name) for name in SETTINGS}
