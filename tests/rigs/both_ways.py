"""One service asked in all ways: by its fast path, over a direct connection, and by the general decoder and encoder."""

import asyncio
import re
import socket
import time

import numpy as np
import numpy.typing as npt

from api.fast.heads import Caller, Head
from api.fast.templates import RequestTemplate
from api.problems import ProblemError
from api.queries.answers import general_answer
from api.queries.body_formats import format_of
from api.queries.parsing import BY_HASH, BY_TOKENS, decode_question
from api.service import LiveService
from api.settings import ApiSettings
from indexer.slices import run_at_once
from kv_events.hashing import sequence_hashes
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream, stored

_FIELDS = {"/query": BY_TOKENS, "/query_by_hash": BY_HASH}
_AGE = re.compile(rb'"age_ms":\d+')
_HEAD = b"POST %b HTTP/1.1\r\nX-Request-Id: 1\r\nContent-Length: %d\r\nHost: h\r\nContent-Type: %b\r\n\r\n"
_DEADLINE_S = 30.0
PROMPT = list(range(1, 41))
BLOCK_SIZE = 4


class BothWays:
    """A service that knows workers with one rank and with two, which hold parts of `PROMPT`. Those of the model
    `hybrid` have groups.
    """

    def __init__(self, fed: HandFed) -> None:
        hashes = sequence_hashes(PROMPT, BLOCK_SIZE).tolist()
        self._consumer = fed.consumer
        full = [("a", 0, range(10)), ("b", 0, range(3)), ("b", 1, range(7))]
        marked = [("hybrid#mamba", *place) for place in (("a", 0, (1, 4, 6)), ("b", 1, (3,)))]
        marked += [("hybrid#swa:6", "a", 0, range(6)), ("hybrid#eagle", "b", 0, ())]
        for model, worker, rank, pages in [(each, *place) for each in ("m", "hybrid") for place in full] + marked:
            stream = Stream(worker, model=model, dp_rank=rank, block_size=BLOCK_SIZE)
            batch = stream.batch(stored(*((hashes[page - 1] if page else 0, [hashes[page]]) for page in pages)))
            run_at_once(self._consumer.applier.apply(batch, 1.0))
        self._fast_path = LiveService(self._consumer, ApiSettings()).fast_path

    def agree(self, body: bytes, path: str = "/query", content_type: str = "application/json") -> bool:
        """Check that the fast path gives the answer of the general encoder. Returns False if it does not take the body.

        A body that the fast path takes is then sent twice over a direct connection.
        """
        head = _HEAD % (path.encode(), len(body), content_type.encode())
        accepted, data = _head(path, content_type, len(body)), head + body
        answered = self._fast_path.answer(accepted, data, len(head))
        if answered is None:
            return False
        assert _AGE.sub(b"", answered) == self._expected(body, path, content_type), body
        template = self._template(accepted, data, len(head))
        if template is not None:
            has_hint = b'"hint":' in answered  # which kernels do not write
            assert self.agree_directly(template, [body, body]) == [not has_hint] * 2
        return True

    def agree_directly(self, template: RequestTemplate, bodies: list[bytes]) -> list[bool]:
        """Send bodies over a connection that is direct for some requests. Checks answers, and that nothing is lost.

        Returns whether each one was answered, and not returned to the owner of the connection.
        """
        path, content_type = template.path, template.content_type
        requests = [_HEAD % (path.encode(), len(body), content_type.encode()) + body for body in bodies]
        answers = asyncio.run(self._ask_directly(template, requests))
        for body, answer in zip(bodies, answers, strict=True):
            assert answer is None or answer == self._expected(body, path, content_type), body
        return [answer is not None for answer in answers]

    def template(self, body: bytes, content_type: str = "application/json") -> RequestTemplate | None:
        """Return what is alike in requests with such a body."""
        head = _HEAD % (b"/query", len(body), content_type.encode())
        return self._template(_head("/query", content_type, len(body)), head + body, len(head))

    def _template(self, head: Head, data: bytes, start: int) -> RequestTemplate | None:
        """Return the template of a request that comes for the second time."""
        self._fast_path.request_template(head, data, start)
        return self._fast_path.request_template(head, data, start)

    def read_into(self, data: npt.NDArray[np.uint8]) -> None:
        """Let requests of direct connections be read into this memory."""
        direct = self._fast_path.direct
        assert direct is not None
        direct._use(direct._sockets._replace(data=data))

    def _expected(self, body: bytes, path: str, content_type: str) -> bytes | None:
        """Return the general answer without ages, or None if the body is refused."""
        try:
            question, numbers = decode_question(body, format_of(content_type), _FIELDS[path])
        except ProblemError:
            return None
        namespaces = self._consumer.namespaces.find(question.model, question.tenant)
        return _AGE.sub(b"", general_answer(question, numbers, namespaces, self._consumer.freshness, time.time()))

    async def _ask_directly(self, template: RequestTemplate, requests: list[bytes]) -> list[bytes | None]:
        """Return the answers without ages, None for those requests that were returned."""
        direct = self._fast_path.direct
        assert direct is not None
        answers: list[bytes | None] = []
        direct.learn(template)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            for request in requests:
                owner = _Owner()
                direct.join(theirs.fileno(), owner)
                ours.send(request)
                answer = await _received(ours, owner)
                assert (answer == b"") == (owner.returned is not None)
                if owner.returned is None:
                    direct.leave(theirs.fileno(), owner)
                else:
                    assert owner.returned == request or theirs.recv(2**16) == request  # or it was not read
                head, _, body = answer.partition(b"\r\n\r\n")
                assert not head or head.endswith(b"content-length: %d\r\ncontent-type: application/json" % len(body))
                answers.append(_AGE.sub(b"", body) if answer else None)
        return answers


def _head(path: str, content_type: str, content_length: int) -> Head:
    return Head(path, Caller((content_type.encode(), b"h", b""), content_type), content_length)


class _Owner:
    """Gets a direct connection back."""

    def __init__(self) -> None:
        self.returned: bytes | None = None

    def response_headers(self) -> bytes:
        return b"server: test\r\n"

    def answer_now(self, data: bytes) -> bool:
        return False

    def resume(self, data: bytes, rest: bytes) -> None:
        assert not rest
        self.returned = data

    def abort(self) -> None:
        raise AssertionError("the connection is closed")


async def _received(connection: socket.socket, owner: _Owner) -> bytes:
    """Return what a nonblocking socket receives, or nothing once the connection was returned to its owner."""
    give_up = time.monotonic() + _DEADLINE_S
    while owner.returned is None and time.monotonic() < give_up:
        try:
            return connection.recv(2**16)
        except BlockingIOError:
            await asyncio.sleep(0)
    return b""
