"""Logs in which a worker holds no more of a prompt for a known cause, among other workers and their noise."""

from collections.abc import Callable
from functools import partial
from inspect import isfunction, signature
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from kv_events.hashing import block_hash_chain, hash_strs_to_int64
from kv_events.http.explanations import WorkerExplanation
from kv_events.log.moments import LogMoment
from kv_events.schema import BATCHES_LOST, CLOSED, MEDIA, AllBlocksCleared, PackedStored, SnapshotBegin, SnapshotEnd
from tests.support.log.planted_scene import MODEL, VICTIM, Scene
from tests.support.log.records import Stream, digest_of, removed, stored, words

_CPU, _DISK = 1, 2


class Truth(NamedTuple):
    """What `explain` must find for the victim."""

    cause: str
    page: int | None = None
    """Counted from 1."""
    record: int | None = None
    """Index of the record that shows the cause: the last one of the evidence."""
    since: int | None = None
    """Index of the record that stored the page: the first one of the evidence."""
    namespace: dict[str, Any] | None = None
    also: tuple[str, ...] = ()
    """Further causes that must be found."""
    tier: str | None = None


Plant = Callable[[Scene], Truth]


def _stored_up_to(scene: Scene, end: int) -> list[int]:
    """Let the victim store the first pages in one to three batches. Returns the record of each page."""
    if not end:
        return []
    cuts = sorted({0, end, *scene.random.integers(0, end + 1, 2).tolist()})
    found: list[int] = []
    for start, stop in pairwise(cuts):
        index = scene.store(scene.victim, range(start, stop))
        found += [index] * (stop - start)
        scene.noise(4)
    return found


def never_stored(scene: Scene) -> Truth:
    end = scene.page()
    scene.send(scene.victim)
    found = _stored_up_to(scene, end)
    return Truth("never_stored", end + 1, record=found[-1] if found else None)


def held_by_another(scene: Scene) -> Truth:
    scene.store(scene.stream("engine-best"), range(scene.num_pages))
    return never_stored(scene)._replace(also=("held_elsewhere",))


def another_prompt(scene: Scene) -> Truth:
    found = _stored_up_to(scene, scene.page(1))
    scene.send(scene.victim, stored((scene.hashes[len(found) - 1], [5, 6])))
    return Truth("other_prompt", len(found) + 1, record=found[-1])


def stored_later(scene: Scene) -> Truth:
    scene.send(scene.victim)
    end = len(_stored_up_to(scene, scene.page()))
    scene.until = LogMoment(time_s=scene.now)
    scene.now += 0.1
    return Truth("stored_later", end + 1, record=scene.store(scene.victim, range(end, scene.num_pages)))


def evicted(scene: Scene) -> Truth:
    end = scene.page()
    found = _stored_up_to(scene, scene.num_pages)
    if scene.random.random() < 0.5:
        found = _restored(scene, end)
    scene.noise()
    scene.now += float(scene.random.uniform(0, 3))
    scene.heartbeats()
    tail = list(range(end + 1, scene.num_pages))
    scene.remove(scene.victim, tail)
    at = scene.remove(scene.victim, [end])
    return Truth("evicted", end + 1, record=at, since=found[end])


def _restored(scene: Scene, page: int) -> list[int]:
    """Evict everything from a page on, and store it again."""
    scene.remove(scene.victim, range(page, scene.num_pages))
    scene.noise()
    return [scene.store(scene.victim, range(page, scene.num_pages))] * scene.num_pages


def evicted_from_a_slower_tier(scene: Scene) -> Truth:
    end = scene.page()
    found = _stored_up_to(scene, scene.num_pages)
    rest = range(end, scene.num_pages)
    scene.store(scene.victim, rest, tier=_CPU)
    scene.remove(scene.victim, rest)
    scene.noise()
    return Truth("evicted", end + 1, record=scene.remove(scene.victim, rest, tier=_CPU), since=found[end])


