"""The container files agree with the code: command lines, settings, ports, health checks, metrics."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from api.settings import ApiSettings
from bridge.settings import parse_engine
from indexer.settings import IndexerSettings
from publisher.settings import PublisherSettings
from tests.support.compose import (
    COMPOSE,
    ROOT,
    SERVICES,
    check_command_line,
    command,
    documented,
    environment,
    unknown_settings,
)  # fmt: skip
from tests.support.engines.released_modules import SGLANG_MAPS, VLLM
from tests.support.servers.certificates import Certificates
from tests.support.servers.service_process import ServiceProcess

DEPLOY = ROOT / "deploy"
PROMETHEUS = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
SCRAPES = {job["job_name"]: job for job in PROMETHEUS}
OURS = {name: service for name, service in SERVICES.items() if service["image"] == "kvsight:latest"}
ENGINES = {name for name in SERVICES if name.startswith("engine-")}
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


def instructions(keyword: str) -> list[str]:
    """Return the arguments of one instruction in the Dockerfile."""
    return re.findall(rf"^{keyword}\s+(.*)$", DOCKERFILE, re.MULTILINE)


def command_lines() -> dict[str, list[str]]:
    """Return the words of every kvsight command in the container files and the Makefile, by location."""
    ours = {name: command(name) for name in OURS}
    on_host = [line.split() for line in documented("Programs on the host")]
    in_image = [json.loads(instructions("CMD")[-1])]
    in_image += [shlex.split(line) for line in instructions("RUN") if line.startswith("kvsight ")]
    in_makefile = {"make demo": ["kvsight", "demo", "--exit"]}
    in_docs = {f"docs {words[1]}": words for words in on_host}
    return ours | {f"Dockerfile {words[1]}": words for words in in_image} | in_makefile | in_docs


def option(words: list[str], name: str) -> str:
    """Return the value of an option that is given as `--name value` or `--name=value`."""
    joined = [word.removeprefix(f"{name}=") for word in words if word.startswith(f"{name}=")]
    return joined[0] if joined else words[words.index(name) + 1]


def literals(*packages: str) -> set[str]:
    """Return every string constant in the source of some packages."""
    trees = [ast.parse(path.read_text()) for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@pytest.mark.parametrize("where", command_lines())
def test_every_command_line_is_one_the_command_accepts(where: str) -> None:
    check_command_line(command_lines()[where])


def test_every_simulated_engine_has_a_name_and_a_seed_of_its_own() -> None:
    engines = [SERVICES[name]["command"] for name in ENGINES]
    assert sorted(option(words, "--engine") for words in engines) == ["engine-0", "engine-1"]
    assert len({option(words, "--seed") for words in engines}) == len(engines)


def test_every_simulated_engine_is_scraped() -> None:
    (found,) = SCRAPES["kvsight-engine"]["static_configs"]
    ports = {name: option(SERVICES[name]["command"], "--metrics-port") for name in ENGINES}
    assert sorted(found["targets"]) == sorted(f"{name}:{port}" for name, port in ports.items())


def test_every_setting_is_one_the_code_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {name: value for service in SERVICES for name, value in environment(service).items()}
    assert not unknown_settings(found)
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    ApiSettings()
    IndexerSettings()
    PublisherSettings(model="m", worker="w", block_size=16)


def test_the_api_is_published_exposed_checked_and_scraped_on_the_port_it_listens_on() -> None:
    port = option(SERVICES["indexer"]["command"], "--port")
    assert SERVICES["indexer"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert instructions("EXPOSE") == [port]
    assert option(json.loads(instructions("CMD")[-1]), "--port") == port
    assert f"'http://127.0.0.1:{port}'" in instructions("HEALTHCHECK")[0]
    assert SCRAPES["kvsight"]["static_configs"] == [{"targets": [f"indexer:{port}"]}]


def test_the_images_health_check_asks_over_tls_and_on_another_port(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    cert, key, _ = certificates.issue("kvsight")
    words = [sys.executable, *json.loads(instructions("HEALTHCHECK")[0].partition("CMD ")[2])[1:]]
    variables = {"KVSIGHT_TLS_CERT_FILE": cert, "KVSIGHT_TLS_KEY_FILE": key, "SSL_CERT_FILE": certificates.ca}
    with ServiceProcess(tmp_path, **variables) as service:
        asked = {**os.environ, "KVSIGHT_URL": f"{service.url}/"}
        assert subprocess.run(words, env=asked, timeout=60).returncode == 0
    assert subprocess.run(words, env=asked, timeout=60, stderr=subprocess.DEVNULL).returncode == 1


def test_every_member_of_the_group_is_published_and_scraped_on_the_port_it_listens_on() -> None:
    member = SERVICES["member"]
    port = option(member["command"], "--port")
    host, published, container = member["ports"][0].split(":")
    first, last = map(int, published.split("-"))
    assert (host, container) == ("127.0.0.1", port)
    assert last - first + 1 >= member["deploy"]["replicas"] == 2
    assert instructions("EXPOSE") == [port]  # the image's health check asks it
    assert SCRAPES["kvsight"]["dns_sd_configs"] == [{"names": ["member"], "type": "A", "port": int(port)}]
    assert {str(first), str(first + 1)} <= set(re.findall(r":(80\d\d)", (ROOT / "docs/deployment.md").read_text()))


def test_the_paths_that_are_checked_and_scraped_are_routes_of_the_api() -> None:
    assert {"/health", SCRAPES["kvsight"]["metrics_path"]} <= literals("api")


def test_clients_name_the_ports_that_kafka_and_redis_listen_on() -> None:
    kafka, redis = SERVICES["kafka"], SERVICES["redis"]
    bootstrap = listeners("KAFKA_ADVERTISED_LISTENERS")["PLAINTEXT"]
    port = bootstrap.partition(":")[2]
    assert listeners("KAFKA_LISTENERS")["PLAINTEXT"] == f":{port}"
    assert kafka["healthcheck"]["test"][-1] == bootstrap
    assert {option(service["command"], "--kafka") for service in OURS.values()} == {bootstrap}
    redis_port = option(redis["command"], "--port")
    assert option(redis["healthcheck"]["test"], "-p") == redis_port
    assert option(SERVICES["indexer"]["command"], "--redis") == f"redis://redis:{redis_port}/0"


def listeners(variable: str) -> dict[str, str]:
    """Return listener -> address, from a variable of the broker."""
    return dict(each.split("://") for each in SERVICES["kafka"]["environment"][variable].split(","))


def test_programs_on_the_host_reach_the_broker_through_a_listener_that_sends_them_back_there() -> None:
    address = listeners("KAFKA_ADVERTISED_LISTENERS")["HOST"]
    host, _, port = address.partition(":")
    assert host == "localhost"
    assert listeners("KAFKA_LISTENERS")["HOST"] == f":{port}"
    assert SERVICES["kafka"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert "HOST:PLAINTEXT" in SERVICES["kafka"]["environment"]["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(",")
    assert {option(line.split(), "--kafka") for line in documented("Programs on the host")} == {address}


def test_the_broker_is_the_version_that_the_tests_run_against() -> None:
    from tests.support.servers.kafka_broker import KAFKA_VERSION

    assert SERVICES["kafka"]["image"].partition("@")[0] == f"apache/kafka:{KAFKA_VERSION}"


def test_every_foreign_image_is_pinned() -> None:
    for name, service in SERVICES.items():
        if name not in OURS:
            image, _, digest = service["image"].partition("@")
            assert re.fullmatch(r"\S+:v?\d+\.\d+\.\d+\S*", image), name
            # no digests of the engines' images are known
            assert re.fullmatch("sha256:[0-9a-f]{64}", digest) or name in ("vllm", "sglang")


@pytest.mark.parametrize(("engine", "release"), [("vllm", VLLM), ("sglang", SGLANG_MAPS)])
def test_an_engine_has_the_release_of_the_tests_and_the_options_of_its_page(
    engine: str, release: tuple[str, str]
) -> None:
    service, page = SERVICES[engine], (ROOT / f"docs/engines/{engine}.md").read_text()
    assert service["image"].endswith(f":v{release[1]}")
    (documented_config,) = re.findall(r"\n    (?:[^\n]*)--kv-events-config '(\{.*?\})'\n```", page, re.DOTALL)[:1]
    assert json.loads(option(command(engine), "--kv-events-config")) == json.loads(documented_config)
    own = {word.split("=")[0] for word in command(engine) if word.startswith("--")}
    assert own <= set(re.findall(r"--[a-z-]+", page)) | {"--host"}
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["driver"] == "nvidia"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_bridge_reads_the_ports_that_its_engine_publishes_on(engine: str) -> None:
    config = json.loads(option(command(engine), "--kv-events-config"))
    read = parse_engine(option(command(f"{engine}-bridge"), "--engine"))
    ports = [config[key].rpartition(":")[2] for key in ("endpoint", "replay_endpoint")]
    assert [read.endpoint, read.replay_endpoint] == [f"tcp://{engine}:{port}" for port in ports]
    assert read.model is not None
    assert read.model in command(engine)[0]
    metrics = option(command(f"{engine}-bridge"), "--metrics-port")
    (scrape,) = SCRAPES["kvsight-bridge"]["dns_sd_configs"]
    assert f"{engine}-bridge" in scrape["names"]
    assert str(scrape["port"]) == metrics


def test_each_service_that_others_wait_for_has_a_health_check() -> None:
    for name, service in SERVICES.items():
        for needed, how in service.get("depends_on", {}).items():
            if name == f"{needed}-bridge":  # reads from the engine's first moment
                assert how == {"condition": "service_started"}
                continue
            assert how == {"condition": "service_healthy"}, name
            in_image = needed in OURS and instructions("HEALTHCHECK")
            assert "test" in SERVICES[needed].get("healthcheck", {}) or in_image, f"{name} waits for {needed}"


def test_every_service_has_a_health_check_because_compose_waits_for_none_without_one() -> None:
    assert instructions("HEALTHCHECK")
    for name, service in SERVICES.items():
        assert "healthcheck" in service or name in OURS, name
        assert "disable" not in service.get("healthcheck", {}), name
        if name in OURS and service["command"][1] != "serve":
            address = f"http://127.0.0.1:{option(command(name), '--metrics-port')}/ready"
            assert address in service["healthcheck"]["test"][-1], name


def test_every_service_restarts_and_is_limited() -> None:
    for name, service in SERVICES.items():
        assert service["restart"] == "unless-stopped", name
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name
        if name not in ("vllm", "sglang"):  # a GPU is reserved; memory depends on the model
            assert service["deploy"]["resources"]["limits"].keys() == {"cpus", "memory"}, name


def test_without_a_profile_only_what_a_first_query_needs_runs() -> None:
    profiles = {name: tuple(service.get("profiles", ())) for name, service in SERVICES.items()}
    always = {name for name, own in profiles.items() if not own}
    assert always == {"kafka", "redis", "indexer", "engine-0", "engine-1"}
    members = {own: {name for name in profiles if profiles[name] == own} for own in set(profiles.values()) if own}
    assert members == {
        ("observability",): {"prometheus", "grafana"},
        ("group",): {"member"},
        ("record",): {"record"},
        ("vllm",): {"vllm", "vllm-bridge"},
        ("sglang",): {"sglang", "sglang-bridge"},
    }
    page = (ROOT / "docs/deployment.md").read_text()
    assert {f"| `{profile}` |" in page for (profile,) in members} == {True}


def test_every_mounted_file_and_volume_is_there() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], volume


def test_the_image_runs_as_an_ordinary_user_who_may_write_the_kernel_cache_and_the_records() -> None:
    lines = DOCKERFILE.splitlines()
    assert instructions("USER") == ["kvsight"]
    assert lines.index("USER kvsight") < lines.index("RUN kvsight compile-kernels")
    cache = re.search(r"NUMBA_CACHE_DIR=(\S+)", DOCKERFILE)
    assert cache is not None
    owned = re.search(r"--owner=kvsight (.*)", DOCKERFILE)
    assert owned is not None
    assert {cache[1], command("record")[2]} <= set(owned[1].split())


def test_the_image_gets_every_package_of_the_wheel() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    copied = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"}
    assert copied == packages | {"pyproject.toml", "LICENSE", "README.md"}


_COUNT = """
import sys
root, folder = sys.argv[1:]
sys.path[:] = [folder, *(path for path in sys.path if path != root)]
from kv_events.kernels import load
print(load.progress())
"""


def test_the_kernels_of_the_image_are_compiled_from_the_files_that_decide_what_they_are(tmp_path: Path) -> None:
    (patterns,) = re.findall(r"cp --parents --target-directory=/kernels (.*)", DOCKERFILE)
    copied = [path for pattern in patterns.split() for path in ROOT.glob(pattern)]
    for path in copied:
        target = tmp_path / "files" / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    counts = {
        subprocess.check_output([sys.executable, "-c", _COUNT, str(ROOT), str(folder)], env=environment, cwd=tmp_path)
        for folder in (tmp_path / "files", ROOT)
    }
    assert len(counts) == 1  # of kernels
    assert len(list((tmp_path / "kernels").iterdir())) == 1  # folder, which is named after the files


def test_one_service_builds_the_image_of_all() -> None:
    assert [name for name, service in SERVICES.items() if "build" in service] == ["indexer"]
    assert {"member", "record", "engine-0", "vllm-bridge"} <= OURS.keys()


def test_the_dashboard_reads_the_source_that_is_provisioned() -> None:
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    dashboard = json.loads((DEPLOY / "grafana/dashboards/kvsight.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert {each["datasource"]["uid"] for each in (*panels, *dashboard["templating"]["list"])} == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/kvsight.yml").read_text())["providers"][0]
    assert any(volume.split(":")[1] == provider["options"]["path"] for volume in SERVICES["grafana"]["volumes"])
