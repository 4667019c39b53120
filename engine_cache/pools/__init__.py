"""Pools of device and host memory, and the owners of their rows.

`allocators.py` allocates rows and `req_to_token.py` maps the tokens of requests to rows; both need only numpy. The
other modules hold tensors and import torch, so this module does not import them.
"""

from engine_cache.pools.allocators import MambaSlotAllocator, PagedTokenToKVPoolAllocator
from engine_cache.pools.req_to_token import ReqToTokenPool

__all__ = ["MambaSlotAllocator", "PagedTokenToKVPoolAllocator", "ReqToTokenPool"]
