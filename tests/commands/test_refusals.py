"""What a command refuses is one line on stderr that names what is wrong, and exit code 2."""

import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kv_events.records import Channel, LogRecord
from kvsight.cli.main import run
from kvsight.extras import SERVE
from tests.support.log.late_log import write_log
from tests.support.log.records import Stream, stored

PAIRS = "give either {} or {}, not both".format
LEVELS = "expected one of 'debug', 'info', 'warning', 'error'"
LIVE = "LOG --diff LOG"
RECORD = "record DIR/new --kafka 127.0.0.1:9"
OPTIONS = [
    ("serve --port 99999", "--port: got 99999, expected a port in 1 .. 65535"),
    ("serve --kafka a:1 --event-log-dir b", PAIRS("--kafka", "--event-log-dir")),
    *(
        (f"serve --kafka {servers}", f"--kafka: got {shown!r}, expected host:port[,host:port] of brokers")
        for servers, shown in {"a:b": "a:b", "a:1,,b:2": "", "a:65536": "a:65536", "u:secret@a:1": "...@a:1"}.items()
    ),
    ("serve --kafka a:1 --group a/b", "--group: got 'a/b', expected 1 .. 249 letters, digits, '.', '_' or '-'"),
    ("serve --log-level loud", f"--log-level: got 'loud', {LEVELS}"),
    ("serve --port 0 --dead-letter-dir /proc/nope", "/proc/nope"),
    ("bridge --kafka a:1 --event-log-dir b", PAIRS("--kafka", "--event-log-dir")),
    ("bridge", "no engine to read"),
    ("bridge --engine worker=w,model=m", "endpoint"),
    ("bridge --engine worker=w,model=m,endpoint=nowhere", "endpoint: got 'nowhere'"),
    ("bridge --engine worker=w,model=m,endpoint=tcp://h:1", "exactly one of them"),
    ("demo --cache best", "himamba"),
    ("demo --prompt --model ", "--model: got '', expected"),
    ("demo --prompt --block-size 0", "--block-size: got 0, expected an integer in 1 .. 65536"),
    ("simulate --cache best", "himamba"),
    ("simulate --trace a --requests 3", PAIRS("--trace", "--requests")),
    ("simulate --kafka a:1 --record b", PAIRS("--kafka", "--record")),
    ("simulate --capacity 3", "--capacity: got 3, expected a positive multiple of the page size 64"),
    ("simulate --booking-delay -1", "--booking-delay: got -1.0, expected a number"),
    ("simulate --ttft-slo 0", "--ttft-slo: got 0.0, expected more than 0"),
    ("simulate --itl-slo 0", "--itl-slo: got 0.0, expected more than 0"),
    ("simulate --policy best", "--policy: got 'best', expected one of random, round-robin, overlap-load"),
    ("simulate --policy lmetric --record DIR/recorded", "recorded/lmetric: there is a log already; give a new folder"),
    ("simulate --policy lmetric --record LOG", "run.log: there is a log already; give a new folder"),
    ("simulate --trace DIR/no.jsonl", "no.jsonl"),
    ("simulate --trace DIR/bad.jsonl", "line 2"),
    ("doctor --prompt 1", "--prompt needs --engine"),
    ("doctor --engine e:8000", "--engine: got 'e:8000', expected an address such as http://HOST:PORT"),
    ("doctor --engine http://h --prompt \t", "--prompt is empty"),
    ("doctor --engine http://h --prompt 99999999999", "--prompt: got '99999999999', expected integers"),
    ("doctor --engine http://h --engine-token-file /nowhere", "--engine-token-file: got '/nowhere'"),
    ("doctor --engine http://u:p@h --engine-token-file PROMPT", "--engine-token-file: got '"),
    ("doctor --wait 0", "--wait: got '0', expected a number in 0.1 .. 600"),
    ("doctor --wait nan", "--wait: got 'nan', expected a number in 0.1 .. 600"),
    ("top --interval nan", "--interval: got 'nan', expected a number in 0.1 .. 3600"),
    ("audit LOG --churn nan", "--churn: got 'nan', expected a number greater than or equal to 0.001"),
    ("query", "give a file with the query, or --model"),
    ("query a.json --model m", "give either a file or --model, not both"),
    ("query --model m --tokens 1,x", "--tokens: got 'x', expected integers in 0 .. 4294967295"),
    ("query --model m --text x", "--text and --tokenize-url belong together"),
    ("query DIR/no.json", "no.json"),
    ("query --show-hashes", "give a file with the query, or --model"),
    ("query --show-hashes - --tokens 1", "either a file or --tokens"),
    ("query --show-hashes --tokens 1,x", "--tokens: got 'x'"),
    ("query --show-hashes --tokens 1,4294967296", "token_ids[1]: got 4294967296"),
    ("query --show-hashes --tokens " + "9" * 5000, "--tokens: got"),
    ("query --show-hashes --tokens 1 --seed abc", "--seed: got 'abc'"),
    ("query --show-hashes --tokens 1 --lora \udcff", r"--lora: got '\udcff', expected text that UTF-8 can hold"),
    ("query --show-hashes --tokens 1 --salt secret\udcff", "--salt: got '7 characters', expected text that UTF-8"),
    ("query PROMPT --url http://u:secret@\udcff", r"--url: got '...@\udcff', expected text that UTF-8 can hold"),
    ("query --model m --text \udcff --tokenize-url http://h", r"--text: got '\udcff', expected text that UTF-8"),
    ("query --model m --tokens 1 --salt @secret\udcff", "--salt: got '8 characters', expected text that UTF-8"),
    ("replay LOG --diff http://:x", "--diff: got 'http://:x', expected an address"),
    ("top --once --contains \udcff", r"--contains: got '\udcff', expected text that UTF-8 can hold"),
    ("query PROMPT --url http://127.0.0.1:9", "127.0.0.1:9"),
    *((f"{RECORD} {words}", "127.0.0.1:9: connection refused") for words in ("--once", "--from -1m")),
    (f"{RECORD} --from soon", "kvsight: --from: got 'soon', expected a time"),
    (f"{RECORD} --to 12", "kvsight: --to: got 12; a topic has no index: give a time or PARTITION:OFFSET,..."),
    (f"{RECORD} --from 0:1 --channel control", "kvsight: --from and --to name offsets of the events' topic"),
    (f"{RECORD} --channel x", "--channel: got 'x', expected one of events, control, decisions, dead_letters"),
    (f"{RECORD} --max-bytes 5", "--max-bytes: got '5', expected at least 16MiB"),
    (f"{RECORD} --max-bytes 5 --segment-bytes 1KiB", "--max-bytes: got '5', expected at least 2048"),
    (f"{RECORD} --max-age long", "--max-age: got 'long', expected a positive number with one of the units s, "),
    ("serve --port 0 --record-keep soon", "kvsight: --record-keep: got 'soon', expected a positive number"),
    ("serve --port 0 --record-max-bytes 20", "--record-max-bytes: got '20', expected at least 16MiB"),
    ("serve --port 0 --record-max-bytes 20GB", "--record-max-bytes: got '20GB', expected a positive number"),
    ("serve --port 0 --record /proc/nowhere", "kvsight: /proc/nowhere: "),
    ("serve --port 0 --record /tmp/r --event-log-dir /tmp/e", "kvsight: --record: got '/tmp/r', expected none"),
    ("tail --limit 0", "--limit: got '0', expected a number greater than or equal to 1"),
    ("tail --kafka a:1 --log b", PAIRS("--kafka", "--log")),
    ("tail --from-beginning", "--from-beginning needs --kafka or --log"),
    ("tail --kind all", "--kind: got 'all', expected one of stored, "),
    ("tail --log LOG --from 2999-01-01", "--from 2999-01-01 is outside the log"),
    ("tail --log LOG --to 1960-01-01", "--to 1960-01-01 is outside the log"),
    ("tail --log LOG --from 50", "indices 0 to 2"),
    ("tail --log LOG --from soon", "--from: got 'soon'"),
    ("tail --log LOG --seq -3", "--seq: got '-3', expected NUMBER or FIRST-LAST"),
    ("tail --log LOG --block-hash abc", "--block-hash: got 'abc', expected a 64-bit integer"),
    ("tail --log LOG --medium tape", "expected one of gpu, cpu, disk, external"),
    ("tail --log LOG --channel news", "expected one of events, control, decisions, dead_letters"),
    ("tail --kind resync", "--kind resync never fits here: only for records: give --kafka or --log"),
    ("tail --log LOG --kind state", "--kind state never fits here: only for the API"),
    ("tail --kind heartbeat --medium gpu", "--kind heartbeat never fits --medium: it changes no pages"),
    ("tail --log LOG --seq 5-3", "--seq: got '5-3', expected FIRST before LAST"),
    ("tail --log LOG --channel control", "needs --full"),
    ("tail --log LOG --full --channel decisions --seq 1", "never fits the other filters, which are of events"),
    ("tail --log LOG --from -1m --to -2m", "--from -1m is after --to -2m"),
    ("record DIR/new --kafka a:1 --from @20 --to @10", "--from @20 is after --to @10"),
    ("record DIR/new", "without Kafka, `kvsight serve --record FOLDER` records what it reads"),
    ("serve --snapshot-dir PROMPT", "--snapshot-dir: got '"),
    ("serve --kafka HOST:1 --engine a=tcp://h:1,model=m", "give either --kafka or --engine, not both"),
    ("serve --engine a=tcp://h:1", "also model=MODEL, or --model MODEL for all engines"),
    (
        "serve --model m --engine \udcff=tcp://h:1",
        r"--engine: worker: got '\udcff', expected text that UTF-8 can hold",
    ),
    (
        "serve --model m --engine a=tcp://h:1,capacity.tape=3",
        "--engine: capacity: got 'tape: 3', expected pages of gpu, cpu",
    ),
    ("register --model m a=tcp://h:1,url=http://h", "only serve and bridge have --engine with topic, bind, url,"),
    ("register --url http://127.0.0.1:9 --model m a=tcp://h:1", "Connection refused: start `kvsight serve`"),
    (
        "tail --log LOG --full --from 0:0 --channel control",
        "--from 0:0 names offsets of the events' topic: give times for",
    ),
    ("log slice LOG LOG", "there is a log already"),
    ("log slice LOG DIR/new --worker x --model m", "run.log: no record matches --worker x --model m"),
    ("log merge LOG LOG LOG", "there is a log already"),
    ("log merge LOG", "give at least two logs"),
    ("replay", "give the folder of an event log, or --kafka HOST:PORT"),
    ("replay LOG --kafka a:1", PAIRS("LOG", "--kafka")),
    ("replay --kafka a:1 --at 5", "--at 5: a topic has no index; give a time or PARTITION:OFFSET,..."),
    ("replay --kafka 127.0.0.1:1", "Kafka at 127.0.0.1:1: connection refused"),
    ("replay DIR/nowhere", "nowhere"),
    ("replay DIR/requests.log", "no batch is before the end: "),
    ("replay DIR/requests.log --at 1 --diff LOG", "no batch is before --at 1: "),
    ("replay LOG --query DIR/no.json", "no.json"),
    *((f"replay LOG --at={moment}", moment[:40]) for moment in ("soon", "-1", "@x", "1.5.2", "@nan", "9" * 5000)),
    ("replay LOG --to 1", "--to needs --diff"),
    (f"replay {LIVE} --at 9", "--at 9 is behind the end of the log"),
    (f"replay {LIVE} --at 1 --to 0", "--to 0 is before the start of the log"),
    (f"replay {LIVE} --at @5", "--at @5 is before the start of the log"),
    ("replay LOG --diff http://localhost:1 --to 2", "no other moment than now"),
    ("replay LOG --diff http://127.0.0.1:9", "refused: start `kvsight serve`, or set --diff to its address"),
    (f"replay {LIVE} --serve", "give either --serve or --diff"),
    ("replay --serve", "give the folder of an event log"),
    ("replay LOG --serve --json", "give either --serve or --json, not both"),
    ("replay LOG --serve --at 9", "--at 9 is behind the end of the log, whose moments are 1 to "),
    ("replay LOG --serve --at soon", "--at: got 'soon', expected a time"),
    ("replay DIR/none --serve", "no such folder"),
    *((f"{words}DIR/unread", "00.kvlog: Is a directory\n") for words in ("replay ", "tail --log ")),
    *((f"{words}PROMPT", "prompt.json: a file, not a folder") for words in ("replay ", "log info ", "tail --log ")),
    (f"replay {LIVE} --query prompt.json", "give either --diff or --query"),
    ("replay LOG --diff /nowhere", "/nowhere: no such folder"),
    ("explain LOG --prompt PROMPT --at @1", "is before the start of the log"),
    ("explain LOG --prompt PROMPT --at @4000000000", "is behind the end of the log"),
    ("explain LOG --prompt PROMPT --at 999999", "is behind the end of the log"),
    ("explain LOG --prompt PROMPT --at yesterday", "--at: got"),
    ("explain LOG --prompt PROMPT --worker x", "worker 'x' is not in the log; model 'm', tenant 'default' has "),
    ("explain DIR/no.log --prompt PROMPT", "no such folder"),
    ("explain --prompt PROMPT", "give the folder of an event log, or --kafka HOST:PORT"),
    ("audit nowhere", "nowhere: no such folder"),
    ("audit LOG --churn 0", "--churn: got '0', expected a number"),
    ("audit LOG --html .", "--html: . is a folder, expected a file"),
    ("audit LOG --html nowhere/report.html", "--html: nowhere: no such folder"),
    *(
        (words, "/empty: not an event log: it has no files *.kvlog\n")
        for words in (
            "audit EMPTY",
            "log info EMPTY",
            "log info --verify EMPTY",
            "log slice EMPTY new",
            "log export EMPTY --parquet new",
        )
    ),
]
"""Words of a command line -> part of the line."""
NESTED = ('{"model_name": "m", "token_ids": ' + "[" * depth + "]" * depth + "}" for depth in (950, 50_000))
INPUTS = [
    ("query -", '{\n "model_name": oops}', "line 2"),
    ("query -", "", "stdin: not JSON: it is empty\n"),
    ("explain LOG --prompt -", "\n", "stdin: not JSON: it is empty\n"),
    ("query -", "[1, 2]", "object"),
    *((words, body, "") for body in NESTED for words in ("query -", "replay LOG --query -")),
    ("query --show-hashes -", '{"model_name": "m", "seq_hashes": [1]}', "token_ids"),
    ("query --show-hashes --tokens @-", "[1, 2.5]", "float"),
    ("query --show-hashes --tokens @-", "[1, -2]", "token_ids[1]: got -2"),
    ("query --show-hashes --tokens @-", '{"tokens": [1]}', "token_ids"),
    ("query --show-hashes --tokens @-", "[1", "not JSON"),
    ("query --show-hashes --tokens @-", "[" * 100_000, "stdin: "),
    ("replay LOG --query -", '{"model_name": "m"}', "token_ids or seq_hashes or block_hashes: missing"),
    ("replay LOG --query -", '{"model_name": "m", "token_ids": null}', "token_ids: got None"),
    ("replay LOG --query -", '{"model_name": "m", "token_ids": 5}', "token_ids: got 5"),
    ("replay LOG --query -", '{"model_name": "m", "token_ids": [], "lora_name": 5}', "lora_name: got 5"),
    ("replay LOG --query -", '{"model_name": 3, "token_ids": []}', "model_name: got 3"),
    ("replay LOG --query -", '{"model_name": "other", "token_ids": []}', "known: m"),
    ("explain LOG --prompt -", '{"model_name": "other", "token_ids": [1, 2, 3]}', "'other', tenant 'default'; it has"),
    ("explain LOG --prompt -", "[1, 2", "stdin: "),
    ("explain LOG --prompt -", '{"model_name": "m"}', ""),
    ("explain LOG --prompt -", '{"model_name": "m", "token_ids": ["x"]}', ""),
    ("explain LOG --prompt -", "[]", ""),
]
"""Words, stdin -> part of the line."""
VARIABLES = [
    ("serve", "KVSIGHT_PORT=99999", "KVSIGHT_PORT: got 99999, expected a port in 1 .. 65535"),
    ("serve", "KVSIGHT_PORT=abc", "KVSIGHT_PORT: got 'abc', expected a valid integer"),
    ("serve --port abc", "KVSIGHT_PORT=9", "--port: got 'abc', expected a valid integer"),
    ("serve", "KVSIGHT_KAFKA_TLS=maybe", "KVSIGHT_KAFKA_TLS: got 'maybe', expected a valid boolean"),
    ("demo --prompt", "KVSIGHT_MODEL=\udcff", r"KVSIGHT_MODEL: got '\udcff', expected text that UTF-8 can hold"),
    ("query PROMPT", "KVSIGHT_URL=xyz", "KVSIGHT_URL: got 'xyz', expected an address such as http://HOST:PORT"),
    ("query PROMPT", "KVSIGHT_API_TOKEN= ", "KVSIGHT_API_TOKEN: got '1 character', expected printable ASCII"),
    ("query PROMPT --api-token secret\t", "", "--api-token: got '7 characters', expected printable ASCII"),
    ("query PROMPT", "KVSIGHT_URL=\udcff", r"KVSIGHT_URL: got '\udcff', expected text that UTF-8 can hold"),
    (
        "query PROMPT",
        "KVSIGHT_API_TOKEN=secret\udcff",
        "KVSIGHT_API_TOKEN: got '7 characters', expected text that UTF-8",
    ),
    ("serve --port 0", "KVSIGHT_API_TOKEN=\udcff", "KVSIGHT_API_TOKEN: got '1 character', expected text that UTF-8"),
    ("serve --port 0", "KVSIGHT_WORKER_TTL_S=-3", "KVSIGHT_WORKER_TTL_S: got '-3'"),
    ("serve --port 0", "KVSIGHT_REDIS=foo://user:secret@host", "foo://...@host"),
    ("serve --port 0", "KVSIGHT_REDIS=redis://:secret@host/abc", "redis://...@host/abc', expected a URL such as"),
]
"""Words, a variable -> part of the line."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a log of three records, a query and a damaged trace."""
    folder = tmp_path_factory.mktemp("refusals")
    stream = Stream("w")
    write_log(folder / "run.log", (stream.batch(stored((page - 1, [page])), now=1000.0 + page) for page in (1, 2, 3)))
    write_log(folder / "requests.log", [LogRecord(0, 0, 1000, b"k", b"", Channel.CONTROL)])
    (folder / "prompt.json").write_text(json.dumps({"model_name": "m", "token_ids": list(range(1, 33))}))
    sound = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n'
    (folder / "bad.jsonl").write_text(sound + '{"timestamp": -1}\n')
    (folder / "empty").mkdir()
    (folder / "unread" / f"{0:020}.kvlog").mkdir(parents=True)
    (folder / "recorded").mkdir()
    (folder / "recorded" / "lmetric").symlink_to(folder / "run.log")
    return folder


