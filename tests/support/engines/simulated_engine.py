"""A simulated engine with the HTTP API of OpenAI, whose events go through kvsight's real plug-in, or through ZMQ.

Usage: `python -m tests.support.engines.simulated_engine JSON`, with the plug-in's settings in `KVSIGHT_*` variables.
The JSON object has the fields of `Behaviour`. The engine caches the whole pages of every prompt, and emits an event for
those that are new, in the form of SGLang.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any, Self

import httpx
import msgspec

from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.http_checks import WITHOUT_TLS, succeeds
from tests.support.prepared_python import PreparedProcess
from tests.support.programs import own_environment
from tests.support.servers.child_process import free_port
from tests.support.waiting import wait_until


class Behaviour(msgspec.Struct):
    """What the engine does, rightly or wrongly."""

    port: int
    model: str = "m"
    block_size: int = 16
    announced_block_size: int | None = None
    """Block size in its metrics. None: the real one."""
    pages_emitted: int = 10**9
    """Pages of a new prompt that its events name."""
    reports_cached: bool = True
    """Whether it reports the tokens that came from its cache."""
    pages_kept: int = 10**9
    """Pages of a prompt that its cache keeps, although its events name all."""
    clock_ahead_s: float = 0.0
    """Stands in for a machine whose clock is wrong: the clock that its HTTP answers name."""
    zmq_port: int | None = None
    """Port for events. None: they go through the plug-in."""
    connects: bool = False
    """Whether it connects to that port instead of binding it, as engines do with an address in place of `*`."""


class _Stored(msgspec.Struct, tag="BlockStored", array_like=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str = "GPU"


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Stored]
    attn_dp_rank: int | None = 0


class SimulatedEngine:
    """`with SimulatedEngine(KVSIGHT_KAFKA=..., KVSIGHT_WORKER=...) as engine:`, a process of its own."""

    def __init__(self, behaviour: dict[str, Any] | None = None, **variables: object) -> None:
        """behaviour: fields of `Behaviour`. variables: settings of the plug-in."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        environment = own_environment(**{"KVSIGHT_MODEL": "m", **variables})
        with Path(os.devnull).open("r+") as nothing:
            streams = nothing.fileno(), nothing.fileno(), sys.stderr.fileno()
            argument = json.dumps({"port": port, **(behaviour or {})})
            self._process = PreparedProcess(__name__, [argument], environment, streams)

    def complete(self, tokens: list[int]) -> None:
        """Let the engine compute a prompt."""
        httpx.post(f"{self.url}/v1/completions", json={"prompt": tokens}, verify=WITHOUT_TLS).raise_for_status()

    def kill(self) -> None:
        """Send SIGKILL. Idempotent."""
        self._process.kill()

    def __enter__(self) -> Self:
        wait_until(self._answers, deadline_s=30, what="the simulated engine to listen")
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _answers(self) -> bool:
        assert self._process.running
        return succeeds(f"{self.url}/v1/models")


