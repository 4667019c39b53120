"""The answer to a query as people read it: who was asked, who holds how much, and why the others hold nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kv_events.runtime.words import count, duration, names, natural_order, partial_page
from kvsight.cli.shared.streams import MEDIA, StreamRow, media_held, namespace_text
from kvsight.cli.shared.tables import Column, table_lines

_TOKENS, _HASHES = ("token_ids",), ("seq_hashes", "block_hashes", "block_hash")


class Asked(NamedTuple):
    """What a query asked for."""

    model: str
    tenant: str
    num_tokens: int | None
    """None: the prompt was given as hashes."""
    num_pages: int | None
    """None: the prompt was given as tokens."""
    worker: str | None
    """The only worker of the answer; None: all."""

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Asked:
        """Read a query in either dialect, which the API has accepted. Its values may be raw JSON."""
        fields = msgspec.json.decode(msgspec.json.encode(body))

        def first(*keys: str) -> Any:
            return next((fields[key] for key in keys if fields.get(key) is not None), None)

        tokens, hashes, worker = first(*_TOKENS), first(*_HASHES), first("instance_id")
        return cls(
            model=first("model_name", "model", "modelname"),
            tenant=first("routing_group", "tenant_id") or "default",
            num_tokens=None if tokens is None else len(tokens),
            num_pages=None if hashes is None else len(hashes),
            worker=None if worker is None else str(worker),
        )

    def fills_a_page(self, block_size: int) -> bool:
        """Whether the prompt has a full page."""
        return bool(self.num_pages) if self.num_tokens is None else self.num_tokens >= block_size


def answer_lines(answer: Mapping[str, Any], asked: Asked, streams: Sequence[StreamRow], width: int) -> Iterator[str]:
    """Yield the lines for an answer in either dialect. width: terminal cells.

    streams: of the model and tenant, to tell why a worker is absent. Empty: unknown.
    """
    held = _instances(answer)
    known = [row for row in streams if (row.model, row.tenant) == (asked.model, asked.tenant) and not row.group]
    if asked.worker is not None:
        known = [row for row in known if row.worker == asked.worker]
    yield from _question_lines(asked, known)
    if held:
        yield from table_lines(_columns(held, known), width)
        yield "Tokens held on a tier include those on the faster tiers."
    elif known and any(asked.fills_a_page(row.block_size) for row in known):
        yield "No worker holds its first page."
    elif not known:
        yield "No worker holds any of it."
    yield from _absent_lines(asked, known, held)
    for lacking in answer["missing"] if isinstance(answer.get("missing"), list) else ():
        partitions = ", ".join(map(str, lacking["partitions"]))
        yield f"missing: the workers of partitions {partitions} ({lacking['member']}: {lacking['reason']})"


def _instances(answer: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Worker -> fields in lower case, best first. The order of equal workers is that of their names."""
    found = answer.get("instances")
    if found is None:  # {tenant: {instance: ...}}
        found = {name: fields for tenant in answer.values() for name, fields in tenant.items()}
    lower = {name: {key.lower(): value for key, value in fields.items()} for name, fields in found.items()}

    def order(item: tuple[str, dict[str, Any]]) -> tuple[Any, ...]:
        name, fields = item
        return (-fields["longest_matched"], -fields.get("gpu", 0), -fields.get("cpu", 0), natural_order(name))

    return dict(sorted(lower.items(), key=order))


def _question_lines(asked: Asked, known: Sequence[StreamRow]) -> Iterator[str]:
    sizes = sorted({row.block_size for row in known if row.block_size})
    tenant_and_model = namespace_text(asked.model, asked.tenant, sizes[0] if len(sizes) == 1 else 0)
    workers = {row.worker for row in known}
    asked_of = f"asked {count(len(workers), 'worker')} of {tenant_and_model}" if workers else tenant_and_model
    yield f"{_prompt_text(asked, sizes)}; {asked_of}"


def _prompt_text(asked: Asked, sizes: Sequence[int]) -> str:
    if asked.num_tokens is None:
        return f"prompt of {count(asked.num_pages or 0, 'page')}"
    prompt = f"prompt of {count(asked.num_tokens, 'token')}"
    if len(sizes) != 1:
        return prompt
    if asked.num_tokens < sizes[0]:
        return partial_page(asked.num_tokens, "token", sizes[0])
    return f"{prompt}, {count(asked.num_tokens // sizes[0], 'page')}"


def _columns(held: Mapping[str, Mapping[str, Any]], known: Sequence[StreamRow]) -> Iterator[Column]:
    instances = list(held.values())
    ranks = [_best_rank(fields) for fields in instances]
    has_several = any(len(fields.get("dp", {})) > 1 for fields in instances)
    yield Column("worker", list(held))
    yield Column("best rank" if has_several else "rank", ranks, is_number=True, rank=4)
    for tier in _tiers(instances, known):
        yield Column(f"{tier} tokens", [fields.get(tier, "") for fields in instances], rank=1)
    if any("weighted" in fields for fields in instances):
        cells = [f"{fields['weighted']:g}" if "weighted" in fields else "" for fields in instances]
        yield Column("weighted", cells, is_number=True, rank=3)
    yield Column("state", [str(fields.get("state", "")) for fields in instances], rank=2)
    heard = [f"{duration(fields['age_ms'])} ago" if "age_ms" in fields else "" for fields in instances]
    yield Column("last heard", heard, is_number=True, rank=5)


def _tiers(instances: Sequence[Mapping[str, Any]], known: Sequence[StreamRow]) -> list[str]:
    """The tiers that any worker has, fastest first. Dynamo's dialect counts external pages as `disk`."""
    if media := media_held(row.pages for row in known):
        return [MEDIA[medium] for medium in media]
    used, faster = [], [0] * len(instances)
    for tier in MEDIA.values():
        tokens = [fields.get(tier, before) for fields, before in zip(instances, faster, strict=True)]
        if tokens != faster:
            used.append(tier)
        faster = tokens
    return used


def _best_rank(fields: Mapping[str, Any]) -> str:
    """The rank that holds most, on any tier and then on its device; the lowest of equals."""
    on_device = fields.get("dp", {})
    on_any = fields.get("matched_dp", on_device)
    return min(on_any, key=lambda rank: (-on_any[rank], -on_device.get(rank, 0), int(rank)), default="")


def _absent_lines(asked: Asked, known: Sequence[StreamRow], held: Mapping[str, Any]) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for worker in sorted({row.worker for row in known} - held.keys(), key=natural_order):
        reason = _why_absent(asked, [row for row in known if row.worker == worker])
        by_reason.setdefault(reason, []).append(worker)
    for reason, workers in by_reason.items():
        yield f"{names(workers)}: {reason}"


def _why_absent(asked: Asked, ranks: Sequence[StreamRow]) -> str:
    last = min(ranks, key=lambda row: row.age_ms)
    if all(row.state == "expired" for row in ranks):
        return f"expired, last heard {duration(last.age_ms)} ago"
    if not any(sum(row.pages.values()) for row in ranks):
        why = last.cause or last.reason
        return f"holds no pages ({why})" if why else "holds no pages"
    if not asked.fills_a_page(last.block_size):
        return f"the prompt is shorter than its pages of {last.block_size} tokens"
    return "does not hold the first page"
