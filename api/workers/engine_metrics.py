"""What the `/metrics` of vLLM and SGLang say of a rank: its room, and its load."""

import re
from typing import NamedTuple
from urllib.parse import urlsplit

_MOST = 2**48
_SAMPLE = re.compile(
    rb"^(?:vllm:(cache_config_info|num_requests_running|num_requests_waiting|kv_cache_usage_perc)"
    rb"|sglang:(max_total_num_tokens|num_running_reqs|num_queue_reqs|token_usage|num_used_tokens))"
    rb"(?:\{([^}]*)\})? ([0-9.e+-]{1,24})",
    re.MULTILINE,
)
_LABEL = re.compile(rb'(\w+)="([^"]*)"')


class EngineMetrics(NamedTuple):
    """What an engine says of one of its ranks. None: it does not say it, or nothing that can be true."""

    room: int | None
    """Tokens for which its device has room."""
    requests: int | None
    """Running and waiting ones."""
    used_tokens: int | None
    """Tokens in the pages of the device that these requests use."""


def metrics_of(text: bytes, dp_rank: int) -> EngineMetrics:
    """Read the metrics of vLLM or SGLang. Without a label for the rank, the first sample of a name counts.

    Raises ValueError for a sample without a number.
    """
    samples: dict[bytes, dict[bytes, float]] = {}
    for vllm, sglang, given, number in _SAMPLE.findall(text):
        labels: dict[bytes, bytes] = dict(_LABEL.findall(given))
        value = float(number)
        if vllm == b"cache_config_info":
            blocks, size = labels.get(b"num_gpu_blocks", b""), labels.get(b"block_size", b"")
            value = float(blocks) * float(size) if blocks.isdigit() and size.isdigit() else -1.0
        rank = labels.get(b"engine", labels.get(b"dp_rank", b""))
        samples.setdefault(vllm or sglang, {}).setdefault(rank, value)

    def of_rank(*names: bytes) -> float:
        found = next((samples[name] for name in names if name in samples), {b"": -1.0})
        return found.get(b"%d" % dp_rank, next(iter(found.values())))

    room = _believed(of_rank(b"cache_config_info", b"max_total_num_tokens")) or None
    counts = of_rank(b"num_requests_running", b"num_running_reqs"), of_rank(b"num_requests_waiting", b"num_queue_reqs")
    used = of_rank(b"num_used_tokens")
    if used < 0 and room is not None:
        used = room * of_rank(b"kv_cache_usage_perc", b"token_usage")
    return EngineMetrics(room, _believed(sum(counts) if min(counts) >= 0 else -1.0), _believed(used))


def _believed(value: float) -> int | None:
    return round(value) if 0 <= value < _MOST else None


def place_of(url: str) -> str:
    """Return HOST:PORT of an address of HTTP."""
    parts = urlsplit(url)
    default = 443 if parts.scheme == "https" else 80
    return parts.netloc if re.search(r":\d+$", parts.netloc) else f"{parts.netloc}:{default}"
