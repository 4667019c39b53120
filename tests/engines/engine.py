"""Real servers on the CPU, with dummy weights and no tokenizer, and everything that they have published."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import httpx
import msgspec
import zmq

from tests.engines.chat_model import write_model
from tests.engines.environment import SGLANG, VLLM, sglang_python, variables
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
    num_blocks: int
    flags: Sequence[str] = ()


ONE_GROUP = Model("one-group", "full 32", 200)
WINDOWS = Model("windows", "3 times window 160 / 32, full 32", 640, ["--no-disable-hybrid-kv-cache-manager"])
CHATS = Model("chat", "full 32", 2000)
MAMBA = Model("mamba", "2 times mamba 32, full 32", 320, ["--mamba-cache-mode", "align"])


class Answer(NamedTuple):
    """What the engine says about a request."""

    reused: int
    """Tokens of the prompt."""
    tokens: list[int]
    """Those that it generated."""


class Engine:
    """One vLLM server. Its ports stay the same over restarts."""

    name: ClassVar = "vllm"
    version: ClassVar = VLLM

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
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self._live}"

    @property
    def replay_endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self._replay}"

    @property
    def header(self) -> Header:
        return Header(engine=self.name, version=self.version, model=self._model.words, block_size=BLOCK_SIZE)

    def launch(self) -> None:
        """Start, without waiting."""
        self._process = ChildProcess(self._command(), self._log, variables(self._environment))

    def wait_until_ready(self) -> None:
        """Return once it answers."""
        wait_until(self._answers, _START_S, f"the engine to answer, see {self._log}")

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
        answer = self._post("/v1/completions", {**body, "return_token_ids": True}, salt)
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

    def _command(self) -> list[str | Path]:
        command: list[str | Path] = [self._environment / "bin/vllm", "serve", _MODELS / self._model.name]
        command += ["--served-model-name", "tiny", "--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager"]
        command += ["--max-model-len", str(MAX_TOKENS), "--max-num-seqs", "8", "--block-size", str(BLOCK_SIZE)]
        command += ["--enable-prefix-caching", "--enable-prompt-tokens-details", *self._model.flags]
        command += ["--num-gpu-blocks-override", str(self._model.num_blocks)]
        return [*command, *self._addresses(enable_kv_cache_events=True)]

    def _addresses(self, **events: Any) -> list[str]:
        # with an address in place of `*`, engines connect instead of binding
        events |= {
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self._live}",
            "replay_endpoint": f"tcp://*:{self._replay}",
        }
        config = msgspec.json.encode(events).decode()
        return ["--host", "127.0.0.1", "--port", str(self._port), "--kv-events-config", config]

    def _post(self, path: str, body: dict[str, Any], salt: str) -> dict[str, Any]:
        salted = {**body, "cache_salt": salt} if salt else body
        answer: dict[str, Any] = self._http.post(path, json=salted).raise_for_status().json()
        return answer

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
        assert self._process.running, f"the engine has ended, see {self._log}"
        try:
            return self._http.get("/health").is_success
        except httpx.TransportError:
            return False


class ChatAnswer(NamedTuple):
    """What the engine says about a request with text."""

    num_tokens: int
    """Of the prompt."""
    reused: int
    tokens: list[int] | None
    """Those of the prompt. None: this route does not say."""


class ChatEngine(Engine):
    """One vLLM server with a tokenizer and the routes that render prompts."""

    def send(self, path: str, body: Mapping[str, Any]) -> ChatAnswer:
        """Send a request and wait for its end."""
        asks_for_tokens = path.endswith("completions")
        answer = self._post(path, {**body, "return_token_ids": True} if asks_for_tokens else dict(body), "")
        usage = answer["usage"]
        match path:
            case "/v1/messages":
                num_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
                return ChatAnswer(
                    num_tokens + usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"], None
                )
            case "/v1/responses":
                return ChatAnswer(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], None)
        tokens = answer["prompt_token_ids"] if "chat" in path else answer["choices"][0]["prompt_token_ids"]
        return ChatAnswer(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], tokens)

    def rendering(self, path: str, data: bytes) -> bytes:
        """Return the answer of a render route, without what nobody reads."""
        answer = self._http.post(path, content=data, headers={"Content-Type": "application/json"}).raise_for_status()
        answers = answer.json()
        is_list = isinstance(answers, list)
        kept = [
            {name: each[name] for name in ("token_ids", "features")} for each in (answers if is_list else [answers])
        ]
        return msgspec.json.encode(kept if is_list else kept[0])

    def _command(self) -> list[str | Path]:
        folder = write_model(self._log.with_name("chat-model"))
        command = [folder if part == _MODELS / self._model.name else part for part in super()._command()]
        command.remove("--skip-tokenizer-init")
        return [*command, "--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]


class SglangEngine(Engine):
    """One SGLang server."""

    name = "sglang"
    version = SGLANG

    def ask(self, prompt: Sequence[int], salt: str, max_tokens: int) -> Answer:
        parameters = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        answer = self._post("/generate", {"input_ids": list(prompt), "sampling_params": parameters}, salt)
        return Answer(answer["meta_info"]["cached_tokens"], answer["output_ids"])

    def _command(self) -> list[str | Path]:
        command: list[str | Path] = [sglang_python(self._environment), "-m", "sglang.launch_server"]
        command += ["--model-path", _MODELS / self._model.name, "--load-format", "dummy", "--skip-tokenizer-init"]
        command += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        command += ["--grammar-backend", "none", "--page-size", str(BLOCK_SIZE), "--max-running-requests", "8"]
        command += ["--context-length", str(MAX_TOKENS), "--max-total-tokens", str(self._model.num_blocks * BLOCK_SIZE)]
        return [*command, *self._addresses()]
