"""Where KV lies and who may use which row.

`allocators.py` hands out rows and `req_to_token.py` remembers which row holds which token of a request: numpy, no
torch. The others hold the tensors and import torch, so they are not imported by this one.
"""

from engine_cache.pools.allocators import MambaSlotAllocator, PagedTokenToKVPoolAllocator
from engine_cache.pools.req_to_token import ReqToTokenPool

__all__ = ["MambaSlotAllocator", "PagedTokenToKVPoolAllocator", "ReqToTokenPool"]
