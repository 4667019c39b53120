"""Probes of a process that serves metrics from a thread: does its event loop answer, and does it do its work?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_PATIENCE_S = 2.0


def with_probes(metrics: WSGIApplication, why_not_ready: Callable[[], str]) -> WSGIApplication:
    """Add `/health` and `/ready` to an application. Both answer 200, or 503 with the reason.

    `/health` fails if the running event loop does not answer: only a restart helps then. `/ready` fails then, too, and
    while the process cannot do its work. why_not_ready: the reason, or "". Called in the event loop.
    """
    loop = asyncio.get_running_loop()
    probes = {"/health": lambda: "", "/ready": why_not_ready}

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        probe = probes.get(environ["PATH_INFO"])
        if probe is None:
            return metrics(environ, start_response)
        reason = _ask(loop, probe)
        status = "503 Service Unavailable" if reason else "200 OK"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{reason or 'ok'}\n".encode()]

    return answer


def _ask(loop: asyncio.AbstractEventLoop, probe: Callable[[], str]) -> str:
    answered: Future[str] = Future()
    loop.call_soon_threadsafe(lambda: answered.set_result(probe()))
    try:
        return answered.result(_PATIENCE_S)
    except TimeoutError:
        return f"the event loop has not answered for {_PATIENCE_S:.0f} s"