class _Cache:
    """Pages of prompts, by their tokens with their prefix, and the events about them."""

    def __init__(self, behaviour: Behaviour, publish: Callable[[_Batch], None]) -> None:
        self._behaviour = behaviour
        self._publish = publish
        self._hashes: dict[tuple[int, ...], int] = {}
        self._numbers = count(1)

    def compute(self, tokens: list[int]) -> int:
        """Cache a prompt. Returns the tokens of it that the cache had before."""
        size, kept = self._behaviour.block_size, self._behaviour.pages_kept
        prefixes = [tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size)]
        held = [prefix for prefix in prefixes if prefix in self._hashes]
        new = prefixes[len(held) :]
        if new:
            hashes = [next(self._numbers) for _ in new]
            parent = self._hashes[held[-1]] if held else None
            self._hashes.update(zip(new, hashes, strict=True))
            emitted = hashes[: self._behaviour.pages_emitted]
            if emitted:
                stored = _Stored(emitted, parent, tokens[len(held) * size :][: len(emitted) * size], size)
                self._publish(_Batch(time.time(), [stored]))
        return min(len(held), kept, (len(tokens) - 1) // size) * size


def _tokens(body: dict[str, Any]) -> list[int]:
    """The bytes of a prompt or of a chat, of which a longer one begins with a shorter one."""
    prompt = body.get("prompt", "".join(f"<{m['role']}>{m['content']}" for m in body.get("messages", ())))
    return list(prompt.encode()) if isinstance(prompt, str) else prompt


def _handler(cache: _Cache, behaviour: Behaviour) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # an answer has two parts, of which the second would wait for an acknowledgement

        def date_time_string(self, timestamp: float | None = None) -> str:
            return super().date_time_string((timestamp or time.time()) + behaviour.clock_ahead_s)

        def do_GET(self) -> None:
            size = behaviour.announced_block_size or behaviour.block_size
            match self.path:
                case "/v1/models":
                    self._answer(json.dumps({"object": "list", "data": [{"id": behaviour.model, "object": "model"}]}))
                case "/health":
                    self._answer("")
                case "/metrics":
                    self._answer(f'vllm:cache_config_info{{block_size="{size}",cache_dtype="auto"}} 1.0\n')
                case _:
                    self.send_error(404)

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            try:
                body = json.loads(content)
                _tokens(body)
            except (AttributeError, ValueError, TypeError, KeyError):
                self.send_error(400)
                return
            match self.path:
                case "/tokenize":
                    self._answer(json.dumps({"tokens": _tokens(body)}))
                case "/v1/completions/render":
                    self._answer(json.dumps([{"token_ids": _tokens(body)}]))
                case "/v1/chat/completions/render":
                    self._answer(json.dumps({"token_ids": _tokens(body)}))
                case "/v1/completions":
                    self._answer(json.dumps({"usage": self._usage(body), "choices": [{"index": 0, "text": "yes"}]}))
                case "/v1/chat/completions" if body.get("stream"):
                    self._stream({"id": "c", "model": behaviour.model, "created": 0}, self._usage(body))
                case "/v1/chat/completions":
                    message = {"role": "assistant", "content": "yes"}
                    choice = {"index": 0, "message": message, "finish_reason": "stop"}
                    answer = {"id": "c", "object": "chat.completion", "created": 0, "model": behaviour.model}
                    self._answer(json.dumps({**answer, "choices": [choice], "usage": self._usage(body)}))
                case _:
                    self.send_error(404)

        def log_message(self, *_: object) -> None:
            """Write no access log."""

        def _usage(self, body: dict[str, Any]) -> dict[str, Any]:
            """Compute the prompt of a body."""
            tokens = _tokens(body)
            cached = cache.compute(tokens)
            details = {"prompt_tokens_details": {"cached_tokens": cached}} if behaviour.reports_cached else {}
            return {"prompt_tokens": len(tokens), "completion_tokens": 1, "total_tokens": len(tokens) + 1, **details}

        def _stream(self, common: dict[str, Any], usage: dict[str, Any]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            common["object"] = "chat.completion.chunk"
            for delta, reason in (({"role": "assistant", "content": "y"}, None), ({"content": "es"}, "stop")):
                choices = [{"index": 0, "delta": delta, "finish_reason": reason}]
                self.wfile.write(f"data: {json.dumps({**common, 'choices': choices})}\n\n".encode())
            self.wfile.write(f"data: {json.dumps({**common, 'choices': [], 'usage': usage})}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def _answer(self, text: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    return Handler


def _publisher(behaviour: Behaviour) -> Callable[[_Batch], Any]:
    if behaviour.zmq_port is not None:
        address = f"tcp://127.0.0.1:{behaviour.zmq_port}" if behaviour.connects else None
        engine, encode = ZmqEngine(port=behaviour.zmq_port, connect_to=address), msgspec.msgpack.Encoder().encode
        return lambda batch: engine.send(encode(batch))
    from kvsight.plugins import make_publisher

    return make_publisher(attn_dp_rank=0).publish


def _main(behaviour: Behaviour) -> None:
    cache = _Cache(behaviour, _publisher(behaviour))
    ThreadingHTTPServer(("127.0.0.1", behaviour.port), _handler(cache, behaviour)).serve_forever()


if __name__ == "__main__":
    _main(msgspec.json.decode(sys.argv[1], type=Behaviour))
