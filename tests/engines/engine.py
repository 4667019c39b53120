"""A real vLLM server on the CPU, with dummy weights and no tokenizer, and everything that it has published."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
import zmq

from tests.engines.environment import VLLM, variables
from tests.engines.recording import Batch, Header
from tests.support.servers.child_process import ChildProcess, free_port
from tests.support.waiting import wait_until

BLOCK_SIZE = 32
MAX_TOKENS = 2048
_END = b"\xff" * 8
_START_S = 400.0
_ANSWER_MS = 20_000
_MODELS = Path(__file__).parent / "models"


class Model(NamedTuple):
    """A configuration in `models/`, with so few blocks that it evicts early."""

    name: str
    words: str
    flags: Sequence[str]

    def header(self, num_workers: int) -> Header:
        return Header(engine="vllm", version=VLLM, model=self.words, block_size=BLOCK_SIZE, num_workers=num_workers)


ONE_GROUP = Model("one-group", "full 32", ["--num-gpu-blocks-override", "200"])
WINDOWS = Model(
    "windows",
    "3 times window 160 / 32, full 32",
    ["--no-disable-hybrid-kv-cache-manager", "--num-gpu-blocks-override", "640"],
)
MAMBA = Model("mamba", "2 times mamba 32, full 32", ["--mamba-cache-mode", "align", "--num-gpu-blocks-override", "320"])


class Answer(NamedTuple):
    """What the engine says about a request."""

    reused: int
    """Tokens of the prompt."""
    tokens: list[int]
    """Those that it generated."""


class Engine:
    """One server. Its ports stay the same over restarts."""

    def __init__(self, number: int, model: Model, environment: Path, log: Path) -> None:
        self.number = number
        self.num_batches = 0
        """Batches that it is known to have published, over all its lives."""
        self._model = model
        self._environment = environment
        self._log = log
        self._port, self._live, self._replay = free_port(), free_port(), free_port()
        self._context = zmq.Context()
        self._expected = 0  # sequence number of the next batch
        self._process: ChildProcess | None = None
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=120)

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self._live}"

    @property
    def replay_endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self._replay}"

    def launch(self) -> None:
        """Start, without waiting."""
        events = f'{{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:{self._live}", '
        events += f'"replay_endpoint": "tcp://*:{self._replay}"}}'
        command: list[str | Path] = [
            self._environment / "bin/vllm",
            "serve",
            _MODELS / self._model.name,
            *self._model.flags,
        ]
        command += ["--served-model-name", "tiny", "--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager"]
        command += ["--max-model-len", str(MAX_TOKENS), "--max-num-seqs", "8", "--block-size", str(BLOCK_SIZE)]
        command += ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--kv-events-config", events]
        command += ["--host", "127.0.0.1", "--port", str(self._port)]
        self._process = ChildProcess(command, self._log, variables(self._environment))

    def wait_until_ready(self) -> None:
        """Return once it answers."""
        wait_until(self._answers, _START_S, f"vLLM to answer, see {self._log}")

    def kill(self) -> None:
        """Send SIGKILL to all its processes. Idempotent."""
        if self._process is not None:
            self._process.kill()
        self._expected = 0

    def close(self) -> None:
        """Kill it, and close the connections to it."""
        self.kill()
        self._http.close()
        self._context.destroy(linger=0)

    def ask(self, prompt: Sequence[int], salt: str, max_tokens: int) -> Answer:
        """Send a request and wait for its end. Thread-safe."""
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True} | ({"cache_salt": salt} if salt else {})
        answer = self._http.post("/v1/completions", json=body).raise_for_status().json()
        details = answer["usage"]["prompt_tokens_details"] or {}
        return Answer(details.get("cached_tokens") or 0, answer["choices"][0]["token_ids"])

    def new_batches(self) -> list[Batch]:
        """Return what it has published since the last call, given that all its requests have ended.

        A step queues its events before its answers. The thread that sends them answers replays, one after each batch:
        after two empty answers in a row, its queue is empty.
        """
        found: list[Batch] = []
        num_empty = 0
        while num_empty < 2:
            got = [Batch(self.number, seq, payload) for seq, payload in self._replayed(self._expected)]
            num_empty = 0 if got else num_empty + 1
            assert [batch.seq for batch in got] == list(range(self._expected, self._expected + len(got)))
            self._expected += len(got)
            found += got
        self.num_batches += len(found)
        return found

    def _replayed(self, start: int) -> Iterator[tuple[int, bytes]]:
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(self.replay_endpoint)
            dealer.send_multipart([b"", start.to_bytes(8, "big")])
            while True:
                assert dealer.poll(_ANSWER_MS), f"no answer to a replay, see {self._log}"
                _, _, seq, payload = dealer.recv_multipart()
                if seq == _END:
                    return
                yield int.from_bytes(seq, "big"), payload

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.running, f"vLLM has ended, see {self._log}"
        try:
            return self._http.get("/health").is_success
        except httpx.TransportError:
            return False
