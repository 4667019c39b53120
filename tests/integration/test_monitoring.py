"""A real Prometheus reads a running service: dashboard and alerts use what the service exports."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from api.app import create_app
from api.server import running_server
from api.settings import ApiSettings
from indexer.recording.recorder import Recorder
from indexer.recording.thread import RecordingThread
from kv_events.records import LogRecord
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream
from tests.support.servers.child_process import ChildProcess, free_port
from tests.support.waiting import async_wait_until

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/kvsight.json").read_text())
RULES = DEPLOY / "prometheus/alerts.yml"
ALERTS = {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
QUERIES = {
    f"{panel['title']} {target['refId']}": target["expr"].replace("$model", ".*").replace("$worker", ".*")
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", [])
}
TOKENS = list(range(1, 17))
FROM_PROMETHEUS = {"instance", "job", "le"}


def program(name: str) -> str:
    """Return a program of Prometheus."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is missing: apt-get install prometheus")
    return found


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[str]:
    """The address of a service that has workers, and has answered, refused and rejected something."""
    fed, settings = HandFed(), ApiSettings(port=0)
    recording = RecordingThread(Recorder(tmp_path / "recording"))
    app = create_app(fed.consumer, settings, recording=recording)
    async with running_server(app, settings) as url, httpx.AsyncClient() as client:
        await fed.hold(Stream("w"), TOKENS)
        await fed.feed(LogRecord(0, 0, 0, b"k", b"\xc1"))
        for body in ({"model_name": "m", "token_ids": TOKENS}, {}):
            await client.post(f"{url}/query", json=body)
        yield url


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each metric of ours in an expression, with the labels that select or group it."""
    grouped = {name for names in re.findall(r"by \(([^)]*)\)", expression) for name in re.split(r",\s*", names)}
    for metric, selector in re.findall(r"(kvsight_\w+)(\{[^}]*\})?", expression):
        yield metric, grouped | set(re.findall(r"(\w+)(?==|=~|!=|!~)", selector))


async def test_every_metric_of_dashboard_and_alerts_is_exported_with_its_labels(service: str) -> None:
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{service}/metrics")).text
    exported: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            exported.setdefault(sample.name, set()).update(sample.labels)
    variables = {each["name"]: each["definition"] for each in DASHBOARD["templating"]["list"]}
    expressions = {**QUERIES, **{name: rule["expr"] for name, rule in ALERTS.items()}, **variables}
    assert len(expressions) > 25
    for name, expression in expressions.items():
        for metric, labels in selectors(expression):
            assert metric in exported, name
            assert labels <= exported[metric] | FROM_PROMETHEUS, (name, metric)


async def test_every_panel_shows_something(service: str, tmp_path: Path) -> None:
    port = free_port()
    configuration = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    configuration["global"] = {"scrape_interval": "200ms", "evaluation_interval": "1s"}
    configuration["rule_files"] = [str(RULES)]
    configuration["scrape_configs"] = configuration["scrape_configs"][:1]
    configuration["scrape_configs"][0]["static_configs"] = [{"targets": [service.removeprefix("http://")]}]
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
            await async_wait_until(lambda: is_shown("kvsight_ready == 1"), 10, "ready")
            assert [each["value"][1] for each in await ask("sum by (state) (kvsight_worker_state) > 0")] == ["1"]
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
}
"""Series of a service where everything is wrong, one sample a minute."""
GOOD = {name: "1x40" if name.startswith(("up", "kvsight_ready", "kvsight_log_up")) else "0x40" for name in BAD}


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
