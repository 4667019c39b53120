"""A slow reference decoder on plain Python objects, for comparison with the bridge's decoder."""

import itertools
from collections.abc import Iterator
from typing import Any

from bridge.decoding.decoder import Decoder
from bridge.decoding.events import ClearedRun, InvalidEvent, MooncakeEvent, PageRun, tier_of
from bridge.decoding.kernels.columns import UNKNOWN
from tests.support.engines.event_payloads import REMOVED_FIELDS, STORED_FIELDS

MASK64 = 2**64 - 1

# --- reference implementation ---------------------------------------------------------------------------------------


class BadError(Exception):
    """An event is malformed."""


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def need(condition: bool) -> None:
    if not condition:
        raise BadError


def text(value: Any) -> str:
    need(value is None or isinstance(value, str))
    need(len((value or "").encode()) <= 1024)
    return value or ""


def number(value: Any) -> int | None:
    if value is None:
        return None
    need(is_int(value) and 0 <= value < 2**31)
    return int(value)


def hash64(value: Any) -> int:
    if isinstance(value, bytes) and value:
        return int.from_bytes(value[-8:], "big")
    need(is_int(value))
    return int(value) & MASK64


def raw_tokens(value: Any) -> tuple[list[int], bool]:
    if value is None:
        return [], False
    need(isinstance(value, list))
    is_bigram = bool(value) and isinstance(value[0], list)
    if not is_bigram:
        need(all(is_int(token) and 0 <= token < 2**32 for token in value))
        return value, False
    need(all(isinstance(pair, list) and len(pair) == 2 for pair in value))
    need(all(is_int(token) and 0 <= token < 2**32 for pair in value for token in pair))
    need(all(one[1] == two[0] for one, two in itertools.pairwise(value)))
    return [value[0][0], *(pair[1] for pair in value)], True


def fields_of(event: Any) -> dict[str, Any]:
    if isinstance(event, dict):
        fields = {key: value for key, value in event.items() if isinstance(key, str)}
        need(isinstance(fields.get("type"), str))
        return fields
    need(isinstance(event, list) and bool(event) and isinstance(event[0], str))
    names = {"BlockStored": STORED_FIELDS, "BlockRemoved": REMOVED_FIELDS}.get(event[0], ())
    fields = {"type": event[0], **dict(zip(names, event[1:], strict=False))}
    seventh = fields.get("lora_name")
    if isinstance(seventh, dict):
        fields["lora_name"] = seventh.get("lora_name")
        fields["cache_salt"] = seventh.get("cache_salt")
    return fields


def place(medium: str, locality: str) -> tuple[int, str]:
    """Return the tier, and the name of an unknown medium."""
    tier = tier_of(medium, locality)
    return tier, medium if tier == UNKNOWN else ""


def reference(event: Any) -> Any:
    """Decode one event."""
    if isinstance(event, dict) and "event_type" in event:
        return "envelope"
    try:
        fields = fields_of(event)
        need(isinstance(fields.get("block_hashes", []), list))
        hashes = [hash64(value) for value in fields.get("block_hashes", [])]
        medium, locality, kind = (text(fields.get(name)) for name in ("medium", "locality", "kv_cache_spec_kind"))
        group, size = number(fields.get("group_idx")), number(fields.get("block_size")) or 0
        spec = kind, number(fields.get("kv_cache_spec_sliding_window")) or 0
        tokens, is_bigram = raw_tokens(fields.get("token_ids"))
        parent = fields.get("parent_block_hash")
        parent = None if parent is None else hash64(parent)
        lora, salt, lora_id = text(fields.get("lora_name")), text(fields.get("cache_salt")), fields.get("lora_id")
        need(lora_id is None or is_int(lora_id))
        extra = fields.get("extra_keys") or []
        need(isinstance(extra, list) and fields.get("extra_keys") in (None, extra))
    except BadError:
        return "bad"
    if not any(key not in (None, []) for key in extra):
        extra = []
    match fields["type"]:
        case "BlockStored":
            signed = lora_id and (lora_id & MASK64) - (2**64 if lora_id & MASK64 >= 2**63 else 0)
            lora = lora or (str(signed) if signed else "")
            where = place(medium, locality)
            return ("stored", hashes, parent, tokens, is_bigram, size, where, group, spec, lora, salt, extra)
        case "BlockRemoved":
            return ("removed", hashes, place(medium, locality), group)
        case "AllBlocksCleared":
            return "cleared"
    return "bad"


# --- runs split into events -----------------------------------------------------------------------------------------


def flat(run: Any) -> Iterator[Any]:
    """Split a run into events. Adjacent removals from one medium stay one event."""
    match run:
        case InvalidEvent():
            yield from ["bad"] * run.num_events
        case ClearedRun():
            yield from ["cleared"] * run.num_events
        case MooncakeEvent():
            yield "envelope"
        case PageRun():
            for part in run.parts():
                if part.is_removal:
                    yield ("removed", part.events.block_hashes.tolist(), where(part), part.attention_group)
                else:
                    yield from flat_stores(part)


def where(run: PageRun) -> tuple[int, str]:
    return run.tier, run.medium if run.tier == UNKNOWN else ""


def flat_stores(run: PageRun) -> Iterator[Any]:
    stores, page, token = run.events, 0, 0
    for event, length in enumerate(stores.lengths.tolist()):
        num_tokens = len(run.tokens) if len(stores.lengths) == 1 else length * run.block_size if len(run.tokens) else 0
        hashes, tokens = stores.block_hashes[page : page + length], run.tokens[token : token + num_tokens]
        parent = int(stores.parents[event]) if stores.has_parent[event] else None
        yield (
            "stored", hashes.tolist(), parent, tokens.tolist(), run.is_bigram, run.block_size, where(run),
            run.attention_group, run.spec, run.lora_name, run.cache_salt, list(run.extra_keys),
        )  # fmt: skip
        page, token = page + length, token + num_tokens
    assert (page, token) == (len(stores.block_hashes), len(run.tokens))


def decoded(data: bytes, decoder: Decoder | None = None) -> tuple[int | None, list[Any], int]:
    batch = (decoder or Decoder()).decode(data)
    events: list[Any] = []
    num_events = 0
    for run, count in batch.runs:
        events += flat(run)
        num_events += count
    return batch.rank, events, num_events


def joined(events: list[Any]) -> list[Any]:
    """Join neighbouring removals from one medium, as runs do. A medium may have two spellings."""
    result: list[Any] = []
    for event in events:
        if event[0] == "removed" and result and result[-1][0] == "removed" and result[-1][2:] == event[2:]:
            result[-1] = ("removed", result[-1][1] + event[1], *event[2:])
        else:
            result.append(event)
    return result
