"""What is played on real engines, and the comparison of each request."""

from __future__ import annotations

import random
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec

from api.prompts.bodies import engine_body
from kv_events.http.queries import PeerAnswer
from kvsight.choice import best_worker
from kvsight.client import Client
from tests.engines.chats import Chat, Chats
from tests.engines.engine import (
    BLOCK_SIZE,
    CHATS,
    MAMBA,
    MAX_TOKENS,
    ONE_GROUP,
    WINDOWS,
    ChatEngine,
    Engine,
    Model,
    SglangEngine,
)
from tests.engines.prompts import Prompts
from tests.engines.recording import Asked, AskedText, Header, Registration, Rendering, Restarted, Step
from tests.engines.slow_reader import SlowReader
from tests.support.servers.service_process import ServiceProcess
from tests.support.waiting import wait_until

_SETTLED_S = 0.03
_PATIENCE_S = 30.0
_BURST = 6
_SINGLES = 3  # compared requests after each burst


class Difference(NamedTuple):
    """A request whose score was wrong."""

    number: int
    worker: int
    prompt_tokens: int
    reused: int
    score: int
    """As the index said, at most what any engine reuses."""


class Game:
    """Engines, the service that reads them, and all that happened. `with Game(...) as game:`."""

    def __init__(self, row: Row, environment: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.prompts = Prompts(self.rng, MAX_TOKENS * 3 // 4)
        self.steps: list[Step] = []
        self.num_asked = 0
        self.num_partial = 0
        """Requests that reused something, but not all that was possible."""
        self.differences: list[Difference] = []
        self.num_misread = 0
        """Requests that the slow reader predicted wrongly: then this comparison is wrong, or vLLM has another rule."""
        folder = Path(tempfile.mkdtemp(prefix="kvsight-engines-"))
        self.engines = [
            row.engine(n, row.model, environment, folder / f"engine-{n}.log") for n in range(row.num_engines)
        ]
        self._readers = [SlowReader(Registration()) for _ in self.engines]
        self._reads = row.engine is not ChatEngine  # the slow reader knows no media
        texts = {"KVSIGHT_TOKENIZE_URL": self.engines[0].url, "KVSIGHT_TOKENIZE_TIMEOUT_S": 20}
        self._service = ServiceProcess(folder, **texts)
        self._client = Client(self._service.url)
        self._stack = ExitStack()

    def __enter__(self) -> Game:
        with ExitStack() as stack:
            stack.callback(self._client.close)
            stack.callback(self._service.close)
            for engine in self.engines:
                stack.callback(engine.close)
                engine.launch()
            self._service.start()
            self._service.wait_until_ready()
            for engine in self.engines:
                engine.wait_until_ready()
                self._client.register(
                    str(engine.number), engine.endpoint, "tiny", BLOCK_SIZE, replay_endpoint=engine.replay_endpoint
                )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def header(self) -> Header:
        """What a recording of the game is."""
        return msgspec.structs.replace(self.engines[0].header, num_workers=len(self.engines))

    def compare(
        self, prompt: Sequence[int], salt: str = "", choose: Callable[[PeerAnswer], int] = lambda _: 0
    ) -> tuple[int, int]:
        """Compare what the index says of a prompt with what the engine reuses. Returns the engine's number and the
        tokens that it computed. choose: answer -> the engine that gets the request.
        """
        answer = self._settled_answer(lambda: self._client.query("tiny", list(prompt), cache_salt=salt or None))
        engine = self.engines[choose(answer)]
        held = answer.instances.get(str(engine.number))
        reused, more = engine.ask(prompt, salt, self.rng.choice([1, 1, 1, 40]))
        most = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        score = min(0 if held is None else held.longest_matched, most)
        reader = self._readers[engine.number]
        if reader.reused(reader.names_of(prompt, salt), len(prompt)) != reused:
            self.num_misread += 1
        if score != reused:
            self.differences.append(Difference(self.num_asked, engine.number, len(prompt), reused, score))
        self.num_asked += 1
        self.num_partial += 0 < reused < most
        self.steps.append(Asked(engine.number, list(prompt), salt, reused))
        self.prompts.remember([*prompt, *more])
        return engine.number, len(prompt) - reused

    def compare_text(self, chat: Chat) -> None:
        """Compare what the index says of a body with what the engine reuses, and the tokens with the engine's."""
        (engine,) = self.engines
        assert isinstance(engine, ChatEngine)
        body = msgspec.json.encode(chat.body)
        answer = self._settled_answer(lambda: self._score_of(body))
        held = answer.instances.get(str(engine.number))
        asked = None if isinstance(chat.body.get("prompt"), list) else engine_body(chat.body)
        rendering = None if asked is None else Rendering(asked.path, engine.rendering(asked.path, asked.data))
        said = engine.send(*chat)
        if rendering is not None and said.tokens is not None:
            assert tokens_of(rendering) == said.tokens, chat
        most = (said.num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        score = min(0 if held is None else held.longest_matched, most)
        if score != said.reused:
            self.differences.append(Difference(self.num_asked, engine.number, said.num_tokens, said.reused, score))
        self.num_asked += 1
        self.num_partial += 0 < said.reused < most
        self.steps.append(AskedText(engine.number, body, rendering, said.num_tokens, said.tokens, said.reused))

    def _score_of(self, body: bytes) -> PeerAnswer:
        answer = self._service.post("/query", msgspec.json.decode(body))
        assert answer.is_success, answer.text
        return msgspec.json.decode(answer.content, type=PeerAnswer)

    def send_at_once(self, prompts: Sequence[Sequence[int]]) -> None:
        """Send requests at the same time. Nobody knows their order, so they are not compared."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(lambda prompt: self.engines[0].ask(prompt, "", 2), prompts))

    def restart(self) -> None:
        """Kill the engine and start it again, with empty caches."""
        self._settled_answer(lambda: self._client.query("tiny", [1]))
        before = self._metric("bridge_restarts", 0)
        self.engines[0].kill()
        self.steps.append(Restarted(0))
        self._readers[0] = SlowReader(Registration())
        self.engines[0].launch()
        self.engines[0].wait_until_ready()
        wait_until(lambda: self._metric("bridge_restarts", 0) > before, _PATIENCE_S, "the bridge to see the restart")

    def _settled_answer(self, ask: Callable[[], PeerAnswer]) -> PeerAnswer:
        """Return what the index says once it has applied everything that the engines have published."""
        for engine in self.engines:
            batches = engine.new_batches()
            self.steps += batches
            for batch in batches if self._reads else ():
                self._readers[engine.number].apply(batch.payload)
        wait_until(self._is_read, _PATIENCE_S, "the bridge to pass on all batches")
        give_up, previous = time.monotonic() + _PATIENCE_S, None
        while time.monotonic() < give_up:
            records = self._metric("records")
            answer = ask()
            said = records, {name: held.longest_matched for name, held in answer.instances.items()}
            if said == previous:
                return answer
            previous = said
            time.sleep(_SETTLED_S)
        raise AssertionError("the index changes all the time")

    def _is_read(self) -> bool:
        return all(
            self._metric("bridge_batches", engine.number) == engine.num_batches
            and self._metric("publisher_queued_pages", engine.number) == 0
            for engine in self.engines
        )

    def _metric(self, name: str, worker: int | None = None) -> float:
        """Return a metric of the service; of one worker, the sum over its streams."""
        text = self._service.get("/metrics").text
        of_worker = "" if worker is None else rf'\{{[^}}]*worker="{worker}"[^}}]*\}}'
        return sum(map(float, re.findall(rf"^kvsight_{name}(?:_total)?{of_worker} (\S+)$", text, re.MULTILINE)))


def one_by_one(game: Game, num_requests: int) -> None:
    for _ in range(num_requests):
        game.compare(game.prompts.draw())


def bursts(game: Game, num_requests: int) -> None:
    """Six requests of one prefix at once, then some that are compared."""
    while game.num_asked < num_requests:
        prefix = game.prompts.draw()
        same = game.rng.randint(2, _BURST)
        game.send_at_once([prefix] * same + [game.prompts.continued(prefix) for _ in range(_BURST - same)])
        game.compare(game.prompts.continued(prefix))
        one_by_one(game, min(_SINGLES - 1, num_requests - game.num_asked))


def restarted(game: Game, num_requests: int) -> None:
    one_by_one(game, num_requests // 3)
    game.restart()
    one_by_one(game, num_requests - num_requests // 3)


def salted(game: Game, num_requests: int) -> None:
    for _ in range(num_requests):
        game.compare(game.prompts.draw(), game.rng.choice(["", "blue", "green"]))


def chosen(game: Game, num_requests: int) -> None:
    """Each request goes where `best_worker` says. The load of an engine is what it has computed lately."""
    load = {str(engine.number): 0.0 for engine in game.engines}

    def choose(answer: PeerAnswer) -> int:
        choice = best_worker(answer, load)
        assert choice is not None
        return int(choice.worker)

    for _ in range(num_requests):
        engine, computed = game.compare(game.prompts.draw(), choose=choose)
        for worker in load:
            load[worker] = 0.8 * load[worker] + (computed if worker == str(engine) else 0)


def chats(game: Game, num_requests: int) -> None:
    drawn = Chats(game.rng)
    for _ in range(num_requests):
        game.compare_text(drawn.draw())


def tokens_of(rendering: Rendering) -> list[int]:
    """Return the tokens of a render answer."""
    answer = msgspec.json.decode(rendering.answer)
    tokens: list[int] = (answer[0] if isinstance(answer, list) else answer)["token_ids"]
    return tokens


class Row(NamedTuple):
    """One line of the table."""

    model: Model
    play: Callable[[Game, int], None]
    num_engines: int = 1
    engine: type[Engine] = Engine


ROWS = {
    "one-group": Row(ONE_GROUP, one_by_one),
    "bursts": Row(ONE_GROUP, bursts),
    "windows": Row(WINDOWS, one_by_one),
    "mamba": Row(MAMBA, one_by_one),
    "two-engines": Row(ONE_GROUP, chosen, 2),
    "restart": Row(WINDOWS, restarted),
    "salts": Row(ONE_GROUP, salted),
    "chats": Row(CHATS, chats, engine=ChatEngine),
    "sglang": Row(ONE_GROUP, one_by_one, engine=SglangEngine),
    "sglang-bursts": Row(ONE_GROUP, bursts, engine=SglangEngine),
    "sglang-salts": Row(ONE_GROUP, salted, engine=SglangEngine),
}
