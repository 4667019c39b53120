"""`kvsight top`"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from http import HTTPStatus
from itertools import islice
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import msgspec
import typer
from rich.text import Text

from kv_events.http.fleet import Fleet, FleetWorker
from kv_events.http.service import DEFAULT_URL
from kv_events.http.workers import Worker
from kv_events.remedies import NO_ENGINE, NO_PUBLISHER
from kv_events.runtime.words import count, duration, names, printable
from kvsight.cli.shared.console import UsageError, at_most_one, err, next_step, out, print_lines, print_result
from kvsight.cli.shared.flags import ApiToken, AsJson, Url
from kvsight.cli.shared.streams import MEDIA, clock, media_held, namespace_text, rows_of, streams_lines, trouble_text
from kvsight.cli.shared.tables import Column, table_lines
from kvsight.errors import KvsightConnectionError, KvsightHttpError

if TYPE_CHECKING:
    from kvsight.client import Client

_TIMEOUT_S = 10.0
_PASSING = {HTTPStatus.TOO_MANY_REQUESTS, *range(500, 600)}
"""Statuses of a service that answers later."""
_MOST_WORKERS = 1000
_STYLES = {"live": "", "syncing": "cyan", "stale": "yellow", "expired": "red"}
"""State of a worker -> colour of its line."""
_LEVELS = {"ok": "green", "warning": "yellow", "trouble": "bold red"}
"""Level of the verdict -> its colour."""
_BARS = "▁▂▃▄▅▆▇█"
_NUM_BARS = 12
_NO_NAME = "no worker's name contains {}"
_NO_WORKER = f"no worker is known: {NO_ENGINE}; or {NO_PUBLISHER}"


def top(
    contains: Annotated[str, typer.Option(help="Only workers whose names contain this text.")] = "",
    ranks: Annotated[bool, typer.Option("--ranks", help="A row for each rank of a worker.")] = False,
    model: Annotated[str | None, typer.Option(help="Only this model, with --ranks.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant (routing group), with --ranks.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one table and exit.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two tables.", min=0.1, max=3600)] = 2.0,
    url: Url = DEFAULT_URL,
    api_token: ApiToken = None,
    as_json: AsJson = False,
) -> None:
    """Watch the workers of a running indexer.

    The first lines say whether the views are true. Below them, each row is one worker, those in trouble first: the
    state of its view, when it was last heard, the pages that it holds on each tier, and pages stored and removed a
    second. The screen is refreshed in place until q or Ctrl-C; an outage of the service is waited out. If the output is
    piped, tables follow each other.

    With --ranks, each row is one rank of a worker, in the order of their names.

    --json prints the answer of GET /fleet, or of GET /workers with --ranks; without --once, one answer in each line.

    Example: kvsight top
    """
    from kvsight.base_client import RetryPolicy
    from kvsight.client import Client

    if not ranks and (flag := at_most_one({"--model": model, "--tenant": tenant})):
        raise UsageError(f"{flag} needs --ranks")
    with Client(url, token=api_token, timeout_s=_TIMEOUT_S, retry=RetryPolicy(attempts=1)) as client:
        table = _Table(lambda: client.fleet(contains, limit=_MOST_WORKERS), partial(_fleet_lines, contains))
        if ranks:
            table = _ranks_table(client, contains, model, tenant)
        if once:
            found = table.read()
            if as_json or found or (model, tenant) == (None, None):
                print_result(found, (line.plain for line in table.lines(found, out.width, None)), as_json=as_json)
            if not found and (model, tenant) != (None, None):
                raise UsageError(_unknown(client, contains, model, tenant))
            return
        is_screen = out.is_terminal and not as_json and not out.is_dumb_terminal
        screen = _screen(table) if is_screen else nullcontext(_printer(table, as_json))
        with suppress(KeyboardInterrupt), _keys() as wants_end, screen as show:
            _watch(table, show, lambda: wants_end(interval))


class _Table(NamedTuple):
    """A table of the workers that a service knows."""

    read: Callable[[], Any]
    """Returns an answer of the service. Raises KvsightError."""
    lines: Callable[[Any, int, int | None], Iterator[Text]]
    """Yields the lines for an answer, given width and height of the terminal; height None: all lines."""


_Show: TypeAlias = Callable[[Any, str], None]
"""Shows the newest answer, or None before the first one, and why there is no newer one; empty if there is."""


def _ranks_table(client: Client, contains: str, model: str | None, tenant: str | None) -> _Table:
    unknown = ""

    def read() -> list[Worker]:
        nonlocal unknown
        found = [each for each in client.workers(model, tenant) if contains in each.instance_id]
        unknown = "" if found else _unknown(client, contains, model, tenant)
        return found

    def lines(found: list[Worker], width: int, height: int | None) -> Iterator[Text]:
        rows = rows_of(found)
        texts = streams_lines(rows, width) if rows else wrap(unknown, width)
        return (Text(text) for text in islice(texts, height))

    return _Table(read, lines)


def _unknown(client: Client, contains: str, model: str | None, tenant: str | None) -> str:
    """Say that no worker is known, and which ones are."""
    if contains and client.workers(model, tenant):
        return _NO_NAME.format(printable(contains))
    if (model, tenant) == (None, None):
        return _NO_WORKER
    asked = namespace_text(model, tenant or "default", 0) if model else f"tenant {printable(tenant or '')}"
    known = sorted({namespace_text(each.model_name, each.routing_group, 0) for each in client.workers()})
    return f"no worker is known for {asked}; known: {names(known) or 'none'}"


def _watch(table: _Table, show: _Show, pauses_and_ends: Callable[[], bool]) -> None:
    """Show the workers until the user ends it. An outage of the service is shown and waited out."""
    found, since = None, 0.0
    while True:
        try:
            found, since, outage = table.read(), 0.0, ""
        except (KvsightConnectionError, KvsightHttpError) as error:
            if isinstance(error, KvsightHttpError) and error.status not in _PASSING:
                raise
            since = since or time.time()
            outage = f"no answer since {clock(since)}: {error}{next_step(error)}; trying again"
        show(found, outage)
        if pauses_and_ends():
            return


@contextmanager
def _screen(table: _Table) -> Iterator[_Show]:
    from rich.live import Live

    def show(found: Any, outage: str) -> None:
        lines = [Text(part, "bold red") for part in wrap(printable(outage), out.width)]
        if found is not None:
            lines += table.lines(found, out.width, out.height - len(lines))
        live.update(Text("\n", no_wrap=True).join(lines), refresh=True)

    with Live(console=out, screen=True, auto_refresh=False) as live:
        yield show


def _printer(table: _Table, as_json: bool) -> _Show:
    """Return what prints one table, or one line of JSON, after another. An outage is reported once on stderr."""
    reported = False

    def show(found: Any, outage: str) -> None:
        nonlocal reported
        if outage and not reported:
            err.print(outage)
        reported = bool(outage)
        if outage:
            return
        if as_json:
            print_lines([msgspec.json.encode(found).decode()])
        else:
            print_lines([*(line.plain for line in table.lines(found, out.width, None)), ""])

    return show


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yield what waits for some seconds and returns whether the user has pressed `q`. Keys are not echoed."""
    if not (sys.stdin.isatty() and out.is_terminal):
        yield partial(_is_q_pressed, [])
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield partial(_is_q_pressed, [descriptor])
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _is_q_pressed(keyboard: list[int], seconds: float) -> bool:
    """Wait for a key. Other keys refresh the screen at once. A terminal that has gone away ends the command."""
    readable, _, _ = select.select(keyboard, [], [], seconds)
    return bool(readable) and os.read(readable[0], 64)[:1] in (b"q", b"Q", b"")


