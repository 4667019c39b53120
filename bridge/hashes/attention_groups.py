"""The attention groups of one engine, and in which stream each of them is published.

Groups of full attention form the worker's own stream. All others form group streams, one for each specification (see
`kv_events.streams.Group`). A page is held if all groups of its stream hold it.
"""

from collections import Counter
from math import gcd, lcm
from typing import NamedTuple, TypeAlias

from bridge.decoding.events import AttentionSpec, PageRun
from bridge.hashes.hash_memory import HashNamespace
from bridge.settings import EngineDefaults
from kv_events.errors import InvalidValueError, shorten
from kv_events.limits import MAX_BLOCK_SIZE
from kv_events.streams import MAMBA_GROUP, MAX_GROUP_SIZE, Group
from publisher.ledger import namespace_salt

OWN_STREAM = ""
"""Name of the worker's own stream among the names of group streams."""

_FULL_KINDS = frozenset({"", "full_attention", "mla_attention", "sink_full_attention"})
_WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
_IGNORED_KINDS = frozenset({"encoder_only_attention", "cross_attention"})
"""Their KV belongs to one request and is never reused."""
_MAX_NAMESPACES = 4096
_MAX_GROUPS = 16
"""Each specification costs a publisher, and a namespace of the index. Engines have about ten groups."""
_MAX_SCALE = 1024
"""Bound on the pages in a block."""

GroupIndex: TypeAlias = int | None
"""The engine's number of a group. None: its events name no group."""


class _Known(NamedTuple):
    spec: AttentionSpec
    block_size: int
    has_parts: bool = False
    """Whether there are stores of parts of blocks. vLLM stores them for states at finer places than blocks."""


