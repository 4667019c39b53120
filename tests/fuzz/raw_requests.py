"""Raw HTTP: streams of bytes that are nearly requests, in packets. A seed and a number determine each stream."""

import itertools
import random

import msgspec
import numpy as np

from tests.rigs.raw_http import QUERY, TOKENS, body_of, request

USUAL = request(QUERY)
"""The request that makes a connection direct."""
LAST = b"GET /health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
"""The end of each stream. Its answer shows that a connection is still open and in step."""

_BODIES = [
    *[body_of(token_ids=TOKENS[:end]) for end in (1, 4, 9, 16)],
    body_of(token_ids=list(range(5000))),
    body_of(token_ids=[1.5]),
    body_of(token_ids=TOKENS, tier_weights=[1, 0.5, 0.25, 0.1]),
    body_of(model_name="unknown", token_ids=TOKENS),
    body_of(seq_hashes=[1, 2**64 - 1]),
    b'{"queries":[' + QUERY + b"," + body_of() + b"]}",
    QUERY.replace(b" ", b""),
    QUERY.replace(b" ", b"\r\n"),
    QUERY[:-1],
    QUERY + b"x",
    QUERY + b" ",
    b"",
    b"\xff\x00",
    LAST,
]  # fmt: skip
_PACKED = [
    msgspec.msgpack.encode(body)
    for tokens in (np.array(TOKENS, "<u4").tobytes(), b"\x05\0\0\0", b"", b"123", TOKENS)
    for body in ({"model_name": "m", "token_ids": tokens}, {"token_ids": tokens, "model_name": "m", "is_eagle": True})
]
_PATHS = [
    b"/query", b"/query_by_hash", b"/query/batch", b"/health", b"/ready", b"/workers", b"/decisions", b"/register",
    b"/explain", b"/tokenize", b"/workers/1/resync",
]  # fmt: skip
_ODD_PATHS = [
    b"/query?", b"/query?a=b", b"/query/", b"//query", b"/./query", b"/x/../query", b"/%71uery", b"/query%00",
    b"/query#x", b"http://h/query", b"http://other:1/query", b"https://h", b"*", b"", b"query", b"/\xff", b"/a b",
    b"/query\t", b"h:443", b"/" + b"x" * 3000, b"/health?" + b"y" * 17_000, b"http://[::1/query", b"/query;a",
    b"\\query", b"/%zz",
]  # fmt: skip
_METHODS = [
    b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE", b"PATCH", b"CONNECT", b"TRACE", b"post", b"PRI", b"FOO", b"",
    b"M-SEARCH", b"POST ", b" POST", b"PO\x00ST", b"QUERY",
]  # fmt: skip
_VERSIONS = [
    b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1.2", b"HTTP/3", b"http/1.1", b"HTTP/1.1 ", b"HTTP/1.10", b"",
    b"HTTP/", b"HTTQ/1.1", b"HTTP/11", b"RTSP/1.0", b"ICE/1.0",
]  # fmt: skip
_HEADERS = [
    b"Host: h", b"Host: other", b"Host:", b"Host: a b", b"Host: h:80", b"host:h", b"Host : h", b"Host: a/b",
    b"Content-Type: application/msgpack", b"Content-Type: text/plain", b"Content-Type: application/json; charset=utf-8",
    b"Content-Type:", b"Content-Encoding: gzip", b"Content-Encoding: identity", b"content-encoding: br, gzip",
    b"Connection: close", b"Connection: keep-alive", b"Connection: upgrade", b"Connection: x, close", b"Connection:",
    b"Upgrade: websocket", b"Upgrade: h2c", b"Expect: 100-continue", b"Expect: x", b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: chunked, identity", b"Transfer-Encoding: identity",
    b"Transfer-Encoding:\tchunked", b"Transfer-Encoding: xchunked", b"Content-Length: 0", b"Content-Length: 5",
    b"Content-Length: +5", b"Content-Length: 0x5", b"Content-Length: -1", b"Content-Length: 5, 5", b"Content-Length:",
    b"Content-Length: 99999999999999999999999", b"Content-Length: 40000000", b"Content-Length: 0005",
    b"Authorization: Bearer x", b"Origin: http://evil", b"Sec-Fetch-Site: cross-site", b"X-Request-ID: r", b"X: y",
    b"X: \x00", b"X: \xff", b"X\x01: y", b": y", b"X", b" folded", b"\tfolded", b"X: " + b"y" * 3000,
    b"X: " + b"y" * 17_000,
    b"Te: trailers", b"Range: bytes=0-1", b"If-None-Match: *", b"X: a\rb", b"X: a\nb", b"Proxy-Connection: close",
]  # fmt: skip
_ENDS = [b"\n", b"\r", b"\r\r\n", b"\n\r", b" \r\n", b"\r\n\r\n", b""]
_CHUNKED = b"Transfer-Encoding: chunked"
_SIZES = [
    b"%x", b"%X", b"00%x", b"%x;a=b", b'%x;a="b;\r"', b"%x ", b" %x", b"0x%x", b"-%x", b"%xg", b"%x\n", b"%x;",
    b"f%x",
]  # fmt: skip
_TAILS = [
    b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"0\r\nHost: t\r\n\r\n", b"0\n\n", b"00\r\n\r\n",
    b"0\r\nX\r\n\r\n", b"0\r\n", b"",
]  # fmt: skip
_GARBAGE = [
    b"garbage", b"\x00", b"\r\n", b"\n", b"\r\n\r\n", b"\xff" * 40, b"GET", b"{}", b"\x16\x03\x01\x02\x00",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b" ", b"0\r\n\r\n",
]  # fmt: skip


