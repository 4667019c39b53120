"""The container files agree with the code: command lines, settings, ports, health checks, metrics."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


def instructions(keyword: str) -> list[str]:
    """Return the arguments of one instruction in the Dockerfile."""
    return re.findall(rf"^{keyword}\s+(.*)$", DOCKERFILE, re.MULTILINE)


def command_lines() -> dict[str, list[str]]:
    """Return the words of every kvsight command in the container files and the Makefile, by location."""
    ours = {name: service["command"] for name, service in SERVICES.items() if "build" in service}
    in_image = [json.loads(instructions("CMD")[-1])]
    in_image += [shlex.split(line) for line in instructions("RUN") if line.startswith("kvsight ")]
    in_makefile = {"make demo": ["kvsight", "demo", "--exit"]}
    return ours | {f"Dockerfile {words[1]}": words for words in in_image} | in_makefile


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def literals(*packages: str) -> set[str]:
    """Return every string constant in the source of some packages."""
    trees = [ast.parse(path.read_text()) for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@pytest.mark.parametrize("where", command_lines())
def test_every_command_line_is_one_the_command_accepts(where: str) -> None:
    from typer.main import get_command

    from kvsight.cli.main import app

    program, name, *arguments = command_lines()[where]
    assert program == "kvsight"
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert name in commands
    commands[name].make_context(name, arguments, resilient_parsing=False)


def test_the_two_engines_are_told_apart_by_their_names() -> None:
    engines = [service["command"] for name, service in SERVICES.items() if name.startswith("engine-")]
    assert sorted(option(words, "--worker") for words in engines) == ["engine-0", "engine-1"]


def test_every_setting_is_one_the_code_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    from api.settings import ApiSettings
    from indexer.settings import IndexerSettings
    from kv_events.variables import SETTINGS, variable
    from publisher.settings import PublisherSettings

    environment = {k: str(v) for s in SERVICES.values() for k, v in s.get("environment", {}).items()}
    used = {name: value for name, value in environment.items() if name.startswith("KVSIGHT_")}
    assert set(used) <= {variable(name) for name in SETTINGS}
    for name, value in used.items():
        monkeypatch.setenv(name, value)
    ApiSettings()
    IndexerSettings()
    PublisherSettings(model="m", worker="w", block_size=16)


def test_the_api_is_published_exposed_checked_and_scraped_on_the_port_it_listens_on() -> None:
    port = option(SERVICES["indexer"]["command"], "--port")
    assert SERVICES["indexer"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert instructions("EXPOSE") == [port]
    assert option(json.loads(instructions("CMD")[-1]), "--port") == port
    assert f"http://127.0.0.1:{port}/health" in instructions("HEALTHCHECK")[0]
    scrape = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scrape["static_configs"] == [{"targets": [f"indexer:{port}"]}]


def test_the_paths_that_are_checked_and_scraped_are_routes_of_the_api() -> None:
    scrape = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]
    assert {"/health", scrape["metrics_path"]} <= literals("api")


def test_clients_name_the_ports_that_kafka_and_redis_listen_on() -> None:
    kafka, redis = SERVICES["kafka"], SERVICES["redis"]
    bootstrap = kafka["environment"]["KAFKA_ADVERTISED_LISTENERS"].removeprefix("PLAINTEXT://")
    port = bootstrap.partition(":")[2]
    assert f"PLAINTEXT://:{port}," in kafka["environment"]["KAFKA_LISTENERS"]
    assert kafka["healthcheck"]["test"][-1] == bootstrap
    for name in ("indexer", "engine-0", "engine-1"):
        assert option(SERVICES[name]["command"], "--kafka") == bootstrap
    redis_port = option(redis["command"], "--port")
    assert option(redis["healthcheck"]["test"], "-p") == redis_port
    assert option(SERVICES["indexer"]["command"], "--redis") == f"redis://redis:{redis_port}/0"


def test_the_broker_is_the_version_that_the_tests_run_against() -> None:
    from tests.support.servers.kafka_broker import KAFKA_VERSION

    assert SERVICES["kafka"]["image"] == f"apache/kafka:{KAFKA_VERSION}"


def test_whoever_is_waited_for_has_a_health_check() -> None:
    for name, service in SERVICES.items():
        for needed, how in service.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"}, name
            in_image = SERVICES[needed].get("image") == "kvsight:latest" and instructions("HEALTHCHECK")
            assert "test" in SERVICES[needed].get("healthcheck", {}) or in_image, f"{name} waits for {needed}"


def test_what_watches_runs_only_under_its_profile() -> None:
    watching = {name for name, service in SERVICES.items() if service.get("profiles") == ["observability"]}
    assert watching == {"prometheus", "grafana"}
    assert all("profiles" not in service for name, service in SERVICES.items() if name not in watching)


def test_every_mounted_file_and_volume_is_there() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], volume


def test_the_image_runs_as_an_ordinary_user_who_may_write_the_kernel_cache() -> None:
    lines = DOCKERFILE.splitlines()
    assert instructions("USER") == ["kvsight"]
    assert lines.index("USER kvsight") < lines.index("RUN kvsight compile-kernels")
    cache = re.search(r"NUMBA_CACHE_DIR=(\S+)", DOCKERFILE)
    assert cache is not None
    assert f"--owner=kvsight {cache[1]}" in DOCKERFILE


def test_the_image_gets_every_package_of_the_wheel() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    copied = {line.split()[-1] for line in instructions("COPY")} - {"./"}
    allowed = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"}
    assert packages == copied
    assert packages <= allowed


def test_the_dashboard_shows_only_metrics_that_the_code_has() -> None:
    dashboard = json.loads((DEPLOY / "grafana/dashboards/kvsight.json").read_text())
    expressions = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    shown = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in re.findall(r"kvsight_\w+", expressions)}
    known = {re.sub(r"_total$", "", text) for text in literals("api", "indexer")}
    assert shown <= known


def test_the_dashboard_reads_the_source_that_is_provisioned() -> None:
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    dashboard = json.loads((DEPLOY / "grafana/dashboards/kvsight.json").read_text())
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/kvsight.yml").read_text())["providers"][0]
    assert any(volume.split(":")[1] == provider["options"]["path"] for volume in SERVICES["grafana"]["volumes"])
