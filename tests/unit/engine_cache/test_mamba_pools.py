from typing import Any

import numpy as np
import pytest

from engine_cache import (
    EvictParams,
    MambaRadixCache,
    MambaSlotAllocator,
    MatchPrefixParams,
    PagedTokenToKVPoolAllocator,
    RadixKey,
    Request,
)
from engine_cache.tree.node import TreeNode, iter_nodes
from kv_events.schema import AllBlocksCleared, BlockStored, StorageMedium
from tests.models.cache_checks import check_cache

torch = pytest.importorskip("torch", reason="device pools need torch: pip install kvsight[engine]")
device = pytest.importorskip("engine_cache.pools.device")
mamba = pytest.importorskip("engine_cache.pools.mamba")

pytestmark = pytest.mark.torch
SLOTS = 4
SHAPE = device.PoolShape(size=8, page_size=2, layer_num=2, dtype=torch.float32)


@pytest.fixture
def pool():
    return mamba.MambaPool(SLOTS, 3, conv_shapes=[(4, 2), (5,)], temporal_shape=(2, 3, 4))


@pytest.fixture
def lines(pool):
    allocator = MambaSlotAllocator(SLOTS)
    return mamba.HybridReqToTokenPool(2, 16, mamba_pool=pool, mamba_allocator=allocator, mamba_map={0: 0, 1: 1, 3: 2})


def fill(pool, slot):
    """Write random states to all layers of one slot. Returns the content, tensor by tensor."""
    written = []
    for tensor in pool.mamba_cache.tensors():
        tensor[:, slot] = torch.randn(tensor[:, slot].shape).to(tensor.dtype)
        written.append(tensor[:, slot].clone())
    return written


def held(pool, slot):
    return [tensor[:, slot] for tensor in pool.mamba_cache.tensors()]


def equal(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def test_all_layers_of_a_kind_of_state_are_one_tensor_with_a_dummy_slot(pool):
    cache = pool.mamba_cache
    assert [tuple(conv.shape) for conv in cache.conv] == [(3, SLOTS + 1, 4, 2), (3, SLOTS + 1, 5)]
    assert tuple(cache.temporal.shape) == (3, SLOTS + 1, 2, 3, 4)
    assert (cache.conv[0].dtype, cache.temporal.dtype) == (torch.bfloat16, torch.float32)


def test_a_copied_state_is_bit_equal_in_every_layer_and_its_own(pool):
    written = fill(pool, 1)
    other = fill(pool, 3)
    pool.copy_from(np.array([1]), np.array([2]))
    assert equal(held(pool, 2), written)
    fill(pool, 1)
    assert equal(held(pool, 2), written)
    assert equal(held(pool, 3), other)


def test_cleared_slots_are_zero_and_others_stay(pool):
    fill(pool, 1)
    written = fill(pool, 2)
    pool.clear_slots(np.array([1, 3]))
    assert not any(tensor.any() for tensor in held(pool, 1))
    assert equal(held(pool, 2), written)


def test_a_layer_is_a_view_of_the_pool(pool):
    pool.layer(1).temporal[2] = 7
    assert pool.mamba_cache.temporal[1, 2].eq(7).all()


@pytest.mark.parametrize("name", ["size", "layer_num"])
def test_an_empty_state_pool_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}: got 0"):
        mamba.MambaPool(**{"size": 1, "layer_num": 1, name: 0}, conv_shapes=[(1,)], temporal_shape=(1,))


def test_global_attention_layers_reach_their_local_tensors():
    hybrid = device.HybridLinearKVPool(device.MHATokenToKVPool(SHAPE, head_num=2, head_dim=4), [2, 5])
    rows, (k, v) = np.array([4, 5, 6]), torch.randn(2, 3, 2, 4)
    hybrid.set_kv_buffer(5, rows, k, v)
    held_k, held_v = hybrid.get_kv_buffer(5)
    assert torch.equal(held_k[rows], k)
    assert torch.equal(held_v[rows], v)
    assert hybrid.full_kv_pool.k_buffer[1] is held_k
    assert not hybrid.get_kv_buffer(2)[0].any()
    assert not hybrid.use_mla


