"""Kernels that receive many messages of a ZMQ socket in one call, without the interpreter lock.

They call libzmq's C functions by their addresses. Message frames, three to a message, cost a tenth of what they cost
one by one in Python.
"""

import errno
from typing import NamedTuple

import zmq

from kv_events.kernels.bundles import I64Matrix, I64Vector, U8Vector, U64Vector
from kv_events.kernels.declare import helper, inline_helper, kernel
from kv_events.kernels.instructions import address_of, call_native
from kv_events.kernels.numbers import U64, int32, int64, uint64

# elements of functions: addresses of C functions
RECEIVE, DATA, SIZE, MORE, PROPERTY, ERROR, COPY = range(7)
NUM_FUNCTIONS = 7

# elements of counts: messages and senders received; bytes of payloads and of topics; whether the payload of the next
# message waits for room; messages that are not of the protocol; number of frames and sizes of the first four, of the
# last of these and of the last message
NUM_MESSAGES, NUM_SENDERS, NUM_BYTES, NUM_TOPIC_BYTES, IS_HELD, NUM_BAD = range(6)
BAD_SHAPE, SHAPE = 6, 11
SHAPE_SIZE = 5
NUM_COUNTS = SHAPE + SHAPE_SIZE

# columns of senders: number of the first message, connection, position and length of the topic
FIRST, CONNECTION, TOPIC, TOPIC_LENGTH = range(4)
NUM_SENDER_COLUMNS = 4

MAX_TOPIC_BYTES = 4096
"""Topics are cut to this length. No longer one names a valid worker and model."""

NO_ROOM = -1
"""Result of `receive_messages`: the payload that comes next needs a larger buffer."""

_SEQ_BYTES = 8
_NO_WAIT, _CONNECTION = uint64(zmq.NOBLOCK), uint64(zmq.SRCFD)
_INTERRUPTED = errno.EINTR
_NONE = uint64(0)


class InboxArrays(NamedTuple):
    """Messages of one pass, their senders, and where libzmq's functions are."""

    functions: U64Vector
    """[7] see RECEIVE and following."""
    frame: U64Vector
    """[8] libzmq's own description of the frame received last: a `zmq_msg_t`."""
    counts: I64Vector
    """[16] see NUM_MESSAGES and following."""
    data: U8Vector
    """Payloads, one after the other."""
    borders: I64Vector
    """[n + 1] positions of payloads in `data`."""
    seqs: U64Vector
    """[n] sequence numbers, big-endian."""
    senders: I64Matrix
    """[n, 4] see FIRST and following: one row for each change of topic or connection."""
    topics: U8Vector
    """Topics of the senders."""


@inline_helper
def _call(inbox: InboxArrays, function: int, argument: U64) -> U64:
    """Call a function of the frame. Returns its result."""
    return call_native(inbox.functions[function], address_of(inbox.frame, 0), argument, _NONE)


@inline_helper
def _size(inbox: InboxArrays) -> int:
    return int64(_call(inbox, SIZE, _NONE))


@inline_helper
def _has_more(inbox: InboxArrays) -> bool:
    """Return whether the frame is not the last one of its message."""
    return int32(_call(inbox, MORE, _NONE)) != 0


@inline_helper
def _copy(inbox: InboxArrays, address: U64, num_bytes: int) -> None:
    """Copy the first bytes of the frame to memory. The caller checks the bounds."""
    call_native(inbox.functions[COPY], address, _call(inbox, DATA, _NONE), uint64(num_bytes))


@helper
def _receive_frame(inbox: InboxArrays, socket: U64) -> int:
    """Receive one frame. Returns 0, or the number of the error; EAGAIN if there is none."""
    while True:
        result = call_native(inbox.functions[RECEIVE], address_of(inbox.frame, 0), socket, _NO_WAIT)
        if int32(result) >= 0:
            return 0
        error = int64(int32(call_native(inbox.functions[ERROR], _NONE, _NONE, _NONE)))
        if error != _INTERRUPTED:
            return error


@inline_helper
def _is_last_topic(inbox: InboxArrays, at: int, length: int) -> bool:
    """Return whether the bytes at this position are the topic of the last sender."""
    counts, senders = inbox.counts, inbox.senders
    last = senders[counts[NUM_SENDERS] - 1]
    if last[TOPIC_LENGTH] != length:
        return False
    i = 0
    while i < length and inbox.topics[last[TOPIC] + i] == inbox.topics[at + i]:
        i += 1
    return i == length