def _fleet_lines(contains: str, fleet: Fleet, width: int, height: int | None) -> Iterator[Text]:
    """Yield the verdict, sums and a table of workers. contains: what their names have. width, height: of the terminal;
    None: all workers."""
    head = [Text(part, _LEVELS.get(fleet.level, "")) for part in wrap(_verdict(fleet.verdict), width)]
    head += [Text(part) for part in wrap(_sums(fleet), width)]
    yield from head
    if not fleet.workers:
        if fleet.num_workers:
            yield Text(_NO_NAME.format(printable(contains)))
        return
    yield Text("")
    room = len(fleet.workers) if height is None else max(1, height - len(head) - 3)
    shown = fleet.workers if room >= len(fleet.workers) else fleet.workers[: max(1, room - 1)]
    title, *rows = table_lines(_columns(shown, fleet), width)
    yield Text(title, "bold")
    yield from (Text(row, _STYLES.get(worker.state, "")) for row, worker in zip(rows, shown, strict=True))
    if len(shown) < fleet.num_selected:
        yield Text(f"and {count(fleet.num_selected - len(shown), 'more worker')}")
    left = None if height is None else height - len(head) - 2 - len(shown)
    yield from islice(_trouble_lines(shown, fleet, width), left if left is None else max(0, left))


