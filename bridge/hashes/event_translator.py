"""Decoded events -> pages with sequence hashes, handed to the publishers of one worker.

Pages are hashed here, where their tokens are. A page that cannot be hashed, or that stands for less than its whole
prefix, is left out and counted: a missing page costs a router less than one that does not exist.

Attention groups other than full attention are published in streams of their own (see `attention_groups`). Their stores
may leave out blocks, which are named by the stores of full attention in the same message. They therefore wait for the
end of the messages that are decoded together, as everything does that follows the first store of a group.
"""

from collections.abc import Iterator

import numpy as np

from bridge.context import EngineContext
from bridge.decoding.events import MASK64, ClearedRun, InvalidEvent, MooncakeEvent, PageRun, Run, tier_of
from bridge.hashes.attention_groups import OWN_STREAM, AttentionGroups, GroupIndex
from bridge.hashes.hash_memory import HashMemory, HashNamespace, TranslatedPages
from bridge.hashes.page_namer import PageNamer, with_pages
from bridge.hashes.page_publisher import PagePublisher
from kv_events.errors import shorten
from kv_events.hashing import U64Array
from kv_events.limits import MAX_BLOCK_SIZE
from kv_events.streams import StreamId, group_model
from publisher.kernels.blocks import BlockTable
from publisher.kernels.events import PageEvents
from publisher.publisher import EventPublisher

_MAX_WAITING = 16_384
"""Runs that wait for the end of a batch. Engines send up to some thousand in one."""


