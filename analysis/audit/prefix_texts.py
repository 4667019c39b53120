"""Prefixes as text, of a log whose publishers send tokens (`KVSIGHT_WITH_TOKENS`)."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import msgspec
import numpy as np

from analysis.audit.report import HotPrefix
from kv_events.codec import stores_with_tokens
from kv_events.log.reader import RecordChunk
from kv_events.records import Channel

_MOST_CHARACTERS = 32


def with_texts(
    prefixes: Sequence[HotPrefix], chunks: Iterable[RecordChunk], text_of: Callable[[list[int]], str]
) -> list[HotPrefix]:
    """Return prefixes with the beginning of their first page and the end of their last one.

    chunks: the log. It is read up to the last of these pages. text_of: makes a text of tokens.
    """
    wanted = np.unique([page for each in prefixes for page in (each.first_page, each.sequence_hash)]).astype(np.uint64)
    found: dict[int, str] = {}
    for chunk in chunks:
        if len(found) == len(wanted):
            break
        for row in np.flatnonzero(chunk.channels == Channel.EVENTS).tolist():
            with suppress(msgspec.DecodeError, ValueError):  # of records that break the contract
                for event in stores_with_tokens(chunk.record(row).payload):
                    hashes = np.frombuffer(event.sequence_hashes, "<u8")
                    tokens = np.frombuffer(event.token_ids or b"", "<u4").reshape(len(hashes), -1)
                    for place in np.flatnonzero(np.isin(hashes, wanted)).tolist():
                        found.setdefault(int(hashes[place]), " ".join(text_of(tokens[place].tolist()).split()))
    texts = []
    for each in prefixes:
        begin, end = found.get(each.first_page, ""), found.get(each.sequence_hash, "")
        text = f"{begin[:_MOST_CHARACTERS]} … {end[-_MOST_CHARACTERS:]}" if begin or end else ""
        texts.append(msgspec.structs.replace(each, text=text))
    return texts