def stream(seed: int, number: int) -> list[bytes]:
    """Return the packets of a stream."""
    choices = random.Random(f"{seed} {number}")
    parts = [_request(choices) for _ in range(choices.choice((1, 1, 1, 1, 2, 2, 3, 5)))]
    if choices.random() < 0.15:
        parts.insert(choices.randrange(len(parts) + 1), choices.choice(_GARBAGE))
    if choices.random() < 0.2:
        place = choices.randrange(len(parts))
        parts[place] = _mutated(choices, parts[place])
    data = b"".join(parts)
    packets = _packets(choices, data)
    if choices.random() < 0.5:
        return [*packets, LAST]
    return [*packets[:-1], packets[-1] + LAST]


def _request(choices: random.Random) -> bytes:
    if choices.random() < 0.3:
        return request(choices.choice(_BODIES[:6]), extra=_own_lines(choices))  # as `USUAL`, apart from the numbers
    if choices.random() < 0.15:
        return request(choices.choice(_PACKED), content_type="application/msgpack", extra=_own_lines(choices))
    body = choices.choice(_BODIES)
    method, path, version = b"POST", choices.choice(_PATHS[:3]), b"HTTP/1.1"
    if choices.random() < 0.3:
        method, path = b"GET", choices.choice(_PATHS)
    match choices.randrange(16):
        case 0:
            method = choices.choice(_METHODS)
        case 1 | 2:
            path = choices.choice(_ODD_PATHS)
        case 3:
            version = choices.choice(_VERSIONS)
        case 4:
            path = choices.choice(_PATHS)
    headers = [b"Host: h", b"X-Request-ID: r", b"Content-Type: application/json"]
    if choices.random() < 0.2:
        headers.append(_CHUNKED)
        body = _chunked(choices, body)
    elif method == b"POST" or choices.random() < 0.2:
        headers.append(b"Content-Length: %d" % max(0, len(body) + choices.choice((0,) * 12 + (1, -1, 40))))
    else:
        body = b""
    for _ in range(choices.choice((0, 0, 0, 1, 1, 2))):
        headers.insert(choices.randrange(len(headers) + 1), choices.choice(_HEADERS))
    if choices.random() < 0.1:
        del headers[choices.randrange(len(headers))]
    lines = [b" ".join((method, path, version)), *headers, b""]
    ends = [b"\r\n"] * len(lines)
    if choices.random() < 0.08:
        ends[choices.randrange(len(ends))] = choices.choice(_ENDS)
    if choices.random() < 0.04:
        ends = [choices.choice(_ENDS)] * len(lines)
    return b"".join(itertools.chain.from_iterable(zip(lines, ends, strict=True))) + body


def _own_lines(choices: random.Random) -> bytes:
    """Return lines of a head that do not matter, and now and then one that does."""
    lines = [b"traceparent: 00-%032x-01" % choices.getrandbits(128), b"X-Request-ID: %x" % choices.getrandbits(40)]
    lines += [choices.choice(_HEADERS)] if choices.random() < 0.3 else []
    lines += [bytes(choices.choices(range(256), k=3)) + b": y"] if choices.random() < 0.1 else []
    lines += [b"X: " + bytes(choices.choices(range(256), k=3))] if choices.random() < 0.1 else []
    return b"".join(line + b"\r\n" for line in choices.sample(lines, choices.randint(0, len(lines))))


def _chunked(choices: random.Random, body: bytes) -> bytes:
    cut = choices.randrange(len(body) + 1)
    chunks = b""
    for part in filter(None, (body[:cut], body[cut:])):
        size = choices.choice(_SIZES) if choices.random() < 0.1 else b"%x"
        chunks += size % len(part) + b"\r\n" + part + (choices.choice(_ENDS) if choices.random() < 0.05 else b"\r\n")
    return chunks + choices.choice(_TAILS[: 2 if choices.random() < 0.8 else None])


def _mutated(choices: random.Random, data: bytes) -> bytes:
    for _ in range(choices.randint(1, 3)):
        at, length = choices.randrange(len(data) + 1), choices.choice((1, 1, 2, 5, 30))
        piece = bytes([choices.choice(b"\r\n \t:,;0159aAf\x00\x7f\x80\xff")])
        match choices.randrange(5):
            case 0:
                data = data[:at] + piece + data[at + 1 :]
            case 1:
                data = data[:at] + piece + data[at:]
            case 2:
                data = data[:at] + data[at + length :]
            case 3:
                data = data[: at + length] + data[at:]
            case 4:
                data = data[:at]
    return data


def _packets(choices: random.Random, data: bytes) -> list[bytes]:
    """Cut the data at random places, or beside the end of a head."""
    places = {choices.randrange(len(data) + 1) for _ in range(choices.choice((0, 0, 0, 1, 2, 6)))}
    head = data.find(b"\r\n\r\n")
    if head >= 0 and choices.random() < 0.3:
        places.add(head + choices.randrange(5))
    return [data[start:end] for start, end in itertools.pairwise([0, *sorted(places), len(data)])]
