"""`kvsight diff`"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsight.cli.console import UsageError, at_most_one, compile_kernels, err, out, print_json, print_lines
from kvsight.cli.log.reading import LogInput, exit_if_any_damaged
from kvsight.cli.moments import extent_text, local_time, moment_fault, parse_moment
from kvsight.cli.options import ApiToken, AsJson
from kvsight.cli.replay import views_at
from kvsight.cli.streams import MEDIA
from kvsight.cli.tables import Column, count, natural_order, table_lines

if TYPE_CHECKING:
    from analysis.diff import Holdings
    from kv_events.http.log import MovedPage, StreamDiff
    from kv_events.log.moments import LogMoment


def diff(
    log: Annotated[Path, typer.Argument(help="Folder of an event log: the side before.")],
    other: Annotated[Path | None, typer.Argument(help="Another event log: the side after.")] = None,
    url: Annotated[str | None, typer.Option(help="A live service as the side after: its address.")] = None,
    api_token: ApiToken = None,
    first: Annotated[str | None, typer.Option("--from", help="Moment of the side before. Default: its end.")] = None,
    last: Annotated[str | None, typer.Option("--to", help="Moment of the side after. Default: its end.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare what the workers hold at two moments.

    The moments are of one log, of two logs, or of a log and a live service. For each worker, shows the pages that
    were gained, lost, and moved to other tiers, with examples. With one log, --from is required. Moments have the
    forms of `kvsight replay --at`.

    Example: kvsight diff run.log --from 2026-01-31T12:00:00Z --to 2026-01-31T12:05:00Z
    """
    against = at_most_one({"OTHER": other, "--url": url})
    if against is None and first is None:
        raise UsageError("give --from, another log, or --url")
    if url is not None and last is not None:
        raise UsageError("--to: a live service has no other moment than now")
    moments = parse_moment(first, "--from"), parse_moment(last, "--to")
    sources = [LogInput(log), LogInput(other or log)]
    compile_kernels("indexer.replay")
    from analysis.diff import diff as diff_of

    before = _of_log(sources[0], moments[0], "--from")
    after = _of_log(sources[1], moments[1], "--to") if url is None else _of_service(url, api_token)
    found = diff_of(before, after)
    if as_json:
        print_json(found)
    else:
        print_lines(_lines(found, out.width))
    exit_if_any_damaged(sources)


def _of_log(source: LogInput, moment: LogMoment, flag: str) -> Holdings:
    """What the workers hold at a moment of a log. Raises UsageError if the moment is outside."""
    from analysis.diff import holdings_of

    views, extent = views_at(source, moment)
    if fault := moment_fault(extent, moment, flag):
        raise UsageError(fault)
    if not views.applier.records:
        raise UsageError(f"{flag} {moment.typed}: no record is before this moment: {extent_text(extent)}")
    err.print(
        f"{source.folder}: views as of {local_time(views.now)}, after {count(views.applier.records, 'record')}",
        markup=False,
    )
    return holdings_of(views)


def _of_service(url: str, api_token: str | None) -> Holdings:
    from analysis.diff import holdings_of_dump
    from kvsight.client import Client

    with Client(url, token=api_token) as client:
        dump = client.dump()
    err.print(f"{url}: views as of now", markup=False)
    return holdings_of_dump(dump)


def _lines(found: Sequence[StreamDiff], width: int) -> Iterator[str]:
    different = sorted(
        (each for each in found if not each.is_empty),
        key=lambda each: (each.model, each.tenant, natural_order(each.worker), each.dp_rank),
    )
    if different:
        yield from table_lines(list(_columns(different)), width)
    num_equal = len(found) - len(different)
    yield f"{count(num_equal, 'worker stream')} without a difference" if different else "no difference"
    for each in different:
        yield from _examples(each)


def _columns(found: Sequence[StreamDiff]) -> Iterator[Column]:
    yield Column("worker", [each.worker for each in found])
    if any(each.dp_rank for each in found):
        yield Column("rank", [str(each.dp_rank) for each in found], is_number=True)
    if len({(each.model, each.tenant) for each in found}) > 1:
        yield Column("model", [each.model for each in found], rank=1)
        yield Column("tenant", [each.tenant for each in found], rank=2)
    yield Column("before", [str(each.before) for each in found], is_number=True, rank=3)
    yield Column("after", [str(each.after) for each in found], is_number=True, rank=3)
    yield Column("gained", [str(each.gained) for each in found], is_number=True)
    yield Column("lost", [str(each.lost) for each in found], is_number=True)
    yield Column("moved", [str(each.moved) for each in found], is_number=True)


def _examples(each: StreamDiff) -> Iterator[str]:
    parts = [
        ("gained", list(map(str, each.gained_examples))),
        ("lost", list(map(str, each.lost_examples))),
        ("moved", list(map(_moved, each.moved_examples))),
    ]
    for verb, pages in parts:
        if pages:
            yield f"{each.worker} {verb}, for example: {', '.join(pages)}"


def _moved(page: MovedPage) -> str:
    before, after = ("+".join(MEDIA[medium] for medium in media) for media in (page.before, page.after))
    return f"{page.sequence_hash} ({before} -> {after})"