class EventTranslator:
    """Translates the events of one worker. Publishes as soon as the block size is known. Not thread-safe."""

    def __init__(self, stream: StreamId, context: EngineContext) -> None:
        """stream: events of another model or tenant are left out."""
        self.unstarted: list[EventPublisher] = []
        """New publishers, for the owner to take and start."""
        self.retired: list[EventPublisher] = []
        """Those of old incarnations, and of group streams that are not needed any more, to take and close."""
        self._stream = stream
        self._context = context
        self._counters, self._limited_logger = context.counters, context.limited_logger
        self._hashes = HashMemory(context.ledger_pages, context.name_pages)
        self._namer = PageNamer(context, self._hashes)
        self._groups = AttentionGroups(context.defaults)
        self._outputs = {OWN_STREAM: PagePublisher(context)}
        self._size = BlockSizeRule(context.defaults.block_size)
        self._waiting: list[PageRun] = []
        if context.defaults.block_size is not None:
            self._open_publisher(context.defaults.block_size)

    @property
    def publisher(self) -> EventPublisher | None:
        """That of the worker's own stream. None until the block size is known."""
        return self._outputs[OWN_STREAM].publisher

    @property
    def publishers(self) -> list[EventPublisher]:
        """Those of all streams, the worker's own first."""
        return [output.publisher for output in self._outputs.values() if output.publisher is not None]

    @property
    def block_size(self) -> int | None:
        return self._size.tokens

    @property
    def problem(self) -> str:
        """Why scores of this worker may be wrong: its block size, or an attention group. Else empty."""
        return self._size.mismatch or self._groups.problem

    @property
    def num_left_out(self) -> int:
        """Pages that were left out since the engine was last empty, because their parents are not known."""
        return self._namer.num_left_out

    @property
    def must_end_batch(self) -> bool:
        """Whether so many runs wait that the engine's batch must count as ended."""
        return len(self._waiting) > _MAX_WAITING

    @property
    def num_remembered(self) -> int:
        return len(self._hashes)

    def apply(self, run: Run) -> None:
        """Apply one run of events, at once or in `end_batch`."""
        match run:
            case PageRun():
                if self._waiting or not self._groups.is_settled(run):
                    self._waiting.append(run.copy())
                else:
                    self._apply_to_own_stream(run)
            case ClearedRun():
                self._counters.clears += run.num_events
                self.end_batch()  # the pages go, but not their hashes
                self.clear()
            case MooncakeEvent():
                self._apply_mooncake_event(run)
            case InvalidEvent():
                self._counters.bad_events[run.reason] += run.num_events
                if run.may_remove:
                    self.end_batch()
                    self.clear()

    def end_batch(self) -> None:
        """Apply the runs that waited for the end of a batch: those of full attention first."""
        for _ in self.end_batch_in_steps():
            pass

    def end_batch_in_steps(self) -> Iterator[None]:
        """Do the same, and yield after each step."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        parts: list[PageRun] = []
        has_changed = False
        for run in waiting:
            for part in run.parts():
                parts.append(part)
                has_changed |= not part.is_removal and self._groups.learn(part)
                yield
        if has_changed:
            self._resize()
        if has_changed or any(output.publisher is None for output in self._outputs.values()):
            self._open_streams()
        for apply in (self._apply_to_own_stream, self._apply_to_groups):
            for part in parts:
                apply(part)
                yield

    def restart(self, *, is_certain: bool) -> None:
        """Begin a new epoch without pages at once, with the old block size until a store proves another one.

        is_certain: whether the engine surely restarted. If not, its hashes stay remembered: the same engine may go on
        to name pages by them, and hashes of another one mean the same content or nothing.
        """
        if self.publisher is None or self.block_size is None:
            return  # nothing was stored since the last restart
        publisher = self._new_publisher(self._stream, self.publisher.block_size, self._hashes.blocks)
        self._retire_publishers()
        if is_certain:
            self._hashes.clear()
            self._groups, self._size = AttentionGroups(self._context.defaults), BlockSizeRule(self._size.registered)
        else:
            self._groups.forget()
            self._size.forget_proof()
        self._outputs[OWN_STREAM].publisher = publisher
        self._open_streams()
        self.clear()

    def clear(self) -> None:
        """Publish that the worker holds no pages. Hashes stay remembered, because they keep their meaning."""
        self._waiting.clear()
        self._namer.num_left_out = 0
        for output in self._outputs.values():
            output.clear()

    # --- streams ----------------------------------------------------------------------------------------------------

    def _open_publisher(self, block_size: int) -> None:
        publisher = self._new_publisher(self._stream, block_size, self._hashes.blocks)
        self._retire_publishers()
        self._outputs[OWN_STREAM].publisher = publisher
        self._open_streams()

    def _retire_publishers(self) -> None:
        for output in self._outputs.values():
            if output.publisher is not None:
                output.publisher.refuse_events()  # before others use its table of blocks
                self.retired.append(output.publisher)
            output.publisher = None

    def _new_publisher(self, stream: StreamId, block_size: int, blocks: BlockTable | None) -> EventPublisher:
        publisher = self._context.new_publisher(stream, block_size, blocks)
        self.unstarted.append(publisher)
        return publisher

    def _open_streams(self) -> None:
        """Open the streams that the groups need, once the block size is known, and close all others."""
        needed = self._groups.streams
        for name in [name for name in self._outputs if name not in (OWN_STREAM, *needed)]:
            unneeded = self._outputs.pop(name).publisher
            if unneeded is not None:
                self.retired.append(unneeded)
        for name, num_groups in needed.items():
            output = self._outputs.setdefault(name, PagePublisher(self._context))
            if output.publisher is None and self.publisher is not None:
                stream = self._stream._replace(model=group_model(self._stream.model, name))
                output.publisher = self._new_publisher(stream, self.publisher.block_size, None)
            if output.publisher is not None:
                output.publisher.require_groups(num_groups)

    # --- stores -----------------------------------------------------------------------------------------------------

    def _apply_to_own_stream(self, run: PageRun) -> None:
        if run.is_mixed:
            self._change(run)
        elif run.is_removal:
            for group in self._groups.removed_from(run.attention_group):
                namespace = self._groups.namespace(group)
                if namespace is not None and self._groups.stream_of.get(group) == OWN_STREAM:
                    self._remove(run, self._outputs[OWN_STREAM], namespace, group, self._groups.scale(group))
        else:
            for group in self._groups.stored_in(run.attention_group):
                if self._groups.stream_of.get(group) == OWN_STREAM:
                    self._store(run._replace(attention_group=group), self._groups.namespace(group))

    def _change(self, run: PageRun) -> None:
        """Apply a mixed run of full attention: at once if it has the stream's block size, else part by part."""
        group = run.attention_group
        if self._groups.stream_of.get(group) is None:
            group = self._groups.stored_in(group)[0]
        namespace = self._groups.namespace(group)
        has_our_size = self._size.admits(run.block_size, is_on_device=run.is_on_device)
        if namespace is None or not has_our_size or self._groups.scale(group) != 1:
            for part in run.parts():
                self._apply_to_own_stream(part)
        else:
            pages = self._namer.by_tokens(run, namespace)
            names_group = run.attention_group is not None
            self._outputs[OWN_STREAM].publish(pages, namespace, names_group=names_group, is_mixed=True)

    def _remove(
        self, run: PageRun, output: PagePublisher, namespace: HashNamespace, group: GroupIndex, scale: int
    ) -> None:
        pages = TranslatedPages(with_pages(run, scale).events)
        output.publish(pages, namespace, names_group=group is not None, medium=run.medium)

    def _apply_to_groups(self, run: PageRun) -> None:
        hashes = run.events.block_hashes
        if run.is_removal:
            groups = self._groups.removed_from(run.attention_group)
        else:
            groups = self._groups.stored_in(run.attention_group) or [run.attention_group]
        for group in groups:
            name, namespace = self._groups.stream_of.get(group), self._namespace(group, len(hashes))
            if name == OWN_STREAM or namespace is None:
                continue
            output = None if name is None else self._outputs.get(name)
            if output is None:
                self._counters.other_groups += len(hashes)
            elif run.is_removal:
                self._remove(run, output, namespace, group, 1)
            else:
                self._store_in_group(run, output, namespace)

    def _store_in_group(self, run: PageRun, output: PagePublisher, namespace: HashNamespace) -> None:
        naming = self._groups.naming()
        if naming is not None and (run.num_positions == 0 or self._has_our_size(run)):
            scale = self._groups.scale(run.attention_group, run.block_size)
            output.publish(self._namer.of_group(run, scale, naming), namespace, medium=run.medium)
        elif run.num_positions:
            self._refuse_size(run.block_size, len(run.events.block_hashes))

    def _store(self, run: PageRun, namespace: HashNamespace | None) -> None:
        """Store pages of full attention, or of a pool."""
        if namespace is None:
            return
        if run.num_positions == 0:
            pages = self._namer.look_up(with_pages(run, self._groups.scale(run.attention_group)), namespace)
        else:
            whole = self._whole_pages(run)
            if whole is None:
                return
            scale = self._groups.scale(run.attention_group, run.block_size)
            pages = self._namer.by_tokens(with_pages(whole, scale), namespace)
        self._outputs[OWN_STREAM].publish(pages, namespace, medium=run.medium)

    def _namespace(self, key: str | GroupIndex, num_pages: int) -> HashNamespace | None:
        """The namespace of a group or owner. None if there are too many: `num_pages` are then left out."""
        namespace = self._groups.namespace(key)
        if namespace is None:
            self._counters.refused_spaces += num_pages
            self._limited_logger.warning("pages of %s left out: too many attention groups and owners", shorten(key))
        return namespace

    def _whole_pages(self, run: PageRun) -> PageRun | None:
        """The full blocks of the run. None if there are none, or if they have another size than the stream's."""
        num_blocks = len(run.events.block_hashes)
        if not self._has_our_size(run):
            self._refuse_size(run.block_size, num_blocks)
            return None
        num_full = run.num_positions // run.block_size
        if run.num_positions == num_blocks * run.block_size:
            return run
        if num_full + 1 != num_blocks:
            self._counters.bad_events["token_count"] += 1
            return None
        self._counters.partial_pages += 1
        if num_full == 0:
            return None
        hashes = run.events.block_hashes[:num_full]
        events = run.events._replace(block_hashes=hashes, hashes=hashes, lengths=np.array([num_full], np.int64))
        return run._replace(events=events, num_positions=num_full * run.block_size)

    def _has_our_size(self, run: PageRun) -> bool:
        size = run.block_size // self._groups.scale(run.attention_group, run.block_size)
        is_on_device = run.is_on_device
        if 1 <= size <= min(MAX_BLOCK_SIZE, run.num_positions) and self._size.is_changed_by(
            size, len(run.events.lengths), is_on_device=is_on_device
        ):
            self._begin_with_size(size)
        return self._size.admits(size, is_on_device=is_on_device)

    def _resize(self) -> None:
        """Use pages of another size at once if a new group needs it: no store would fit them otherwise."""
        size = self._groups.page_size
        if size and self._size.registered is None and self._size.tokens not in (None, size):
            self._begin_with_size(size)

    def _begin_with_size(self, block_size: int) -> None:
        if self.block_size is not None or self.publisher is None or self.publisher.block_size != block_size:
            self._open_publisher(block_size)
        self.clear()
        self._hashes.clear()
        self._size.learn(block_size)

    def _refuse_size(self, block_size: int, num_pages: int) -> None:
        self._counters.other_block_sizes += num_pages
        self._limited_logger.warning(
            "pages of block_size %d left out, the stream's is %s", block_size, self._size.tokens
        )

    # --- events of Mooncake's RFC #1527 -----------------------------------------------------------------------------

    def _apply_mooncake_event(self, event: MooncakeEvent) -> None:
        if (event.model_name or self._stream.model) != self._stream.model or (
            event.tenant_id or self._stream.tenant
        ) != self._stream.tenant:
            self._counters.foreign_events += 1
            other = shorten((event.model_name, event.tenant_id))
            self._limited_logger.warning("events of (model_name, tenant_id) %s left out: another stream's", other)
            return
        hashes = np.array([value & MASK64 for value in event.seq_hashes], np.uint64)
        if event.event_type == "stored":
            namespace = self._namespace(event.owner, len(hashes))
            if namespace is not None:
                self._store_mooncake_event(event, hashes, namespace)
        elif (known := self._groups.namespaces.get(event.owner)) is not None:
            if event.event_type == "removed":
                self._outputs[OWN_STREAM].remove_all(hashes, known, event.medium or "")
            else:
                self._counters.clears += 1
                self._outputs[OWN_STREAM].remove_all(self._hashes.block_hashes_in(known), known, event.medium)

    def _store_mooncake_event(self, event: MooncakeEvent, hashes: U64Array, namespace: HashNamespace) -> None:
        medium = event.medium or ""
        tier = tier_of(medium)
        if not len(hashes):
            self._counters.unresolved_pages += 1  # a pooled object whose key is not a hash
        elif not event.token_ids:
            if event.block_size is not None and not self._size.admits(event.block_size, is_on_device=False):
                self._refuse_size(event.block_size, len(hashes))
                return
            seed = self._namer.seed(event.lora_name, event.additional_salt).seed
            pages = self._hashes.remember(hashes, hashes, tier, seed, namespace)
            self._outputs[OWN_STREAM].publish(pages, namespace, medium=medium)
        elif event.parent_hash is None and event.base_block_idx:
            self._namer.leave_out(len(hashes))
        else:
            parent = None if event.parent_hash is None else event.parent_hash & MASK64
            run = PageRun(
                PageEvents.one(hashes, tier, parent),
                tier,
                medium=medium,
                tokens=np.array(event.token_ids, np.uint32),
                num_positions=len(event.token_ids),
                block_size=event.block_size or self.block_size or 0,
                lora_name=event.lora_name or "",
                cache_salt=event.additional_salt or "",
            )
            self._store(run, namespace)