@helper
def _note_sender(inbox: InboxArrays, with_topics: bool) -> None:
    """Add a row if the frame, the first of a message, has another topic or connection than the message before."""
    counts, senders = inbox.counts, inbox.senders
    connection = int64(int32(_call(inbox, PROPERTY, _CONNECTION)))
    at, length = counts[NUM_TOPIC_BYTES], int64(0)
    if with_topics:
        length = min(_size(inbox), MAX_TOPIC_BYTES)
        _copy(inbox, address_of(inbox.topics, at), length)
    number = counts[NUM_SENDERS]
    if number > 0 and senders[number - 1, CONNECTION] == connection and _is_last_topic(inbox, at, length):
        return
    row = senders[number]
    row[FIRST], row[CONNECTION], row[TOPIC], row[TOPIC_LENGTH] = counts[NUM_MESSAGES], connection, at, length
    counts[NUM_SENDERS] += 1
    counts[NUM_TOPIC_BYTES] += length


@helper
def _receive_message(inbox: InboxArrays, socket: U64, with_topics: bool) -> int:
    """Receive one message, whose last frame stays where it is. Returns 0, or the number of the error."""
    counts, num_frames, has_more = inbox.counts, 0, True
    while has_more:
        error = _receive_frame(inbox, socket)
        if error != 0:
            return error
        num_frames += 1
        size, has_more = _size(inbox), _has_more(inbox)
        if num_frames < SHAPE_SIZE:
            counts[SHAPE + num_frames] = size
        if num_frames == 1:
            _note_sender(inbox, with_topics)
        elif num_frames == 2 and size == _SEQ_BYTES:
            _copy(inbox, address_of(inbox.seqs, counts[NUM_MESSAGES]), _SEQ_BYTES)
    counts[SHAPE] = num_frames
    return 0


@inline_helper
def _is_of_protocol(inbox: InboxArrays) -> bool:
    """Return whether the last message consists of a topic, a sequence number and a payload."""
    return inbox.counts[SHAPE] == 3 and inbox.counts[SHAPE + 2] == _SEQ_BYTES


@inline_helper
def _has_room(inbox: InboxArrays, most_bytes: int) -> bool:
    """Return whether another message may be received, of any topic."""
    counts = inbox.counts
    return (
        counts[NUM_MESSAGES] + counts[NUM_BAD] < inbox.seqs.shape[0]
        and counts[NUM_SENDERS] < inbox.senders.shape[0]
        and counts[NUM_TOPIC_BYTES] + MAX_TOPIC_BYTES <= inbox.topics.shape[0]
        and counts[NUM_BYTES] < most_bytes
    )


# --- entry point ------------------------------------------------------------------------------------------------------


@kernel
def receive_messages(inbox: InboxArrays, socket: U64, with_topics: bool, most_bytes: int) -> int:
    """Receive the messages that wait, until there is no room or the payloads have `most_bytes`.

    inbox: with counts of zero, or as it was when the result was NO_ROOM. socket: libzmq's. with_topics: whether
    messages of other topics are of another sender. Returns 0, NO_ROOM, or the number of the error; EAGAIN if no more
    messages wait.
    """
    counts = inbox.counts
    while counts[IS_HELD] or _has_room(inbox, most_bytes):
        if not counts[IS_HELD]:
            error = _receive_message(inbox, socket, with_topics)
            if error != 0:
                return error
            if not _is_of_protocol(inbox):
                counts[NUM_BAD] += 1
                for i in range(SHAPE_SIZE):
                    counts[BAD_SHAPE + i] = counts[SHAPE + i]
                continue
        size, at = _size(inbox), counts[NUM_BYTES]
        counts[IS_HELD] = at + size > inbox.data.shape[0]
        if counts[IS_HELD]:
            return NO_ROOM
        if size > 0:
            _copy(inbox, address_of(inbox.data, at), size)
        counts[NUM_MESSAGES] += 1
        counts[NUM_BYTES] += size
        inbox.borders[counts[NUM_MESSAGES]] = counts[NUM_BYTES]
    return 0
