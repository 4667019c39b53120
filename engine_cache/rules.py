"""Rules: the points in which caches of the same components and tiers behave differently."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    """Choices of one class of caches."""

    frees_duplicates: bool = True
    """Whether `insert` frees the duplicate rows behind `prev_prefix_len`. Otherwise the caller does."""
    counts_evicted_overlap: bool = False
    """Whether `prefix_len` of an insert counts the units of evicted nodes, whose rows the tree has taken."""
    counts_hits_of_evicted_nodes: bool = True
    """Whether an insert is a hit of the evicted nodes on its path."""
    split_copies_hits: bool = True
    """Whether the upper part of a split node keeps the node's hits. Otherwise it begins with none."""
    match_ends_on_host: bool = True
    """Whether the best match of a cache with a host tier is moved up to the first node with a host copy."""
    device_match_needs_states: bool = False
    """Whether the device part of a match ends at a node with all kinds of state on the device, not only KV."""
    locks_evicted_nodes: bool = True
    """Whether a lock of an evicted node locks its first ancestor on the device. Otherwise it is an error."""
    locks_have_tickets: bool = False
    """Whether a lock is released by its tickets. Otherwise the node alone identifies it."""
    deletes_tombstone_leaves: bool = False
    """Whether a leaf without any state, at which no match can end, is deleted with the leaf below it."""
    keeps_kv_above_host_children: bool = True
    """Whether a node that loses its state, but has children on the host, keeps its KV on the device."""
    evicts_shortage_only: bool = False
    """Whether a backup or load-back without room evicts what is missing. Otherwise it evicts its whole length."""
    shares_eviction: bool = False
    """Whether what leaves with KV counts for the states that an eviction has to free."""
    backs_up_parents: bool = False
    """Whether a backup first backs up the ancestors that have no host copy. Otherwise it is refused."""
    late_states_wait: bool = False
    """Whether the backup of a state that arrived after its KV waits for the acknowledgement of KV."""
    quota_covers_states: bool = False
    """Whether a load-back that brings a state has to respect `mem_quota`."""


RADIX = Rules(frees_duplicates=False, counts_hits_of_evicted_nodes=False, locks_evicted_nodes=False)
"""One kind of state, Full KV."""
MAMBA = Rules(split_copies_hits=False, deletes_tombstone_leaves=True)
"""Full KV and recurrent states."""
UNIFIED = Rules(
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
