"""What the `/metrics` of vLLM and SGLang say of a rank: its room, and its load."""

import re
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

_MOST = 2**48
# linear: a sample begins a line and ends in it, and a label begins a word
_SAMPLE = re.compile(
    rb"^(?:vllm:(cache_config_info|num_requests_running|num_requests_waiting|kv_cache_usage_perc)"
    rb"|sglang:(max_total_num_tokens|num_running_reqs|num_queue_reqs|token_usage|num_used_tokens))"
    rb"(?:\{(.*)\})? ([0-9.e+-]{1,24})",
    re.MULTILINE,
)
_LABEL = re.compile(rb'\b(\w+)="([^"]*)"')


class EngineMetrics(NamedTuple):
    """What an engine says of one of its ranks. None: it does not say it, or nothing that can be true."""

    room: int | None
    """Tokens for which its device has room."""
    requests: int | None
    """Running and waiting ones."""
    used_tokens: int | None
    """Tokens in the pages of the device that these requests use."""


def metrics_of(text: bytes, dp_ranks: Iterable[int]) -> list[EngineMetrics]:
    """Return what vLLM or SGLang say of each rank. Without a label for a rank, the first sample of a name counts.

    Raises ValueError for a sample without a number.
    """
    samples: dict[bytes, dict[bytes, float]] = {}
    for sample in _SAMPLE.finditer(text):  # lets other threads run, as `findall` does not
        vllm, sglang, given, number = sample.groups(b"")
        labels: dict[bytes, bytes] = dict(_LABEL.findall(given))
        value = float(number)
        if vllm == b"cache_config_info":
            blocks, size = labels.get(b"num_gpu_blocks", b""), labels.get(b"block_size", b"")
            value = float(blocks) * float(size) if blocks.isdigit() and size.isdigit() else -1.0
        rank = labels.get(b"engine", labels.get(b"dp_rank", b""))
        samples.setdefault(vllm or sglang, {}).setdefault(rank, value)

    def of_rank(rank: bytes, *names: bytes) -> float:
        found = next((samples[name] for name in names if name in samples), {b"": -1.0})
        return found.get(rank, next(iter(found.values())))

    said = []
    for rank in (b"%d" % dp_rank for dp_rank in dp_ranks):
        room = _believed(of_rank(rank, b"cache_config_info", b"max_total_num_tokens")) or None
        names = (b"num_requests_running", b"num_running_reqs"), (b"num_requests_waiting", b"num_queue_reqs")
        counts = [of_rank(rank, *each) for each in names]
        used = of_rank(rank, b"num_used_tokens")
        if used < 0 and room is not None:
            used = room * of_rank(rank, b"kv_cache_usage_perc", b"token_usage")
        said.append(EngineMetrics(room, _believed(sum(counts) if min(counts) >= 0 else -1.0), _believed(used)))
    return said


def _believed(value: float) -> int | None:
    return round(value) if 0 <= value < _MOST else None


def place_of(url: str) -> str:
    """Return HOST:PORT of an address of HTTP."""
    parts = urlsplit(url)
    default = 443 if parts.scheme == "https" else 80
    return parts.netloc if re.search(r":\d+$", parts.netloc) else f"{parts.netloc}:{default}"
