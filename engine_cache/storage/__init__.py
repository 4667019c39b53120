"""Storage backends behind the host tier: a local directory, and a Mooncake store shared by engines.

Contains the interface of backends (`base`), the names of pages (`object_names`) and the backends themselves. Start at
`base.py`. `directory.py` needs torch and `mooncake.py` the Mooncake client, so this module imports neither.
"""

from engine_cache.storage.base import HiCacheStorage as HiCacheStorage
from engine_cache.storage.base import PagedHostPool as PagedHostPool
from engine_cache.storage.base import PoolHitPolicy as PoolHitPolicy
from engine_cache.storage.base import PoolName as PoolName
from engine_cache.storage.base import PoolTransfer as PoolTransfer
from engine_cache.storage.base import PoolTransferResult as PoolTransferResult
from engine_cache.storage.base import StorageClosedError as StorageClosedError
from engine_cache.storage.base import StorageStats as StorageStats
from engine_cache.storage.base import ZeroCopyHostPool as ZeroCopyHostPool
from engine_cache.storage.object_names import PageLayout as PageLayout
from engine_cache.storage.object_names import StorageIdentity as StorageIdentity
from engine_cache.storage.object_names import page_key as page_key
from engine_cache.storage.object_names import page_keys as page_keys
