"""CacheVariant: the differences between caches with the same components and tiers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheVariant:
    """The rules of one cache class."""

    frees_duplicates: bool = True
    """Whether `insert` frees the duplicate rows after `prev_prefix_len`. Otherwise the caller frees them."""
    counts_evicted_overlap: bool = False
    """Whether `prefix_len` of an insert includes the units of evicted nodes that received rows from it."""
    counts_hits_of_evicted_nodes: bool = True
    """Whether an insert counts as a hit of the evicted nodes on its path."""
    split_copies_hits: bool = True
    """Whether the upper part of a split node keeps the hit count of the node. Otherwise its count starts at 0."""
    match_ends_on_host: bool = True
    """Whether the best match of a cache with a host tier is moved up to the nearest node with a host copy."""
    device_match_needs_states: bool = False
    """Whether the device part of a match ends at a node with all kinds of state on the device, not only with KV."""
    locks_evicted_nodes: bool = True
    """Whether locking an evicted node locks its nearest ancestor on the device. Otherwise it is an error."""
    locks_have_tickets: bool = False
    """Whether a lock is released by its tickets. Otherwise the node alone identifies it."""
    deletes_tombstone_leaves: bool = False
    """Whether a leaf without any state, at which no match can end, is deleted together with the leaf below it."""
    keeps_kv_above_host_children: bool = True
    """Whether a node that loses its state but has children on the host keeps its KV on the device."""
    evicts_shortage_only: bool = False
    """Whether a backup or load-back without room evicts only the missing amount, not its whole length."""
    shares_eviction: bool = False
    """Whether states freed together with KV count towards the states that an eviction has to free."""
    backs_up_parents: bool = False
    """Whether a backup first backs up the ancestors that have no host copy. Otherwise the backup is refused."""
    late_states_wait: bool = False
    """Whether the backup of a state that arrived after its KV waits until the backup of the KV is acknowledged."""
    quota_covers_states: bool = False
    """Whether `mem_quota` also limits a load-back that includes a state."""


RADIX = CacheVariant(frees_duplicates=False, counts_hits_of_evicted_nodes=False, locks_evicted_nodes=False)
"""One kind of state, Full KV."""
MAMBA = CacheVariant(split_copies_hits=False, deletes_tombstone_leaves=True)
"""Full KV and recurrent states."""
UNIFIED = CacheVariant(
    counts_evicted_overlap=True,
    match_ends_on_host=False,
    device_match_needs_states=True,
    locks_have_tickets=True,
    keeps_kv_above_host_children=False,
    evicts_shortage_only=True,
    shares_eviction=True,
    backs_up_parents=True,
    late_states_wait=True,
    quota_covers_states=True,
)
"""Any kinds of state in one tree."""
