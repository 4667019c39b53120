"""The local directory under random writes, reads, evictions, damage and crashes.

The model is a dict with the expected bytes of each page, and the folder as the operating system lists it. The pages
announced by events follow the rule of `HiCacheStorage.is_held`.
"""

import hashlib
import os
import tempfile
from pathlib import Path

import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_cache.storage import (
    PageLayout,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    StorageIdentity,
    page_key,
)
from engine_cache.storage.directory import DirectoryStorage
from tests.rigs.page_pools import PagePool
from tests.support.effort import num_examples

NUM_PAGES = 6
FILE_BYTES = 6 + 8  # of either pool
KEYS = [page_key(hashlib.sha256(bytes([i])).hexdigest(), "tenant" if i % 2 else None) for i in range(NUM_PAGES)]
IDENTITY = StorageIdentity("m", PageLayout("uint8", 2, (1, 3), "page_first"))
NAMES = (PoolName.KV, PoolName.MAMBA)
PAGES = st.lists(st.integers(0, NUM_PAGES - 1), min_size=1, max_size=NUM_PAGES, unique=True)


def opened(folder, capacity_bytes):
    """Open a backend with two pools, whose pages 0 .. NUM_PAGES - 1 hold the data of KEYS."""
    store = DirectoryStorage(folder, IDENTITY, capacity_bytes=capacity_bytes)
    pools = {PoolName.KV: PagePool(2 * NUM_PAGES, 2, torch.uint8), PoolName.MAMBA: PagePool(2 * NUM_PAGES, 1)}
    store.register_mem_pool_host(pools[PoolName.KV])
    store.register_mem_host_pool_v2(pools[PoolName.MAMBA], PoolName.MAMBA)
    return store, pools


class DirectoryMachine(RuleBasedStateMachine):
    @initialize(capacity_bytes=st.integers(FILE_BYTES, 120))
    def start(self, capacity_bytes):
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        self.capacity_bytes = capacity_bytes
        self.harmed = set()  # files that were damaged or removed, possibly unnoticed by the backend
        self.announced = set()  # pages announced by events
        self.acknowledged = []  # keys that were written successfully and not drained yet
        self.open()

    def teardown(self):
        if hasattr(self, "temporary"):
            self.temporary.cleanup()

    def open(self):
        self.store, self.pools = opened(self.folder, self.capacity_bytes)
        self.announced = {key for key in KEYS if self.store.is_held(key)}
        self.acknowledged = []

    # --- the model ---

    def files(self):
        return {path for path in self.folder.iterdir() if path.suffix == ".bin"}

    def filled(self):
        return sorted(path for path in self.files() if path.stat().st_size)

    def path_of(self, name, page):
        middle = "" if name is PoolName.KV else f".{name.value}"
        return self.folder / f"{IDENTITY.prefix}{KEYS[page]}{middle}_m_0_1.bin"

    def is_sound(self, name, page):
        path = self.path_of(name, page)
        content = self.pools[name].page_bytes(page)
        checksum = xxhash.xxh3_64_digest(content, xxhash.xxh3_64_intdigest(path.name.encode()))
        return path.exists() and path.read_bytes() == content + checksum

    def job(self, name, pages, first_page=0):
        keys = [KEYS[page] for page in pages]
        return PoolTransfer(name, self.pools[name].indices(*(page + first_page for page in pages)), keys=keys)

    def drain(self):
        self.announced |= {key for key in self.acknowledged if self.store.is_held(key)}
        self.acknowledged = []
        self.announced -= set(self.store.take_removed())

    # --- operations ---

    @rule(name=st.sampled_from(NAMES), pages=PAGES)
    def write(self, name, pages):
        done = self.store.batch_set_v2([self.job(name, pages)])[name]
        there = self.files()
        for page, stored in zip(pages, done, strict=True):
            assert not stored or self.path_of(name, page) in there
        if name is PoolName.KV:
            self.acknowledged += [KEYS[page] for page, stored in zip(pages, done, strict=True) if stored]

    @rule(name=st.sampled_from(NAMES), pages=PAGES)
    def read(self, name, pages):
        sound = [self.is_sound(name, page) for page in pages]
        done = self.store.batch_get_v2([self.job(name, pages, NUM_PAGES)])[name]
        pool = self.pools[name]
        assert done == sound
        for page, read in zip(pages, done, strict=True):
            assert not read or pool.page_bytes(NUM_PAGES + page) == pool.page_bytes(page)
            self.harmed.discard(self.path_of(name, page))

    @rule(num_keys=st.integers(0, NUM_PAGES))
    def look(self, num_keys):
        wanted = [self.path_of(PoolName.KV, page) for page in range(num_keys)]
        there = [path.exists() and path.stat().st_size == FILE_BYTES for path in wanted]
        assert self.store.batch_exists(KEYS[:num_keys]) == [*there, False].index(False)

    @precondition(lambda self: self.filled())
    @rule(data=st.data(), kind=st.sampled_from(["flip", "cut", "grow", "unlink"]))
    def damage(self, data, kind):
        path = data.draw(st.sampled_from(self.filled()))
        content = bytearray(path.read_bytes())
        self.harmed.add(path)
        if kind == "unlink":
            path.unlink()
        elif kind == "flip":
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            path.write_bytes(content)
        else:
            keep = data.draw(st.integers(0, len(content) - 1)) if kind == "cut" else len(content)
            path.write_bytes(content[:keep] + b"+" * (kind == "grow"))

    @rule(data=st.data(), half=st.booleans())
    def crash(self, data, half):
        """Simulate a crash, optionally during a write, and open the folder again."""
        if half:
            path = self.path_of(PoolName.KV, data.draw(st.integers(0, NUM_PAGES - 1)))
            unfinished = path.with_name(f"{path.name}.00000000.tmp")
            unfinished.write_bytes(b"half")
            os.utime(unfinished, (0, 0))
        self.open()
        assert set(self.folder.iterdir()) == self.files()

    @rule()
    def clear(self):
        self.store.clear()
        self.announced, self.acknowledged = set(), []
        self.harmed = set()
        assert list(self.folder.iterdir()) == []

    @rule()
    def drain_acks(self):
        self.drain()

    # --- invariants --------------

    @invariant()
    def the_bound_holds(self):
        # a file that this test extended counts with the size that the backend wrote
        assert sum(min(path.stat().st_size, FILE_BYTES) for path in self.files()) <= self.capacity_bytes

    @invariant()
    def the_store_recounts(self):
        if not any(not path.exists() for path in self.harmed):
            self.store.check()

    @invariant()
    def every_other_file_is_sound(self):
        for name in NAMES:
            for page in range(NUM_PAGES):
                path = self.path_of(name, page)
                assert path in self.harmed or not path.exists() or self.is_sound(name, page)

    @invariant()
    def what_is_announced_is_what_is_there(self):
        self.drain()
        harmed = {key for page, key in enumerate(KEYS) if self.path_of(PoolName.KV, page) in self.harmed}
        there = {key for page, key in enumerate(KEYS) if self.path_of(PoolName.KV, page) in self.files()}
        assert self.announced - harmed == there - harmed


