"""Why each worker holds no more of a prompt, from a log."""

from collections.abc import Iterable, Iterator

from analysis.explain import messages
from analysis.explain.asked_prompt import AskedPrompt
from analysis.explain.causes import Causes, best_elsewhere, found_at_best, found_elsewhere
from analysis.explain.tracer import History, PromptTracer, StreamTrace
from indexer.replay import Replay
from kv_events.errors import KvsightError, shorten
from kv_events.http.explanations import Evidence, Explanation, Finding, WorkerExplanation
from kv_events.log.moments import LogMoment
from kv_events.log.reader import RecordChunk
from kv_events.runtime.words import names
from kv_events.schema import TIERS
from kv_events.streams import StreamId, split_group

_NEVER_STORED = ("never_stored", "other_prompt", "stored_later")


class NothingToExplainError(KvsightError):
    """The prompt fits no namespace of the log, or the worker is not in it."""


def explain(
    prompt: AskedPrompt,
    records: History,
    until: LogMoment | None = None,
    views: Replay | None = None,
    decisions: Iterable[RecordChunk] = (),
) -> Explanation:
    """Explain why each worker holds no more of a prompt at a moment of a log.

    records: all records of the log. Chunks are followed faster than single records. until: the moment; None: the end.
    views: those before the first record, with the settings that the router had; they are changed. None: empty ones.
    decisions: those of a log of their own.

    Raises NothingToExplainError, and what `records` raises.
    """
    num_before = 0 if views is None else views.applier.records
    tracer = PromptTracer(prompt, views)
    tracer.follow(records, until)
    for chunk in decisions:
        tracer.decisions.take_chunk(chunk, chunk.timestamps_ms <= 1000 * tracer.replay.now)
    workers = [*_asked_workers(tracer), *_later_workers(tracer)]
    names = {worker.instance_id for worker in workers}
    workers += _workers_elsewhere(tracer, names)
    if not workers:
        raise NothingToExplainError(_why_nothing(tracer))
    workers.sort(key=lambda each: (-each.held["external"], -each.held["gpu"], each.instance_id, each.dp_rank))
    return Explanation(
        model_name=prompt.query.model,
        routing_group=prompt.query.tenant,
        time=tracer.replay.now,
        records=tracer.replay.applier.records - num_before,
        num_tokens=None if prompt.tokens is None else len(prompt.tokens),
        workers=workers,
    )


def _asked_workers(tracer: PromptTracer) -> Iterator[WorkerExplanation]:
    """Yield the streams of the model and tenant that are known at the moment."""
    found: list[tuple[Causes, WorkerExplanation]] = []
    for history in tracer.streams.values():
        if (history.stream.model, history.stream.tenant) == (tracer.prompt.query.model, tracer.prompt.query.tenant):
            causes = Causes(tracer, history)
            explained = _worker(
                history.stream,
                history.block_size,
                causes.findings(),
                num_pages=causes.num_pages,
                held=causes.lengths if causes.reuse.has_full else causes.reuse.lengths,
                reusable=causes.reuse.lengths,
                state=causes.state.value,
                state_reason=causes.state_reason,
            )
            found.append((causes, explained))
    most = max(found, key=lambda each: each[1].held["external"], default=None)
    for causes, explained in found:
        if most is not None and explained.cause in _NEVER_STORED and _is_less(explained, most[1]):
            explained.findings.append(found_at_best(tracer, causes, most[1], most[0].hashes))
        if _is_asked(tracer.prompt, causes.stream):
            yield explained


def _is_less(worker: WorkerExplanation, other: WorkerExplanation) -> bool:
    is_comparable = worker.block_size == other.block_size and worker.instance_id != other.instance_id
    return is_comparable and worker.held["external"] < other.held["external"]


def _later_workers(tracer: PromptTracer) -> Iterator[WorkerExplanation]:
    """Yield the streams of the model and tenant whose first batch comes after the moment."""
    for stream, (first, block_size) in tracer.first_records.items():
        if stream not in tracer.streams and _is_asked(tracer.prompt, stream):
            evidence = [Evidence(what="first_batch", batch=first)]
            text = f"The worker is not known yet: its first batch comes {messages.at(first)}."
            finding = Finding(cause="not_known_yet", evidence=evidence, text=text)
            yield _worker(stream, block_size, [finding], num_pages=tracer.prompt.num_pages(block_size))


def _workers_elsewhere(tracer: PromptTracer, known: set[str]) -> Iterator[WorkerExplanation]:
    """Yield workers that hold the prompt, but have no stream of the model and tenant."""
    histories: dict[str, StreamTrace] = {}
    for stream, history in tracer.streams.items():
        is_wanted = tracer.prompt.worker in (None, stream.worker)
        if is_wanted and stream.worker not in known and not _is_asked(tracer.prompt, stream):
            histories.setdefault(stream.worker, history)
    for worker, history in histories.items():
        elsewhere = best_elsewhere(tracer, worker, None)
        if elsewhere is not None:
            pages = tracer.prompt.num_pages(history.block_size)
            yield _worker(history.stream, history.block_size, [found_elsewhere(elsewhere, 0)], num_pages=pages)


def _worker(
    stream: StreamId,
    block_size: int,
    findings: list[Finding],
    *,
    num_pages: int,
    held: tuple[int, ...] = (0, 0, 0, 0),
    reusable: tuple[int, ...] = (0, 0, 0, 0),
    state: str | None = None,
    state_reason: str = "",
) -> WorkerExplanation:
    return WorkerExplanation(
        instance_id=stream.worker,
        dp_rank=stream.dp_rank,
        model_name=stream.model,
        routing_group=stream.tenant,
        block_size=block_size,
        state=state,
        state_reason=state_reason,
        num_pages=num_pages,
        held=dict(zip(TIERS, held, strict=True)),
        reusable=dict(zip(TIERS, reusable, strict=True)),
        cause=findings[0].cause,
        findings=findings,
    )


def _is_asked(prompt: AskedPrompt, stream: StreamId) -> bool:
    is_wanted = prompt.worker is None or prompt.worker == stream.worker
    return is_wanted and (stream.model, stream.tenant) == (prompt.query.model, prompt.query.tenant)


def _why_nothing(tracer: PromptTracer) -> str:
    prompt, streams = tracer.prompt, list({**tracer.streams, **tracer.first_records})
    here = [stream for stream in streams if (stream.model, stream.tenant) == (prompt.query.model, prompt.query.tenant)]
    if here and prompt.worker is not None:
        known = names(sorted({shorten(stream.worker) for stream in here}))
        return f"worker {shorten(prompt.worker)} is not in the log; {_namespace(here[0])} has {known}"
    asked = f"no worker of the log serves model {shorten(prompt.query.model)}, tenant {shorten(prompt.query.tenant)}"
    served = dict.fromkeys(_namespace(stream) for stream in streams if split_group(stream.model)[1] is None)
    known = names(list(served), separator="; ")
    return f"{asked}; it has {known or 'no readable record'}"


def _namespace(stream: StreamId) -> str:
    return f"model {shorten(stream.model)}, tenant {shorten(stream.tenant)}"
