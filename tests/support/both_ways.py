"""One service asked in both ways: by its hot lane, and by the ordinary decoder and encoder."""

from __future__ import annotations

import re
import time
from functools import partial

from api.app import create_app
from api.decoding import codec_of
from api.encoded_answers import encoded_answer
from api.hot_lane.heads import Head
from api.hot_lane.lane import HotLane
from api.questions import BY_HASH, BY_TOKENS, decode_question
from api.settings import ApiSettings
from indexer.questions import score_all
from kv_events.hashing import sequence_hashes
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream, stored

_FIELDS = {"/query": BY_TOKENS, "/query_by_hash": BY_HASH}
_AGE = re.compile(rb'"age_ms":\d+')
PROMPT = list(range(1, 41))
BLOCK_SIZE = 4


class BothWays:
    """A service that knows workers with one rank and with two, which hold parts of `PROMPT`."""

    def __init__(self, fed: HandFed) -> None:
        hashes = sequence_hashes(PROMPT, BLOCK_SIZE).tolist()
        self._consumer = fed.consumer
        for worker, rank, pages in (("a", 0, 10), ("b", 0, 3), ("b", 1, 7)):
            batch = Stream(worker, dp_rank=rank, block_size=BLOCK_SIZE).batch(stored((0, hashes[:pages])))
            for _ in self._consumer.applier.apply(batch, 1.0):
                pass
        self._lane: HotLane = create_app(self._consumer, ApiSettings()).state.lane

    def agree(self, body: bytes, path: str = "/query", content_type: str = "application/json") -> bool:
        """Check that the lane's answer is the ordinary one. Returns False if the lane does not take the body."""
        answered = self._lane.answer(Head(path, content_type, len(body)), b"head" + body, len(b"head"))
        if answered is not None:
            question, numbers = decode_question(body, codec_of(content_type), _FIELDS[path])
            namespaces = self._consumer.namespaces.find(question.model, question.tenant)
            scores = score_all(namespaces, partial(question.hashes, numbers), self._consumer.freshness)
            expected = encoded_answer(question, scores, time.time())
            assert _AGE.sub(b"", answered) == _AGE.sub(b"", expected), body
        return answered is not None
