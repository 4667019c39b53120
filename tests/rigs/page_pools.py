"""A minimal host pool for tests of stores: real tensors that contain only pages. Steps with a store that has one."""

import numpy as np
import torch

from engine_cache.storage import page_keys

KEYS = page_keys([f"{page:064x}" for page in range(16)])
"""The key of each page of a pool."""


class PagePool:
    """One tensor of `num_pages` pages with `page_size` rows of three values each, initially random. For stores that
    access memory in place, a page consists of `num_runs` runs of memory."""

    def __init__(
        self, num_pages: int = 16, page_size: int = 2, dtype: torch.dtype = torch.bfloat16, num_runs: int = 1
    ) -> None:
        self.page_size = page_size
        self.num_runs = num_runs
        self.dtype = dtype
        self.rows = torch.empty((num_pages * page_size, 3), dtype=dtype)
        self.fill(seed=0)

    def fill(self, seed: int) -> None:
        """Fill every page with other content."""
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randint(0, 256, (self.rows.nbytes,), dtype=torch.uint8, generator=generator)
        self.rows.view(torch.uint8).view(-1).copy_(noise)

    def indices(self, *pages: int) -> np.ndarray:
        """Return the rows of the pages, page by page."""
        return (np.array(pages, np.int64)[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)

    def page_bytes(self, page: int) -> bytes:
        return self.get_data_page(page * self.page_size).view(torch.uint8).numpy().tobytes()

    def get_data_page(self, index: int) -> torch.Tensor:
        return self.rows[self._slice(index)].flatten().clone()

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self.page_size * 3, dtype=self.dtype)

    def set_from_flat_data_page(self, index: int, data: torch.Tensor) -> None:
        self.rows[self._slice(index)] = data.view(self.page_size, 3)

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        return [self.rows]

    def get_page_buffer_meta(self, indices: np.ndarray) -> tuple[list[int], list[int]]:
        row_bytes = 3 * self.dtype.itemsize
        length = self.page_size * row_bytes // self.num_runs
        pages = [self.rows.data_ptr() + int(index) * row_bytes for index in indices[:: self.page_size]]
        addresses = [page + run * length for page in pages for run in range(self.num_runs)]
        return addresses, [length] * len(addresses)

    def _slice(self, index: int) -> slice:
        if index % self.page_size or not 0 <= index < len(self.rows):
            raise IndexError(index)
        return slice(index, index + self.page_size)


def put(store, *pages):
    """Write pages of `store.kv`, each under the key of the same number. Returns whether each is stored."""
    return store.batch_set_v1([KEYS[page] for page in pages], store.kv.indices(*pages))


def get(store, *pages):
    """Read pages of `store.kv` in place. Returns whether each was read."""
    return store.batch_get_v1([KEYS[page] for page in pages], store.kv.indices(*pages))


def held(store):
    """Return the numbers of the pages that the store holds, according to its own records."""
    return [page for page, key in enumerate(KEYS) if store.is_held(key)]
