"""Events according to Mooncake's RFC #1527, and events of `mooncake_master`."""

from typing import Any

from tests.rigs.bridge import CPU, DISK, GPU, Rig, on
from tests.support.engines.event_payloads import names_of, stored

TOKENS = list(range(100, 116))
NAMES = names_of(TOKENS)


def envelope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"event_id": 1, "timestamp": None, "event_type": kind, "model_name": "m", "block_size": 4, **fields}


def master(kind: str, key: int | None, **fields: Any) -> dict[str, Any]:
    """Return an event in the form that `mooncake_master` writes."""
    signed = None if key is None else key - 2**64 if key >= 2**63 else key
    return {
        "event_id": 7,
        "timestamp": 1_700_000_000_000,
        "event_type": kind,
        "type": "BlockStored" if kind == "stored" else "BlockRemoved",
        "model_name": None,
        "block_size": None,
        "additional_salt": None,
        "lora_name": None,
        "tenant_id": "default",
        "backend_id": "segment-1",
        "group_id": None,
        "medium": "cpu",
        "dp_rank": None,
        "object_key": "key",
        "seq_hashes": [] if key is None else [key],
        "block_hashes": [] if signed is None else [signed],
        "base_block_idx": 0 if kind == "stored" else None,
        **({"parent_hash": None, "token_ids": None, "parent_block_hash": None} if kind == "stored" else {}),
        **fields,
    }


def test_standard_hashes_are_the_routers_hashes() -> None:
    rig = Rig(block_size=4).take(envelope("stored", seq_hashes=NAMES, base_block_idx=0, medium="gpu"))
    assert rig.pages == on(GPU, NAMES)
    assert rig.take(envelope("removed", seq_hashes=NAMES[1:2], medium="gpu")).pages == on(GPU, NAMES[:1] + NAMES[2:])


def test_other_hashes_come_with_tokens_and_are_named_by_them() -> None:
    rig = Rig().take(
        envelope("stored", seq_hashes=[1, 2], base_block_idx=0, token_ids=TOKENS[:8]),
        envelope("stored", seq_hashes=[3, 4], parent_hash=2, token_ids=TOKENS[8:]),
    )
    assert rig.pages == on(GPU, NAMES)
    assert rig.take(envelope("removed", seq_hashes=[4])).pages == on(GPU, NAMES[:3])


def test_salt_and_adapter_enter_the_hashes() -> None:
    rig = Rig().take(
        envelope(
            "stored", seq_hashes=[1, 2, 3, 4], base_block_idx=0, token_ids=TOKENS, additional_salt="s", lora_name="a"
        )
    )
    assert rig.pages == on(GPU, names_of(TOKENS, lora="a", salt="s"))


def test_a_chain_that_begins_in_the_middle_cannot_be_named() -> None:
    rig = Rig(block_size=4).take(envelope("stored", seq_hashes=[9], base_block_idx=2, token_ids=TOKENS[:4]))
    assert rig.pages == set()
    assert rig.counters.unknown_parents == 1


def test_cleared_empties_its_stream_only() -> None:
    rig = Rig(block_size=4).take(
        envelope("stored", seq_hashes=NAMES, base_block_idx=0, medium="gpu", backend_id="a"),
        envelope("stored", seq_hashes=NAMES[:2], base_block_idx=0, medium="cpu", backend_id="a"),
        envelope("stored", seq_hashes=NAMES[:1], base_block_idx=0, medium="gpu", backend_id="b"),
        envelope("cleared", medium="gpu", backend_id="a"),
    )
    assert rig.pages == on(GPU, NAMES[:1]) | on(CPU, NAMES[:2])
    assert rig.counters.clears == 1


def test_a_page_of_two_owners_stays_until_both_removed_it() -> None:
    rig = Rig(block_size=4)
    for owner in "ab":
        rig.take(envelope("stored", seq_hashes=NAMES[:1], base_block_idx=0, backend_id=owner))
    assert rig.take(envelope("removed", seq_hashes=NAMES[:1], backend_id="a")).pages == on(GPU, NAMES[:1])
    assert rig.take(envelope("removed", seq_hashes=NAMES[:1], backend_id="b")).pages == set()


def test_events_of_another_model_tenant_or_page_size_are_not_ours() -> None:
    rig = Rig(block_size=4).take(
        envelope("stored", seq_hashes=[1], model_name="other"),
        envelope("stored", seq_hashes=[1], tenant_id="other"),
        envelope("stored", seq_hashes=[1], block_size=8),
    )
    assert rig.pages == set()
    assert (rig.counters.foreign_events, rig.counters.other_block_sizes) == (2, 1)


def test_the_masters_events_are_read() -> None:
    rig = Rig(block_size=4).take(
        master("stored", NAMES[0]), master("stored", NAMES[1], medium="disk"), master("stored", None), form="map"
    )
    assert rig.pages == on(CPU, NAMES[:1]) | on(DISK, NAMES[1:2])
    assert rig.counters.unresolved_pages == 1
    rig.take(master("removed", NAMES[0]), master("removed", None), form="map")
    assert rig.pages == on(DISK, NAMES[1:2])


def test_a_bad_envelope_does_not_take_its_neighbours_along() -> None:
    rig = Rig().take(
        envelope("stored", seq_hashes="none"),
        envelope("moved", seq_hashes=[1]),
        envelope("stored", seq_hashes=[1], medium=7),
        stored([1], TOKENS[:4]),
    )
    assert rig.pages == on(GPU, NAMES[:1])
    assert rig.counters.bad_events == {"field": 3}
