"""`kvsight top` on a terminal, where it is refreshed in place, and piped."""

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from kv_events.log.event_log import EventLogWriter
from tests.support.commands import RunningCommand, kvsight
from tests.support.log.records import Stream, stored
from tests.support.servers.service_process import ServiceProcess
from tests.support.terminal import COLUMNS, Screen, on_terminal
from tests.support.waiting import wait_until

WORKERS = ["engine-2", "engine-10"]
HOSTILE = "\x1b[31mevil\r\n"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service that reads a log of three workers, of which two were heard only now."""
    folder = tmp_path_factory.mktemp("top")
    now = time.time()
    first, second, hostile = (Stream(name) for name in (*WORKERS, HOSTILE))
    with EventLogWriter(folder / "log") as writer:
        writer.append(hostile.batch(stored((0, [7])), now=now - 60))
        writer.append(first.batch(stored((0, range(1, 1235))), now=now))
        writer.append(second.batch(stored((0, [1, 2])), stored((0, [3]), tier=1), now=now))
    variables = {"KVSIGHT_EVENT_LOG_DIR": folder / "log", "KVSIGHT_WORKER_TTL_S": 100_000}
    with ServiceProcess(folder, **variables) as running:
        running.wait_until_ready()
        yield running


@pytest.mark.parametrize("screen", [on_terminal, kvsight])
def test_one_table_shows_the_verdict_the_sums_and_each_worker(
    screen: Callable[..., subprocess.CompletedProcess[str]], service: ServiceProcess
) -> None:
    shown = screen("top", "--once", "--url", service.url)
    assert (shown.returncode, "\x1b" in shown.stdout) == (0, False), shown.stdout
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= COLUMNS
    text = " ".join(shown.stdout.split())
    assert re.search(r"live\.|stale since", text.partition("pages:")[0])  # the verdict
    assert "pages: 1,237 gpu, 1 cpu;" in text
    titles = next(line for line in lines if line.startswith("worker "))
    assert titles.split("  ")[0] == "worker"
    assert {"gpu pages", "cpu pages"} <= set(re.split(r"\s{2,}", titles))
    rows = {line.split()[0]: line for line in lines[lines.index(titles) + 1 :][:3]}
    assert rows.keys() == {*WORKERS, "\\x1b[31mevil\\r\\n"}
    assert re.search(r"\b1,234\b", rows["engine-2"])


def test_workers_are_selected_by_their_names(service: ServiceProcess) -> None:
    shown = kvsight("top", "--once", "--json", "--contains", "E-10", "--url", service.url)
    fleet = json.loads(shown.stdout)
    assert [worker["worker"] for worker in fleet["workers"]] == ["engine-10"]
    assert fleet["num_workers"] == 3
    assert fleet["workers"][0]["pages"]["GPU"] == 2
    for ranks in ((), ("--ranks",)):
        none = kvsight("top", "--once", *ranks, "--contains", "zz", "--url", service.url)
        assert none.stdout.splitlines()[-1] == "no worker's name contains zz"


@pytest.mark.parametrize("ranks", [[], ["--ranks"]])
def test_piped_tables_follow_each_other_until_ctrl_c(ranks: list[str], service: ServiceProcess) -> None:
    with RunningCommand("top", *ranks, "--json", "--interval", 0.1, "--url", service.url) as command:
        wait_until(lambda: command.out.count("\n") >= 2, 60, "two tables")
        assert (command.end(signal.SIGINT), command.err) == (0, "")
    shown = [json.loads(line) for line in command.out.splitlines()[:2]]
    assert [len(each if ranks else each["workers"]) for each in shown] == [3, 3]


@pytest.mark.parametrize(("words", "text"), [((), "engine-10"), (("--ranks", "--model", "other"), "known: model m")])
def test_a_screen_outlives_the_service_and_ends_with_q(
    words: tuple[str, ...], text: str, service: ServiceProcess
) -> None:
    with Screen("top", *words, "--interval", 0.2, "--url", service.url) as screen:
        screen.wait_for(text)
        service.kill()
        screen.wait_for("no answer since")
        assert text in screen.last_frame()  # what was known stays
        service.start()
        screen.wait_for(text, absent="no answer since")
        screen.type("q")
        assert screen.end() == 0, screen.text
    assert "Traceback" not in screen.text


def test_ctrl_c_ends_a_screen_without_a_word(service: ServiceProcess) -> None:
    with Screen("top", "--url", service.url) as screen:
        screen.wait_for("engine-10")
        screen.type("\x03")
        assert screen.end() == 0, screen.text
    assert "Traceback" not in screen.text
    assert "Aborted" not in screen.text


def test_a_service_that_does_not_answer_is_one_line() -> None:
    url = "http://127.0.0.1:9"  # the port of a service that nothing runs
    shown = on_terminal("top", "--once", "--url", url)
    assert shown.returncode == 2
    assert shown.stdout.startswith(f"kvsight: {url}/fleet: ")
    assert shown.stdout.count("\n") == 1
    with RunningCommand("top", "--interval", 0.1, "--url", url) as command:
        command.wait_for("no answer since")
        assert command.end(signal.SIGINT) == 0
    assert (command.out, command.err.count("no answer since")) == ("", 1)


def test_a_refusal_ends_the_command(service: ServiceProcess) -> None:
    shown = on_terminal("top", "--url", f"{service.url}/elsewhere")
    assert (shown.returncode, shown.stdout.count("\n")) == (2, 1)
    assert "status 404" in shown.stdout
