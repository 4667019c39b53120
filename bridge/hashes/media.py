"""Engines' names of storage media -> the four tiers."""

from __future__ import annotations

from kv_events.schema import MEDIUM_INDEX, StorageMedium

_GPU, _CPU, _DISK, _EXTERNAL = (MEDIUM_INDEX[medium.value] for medium in StorageMedium)

_TIERS = {
    "": _GPU,  # absent
    "GPU": _GPU,
    "CPU": _CPU,  # vLLM's offload, LMCache, Mooncake
    "CPU_PINNED": _CPU,  # SGLang
    "CPU_TIER1": _CPU,  # Dynamo's block manager; also the next two
    "CPU_TIER2": _DISK,
    "NVME": _DISK,
    "DISK": _DISK,
    "FS": _DISK,  # vLLM's offload; also the next two
    "OBJ": _DISK,
    "STORAGE": _DISK,
    "EXTERNAL": _EXTERNAL,  # SGLang's third level
    "REMOTE": _EXTERNAL,  # ATOM
}
_CUDA_DEVICE = "DEVICE(TYPE='CUDA'"  # one LMCache version writes this for GPU


def is_device(medium: str, locality: str = "") -> bool:
    """Whether the medium is the accelerator's own memory."""
    return tier_of(medium, locality) == _GPU


def tier_of(medium: str, locality: str = "") -> int | None:
    """Tier index of a medium's name, in any case. None if the name is unknown.

    locality: vLLM's `LOCAL` or `REMOTE`. Pages on another machine are external, whatever their medium there.
    """
    name = medium.upper()
    tier = _GPU if name.startswith(_CUDA_DEVICE) else _TIERS.get(name)
    if tier is not None and locality.upper() == "REMOTE":
        return _EXTERNAL
    return tier
