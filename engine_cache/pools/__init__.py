"""Where KV lies and who may use which row.

`allocators.py` hands out rows and `req_to_token.py` remembers which row holds which token of a request: numpy, no
torch. `device.py` holds the tensors and is the only module here that imports torch, so it is not imported by this one.
"""

from engine_cache.pools.allocators import PagedTokenToKVPoolAllocator
from engine_cache.pools.req_to_token import ReqToTokenPool

__all__ = ["PagedTokenToKVPoolAllocator", "ReqToTokenPool"]