def moved(scene: Scene) -> Truth:
    end = scene.page()
    _stored_up_to(scene, scene.num_pages)
    rest = range(end, scene.num_pages)
    if scene.random.random() < 0.5:  # one batch moves the pages, the removal first
        hashes = [scene.hashes[page] for page in rest]
        at = scene.send(scene.victim, removed(hashes), stored((scene.hashes[end - 1] if end else 0, hashes), tier=_CPU))
        return Truth("moved", end + 1, record=at, since=at, tier="gpu")
    since = scene.store(scene.victim, rest, tier=_CPU)
    scene.noise()
    return Truth("moved", end + 1, record=scene.remove(scene.victim, rest), since=since, tier="gpu")


def stored_on_a_slower_tier(scene: Scene) -> Truth:
    end = scene.page()
    _stored_up_to(scene, end)
    at = scene.store(scene.victim, range(end, scene.num_pages), tier=_DISK)
    return Truth("slower_tier", end + 1, record=at, tier="gpu")


def cleared(scene: Scene) -> Truth:
    found = _stored_up_to(scene, scene.num_pages)
    scene.noise()
    at = scene.send(scene.victim, AllBlocksCleared())
    end = scene.page()
    _stored_up_to(scene, end)
    return Truth("cleared", end + 1, record=at, since=found[end])


def restarted(scene: Scene) -> Truth:
    found = _stored_up_to(scene, scene.num_pages)
    scene.noise()
    scene.victim.restart()
    end = scene.page()
    if scene.random.random() < 0.5:  # it resends what it holds
        scene.send(scene.victim, SnapshotBegin("start"))
        _stored_up_to(scene, end)
        at = scene.send(scene.victim, SnapshotEnd())
    else:
        at = scene.send(scene.victim)
        _stored_up_to(scene, end)
    return Truth("restarted", end + 1, record=at, since=found[end])


def lost_batch(scene: Scene) -> Truth:
    end = scene.page(1)
    _stored_up_to(scene, end)
    scene.lose(scene.victim, stored((scene.hashes[end - 1], scene.hashes[end:])))
    if scene.random.random() < 0.3:
        scene.lose(scene.victim)
    at = scene.send(scene.victim)
    if scene.random.random() < 0.5:
        scene.noise()
        scene.send(scene.victim, SnapshotBegin("gap"))
        if scene.random.random() < 0.5:
            scene.store(scene.victim, range(end))
    return Truth("lost_batches", end + 1, record=at)


def batches_before_the_log(scene: Scene) -> Truth:
    scene.lose(scene.victim, stored((0, scene.hashes)))
    at = scene.send(scene.victim)
    return Truth("before_the_log", 1, record=at)


def wrong_digest(scene: Scene) -> Truth:
    end = scene.page()
    _stored_up_to(scene, end)
    scene.send(scene.victim)
    wrong = digest_of({(h, 0) for h in scene.hashes})
    at = scene.send(scene.victim, digest=wrong)
    scene.victim.held = {(h, 0) for h in scene.hashes}  # what it really holds
    return Truth("stale", end + 1, record=at)


def degraded(scene: Scene) -> Truth:
    end = scene.page()
    _stored_up_to(scene, end)
    scene.send(scene.victim)
    at = scene.send(scene.victim, degraded_reason=BATCHES_LOST)
    scene.silence(VICTIM)
    return Truth("stale", end + 1, record=at)


def no_state_further_on(scene: Scene) -> Truth:
    end = scene.page(1)
    states = scene.stream(VICTIM, model=f"{MODEL}#mamba")
    _stored_up_to(scene, scene.num_pages)
    for _ in range(2):  # the state further on is evicted again
        scene.send(states, stored(*((0, [scene.hashes[page]]) for page in {end - 1, scene.page(end)})))
        scene.send(states, removed(scene.hashes[end:]))
    scene.noise()
    return Truth("group", end + 1)


def incomplete_window(scene: Scene) -> Truth:
    end = scene.page()
    window = scene.stream(VICTIM, model=f"{MODEL}#swa:{2 * scene.block_size}")
    _stored_up_to(scene, scene.num_pages)
    scene.send(window, stored((0, scene.hashes)))
    scene.noise()
    scene.send(window, removed(scene.hashes[end::2]))
    return Truth("group", end + 1)