def test_a_hybrid_pool_over_latent_attention_takes_one_tensor():
    hybrid = device.HybridLinearKVPool(device.MLATokenToKVPool(SHAPE, kv_lora_rank=4, qk_rope_head_dim=2), [0, 3])
    kv = torch.randn(2, 1, 6)
    hybrid.set_kv_buffer(3, np.array([2, 3]), kv)
    assert torch.equal(hybrid.get_kv_buffer(3)[2:4], kv)
    assert hybrid.use_mla
    with pytest.raises(ValueError, match="v: got 'Tensor'"):
        hybrid.set_kv_buffer(3, np.array([2, 3]), kv, kv)


def test_a_layer_without_kv_or_without_a_state_is_refused(lines):
    hybrid = device.HybridLinearKVPool(device.MHATokenToKVPool(SHAPE, head_num=1, head_dim=1), [2, 5])
    with pytest.raises(ValueError, match=r"layer_id: got 3, expected one of \[2, 5\]"):
        hybrid.get_kv_buffer(3)
    with pytest.raises(ValueError, match=r"layer_id: got 2, expected one of \[0, 1, 3\]"):
        lines.mamba_layer(2)


def test_layer_ids_and_pools_must_fit(pool):
    with pytest.raises(ValueError, match="one id for each of 2 layers"):
        device.HybridLinearKVPool(device.MHATokenToKVPool(SHAPE, head_num=1, head_dim=1), [2])
    parts = {"mamba_pool": pool, "mamba_allocator": MambaSlotAllocator(SLOTS), "mamba_map": {0: 0, 1: 1, 2: 2}}
    with pytest.raises(ValueError, match=r"local layers 0 \.\. 2"):
        mamba.HybridReqToTokenPool(2, 16, **{**parts, "mamba_map": {0: 0, 1: 2}})
    with pytest.raises(ValueError, match="the pool's, 4"):
        mamba.HybridReqToTokenPool(2, 16, **{**parts, "mamba_allocator": MambaSlotAllocator(9)})


def test_a_request_gets_a_line_and_a_cleared_state_together(lines, pool):
    for slot in range(1, SLOTS + 1):
        fill(pool, slot)
    line, slot = lines.alloc_with_state()
    assert lines.mamba_slots(np.array([line])).tolist() == slot.tolist()
    assert not lines.mamba_layer(3).temporal[slot].any()


def test_a_request_keeps_the_slot_that_a_match_gave_it(lines, pool):
    slot = lines.mamba_allocator.alloc(1)
    written = fill(pool, int(slot[0]))
    line, same = lines.alloc_with_state(slot)
    assert same is slot
    assert lines.mamba_slots(np.array([line])).tolist() == slot.tolist()
    assert equal(held(pool, int(slot[0])), written)


def test_a_request_without_room_takes_nothing(lines):
    slots = lines.mamba_allocator.alloc(SLOTS)
    assert lines.alloc_with_state() is None
    assert lines.available_size() == 2
    lines.mamba_allocator.free(slots)
    lines.alloc()
    lines.alloc()
    assert lines.alloc_with_state() is None
    assert lines.mamba_allocator.available_size() == SLOTS