TestDirectory = DirectoryMachine.TestCase
TestDirectory.settings = settings(max_examples=num_examples(80), stateful_step_count=30)

STATES = st.sets(st.integers(0, NUM_PAGES - 1))


@settings(max_examples=num_examples(60))
@given(
    kv=STATES,
    pools=st.lists(st.tuples(STATES, st.one_of(st.none(), st.integers(0, 3))), min_size=1, max_size=2),
)
def test_the_usable_prefix_is_the_longest_that_every_pool_allows(kv, pools):
    names = [PoolName.MAMBA, PoolName.SWA][: len(pools)]
    with tempfile.TemporaryDirectory() as folder:
        store, _ = opened(Path(folder), 10_000)
        store.register_mem_host_pool_v2(PagePool(), PoolName.SWA)
        wanted = []
        for name, (pages, window) in zip((PoolName.KV, *names), [(kv, None), *pools], strict=True):
            pool = store._pool(name)
            keys = [KEYS[page] for page in sorted(pages)]
            store.batch_set_v2([PoolTransfer(name, pool.indices(*sorted(pages)), keys=keys)])
            policy = PoolHitPolicy.ALL_PAGES if window is None else PoolHitPolicy.TRAILING_PAGES
            wanted.append(PoolTransfer(name, keys=[""] * (window or 0), hit_policy=policy))
        found = store.batch_exists_v2(KEYS, wanted[1:])

    def allows(end, pages, window):
        first = 0 if window is None else max(0, end - max(1, window))
        return set(range(first, end)) <= pages

    ends = range(NUM_PAGES, -1, -1)
    longest = next(e for e in ends if all(allows(e, *rule) for rule in [(kv, None), *pools]))
    assert found == (longest, dict.fromkeys(names, longest) if longest else {})
