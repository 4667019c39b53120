"""The kernel that reads the lines of an HTTP/1.1 head: it finds those that matter, and checks the characters of all."""

import numpy as np

from kv_events.kernels.bundles import BytesInput, I64Matrix, U8Input
from kv_events.kernels.declare import inline_helper, kernel
from kv_events.kernels.numbers import int64, uint8

_READ = (
    *(b"content-length", b"content-type", b"host", b"authorization", b"traceparent", b"tracestate", b"origin"),
    *(b"sec-fetch-site", b"connection"),
)
_REFUSED = (b"content-encoding", b"expect", b"proxy-connection", b"transfer-encoding", b"upgrade")
"""Requests with one of these lines are passed to FastAPI."""

(
    *(CONTENT_LENGTH, CONTENT_TYPE, HOST, AUTHORIZATION, TRACE_PARENT, TRACE_STATE, ORIGIN, FETCH_SITE),
    _CONNECTION,
) = range(len(_READ))
"""Rows of `found`."""
NUM_FOUND = len(_READ)

MAX_HEAD_BYTES = 2**13
"""Requests whose lines are longer are passed to FastAPI."""
PASS_ON = -1
"""Another parser must read the head, or the rest of it has not arrived."""

_KEEP_ALIVE = np.frombuffer(b"keep-alive", np.uint8)
_NAMES = np.frombuffer(b"".join(_READ + _REFUSED), np.uint8)
_ENDS = np.cumsum([0, *map(len, _READ + _REFUSED)], dtype=np.int64)
_LONGEST = max(map(len, _READ + _REFUSED))
_HAS_LENGTH = np.isin(np.arange(_LONGEST + 1), np.diff(_ENDS))

_CR, _LF, _COLON, _SPACE, _TAB, _CASE = (uint8(ord(char)) for char in "\r\n: \t ")
# characters of RFC 9110: those of a name (5.6.2), and those of a value (5.5)
_IN_NAME = np.isin(
    np.arange(256), list(b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
)
_IN_VALUE = (np.arange(256) >= ord(" ")) & (np.arange(256) != 127) | (np.arange(256) == ord("\t"))


@inline_helper
def _is_word(data: U8Input, start: int, end: int, words: U8Input, first: int, last: int) -> bool:
    """Return whether `data[start:end]` is `words[first:last]`, which is in lower case, in any case."""
    if end - start != last - first:
        return False
    i = 0
    while start + i < end and data[start + i] | _CASE == words[first + i]:
        i += 1
    return start + i == end


@inline_helper
def _line_of(data: U8Input, start: int, end: int) -> int:
    """Return the number of a name among those that matter, or -1."""
    if end - start <= _LONGEST and _HAS_LENGTH[end - start]:
        for line in range(len(_ENDS) - 1):
            if _is_word(data, start, end, _NAMES, _ENDS[line], _ENDS[line + 1]):
                return line
    return -1


@kernel
def read_head(data: BytesInput, start: int, stop: int, found: I64Matrix) -> int:
    """Read the lines of a head, from `start` up to and including the empty line.

    stop: end of what has arrived. found: int64[NUM_FOUND, 2], written: begin and end of the
    value of each line that matters, 0 and 0 if it is missing. Returns the end of the head, or PASS_ON: also for lines
    that occur twice, are empty or end with white space, and for a connection that is not kept.
    """
    found[:] = 0
    at, stop = start, min(stop, start + MAX_HEAD_BYTES)
    while at + 1 < stop and data[at] != _CR:
        begin = at
        while at < stop and _IN_NAME[data[at]]:
            at += 1
        if at in (begin, stop) or data[at] != _COLON:
            return int64(PASS_ON)
        line = _line_of(data, begin, at)
        at += 1
        while at < stop and (data[at] == _SPACE or data[at] == _TAB):
            at += 1
        begin = at
        while at < stop and _IN_VALUE[data[at]]:
            at += 1
        if at + 1 >= stop or data[at] != _CR or data[at + 1] != _LF:
            return int64(PASS_ON)
        if line >= 0:
            is_plain = at > begin and data[at - 1] != _SPACE and data[at - 1] != _TAB
            if line >= NUM_FOUND or found[line, 1] > 0 or not is_plain:
                return int64(PASS_ON)
            found[line, 0], found[line, 1] = begin, at
        at += 2
    if at + 1 >= stop or data[at + 1] != _LF:
        return int64(PASS_ON)
    begin, end = found[_CONNECTION, 0], found[_CONNECTION, 1]
    if end > 0 and not _is_word(data, begin, end, _KEEP_ALIVE, 0, len(_KEEP_ALIVE)):
        return int64(PASS_ON)
    return at + 2
