"""`kvsight replay --diff` of a log and a live service that follows it."""

from pathlib import Path

from typer.testing import CliRunner

from kv_events.log.event_log import EventLogWriter
from kvsight.cli.main import app
from tests.support.log.records import Stream, stored
from tests.support.servers.service_process import ServiceProcess


def test_a_service_that_follows_a_log_equals_its_end_and_differs_from_earlier_moments(tmp_path: Path) -> None:
    folder, stream = tmp_path / "run.log", Stream("engine-0")
    with EventLogWriter(folder) as writer:
        for page in range(10):
            writer.append(stream.batch(stored((0, [page + 1]), tier=page % 4)))
    with ServiceProcess(tmp_path, KVSIGHT_EVENT_LOG_DIR=str(folder)) as service:
        service.wait_until_ready()
        done = CliRunner().invoke(app, ["replay", str(folder), "--diff", service.url])
        assert (done.exit_code, done.stdout) == (0, "no difference\n")
        done = CliRunner().invoke(app, ["replay", str(folder), "--diff", service.url, "--at", "8"])
        assert "engine-0 gained, for example: 9, 10" in done.stdout
