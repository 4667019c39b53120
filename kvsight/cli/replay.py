"""`kvsight replay`"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvsight.cli.console import UsageError, compile_kernels, out, print_json, progress_bar, read_json_object

if TYPE_CHECKING:
    from indexer.replay import Replay, Until
    from kv_events.records import LogRecord

_AT_HELP = "Offset (a whole number: records before it are applied) or time (ISO 8601, or @seconds since 1970)."


def replay(
    log: Annotated[Path, typer.Argument(help="Folder of an event log, as `kvsight record` writes it.")],
    at: Annotated[str | None, typer.Option(help=_AT_HELP)] = None,
    query: Annotated[
        Path | None, typer.Option(help='JSON file with the prompt: {"model_name": "m", "token_ids": [...]}.')
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Rebuild what the router saw at some moment, and ask it.

    Without --at: everything in the log. Without --query: the views as they were.

    Example: kvsight replay run.log --at 2026-01-31T12:00:00Z --query prompt.json
    """
    compile_kernels()
    body = read_json_object(query) if query is not None else None
    replayed = _replay(log, _until(at))
    answer = _views(replayed) if body is None else _scores(replayed, body)
    if as_json:
        print_json(answer)
    else:
        out.print(_table(answer))


def _replay(folder: Path, until: Until) -> Replay:
    from indexer.replay import Replay, log_records
    from kv_events.event_log import EventLogReader

    total = EventLogReader(folder).next_index
    with progress_bar() as bar:
        task = bar.add_task("replaying", total=min(total, until.offset) if until.offset is not None else total)

        def shown(records: Iterable[LogRecord]) -> Iterable[LogRecord]:
            for record in records:
                if record.offset % 256 == 0:
                    bar.update(task, completed=record.offset)
                yield record

        return Replay().apply_all(shown(log_records(folder, until.offset)), until)


def _until(at: str | None) -> Until:
    from indexer.replay import Until

    if at is None:
        return Until()
    if at.isdecimal():
        return Until(offset=int(at))
    try:
        if at.startswith("@"):
            return Until(time_s=float(at[1:]))
        moment = datetime.fromisoformat(at)
    except ValueError:
        raise UsageError(f"--at {at}: neither an offset nor a time; {_AT_HELP}") from None
    return Until(time_s=(moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())


def _views(replayed: Replay) -> list[dict[str, Any]]:
    from kv_events.schema import MEDIA

    return [
        {
            "model": view.stream.model,
            "worker": view.stream.worker,
            "dp_rank": view.stream.dp_rank,
            "state": replayed.freshness.state(view).value,
            "epoch": view.epoch,
            "next_seq": view.next_seq,
            **{medium.value: pages for medium, pages in zip(MEDIA, view.num_pages, strict=True)},
        }
        for view in replayed.namespaces.views
    ]


def _scores(replayed: Replay, body: dict[str, Any]) -> list[dict[str, Any]]:
    from indexer.scores import score
    from kv_events.hashing import namespace_seed, sequence_hashes, token_array
    from kv_events.streams import DEFAULT_TENANT

    model = str(body.get("model_name") or body.get("model") or "")
    tenant = str(body.get("routing_group") or body.get("tenant_id") or DEFAULT_TENANT)
    namespaces = replayed.namespaces.find(model, tenant)
    if not namespaces:
        known = sorted({n.key.model for n in replayed.namespaces}) or "none"
        raise UsageError(f"model {model!r}, tenant {tenant!r}: nothing is known of it there; known models: {known}")
    tokens = token_array(body.get("token_ids", []))
    seed = namespace_seed(body.get("lora_name"), body.get("cache_salt"))
    found = [
        found
        for namespace in namespaces
        for found in score(namespace, sequence_hashes(tokens, namespace.key.block_size, seed), replayed.freshness)
    ]
    return [
        {"worker": s.worker, **s.tiers._asdict(), "state": s.state.value}
        for s in sorted(found, key=lambda s: -s.longest_matched)
    ]


def _table(rows: list[dict[str, Any]]) -> Table | str:
    if not rows:
        return "nothing was held"
    table = Table()
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*[str(value) for value in row.values()])
    return table