class Ended(NamedTuple):
    """A command that ended."""

    code: object
    out: str
    errors: str


@pytest.fixture
def kvsight(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ended]]:
    """Runs a command in this process as its entry point does."""
    before = signal.getsignal(signal.SIGINT)

    def ended(words: str, stdin: str = "") -> Ended:
        monkeypatch.setattr(sys, "argv", ["kvsight", *words.split(" ")])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as end:
            run()
        return Ended(end.value.code, *capsys.readouterr())

    yield ended
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("words", "stdin", "variable", "said"),
    [(words, "", "", said) for words, said in OPTIONS]
    + [(words, stdin, "", said) for words, stdin, said in INPUTS]
    + [(words, "", variable, said) for words, variable, said in VARIABLES],
    ids=lambda each: each[:50].encode("ascii", "replace").decode(),
)
def test_what_is_wrong_is_one_line(
    words: str,
    stdin: str,
    variable: str,
    said: str,
    folder: Path,
    kvsight: Callable[..., Ended],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, path in {"LOG": "run.log", "PROMPT": "prompt.json", "DIR": "", "EMPTY": "empty"}.items():
        words = words.replace(name, str(folder / path))
    monkeypatch.chdir(folder)
    if variable:
        monkeypatch.setenv(*variable.split("=", 1))
    shown = kvsight(words, stdin)
    *context, line = shown.errors.splitlines(keepends=True)
    assert (shown.code, shown.out, line[:9]) == (2, "", "kvsight: "), shown
    assert all(": views as of " in each for each in context), shown
    assert said in line
    assert "secret" not in line
    assert not (folder / "new").exists()


@pytest.mark.parametrize(
    ("lacking", "words", "needed_by"),
    [
        (SERVE, "serve", "serve"),
        (SERVE[-2:-1], "serve", "serve"),
        (SERVE, "demo", "demo"),
        (SERVE, "bridge --metrics-port 9", "bridge --metrics-port"),
        (SERVE, "replay folder --query prompt.json", "replay --query"),
        (("bokeh",), "audit . --html report.html", "audit --html"),
    ],
)
def test_a_missing_extra_is_one_line_that_names_what_to_install(
    lacking: tuple[str, ...],
    words: str,
    needed_by: str,
    kvsight: Callable[..., Ended],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in lacking:
        monkeypatch.setitem(sys.modules, module, None)
    extra = "analysis" if lacking == ("bokeh",) else "serve"
    line = f"kvsight {needed_by} needs {', '.join(lacking)}: pip install 'kvsight[{extra}]'\n"
    assert kvsight(words) == (2, "", line)
