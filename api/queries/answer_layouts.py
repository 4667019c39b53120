"""The layout of answers, taken from the structs that describe them: fixed texts, and gaps for numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
import numpy as np

from api.fast.answer_kernels import AGE, CPU, DISK, EXTERNAL, GPU, MARGIN, RANKS, STATE, Layout, Texts
from indexer.views import STATES
from kv_events.http.queries import PeerInstance, RfcInstance

_TOKENS = {GPU: 1000001, CPU: 1000002, DISK: 1000003, EXTERNAL: 1000004}
_AGE_MS, _RANK, _RANK_TOKENS, _STATE = 1000005, 1000006, 1000007, "?"
_GAPS = {str(tokens).encode(): tier for tier, tokens in _TOKENS.items()} | {
    str(_AGE_MS).encode(): AGE,
    b'"%d":%d' % (_RANK, _RANK_TOKENS): RANKS,
    _STATE.encode(): STATE,
}
_GAP = re.compile(b"|".join(re.escape(gap) for gap in sorted(_GAPS, key=len, reverse=True)))


def texts(pieces: Iterable[bytes]) -> Texts:
    """Join pieces of text."""
    held = list(pieces)
    data = np.frombuffer(bytearray(b"".join(held).ljust(sum(map(len, held)) + MARGIN)), np.uint8)
    return Texts(data, np.cumsum([0, *map(len, held)], dtype=np.int64))


def layout_of(instance: PeerInstance | RfcInstance) -> Layout:
    """Return the layout of a dialect. instance: one whose values are those of `_GAPS`."""
    text = b":" + msgspec.json.encode(instance).removesuffix(b"}")
    has_scores = np.array([isinstance(instance, PeerInstance)])
    gaps = np.array([_GAPS[gap] for gap in _GAP.findall(text)], np.uint8)
    return Layout(texts(_GAP.split(text)[:-1]), gaps, texts(state.value.encode() for state in STATES), has_scores)


_SHARED = {"longest_matched": _TOKENS[EXTERNAL], "gpu": _TOKENS[GPU], "cpu": _TOKENS[CPU]}
_SHARED |= {"disk": _TOKENS[EXTERNAL], "external": _TOKENS[EXTERNAL], "age_ms": _AGE_MS}
PEER = layout_of(PeerInstance(**_SHARED, dp={_RANK: _RANK_TOKENS}, state=_STATE))  # type: ignore[arg-type]
RFC = layout_of(RfcInstance(**_SHARED, dp={_RANK: _RANK_TOKENS}, state=_STATE))  # type: ignore[arg-type]
