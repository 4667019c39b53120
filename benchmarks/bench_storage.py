"""Throughput of the storage tier: `python -m benchmarks.bench_storage [--json FILE]`.

Pages are archived node by node into an empty backend, in batches of 128 as the storage tier issues them, and then
prefetched by a second engine. The backends are a Mooncake store over TCP and a directory. The Mooncake master and the
process that lends it memory run on the same machine. The directory is a temporary one and is read from the page cache.
"""

import hashlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import create_connection, socket

import numpy as np
import torch

from benchmarks.report import Figure, figure, main, timed
from engine_cache.pools.device import MHATokenToKVPool, PoolShape
from engine_cache.pools.host import MHATokenToKVPoolHost
from engine_cache.settings import MooncakeSettings
from engine_cache.storage import HiCacheStorage, PageLayout, StorageIdentity, page_keys
from engine_cache.storage.directory import DirectoryStorage
from engine_cache.storage.mooncake import MooncakeStorage

PAGE, LAYERS, HEADS, HEAD_DIM = 16, 8, 8, 128
BATCH_PAGES, BATCHES, ROUNDS = 128, 2, 5
STORE_BYTES = 2**29
LAYOUT = "page_first_direct"
IDENTITY = StorageIdentity("benchmark", PageLayout("bfloat16", PAGE, (LAYERS, HEADS, HEAD_DIM), LAYOUT))
LENDER = """
import sys
from engine_cache.settings import MooncakeSettings
from engine_cache.storage.mooncake_client import MooncakeClient
client = MooncakeClient(MooncakeSettings(mooncake_master=sys.argv[1], mooncake_segment_bytes=int(sys.argv[2])))
print("lent", flush=True)
sys.stdin.read()
"""


def host_pool() -> MHATokenToKVPoolHost:
    rows = BATCH_PAGES * BATCHES * PAGE
    device = MHATokenToKVPool(PoolShape(PAGE, PAGE, LAYERS, torch.bfloat16), HEADS, HEAD_DIM)
    pool = MHATokenToKVPoolHost(device, layout=LAYOUT, ratio=rows / PAGE)
    pool.kv_buffer.view(torch.uint8).random_(0, 256)
    return pool


def bench_store(kind: str, writer: HiCacheStorage, reader: HiCacheStorage) -> Iterator[Figure]:
    source, target = host_pool(), host_pool()
    writer.register_mem_pool_host(source)
    reader.register_mem_pool_host(target)
    archived: list[float] = []
    prefetched: list[float] = []
    asked: list[float] = []
    for turn in range(ROUNDS + 1):
        writer.clear()
        for batch in range(BATCHES):
            numbers = range(batch * BATCH_PAGES, (batch + 1) * BATCH_PAGES)
            keys = page_keys(hashlib.sha256(b"%d %d" % (turn, number)).hexdigest() for number in numbers)
            rows = np.arange(numbers.start * PAGE, numbers.stop * PAGE)
            done: list[bool] = []
            spent = (
                timed(lambda k, r, d: d.extend(writer.batch_set_v1(k, r)), keys, rows, done),
                timed(lambda k, d: d.append(reader.batch_exists(k) == BATCH_PAGES), keys, done),
                timed(lambda k, r, d: d.extend(reader.batch_get_v1(k, r)), keys, rows, done),
            )
            assert all(done)
            if turn:  # the first round touches fresh memory
                for values, seconds in zip((archived, asked, prefetched), spent, strict=True):
                    values.append(BATCH_PAGES / seconds)
        assert torch.equal(source.kv_buffer.view(torch.uint8)[:, :-1], target.kv_buffer.view(torch.uint8)[:, :-1])
    page_kib = PAGE * source.size_per_token // 1024
    yield figure(f"{kind}: archived, {page_kib} KiB a page", "pages/s", archived)
    yield figure(f"{kind}: looked up", "pages/s", asked)
    yield figure(f"{kind}: prefetched", "pages/s", prefetched)


@contextmanager
def mooncake_store() -> Iterator[MooncakeSettings]:
    """Run a master, and a process that lends memory to it, for the duration of the block."""
    ports = [free_port(), free_port()]
    address = f"127.0.0.1:{ports[0]}"
    binary = Path(sys.executable).parent / "mooncake_master"
    command: list[str | Path] = [binary, f"--rpc_port={ports[0]}", f"--metrics_port={ports[1]}"]
    with tempfile.TemporaryFile() as output, ExitStack() as stack:
        master = stack.enter_context(subprocess.Popen(command, stdout=output, stderr=output))
        stack.callback(master.kill)
        wait_for_port(ports[0])
        pipe = subprocess.PIPE
        lender = subprocess.Popen(
            [sys.executable, "-c", LENDER, address, str(STORE_BYTES)], stdin=pipe, stdout=pipe, stderr=output
        )
        stack.enter_context(lender)
        stack.callback(lender.kill)
        assert lender.stdout is not None
        assert lender.stdout.readline() == b"lent\n", "the lender did not reach the master"
        yield MooncakeSettings(mooncake_master=address, mooncake_segment_bytes=0)


def free_port() -> int:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for_port(port: int, deadline_s: float = 20.0) -> None:
    give_up = time.monotonic() + deadline_s
    while True:
        try:
            create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.05)
        else:
            return


def run() -> list[Figure]:
    torch.set_num_threads(1)  # copies are too short to split; waiting for a busy core would distort them
    with tempfile.TemporaryDirectory() as folder:
        stores = [DirectoryStorage(Path(folder), IDENTITY, capacity_bytes=STORE_BYTES) for _ in range(2)]
        figures = list(bench_store("directory", *stores))
    with mooncake_store() as settings:
        clients = [MooncakeStorage.connect(IDENTITY, settings) for _ in range(2)]
        figures += bench_store("Mooncake", *clients)
        for client in clients:
            client.close()
    return figures


if __name__ == "__main__":
    main("storage", run)