class AttentionGroups:
    """Learns groups from stores. Also hands out hash namespaces: one for each group, and for each owner of a pool."""

    def __init__(self, defaults: EngineDefaults) -> None:
        self.streams: dict[str, int] = {}
        """Streams that the groups need, by name -> number of groups that must all hold a page."""
        self._defaults = defaults
        self.namespaces: dict[str | GroupIndex, HashNamespace] = {}
        self._known: dict[GroupIndex, _Known] = {}
        self.stream_of: dict[GroupIndex, str | None] = {}
        """The stream of each known group. None: it has none."""
        self._unit = 0
        self._unknown_rule = ""  # why some group has no stream
        self._contradiction = ""  # what was ignored since the groups were forgotten

    @property
    def problem(self) -> str:
        """Why scores may be wrong: a group whose rule is not known. Else empty."""
        return self._contradiction or self._unknown_rule

    @property
    def page_size(self) -> int:
        """The largest size that divides the block sizes of several groups. 0: there is one group, or no such size."""
        return self._unit if len(self._known) > 1 else 0

    def namespace(self, key: str | GroupIndex) -> HashNamespace | None:
        """The namespace of a group or owner. None if there are too many."""
        namespace = self.namespaces.get(key)
        if namespace is None and len(self.namespaces) < _MAX_NAMESPACES:
            label = f"group {key}" if isinstance(key, int) else key
            namespace = self.namespaces[key] = HashNamespace(label, len(self.namespaces), namespace_salt(label))
        return namespace

    def forget(self) -> None:
        """Forget all groups, because the engine may have been replaced. Namespaces keep their meaning."""
        self.streams, self._known, self.stream_of, self._unit = {}, {}, {}, 0
        self._unknown_rule = self._contradiction = ""

    def naming(self) -> HashNamespace | None:
        """The namespace in which block hashes of all groups are named: that of the finest group of full attention.

        Equal prefixes have equal hashes in all groups.
        """
        full = [group for group, stream in self.stream_of.items() if stream == OWN_STREAM]
        key = min(full, key=lambda group: self._known[group].block_size) if full else None
        return self.namespace(key)

    def is_settled(self, run: PageRun) -> bool:
        """Whether a run can be applied before the rest of its batch: it concerns the worker's own stream alone."""
        if run.is_removal:
            return all(self.stream_of[group] == OWN_STREAM for group in self.removed_from(run.attention_group))
        known = self._known.get(run.attention_group)
        if known is None or len(self._known) > 1:  # not the only group
            groups = self.stored_in(run.attention_group)
            if len(groups) != 1 or (run.is_mixed and self.removed_from(run.attention_group) != groups):
                return False
            known = self._known[groups[0]]
        if known.spec.kind not in _FULL_KINDS:
            return False
        has_size = run.block_size in (0, known.block_size) if known.block_size else not run.is_on_device
        return has_size and (run.spec == known.spec or not run.spec.kind)

    def stored_in(self, group: GroupIndex) -> list[GroupIndex]:
        """The known groups that a store concerns. One that names no group is for all groups of full attention.

        Storage behind an engine may name no groups although the engine does.
        """
        numbered: list[GroupIndex] = [
            key for key, stream in self.stream_of.items() if key is not None and stream == OWN_STREAM
        ]
        if group is None and numbered:
            return numbered
        return [group] if group in self.stream_of else []

    def removed_from(self, group: GroupIndex) -> list[GroupIndex]:
        """The known groups that a removal affects. One that names no group removes the hash from every group."""
        if group is None:
            return list(self.stream_of)
        return [group] if group in self.stream_of else []

    def learn(self, run: PageRun) -> bool:
        """Learn the group of a store. Returns whether the groups changed.

        Only stores on the device tell block sizes. A store without kind and tokens tells nothing of a group with a
        number: storage behind the engine also names groups of other kinds in this way.
        """
        group, known = run.attention_group, self._known.get(run.attention_group)
        if group is None and self.stored_in(None) not in ([], [None]):
            return False
        if known is None and group is not None and not run.spec.kind and not run.num_positions:
            return False
        if known is None and len(self._known) == _MAX_GROUPS:
            return self._contradict(f"it has more than {_MAX_GROUPS} attention groups")
        if known is not None and run.spec.kind and run.spec != known.spec:
            return self._contradict(
                f"attention group {group} became {shorten(run.spec.kind)}, window {run.spec.window}"
            )
        is_size = run.is_on_device and 1 <= run.block_size <= min(MAX_BLOCK_SIZE, run.num_positions)
        size = run.block_size if is_size else 0
        learned = _Known(run.spec, size)
        if known is not None:  # a store may be of a part of a block, even the first one
            has_parts = known.has_parts or 0 < min(size, known.block_size) < max(size, known.block_size)
            learned = _Known(known.spec, max(size, known.block_size), has_parts)
        if learned == known or self.namespace(group) is None:
            return False
        self._known[group] = learned
        self._assign()
        return True

    def _contradict(self, text: str) -> bool:
        """Note what cannot be followed. Returns whether it is the first."""
        is_first = not self._contradiction
        self._contradiction = self._contradiction or text
        return is_first

    def scale(self, group: GroupIndex, block_size: int | None = None) -> int:
        """Pages in a block of a group: its block size by the largest size that divides those of all groups.

        block_size: that of a store, which may be a part of a block; 1 is returned if it does not fit the groups.
        """
        known = self._known.get(group)
        if known is None or len(self._known) == 1:
            return 1
        size = known.block_size if block_size is None else block_size
        return size // self._unit if self._unit and size and size % self._unit == 0 else 1

    def _assign(self) -> None:
        self._unknown_rule = ""
        counted = {g: known for g, known in self._known.items() if known.spec.kind not in _IGNORED_KINDS}
        sizes = {known.block_size for known in counted.values() if known.block_size}
        self._unit = gcd(*sizes)
        if max(sizes, default=0) > _MAX_SCALE * self._unit:
            self._unknown_rule = f"its attention groups have blocks of {min(sizes)} and of {max(sizes)} tokens"
            self._unit = 0
        self.stream_of = {group: self._name(group, known) for group, known in self._known.items()}
        self.streams = dict(Counter(stream for stream in self.stream_of.values() if stream is not None))
        if self.stream_of.get(None) == OWN_STREAM and self.streams[OWN_STREAM] > 1:
            self.streams[OWN_STREAM] -= 1  # came before it was known that groups have numbers
        step = lcm(*sizes)
        reuses_parts = any(known.has_parts and known.spec.kind == "mamba" for known in counted.values())
        if step > self._unit > 0 and not reuses_parts:
            self.streams[Group("step", min(step, MAX_GROUP_SIZE)).name] = 1
        if self.streams and OWN_STREAM not in self.streams:
            self.streams["nofull"] = 1
        if self._defaults.eagle:
            self.streams["eagle"] = 1

    def _name(self, group: GroupIndex, known: _Known) -> str | None:
        kind, window = known.spec
        block = known.block_size if known.block_size > self._unit else 0
        if kind in _FULL_KINDS:
            return OWN_STREAM
        try:
            if kind in _WINDOW_KINDS and window:
                return Group("swa", window - 1, block).name if window > 1 else None
            if kind == "mamba":
                return MAMBA_GROUP
            if kind == "chunked_local_attention" and self._defaults.attention_chunk_size and not block:
                return Group("chunk", self._defaults.attention_chunk_size).name
        except InvalidValueError:
            pass
        if kind not in _IGNORED_KINDS:
            lacks = {"chunked_local_attention": ": attention_chunk_size is not registered"}.get(kind, "")
            self._unknown_rule = f"attention group {group}: {shorten(kind)}, window {window}, cannot be scored{lacks}"
        return None