class Server:
    """Serves prompts one by one on real pools. The KV of a token is the token; a state is the sum of its tokens."""

    def __init__(self):
        self.rows = PagedTokenToKVPoolAllocator(24, 1)
        self.kv = device.HybridLinearKVPool(
            device.MHATokenToKVPool(device.PoolShape(24, 1, 1, torch.float32), head_num=1, head_dim=1), [2]
        )
        self.states = mamba.MambaPool(SLOTS, 3, [(2,)], (3,), conv_dtype=torch.float32)
        self.slots = MambaSlotAllocator(SLOTS)
        self.lines = mamba.HybridReqToTokenPool(
            2, 16, mamba_pool=self.states, mamba_allocator=self.slots, mamba_map={0: 0, 1: 1, 3: 2}
        )
        self.cache = MambaRadixCache(
            page_size=1,
            mamba_allocator=self.slots,
            mamba_pool=self.states,
            allocator=self.rows,
            req_to_token_pool=self.lines,
            enable_kv_cache_events=True,
        )
        self.announced = set()

    def serve(self, tokens):
        req = Request("r", tokens, -1)
        match = self.cache.match_prefix(MatchPrefixParams(RadixKey(tokens), cow_mamba=True, req=req))
        self.cache.inc_lock_ref(match.last_device_node)
        have = req.cache_protected_len = len(match.device_indices)
        req.last_node = match.last_device_node
        if req.mamba_pool_idx is None and not self.slots.available_size():
            self.cache.evict(EvictParams(0, mamba_num=1))
        req.req_pool_idx, req.mamba_pool_idx = self.lines.alloc_with_state(req.mamba_pool_idx)
        if req.mamba_cow_src_index is not None:
            self.states.copy_from(req.mamba_cow_src_index, req.mamba_pool_idx)
        self.lines.write(req.req_pool_idx, 0, match.device_indices)
        last = max(have, len(tokens) - 1)
        self.prefill(req, have, last)
        self.prefill(req, last, len(tokens))
        self.cache.cache_finished_req(req)
        self.lines.free(req.req_pool_idx)

    def prefill(self, req, start, end):
        """Compute the tokens from `start` on, each state from the previous one, and insert them."""
        rows = self.rows.alloc(end - start)
        if rows is None:
            self.cache.evict(EvictParams(end - start))
            rows = self.rows.alloc(end - start)
        new = torch.tensor(req.token_ids[start:end], dtype=torch.float32)
        self.kv.set_kv_buffer(2, rows, new.reshape(-1, 1, 1), -new.reshape(-1, 1, 1))
        self.lines.write(req.req_pool_idx, start, rows)
        for layer in (0, 1, 3):
            cache = self.lines.mamba_layer(layer)
            for tensor in cache.tensors():
                tensor[req.mamba_pool_idx] += new.sum()
        whole, req.token_ids = req.token_ids, req.token_ids[:end]
        self.cache.cache_unfinished_req(req, chunked=True)
        req.token_ids = whole

    def check(self):
        """Check that pages and states in the tree match their tokens, and that the events announce these pages."""
        nothing = np.empty(0, np.int64)
        check_cache(self.cache, nothing, nothing)
        tokens: dict[TreeNode, list[Any]] = {self.cache.root_node: []}
        k, v = self.kv.get_kv_buffer(2)
        for node in iter_nodes(self.cache.root_node):
            tokens[node] = [*tokens[node.parent], *node.key]
            assert k[node.value].flatten().tolist() == list(node.key)
            assert v[node.value].flatten().tolist() == [-token for token in tokens[node][-len(node.key) :]]
            if node.mamba_value is not None:
                states = [tensor[:, node.mamba_value] for tensor in self.states.mamba_cache.tensors()]
                assert all(state.eq(sum(tokens[node])).all() for state in states)
        for event in self.cache.take_events():
            match event:
                case AllBlocksCleared():
                    self.announced.clear()
                case BlockStored(block_hashes=[name]):
                    self.announced.add(name)
                case _:
                    self.announced.remove(*event.block_hashes)
        assert self.announced == {page.block_hash for page in self.cache.iter_resident(StorageMedium.GPU)}


def test_a_serving_loop_keeps_bytes_states_and_events_right_on_nearly_full_pools():
    server, draw = Server(), np.random.default_rng(7)
    for _ in range(150):
        server.serve([1, 2, 3, *draw.integers(1, 4, draw.integers(0, 9)).tolist()])
        server.check()
