"""Mooncake traces: real arrival times and prompt lengths, with contents known only by block.

Each line is a JSON object: `timestamp` in milliseconds, `input_length` and `output_length` in tokens, and `hash_ids`,
each of which identifies a block of 512 tokens together with its prefix. Equal ids become equal tokens and different ids
different tokens, so prefixes are shared exactly as in the original.
"""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kv_events.errors import InvalidValueError
from kv_events.hashing import U32Array
from simulation.workload import Request

BLOCK_TOKENS = 512
MAX_HASH_ID = 2**53 - 1
"""Largest integer that every JSON reader represents exactly."""
MAX_OUTPUT = 2**20

_TOKEN_BITS = 17  # a vocabulary of 131,072
_POSITIONS = np.arange(BLOCK_TOKENS, dtype=np.uint64)


class _Row(NamedTuple):
    arrival_s: float
    input_length: int
    output_length: int
    hash_ids: npt.NDArray[np.uint64]


class MooncakeTrace:
    """The requests of a trace, in order of arrival. Each iteration computes the tokens again, which is cheaper than
    keeping them.

    path: `.jsonl` or `.jsonl.gz`. The whole file is checked at once; raises InvalidValueError naming the file, the
    line, the field and its value. Of outputs, only the lengths are known.
    """

    def __init__(self, path: Path) -> None:
        rows = [_row(line, f"{path}, line {number}") for number, line in _lines(path)]
        if not rows:
            raise InvalidValueError("trace", path, "at least one request")
        self._rows = sorted(rows, key=lambda row: row.arrival_s)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Request]:
        for number, row in enumerate(self._rows):
            tokens = block_tokens(row.hash_ids)[: row.input_length]
            yield Request(row.arrival_s, tokens, session=f"request-{number}", output_length=row.output_length)


def block_tokens(hash_ids: npt.NDArray[np.uint64]) -> U32Array:
    """Return uint32[512 * n]: the tokens of n blocks. hash_ids: uint64[n], at most `MAX_HASH_ID`."""
    # splitmix64 of (id, position) is a bijection on 64 bits, so that no two blocks agree in 64 tokens
    mixed = (hash_ids[:, None] * np.uint64(BLOCK_TOKENS) + _POSITIONS).reshape(-1)
    mixed += np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    return (mixed >> np.uint64(64 - _TOKEN_BITS)).astype(np.uint32)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidValueError("trace", path, f"a readable .jsonl or .jsonl.gz file ({error})") from error


def _row(line: bytes, where: str) -> _Row:
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidValueError(where, line.decode(errors="replace"), f"a JSON object ({error})") from None
    if not isinstance(fields, dict):
        raise InvalidValueError(where, fields, "a JSON object")
    given = {name: fields.get(name, "nothing") for name in ("timestamp", "input_length", "output_length", "hash_ids")}
    if not isinstance(given["hash_ids"], list):
        raise InvalidValueError(f"{where}: hash_ids", given["hash_ids"], "a list of integers")
    arrival_ms = _checked(given["timestamp"], f"{where}: timestamp", (int, float), "milliseconds, not negative")
    for name in ("input_length", "output_length"):
        _checked(given[name], f"{where}: {name}", (int,), "an integer, not negative")
    for position, hash_id in enumerate(given["hash_ids"]):
        _checked(hash_id, f"{where}: hash_ids[{position}]", (int,), f"an integer in 0 .. {MAX_HASH_ID}")
    if given["output_length"] > MAX_OUTPUT:
        raise InvalidValueError(f"{where}: output_length", given["output_length"], f"0 .. {MAX_OUTPUT}")
    input_length, num_blocks = given["input_length"], len(given["hash_ids"])
    if not 1 <= input_length <= num_blocks * BLOCK_TOKENS:
        expected = f"1 .. {num_blocks * BLOCK_TOKENS}: {num_blocks} hash_ids of {BLOCK_TOKENS} tokens"
        raise InvalidValueError(f"{where}: input_length", input_length, expected)
    return _Row(arrival_ms / 1000, input_length, given["output_length"], np.array(given["hash_ids"], np.uint64))


def _checked(value: Any, where: str, kinds: tuple[type, ...], expected: str) -> float:
    if type(value) not in kinds or not 0 <= value <= MAX_HASH_ID:
        raise InvalidValueError(where, value, expected)
    return float(value)
