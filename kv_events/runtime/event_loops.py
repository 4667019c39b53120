"""The event loops of kvsight's own processes and threads."""

import asyncio
import logging
import socket
from typing import Any

import uvloop

logger = logging.getLogger(__name__)


def new_event_loop() -> uvloop.Loop:
    """Create a loop of uvloop, which does not report look-ups of names that nobody waits for any longer.

    uvloop cannot cancel a look-up. If a connection attempt is given up before its name is resolved, which takes 10 s
    while no name server answers, the look-up goes on and its error is one that no part of the program retrieves.
    """
    loop = uvloop.new_event_loop()
    loop.set_exception_handler(_report)
    return loop


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error, future = context.get("exception"), context.get("future")
    if isinstance(error, socket.gaierror) and not isinstance(future, asyncio.Task):
        logger.debug("a look-up that was given up has failed: %s", error)
    else:
        loop.default_exception_handler(context)
