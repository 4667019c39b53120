"""What the `/metrics` of vLLM and SGLang say: the room of an engine, and its load."""

import re
from typing import NamedTuple
from urllib.parse import urlsplit

_MAX_TOKENS = 2**48
_VLLM = re.compile(rb"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_SGLANG = re.compile(rb"^sglang:max_total_num_tokens(?:\{([^}]*)\})? ([0-9.e+]{1,24})", re.MULTILINE)
_LOAD = re.compile(
    rb"^(?:vllm|sglang):(num_requests_running|num_requests_waiting|kv_cache_usage_perc|num_running_reqs|num_queue_reqs"
    rb"|num_used_tokens|token_usage)(?:\{([^}]*)\})? ([0-9.e+-]{1,24})",
    re.MULTILINE,
)
_LABEL = re.compile(rb'(\w+)="([^"]*)"')


class EngineLoad(NamedTuple):
    """The load of one rank of an engine."""

    requests: int
    waiting: int
    """Those of the requests that are not computed yet."""
    used_tokens: int | None
    """Tokens in the pages of the device that these requests use. None: unknown."""


def tokens_of(text: bytes, dp_rank: int) -> int:
    """Return for how many tokens a rank has room on its device, from `/metrics` of vLLM or SGLang. Raises ValueError.

    Without a label for the rank, the first sample counts.
    """
    found: dict[bytes, int] = {}
    for labels, blocks in ((dict(_LABEL.findall(each)), b"") for each in _VLLM.findall(text)):
        if (blocks := labels.get(b"num_gpu_blocks", b"")).isdigit() and labels.get(b"block_size", b"").isdigit():
            found.setdefault(labels.get(b"engine", b""), int(blocks) * int(labels[b"block_size"]))
    for given, number in _SGLANG.findall(text):
        found.setdefault(_rank(given), int(min(float(number), _MAX_TOKENS)))
    if not found:
        raise ValueError("neither vllm:cache_config_info with num_gpu_blocks nor sglang:max_total_num_tokens is there")
    tokens = found.get(b"%d" % dp_rank, next(iter(found.values())))
    if not 0 < tokens < _MAX_TOKENS:
        raise ValueError(f"{tokens} tokens")
    return tokens


def load_of(text: bytes, dp_rank: int, room: int | None) -> EngineLoad:
    """Return the load of a rank. room: tokens on its device. Raises ValueError. Samples count as in `tokens_of`."""
    found: dict[bytes, dict[bytes, float]] = {}
    for name, labels, number in _LOAD.findall(text):
        found.setdefault(name, {}).setdefault(_rank(labels), float(number))
    load = {name: samples.get(b"%d" % dp_rank, next(iter(samples.values()))) for name, samples in found.items()}
    running = load.get(b"num_requests_running", load.get(b"num_running_reqs", -1))
    waiting = load.get(b"num_requests_waiting", load.get(b"num_queue_reqs", -1))
    part = load.get(b"kv_cache_usage_perc", load.get(b"token_usage"))
    tokens = load.get(b"num_used_tokens", None if part is None or room is None else part * room)
    if not all(0 <= value < _MAX_TOKENS for value in (running, waiting, tokens or 0)):
        raise ValueError(f"{running} running and {waiting} waiting requests that use {tokens} tokens")
    return EngineLoad(int(running + waiting), int(waiting), None if tokens is None else round(tokens))


def corrected(booked: int, reported: int, booked_then: int) -> int:
    """Return the load of a rank with the requests of others, which this service did not book.

    booked: what is booked now. reported: what the engine said, in the same unit. booked_then: what was booked then.
    """
    return booked + max(0, reported - booked_then)


def _rank(labels: bytes) -> bytes:
    """Return the DP rank of a sample, or b"" if it names none."""
    found = dict(_LABEL.findall(labels))
    return found.get(b"engine", found.get(b"dp_rank", b""))


def place_of(url: str) -> str:
    """Return HOST:PORT of an address of HTTP."""
    parts = urlsplit(url)
    default = 443 if parts.scheme == "https" else 80
    return parts.netloc if re.search(r":\d+$", parts.netloc) else f"{parts.netloc}:{default}"