def _trouble_lines(workers: Sequence[FleetWorker], fleet: Fleet, width: int) -> Iterator[Text]:
    """Yield what is wrong with workers that the verdict does not describe, and what to do about it."""
    described = _verdict(fleet.verdict)
    for worker in workers:
        if worker.cause and not (worker.cause in described and described.startswith(f"{worker.worker} ")):
            yield Text("")
            text = trouble_text(worker.worker, worker.endpoint, worker.cause, worker.since, worker.remedy)
            yield from (Text(part) for part in wrap(text, width))


def _verdict(parts: Sequence[str | float]) -> str:
    return printable("".join(part if isinstance(part, str) else clock(part) for part in parts))


def _sums(fleet: Fleet) -> str:
    """Time, states, pages by tier and rates of the workers that were asked for."""
    states = ", ".join(f"{number} {state}" for state, number in fleet.states.items() if number)
    pages = {medium: sum(worker.pages.get(medium, 0) for worker in fleet.workers) for medium in MEDIA}
    held = ", ".join(f"{number:,} {MEDIA[medium]}" for medium, number in pages.items() if number) or "none"
    rates = [sum(map(_now, (getattr(each, name) for each in fleet.workers))) for name in ("stored", "removed")]
    held += f" ({fleet.duplicated:.0%} of all are copies)" if fleet.duplicated >= 0.005 else ""
    events = f"stored {rates[0]:,.0f}/s, removed {rates[1]:,.0f}/s"
    part = "" if len(fleet.workers) == sum(fleet.states.values()) else f" of {count(len(fleet.workers), 'worker')}"
    return f"{clock(fleet.time)}; workers: {states or 'none'}; pages{part}: {held}; {events}"


def _columns(workers: Sequence[FleetWorker], fleet: Fleet) -> Iterator[Column]:
    yield Column("worker", [each.worker for each in workers])
    if len({(each.model, each.tenant) for each in fleet.workers}) > 1:
        yield Column("model", [each.model for each in workers], rank=5)
    yield Column("state", [each.state for each in workers])
    yield Column("last heard", [_heard(each) for each in workers], True, rank=3)
    for medium in media_held(each.pages for each in fleet.workers) or ["GPU"]:
        cells = [_room(each, medium) for each in workers]
        yield Column(f"{MEDIA[medium]} pages", cells, is_number=True, rank=2)
    yield Column("stored/s", [f"{_now(each.stored):,.0f}" for each in workers], is_number=True, rank=1)
    yield Column("removed/s", [f"{_now(each.removed):,.0f}" for each in workers], is_number=True, rank=1)
    if any(each.lifetime_s is not None for each in workers):
        lives = [None if each.lifetime_s is None else duration(round(each.lifetime_s * 1000)) for each in workers]
        yield Column("a page stays", lives, is_number=True, rank=6)
    yield Column("resyncs", [f"{each.resyncs:,}" for each in workers], is_number=True, rank=7)
    if out.encoding.lower().startswith("utf"):
        title = f"stored, {_NUM_BARS * fleet.interval_s:.0f} s"
        yield Column(title, [_curve(each.stored) for each in workers], rank=8)
    if any(each.reason for each in workers):
        yield Column("reason", [each.reason for each in workers], rank=4)


def _heard(worker: FleetWorker) -> str:
    is_heard = any(rank.epoch >= 0 for rank in worker.ranks)
    return f"{duration(round(worker.age_s * 1000))} ago" if is_heard else "not yet"


def _room(worker: FleetWorker, medium: str) -> str:
    """Pages held, and the share of the worker's room that they take, if it is known."""
    held, room = worker.pages.get(medium, 0), worker.capacity.get(medium)
    return f"{held:,}" if room is None else f"{held:,} ({held / room:.0%})"


def _now(rates: Sequence[float]) -> float:
    return rates[-1] if rates else 0.0


def _curve(rates: Sequence[float]) -> str:
    """The last intervals as bars, oldest first. The highest of them has the highest bar."""
    last = rates[-_NUM_BARS:]
    highest = max(last, default=0.0)
    return "".join(_BARS[round(rate / highest * (len(_BARS) - 1))] if highest else _BARS[0] for rate in last)
