"""The KV event modules of released versions of vLLM and SGLang, without the rest of the packages.

Stand-ins replace the module's imports from its package: a logger, a decorator, the type of a hash. The event classes,
the publishers and their factory are the released code.
"""

import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pydantic.dataclasses

from tests.support.engines.released_packages import files_of, load_module

Engine = Literal["sglang", "vllm"]
Release = tuple[Engine, str]

SGLANG_ARRAYS: Release = ("sglang", "0.5.13.post1")
SGLANG_MAPS: Release = ("sglang", "0.5.23")
VLLM_ARRAYS: Release = ("vllm", "0.18.1")
VLLM: Release = ("vllm", "0.33.0")
RELEASES = (SGLANG_ARRAYS, SGLANG_MAPS, VLLM_ARRAYS, VLLM)

_EVENTS = {"sglang": "sglang/srt/disaggregation/kv_events.py", "vllm": "vllm/distributed/kv_events.py"}
_VLLM_CONFIG = "vllm/config/kv_events.py"
_SGLANG_RECORDER = ("sglang/srt/mem_cache/utils.py", "sglang/srt/mem_cache/events.py")


def engine_folder(engine: Engine, version: str) -> Path:
    """Return the folder of the module. Skips the test if pip cannot download the package."""
    return files_of(engine, version, [_EVENTS[engine], *([_VLLM_CONFIG] if engine == "vllm" else [])])


def engine_module(engine: Engine, folder: Path) -> ModuleType:
    """Import the module under its own name."""
    if engine == "vllm":
        return _vllm_module(folder)
    _stand_in("sglang.srt.runtime_context", get_parallel=None)
    _stand_in("sglang.srt.utils.network", NetworkAddress=None)
    return load_module(folder / _EVENTS["sglang"], "sglang.srt.disaggregation.kv_events")


def sglang_recorder(native_hash: Callable[..., list[str]]) -> ModuleType:
    """Import the module that makes SGLang's events of tree nodes. native_hash: in place of the hash in C++."""
    folder = files_of(*SGLANG_MAPS, [_EVENTS["sglang"], *_SGLANG_RECORDER])
    engine_module("sglang", folder)
    kernels = re.findall(r"import \(\s+(\w+) as", (folder / _SGLANG_RECORDER[0]).read_text())
    _stand_in("sglang.kernels.ops.kvcache.mla_buffer", **dict.fromkeys(kernels))
    _stand_in("sglang.srt.environ", envs=None)
    _stand_in("sglang.srt.mem_cache.cpp_utils.native_hash", get_native_hash=native_hash)
    policies = ("Eviction", "FIFO", "FILO", "LFU", "LRU", "MRU", "Priority", "SLRU", "TLRU")
    _stand_in("sglang.srt.mem_cache.evict_policy", **{f"{name}Strategy": object for name in policies})
    load_module(folder / _SGLANG_RECORDER[0], "sglang.srt.mem_cache.utils")
    return load_module(folder / _SGLANG_RECORDER[1], "sglang.srt.mem_cache.events")


def _vllm_module(folder: Path) -> ModuleType:
    _stand_in("vllm.logger", init_logger=logging.getLogger)
    _stand_in("vllm.config.utils", config=pydantic.dataclasses.dataclass)
    nothing = dict.fromkeys(("get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path"))
    _stand_in("vllm.utils.network_utils", **nothing)
    _stand_in("vllm.v1.core.kv_cache_utils", ExternalBlockHash=bytes | int)
    load_module(folder / _VLLM_CONFIG, "vllm.config.kv_events")
    return load_module(folder / _EVENTS["vllm"], "vllm.distributed.kv_events")


def forget_engine_modules() -> None:
    """Unload the modules, so that another version can be imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("sglang", "vllm")]:
        del sys.modules[name]


def _stand_in(name: str, **contents: Any) -> None:
    """Install a module with that name and its parent packages."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:length]), ModuleType(".".join(parts[:length])))
    vars(sys.modules[name]).update(contents)