def last_token(scene: Scene) -> Truth:
    window = scene.stream(VICTIM, model=f"{MODEL}#swa:{scene.block_size}")
    _stored_up_to(scene, scene.num_pages)
    scene.send(window, stored((0, scene.hashes)))
    return Truth("last_token", scene.num_pages)


def expired(scene: Scene) -> Truth:
    found = _stored_up_to(scene, scene.page(1))
    scene.silence(VICTIM)
    last = max(index for index, record in enumerate(scene.records) if record.key == scene.victim.id.key.encode())
    assert last >= found[-1]
    for _ in range(12):
        scene.now += 1.5
        scene.heartbeats()
        scene.noise(3)
    return Truth("expired", record=last)


def closed(scene: Scene) -> Truth:
    _stored_up_to(scene, scene.page(1))
    at = scene.send(scene.victim, degraded_reason=CLOSED)
    scene.silence(VICTIM)
    return Truth("expired", record=at)


def not_known_yet(scene: Scene) -> Truth:
    for _ in range(3):
        scene.noise()
    scene.until = LogMoment(time_s=scene.now)
    scene.now += 1.0
    at = scene.send(scene.victim)
    _stored_up_to(scene, scene.num_pages)
    return Truth("not_known_yet", record=at)


def _in_other_stream(scene: Scene, **names: Any) -> Truth:
    other = scene.stream(VICTIM, **names)
    if scene.random.random() < 0.5:  # it serves the model that was asked for, too
        scene.send(scene.victim)
    at = scene.store(other, range(scene.num_pages))
    return Truth("other_namespace", 1, since=at, namespace=dict(names))


def other_block_size(scene: Scene) -> Truth:
    """The query names the only block size that it accepts."""
    asked = scene.block_size
    scene.block_size = 2 * asked
    hashes = scene.hashes_under()
    scene.victim = scene.stream(VICTIM)
    scene.store(scene.victim, range(len(hashes)), hashes)
    scene.block_size = asked
    scene.body = {"model": MODEL, "block_size": asked, "token_ids": scene.tokens}
    return Truth("other_namespace", namespace={"block_size": 2 * asked})


