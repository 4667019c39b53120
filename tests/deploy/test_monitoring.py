"""A real Prometheus reads real processes: dashboard and alerts use what service, publisher and bridge export."""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kv_events.records import LogRecord
from tests.support.commands import RunningCommand
from tests.support.engines.event_payloads import payload, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.servers.child_process import ChildProcess, free_port
from tests.support.servers.service_process import ServiceProcess, own_topics, write_events
from tests.support.waiting import async_wait_until, wait_until

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/kvsight.json").read_text())
RULES = DEPLOY / "prometheus/alerts.yml"
ALERTS = {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
QUERIES = {
    f"{panel['title']} {target['refId']}": target["expr"].replace("$model", ".*").replace("$worker", ".*")
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", [])
}
FROM_PROMETHEUS = {"instance", "job", "le"}


def program(name: str) -> str:
    """Return a program of Prometheus."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is missing: apt-get install prometheus")
    return found


@pytest.fixture(scope="module")
def targets(kafka_bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Job of Prometheus -> address of a process that runs: a service, an engine, a bridge that reads another one,
    and a recording.

    The service has answered and refused queries, and has rejected a record.
    """
    folder = tmp_path_factory.mktemp("monitored")
    topics = own_topics(kafka_bootstrap)
    ports = {f"kvsight-{name}": free_port() for name in ("engine", "bridge", "record")}
    with ZmqEngine() as zmq_engine, ServiceProcess(folder, **topics, KVSIGHT_RECORD=folder / "recording") as service:
        lines: dict[str, list[object]] = {
            "kvsight-engine": ["demo", "--engine", "e", "--kafka", kafka_bootstrap],
            "kvsight-record": ["record", folder / "record", "--kafka", kafka_bootstrap],
            "kvsight-bridge": ["bridge", "--engine", f"worker=b,model=m,block_size=4,endpoint={zmq_engine.endpoint}"],
        }
        with ExitStack() as running:
            for job, words in lines.items():
                running.enter_context(RunningCommand(*words, "--metrics-port", ports[job], **topics))
            zmq_engine.wait_for_readers(deadline_s=60)
            zmq_engine.send(payload(stored([1, 2], range(8))))
            write_events(topics, LogRecord(0, 0, 0, b"k", b"garbage"))
            service.wait_until_ready()
            wait_until(lambda: service.query("m", [1]).is_success, 60, "the first worker of the bridge")
            httpx.post(f"{service.url}/query", json={})
            wait_until(
                lambda: "kvsight_records_rejected_total{reason=" in service.get("/metrics").text, 60, "a rejection"
            )
            yield {
                "kvsight": service.url.removeprefix("http://"),
                **{job: f"127.0.0.1:{port}" for job, port in ports.items()},
            }


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each metric of ours in an expression, with the labels that select or group it."""
    grouped = {name for names in re.findall(r"by \(([^)]*)\)", expression) for name in re.split(r",\s*", names)}
    for metric, selector in re.findall(r"(kvsight_\w+)(\{[^}]*\})?", expression):
        yield metric, grouped | set(re.findall(r"(\w+)(?==|=~|!=|!~)", selector))


def exported(targets: Iterable[str]) -> dict[str, set[str]]:
    """Return the labels of every sample that some processes export."""
    found: dict[str, set[str]] = {}
    for target in targets:
        for family in text_string_to_metric_families(httpx.get(f"http://{target}/metrics").text):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_metric_of_dashboard_and_alerts_is_exported_with_its_labels(targets: dict[str, str]) -> None:
    found = exported(targets.values())
    variables = {each["name"]: each["definition"] for each in DASHBOARD["templating"]["list"]}
    expressions = {**QUERIES, **{name: rule["expr"] for name, rule in ALERTS.items()}, **variables}
    assert len(expressions) > 50
    for name, expression in expressions.items():
        for metric, labels in selectors(expression):
            assert metric in found, name
            assert labels <= found[metric] | FROM_PROMETHEUS, (name, metric)


def test_the_documentation_lists_every_metric(targets: dict[str, str]) -> None:
    pages = "".join((DEPLOY.parent / "docs" / name).read_text() for name in ("http.md", "debugging.md"))
    listed = set(re.findall(r"`(kvsight_\w+)`", pages))
    found = {
        re.sub(r"_(bucket|count|sum)$", "", name)
        for name in exported([targets["kvsight"], targets["kvsight-engine"]])
        if not name.endswith("_created")
    }
    assert found <= listed


async def test_every_panel_shows_something(targets: dict[str, str], tmp_path: Path) -> None:
    port = free_port()
    configuration = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    assert {job["job_name"] for job in configuration["scrape_configs"]} == targets.keys()
    configuration["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    configuration["rule_files"] = [str(RULES)]
    configuration["scrape_configs"] = [
        {"job_name": job, "static_configs": [{"targets": [target]}]} for job, target in targets.items()
    ]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    options = {
        "config.file": tmp_path / "prometheus.yml",
        "storage.tsdb.path": tmp_path / "data",
        "web.listen-address": f"127.0.0.1:{port}",
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    process = ChildProcess([program("prometheus"), *arguments], tmp_path / "prometheus.log")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/api/v1") as client:

        async def ask(expression: str) -> Any:
            answer = (await client.get("/query", params={"query": expression})).json()
            assert answer["status"] == "success", (expression, answer)
            return answer["data"]["result"]

        async def is_started() -> bool:
            return (await client.get(f"http://127.0.0.1:{port}/-/ready")).is_success

        async def is_shown(expression: str) -> bool:
            return bool(await ask(expression))

        try:
            await asyncio.to_thread(process.wait_for_port, port, 60)
            await async_wait_until(is_started, 30, "Prometheus has started")
            for title, expression in QUERIES.items():
                await async_wait_until(lambda: is_shown(expression), 30, title)  # noqa: B023  (waited for at once)
            rules = (await client.get("/rules")).json()["data"]["groups"][0]["rules"]
            assert {rule["name"] for rule in rules} == ALERTS.keys()
            await async_wait_until(lambda: is_shown('up{job="kvsight-bridge"} == 1'), 30, "the bridge")
            await async_wait_until(lambda: is_shown("kvsight_ready == 1"), 30, "ready")
        finally:
            process.kill()


def test_the_operations_page_lists_every_alert() -> None:
    page = (DEPLOY.parent / "docs/operations.md").read_text()
    assert set(re.findall(r"^\| `(Kvsight\w+)` \|", page, re.MULTILINE)) == ALERTS.keys()


BAD = {
    'up{job="kvsight", instance="i"}': "0x40",
    'kvsight_ready{instance="i"}': "0x40",
    'kvsight_log_up{instance="i"}': "0x40",
    'kvsight_log_lag_records{instance="i"}': "2000+100x40",
    'kvsight_recording_degraded_seconds{instance="i"}': "100x40",
    'kvsight_worker_state{worker="w", model="m", state="stale"}': "1x40",
    'kvsight_worker_state{worker="v", model="m", state="expired"}': "1x40",
    'kvsight_worker_resyncs_total{worker="w", model="m"}': "0+1x40",
    'kvsight_refused_pages_total{instance="i"}': "0+1x40",
    'kvsight_records_rejected_total{instance="i", reason="msgpack"}': "0+1x40",
    'kvsight_snapshot_failures_total{instance="i"}': "0+1x40",
    'kvsight_query_seconds_bucket{instance="i", le="0.05"}': "0x40",
    'kvsight_query_seconds_bucket{instance="i", le="1.0"}': "0+9x40",
    'kvsight_query_seconds_bucket{instance="i", le="+Inf"}': "0+9x40",
    'kvsight_http_errors_total{instance="i", status_class="5xx"}': "0+1x40",
    'kvsight_worker_digest_mismatches_total{worker="w", model="m"}': "0+1x40",
    'kvsight_publisher_dropped_pages_total{worker="w", model="m"}': "0+1x40",
    'kvsight_publisher_sink_available{worker="w", model="m"}': "0x40",
    'up{job="kvsight-bridge", instance="i"}': "0x40",
    'kvsight_bridge_link{worker="w", model="m", state="away"}': "1x40",
    'kvsight_bridge_lost_batches_total{worker="w", model="m"}': "0+1x40",
}
"""Series of a service where everything is wrong, one sample a minute."""
UP = ("up", "kvsight_ready", "kvsight_log_up", "kvsight_publisher_sink_available")
GOOD = {name: "1x40" if name.startswith(UP) else "0x40" for name in BAD}


@pytest.mark.parametrize(("series", "firing"), [(BAD, sorted(ALERTS)), (GOOD, [])], ids=["bad", "good"])
def test_each_alert_fires_when_it_should_and_only_then(
    series: dict[str, str], firing: list[str], tmp_path: Path
) -> None:
    expected = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing]
    question = {
        "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": "35m",
        "exp_samples": expected,
    }
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [question],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": [case]}))
    for arguments in (["check", "rules", RULES], ["test", "rules", tmp_path / "test.yml"]):
        done = subprocess.run([program("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
