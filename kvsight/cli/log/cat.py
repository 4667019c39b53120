"""`kvsight log cat`"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from kv_events.errors import RecordRejectedError
from kv_events.records import Channel
from kvsight.cli.log.reading import LogFolder, LogInput
from kvsight.cli.log.selection import (
    From,
    OfChannel,
    OfModel,
    OfWorker,
    Range,
    Selection,
    To,
    channels_of,
    hashes_of,
    media_of,
    seqs_of,
)
from kvsight.cli.streams import MEDIA

if TYPE_CHECKING:
    from kv_events.codec import Step
    from kv_events.records import LogRecord

_TIERS = tuple(MEDIA.values())


def cat(
    log: LogFolder,
    first: From = None,
    last: To = None,
    worker: OfWorker = None,
    model: OfModel = None,
    channel: OfChannel = None,
    medium: Annotated[list[str] | None, typer.Option(help="Only changes on this tier. Repeatable.")] = None,
    sequence_hash: Annotated[list[str] | None, typer.Option(help="Only batches with this hash. Repeatable.")] = None,
    block_hash: Annotated[list[str] | None, typer.Option(help="Only batches with this hash. Repeatable.")] = None,
    seq: Annotated[str | None, typer.Option(help="Only these numbers: NUMBER or FIRST-LAST.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", help="Stop after this many records.", min=1)] = None,
) -> None:
    """Print the records of a log as JSON, one a line.

    --from and --to accept the same forms as `kvsight replay --at`. Hashes are printed as unsigned integers.

    Example: kvsight log cat run.log --worker engine-0 --from 2026-01-31T12:00:00Z --limit 10
    """
    source = LogInput(log)
    selection = Selection(
        Range.of(first, last),
        channels_of(channel),
        worker,
        model,
        media_of(medium),
        hashes_of("--sequence-hash", sequence_hash),
        hashes_of("--block-hash", block_hash),
        seqs_of(seq),
    )
    encode, write, num_left = msgspec.json.Encoder().encode, sys.stdout.buffer.write, limit
    for chunk in source.chunks("reading"):
        for index, record in selection.records(chunk):
            write(encode(described(index, record)) + b"\n")
            if num_left is not None and (num_left := num_left - 1) == 0:
                return
    sys.stdout.flush()
    if not selection.num_in_range and (first or last):
        source.fail_outside(str(selection.range))
    source.exit_if_damaged()


def described(index: int, record: LogRecord) -> dict[str, Any]:
    """A record as a JSON object. One that cannot be decoded has `rejected`, with the reason."""
    known = record.channel in list(Channel)
    found: dict[str, Any] = {
        "index": index,
        "channel": Channel(record.channel).name.lower() if known else record.channel,
        "partition": record.partition,
        "offset": record.offset,
        "time_ms": record.timestamp_ms,
        "key": record.key.decode(errors="replace"),
        "bytes": len(record.payload),
    }
    try:
        return found | _contents(record)
    except RecordRejectedError as error:
        return found | {"rejected": str(error)}


def _contents(record: LogRecord) -> dict[str, Any]:
    from kv_events.codec import decode_batch, decode_resync
    from kv_events.decisions import decode_decision

    match record.channel:
        case Channel.EVENTS | Channel.DEAD_LETTERS:
            batch = decode_batch(record.payload)
            return {
                **batch.stream._asdict(),
                "block_size": batch.block_size,
                "epoch": batch.epoch,
                "seq": batch.seq,
                "degraded_reason": batch.degraded_reason,
                "events": [_event(step) for step in batch.steps],
            }
        case Channel.CONTROL:
            return msgspec.structs.asdict(decode_resync(record.payload))
        case Channel.DECISIONS:
            decision = decode_decision(record.payload)
            found: dict[str, Any] = {"kind": type(decision).__name__.lower(), **msgspec.structs.asdict(decision)}
            if "sequence_hashes" in found:
                found["sequence_hashes"] = memoryview(found["sequence_hashes"]).cast("Q").tolist()
            return found
    return {}


def _event(step: Step) -> dict[str, Any]:
    from kv_events.codec import RemovedPages, StoredPages

    if isinstance(step, RemovedPages):
        pages = {"sequence_hashes": step.hashes.tolist(), "block_hashes": step.block_hashes.tolist()}
        return {"type": "removed", "medium": _TIERS[step.medium], **pages}
    if isinstance(step, StoredPages):
        import numpy as np

        starts = np.flatnonzero(np.unpackbits(step.chain_starts, bitorder="little")).tolist()
        pages = {"sequence_hashes": step.hashes.tolist(), "block_hashes": step.block_hashes.tolist()}
        chains = [{"start": s, "parent": p} for s, p in zip(starts, step.parents.tolist(), strict=True)]
        return {"type": "stored", "medium": _TIERS[step.medium], "chains": chains, **pages}
    return {"type": _OTHER_EVENTS[type(step).__name__], **msgspec.structs.asdict(step)}


_OTHER_EVENTS = {"AllBlocksCleared": "cleared", "SnapshotBegin": "resync_begin", "SnapshotEnd": "resync_end"}
