"""What the `/metrics` of vLLM and SGLang say: the room of an engine, and its load."""

import re
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


def load_of(text: bytes, dp_rank: int, room: int) -> tuple[int, int]:
    """Return the requests of a rank, running and waiting, and the tokens in the pages of its device that they use.

    Samples count as in `tokens_of`. room: tokens on the device, 0 if unknown. Raises ValueError.
    """
    samples: dict[bytes, dict[bytes, float]] = {}
    for name, labels, number in _LOAD.findall(text):
        samples.setdefault(name, {}).setdefault(_rank(labels), float(number))
    load = {name: found.get(b"%d" % dp_rank, next(iter(found.values()))) for name, found in samples.items()}
    running = load.get(b"num_requests_running", load.get(b"num_running_reqs", -1))
    waiting = load.get(b"num_requests_waiting", load.get(b"num_queue_reqs", -1))
    tokens = load.get(b"num_used_tokens", load.get(b"kv_cache_usage_perc", load.get(b"token_usage", 0.0)) * room)
    if not all(0 <= each < _MAX_TOKENS for each in (running, waiting, tokens)):
        raise ValueError(f"{running:g} running and {waiting:g} waiting requests with {tokens:g} tokens")
    return int(running + waiting), round(tokens)


def _rank(labels: bytes) -> bytes:
    """Return the DP rank of a sample, or b"" if it names none."""
    found: dict[bytes, bytes] = dict(_LABEL.findall(labels))
    return found.get(b"engine", found.get(b"dp_rank", b""))


def place_of(url: str) -> str:
    """Return HOST:PORT of an address of HTTP."""
    parts = urlsplit(url)
    default = 443 if parts.scheme == "https" else 80
    return parts.netloc if re.search(r":\d+$", parts.netloc) else f"{parts.netloc}:{default}"