def pages_of_another_size(scene: Scene) -> Truth:
    """The worker hashes pages of another size than it states. A second worker of the log states that size."""
    twice = scene.stream("engine-twice", block_size=2 * scene.block_size)
    scene.send(twice)
    at = scene.store(scene.victim, range(scene.num_pages // 2), scene.hashes_under(block_size=2 * scene.block_size))
    return Truth("other_namespace", 1, since=at, namespace={"block_size": 2 * scene.block_size})


def _under(scene: Scene, asked: dict[str, str], namespace: dict[str, Any], **rule: Any) -> Truth:
    """The query has other names than the pages."""
    scene.body |= asked
    scene.send(scene.victim)
    hashes = scene.hashes_under(**rule)
    at = scene.store(scene.victim, range(len(hashes)), hashes)
    return Truth("other_namespace", 1, since=at, namespace=namespace)


def unusual_seed(scene: Scene) -> Truth:
    seed = int(scene.random.integers(2000, 60_000))
    return _by_block_hash(scene, scene.hashes_under(seed=seed), {"seed": seed})


def unknown_salt(scene: Scene) -> Truth:
    return _by_block_hash(scene, scene.hashes_under(salt="never in the log"), {})


def salt_in_the_record(scene: Scene) -> Truth:
    return _by_block_hash(scene, scene.hashes_under(salt="pepper"), {"cache_salt": "pepper"}, "pepper")


def _by_block_hash(scene: Scene, hashes: list[int], namespace: dict[str, Any], extra_key: str | None = None) -> Truth:
    """The pages can only be recognised by the block hashes of an engine that hashes tokens."""
    scene.send(scene.victim)
    at = store_under_engine_names(scene, scene.victim, hashes, extra_key)
    return Truth("other_namespace", 1, since=at, namespace=namespace)


def store_under_engine_names(scene: Scene, stream: Stream, hashes: list[int], extra_key: str | None = None) -> int:
    """Store the whole prompt with the block hashes of an engine that hashes tokens. Returns the index of the record."""
    chain = block_hash_chain(scene.tokens, scene.block_size, None, is_bigram=False)
    event = stored((0, hashes))
    tokens = np.array(scene.tokens, "<u4").tobytes() if extra_key is not None else None
    block_hashes = words(hash_strs_to_int64(chain).view(np.uint64).tolist())
    return scene.send(
        stream,
        PackedStored(
            MEDIA[0], event.sequence_hashes, block_hashes, event.chain_starts, event.parents, tokens, extra_key
        ),
    )


def hidden(scene: Scene) -> Truth:
    found = _stored_up_to(scene, scene.num_pages)
    hole = scene.page()
    scene.noise()
    at = scene.remove(scene.victim, [hole])
    return Truth("evicted", hole + 1, record=at, since=found[hole], also=("hidden",))


def hidden_from_the_start(scene: Scene) -> Truth:
    scene.send(scene.victim)
    hole = scene.page()
    _stored_up_to(scene, hole)
    scene.store(scene.victim, range(hole + 1, scene.num_pages))
    return Truth("never_stored", hole + 1, also=("hidden",))


def partial_page(scene: Scene) -> Truth:
    _stored_up_to(scene, scene.num_pages)
    scene.body["token_ids"] = scene.tokens + scene.new_tokens(int(scene.random.integers(1, scene.block_size)))
    return Truth("partial_page", scene.num_pages + 1)


def shorter_than_a_page(scene: Scene) -> Truth:
    scene.send(scene.victim)
    scene.body["token_ids"] = scene.tokens[: int(scene.random.integers(1, scene.block_size))]
    return Truth("partial_page", 1)


def not_resent(scene: Scene) -> Truth:
    found = _stored_up_to(scene, scene.num_pages)
    end = scene.page()
    scene.noise()
    scene.lose(scene.victim, removed(scene.hashes[end:]))
    scene.send(scene.victim)
    at = scene.emit(scene.victim.resync(now=scene.now))
    return Truth("not_resent", end + 1, record=at, since=found[end])


def index_full(scene: Scene) -> Truth:
    scene.others = []
    scene.settings = {"max_pages": scene.num_pages - 1}
    return Truth("index_full", scene.num_pages, record=_stored_up_to(scene, scene.num_pages)[-1])


def held(scene: Scene) -> Truth:
    _stored_up_to(scene, scene.num_pages)
    return Truth("held")


PLANTS: dict[str, Plant] = {
    name: plant
    for name, plant in list(globals().items())
    if isfunction(plant) and signature(plant) == signature(held) and not name.startswith("_")
}
PLANTS |= {
    "other_model": partial(_in_other_stream, model="model-b"),
    "other_tenant": partial(_in_other_stream, tenant="tenant-b"),
    "without_lora": partial(_under, asked={"lora_name": "sql"}, namespace={"lora_name": None}),
    "without_salt": partial(_under, asked={"cache_salt": "s3cret"}, namespace={"cache_salt": None}),
    "lora_as_salt": partial(
        _under, asked={"lora_name": "sql"}, namespace={"lora_name": None, "cache_salt": "sql"}, salt="sql"
    ),
    "other_seed": partial(_under, asked={}, namespace={"seed": 0}, seed=0),
    "token_pairs": partial(_under, asked={}, namespace={"is_bigram": True}, is_bigram=True),
}
"""Name -> the function that plants the cause."""


def planted(name: str, number: int) -> tuple[Scene, Truth]:
    """Return one of the random instances of a cause."""
    scene = Scene(np.random.default_rng([number, *name.encode()]))
    if name != "index_full":
        scene.noise()
    truth = PLANTS[name](scene)
    if name != "index_full":
        scene.noise()
    scene.heartbeats()
    return scene, truth


def check_truth(worker: WorkerExplanation, truth: Truth) -> None:
    """Check that the cause that was planted is the one that was found."""
    main = worker.findings[0]
    assert (main.cause, main.page, main.namespace) == (truth.cause, truth.page, truth.namespace), main.text
    if truth.record is not None:
        assert main.evidence[-1].batch.index == truth.record, main.text
    if truth.since is not None:
        assert main.evidence[0].batch.index == truth.since, main.text
    assert main.tier == truth.tier
    assert set(truth.also) <= {finding.cause for finding in worker.findings}