_MAX_REFUSED = 64


class BlockSizeRule:
    """Decides which stores have the stream's block size.

    Only stores on the device prove it. Storage behind the engine may cut pages in its own way.
    """

    def __init__(self, registered: int | None) -> None:
        self.tokens = registered
        """Tokens a page; None until the first store."""
        self.mismatch = ""
        """Names both sizes while stores arrive and none has the registered size; else empty."""
        self.registered = registered
        self._is_proved = registered is not None
        self._has_matched = False
        self._refused = 0  # device stores since the last one that matched

    def is_changed_by(self, size: int, num_stores: int, *, is_on_device: bool) -> bool:
        """Whether stores of another size prove that the assumed size is wrong. If so, call `learn`.

        Device stores do if no device store proved the assumed size, or if none has matched it for long.
        """
        if self.registered is not None or size == self.tokens:
            return False
        self._refused += num_stores * is_on_device
        return self.tokens is None or (is_on_device and (not self._is_proved or self._refused > _MAX_REFUSED))

    def learn(self, size: int) -> None:
        self.tokens = size
        self.forget_proof()

    def forget_proof(self) -> None:
        """Keep the size as an assumption only, because the engine may have been replaced."""
        self._is_proved, self._has_matched, self._refused, self.mismatch = self.registered is not None, False, 0, ""

    def admits(self, size: int, *, is_on_device: bool) -> bool:
        if size == self.tokens:
            self._is_proved = self._is_proved or is_on_device
            self._has_matched, self._refused, self.mismatch = True, 0, ""
            return True
        if self.registered is not None and not self._has_matched:
            self.mismatch = f"block size {size}, registered with {self.tokens}"
        return False
