"""What the kernel reads in a head is what httptools reads in it."""

from typing import Any

import httptools
from hypothesis import example, given, settings
from hypothesis import strategies as st

from api.access.tokens import TokenRegistry
from api.fast.heads import HeadReader
from api.settings import ApiSettings
from tests.support.effort import num_examples

names = st.sampled_from(
    b"Content-Length,CONTENT-TYPE,host,Host,Authorization,traceparent,tracestate,Connection,Expect,Upgrade,x,"
    b"X-Request-Id,Content-Lengthy,Transfer-Encoding,Proxy-Connection,Content-Encoding".split(b",")
) | st.binary(max_size=3)
given_values = b"5|05|+5|application/json|application/msgpack; x|text/plain|h|h:80|a b|Bearer x|keep-alive|Keep-Alive|"
values = st.sampled_from([*given_values.split(b"|"), b"close"]) | st.binary(max_size=4)
separators = st.sampled_from([b": ", b":", b":\t ", b" : ", b""])
ends = st.sampled_from([b"\r\n"] * 8 + [b"\n", b" \r\n", b"\r\n "])
lines = st.lists(st.tuples(names, separators, values, ends).map(b"".join), max_size=4)
USUAL = [b"Host: h\r\n", b"Content-Type: application/json\r\n", b"Content-Length: 5\r\n"]


class Seen:
    """What httptools reports."""

    def __init__(self, data: bytes) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_complete = False
        self.parser: Any = httptools.HttpRequestParser(self)
        self.parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.is_complete = True


@settings(max_examples=num_examples(2_000))
@given(lines, st.permutations(range(len(USUAL))), st.integers(0, 4), st.booleans())
@example([b"x: \x7f\r\n"], [0, 1, 2], 0, False)
@example([b"x: \xff\r\n", b"x:\r\n"], [0, 1, 2], 0, False)
@example([b"tracestate: a\r\n"] * 2, [0, 1, 2], 0, False)
def test_a_head_that_is_accepted_says_what_httptools_reads(
    others: list[bytes], order: list[int], place: int, is_cut: bool
) -> None:
    usual = [USUAL[number] for number in order]
    data = b"".join([b"POST /query HTTP/1.1\r\n", *usual[:place], *others, *usual[place:], b"\r\n"])
    read = HeadReader(["/query"], TokenRegistry(ApiSettings()), 2**20, with_traces=True).read(
        data[:-1] if is_cut else data
    )
    if read is None:
        return
    head, end = read
    seen = Seen(data[:end])
    headers = dict(seen.headers)
    assert seen.is_complete
    assert seen.parser.should_keep_alive()
    assert not {b"transfer-encoding", b"upgrade", b"expect", b"content-encoding"} & set(headers)
    assert head.content_length == int(headers[b"content-length"])
    assert head.caller.lines == (headers[b"content-type"], headers[b"host"], b"")
    traces = {name.encode(): value for name, value in head.trace}
    assert traces == {name: value for name, value in headers.items() if name in (b"traceparent", b"tracestate")}


def test_usual_heads_are_accepted_in_any_order_with_any_other_lines() -> None:
    heads = HeadReader(["/query"], TokenRegistry(ApiSettings()), 2**20)
    own = [b"traceparent: 00-1\r\n", b"x-request-id:\t7\r\n", b"X-Empty:\r\n", b"CONNECTION: Keep-Alive\r\n"]
    for shift in range(7):
        lines = [*USUAL, *own]
        data = b"".join([b"POST /query HTTP/1.1\r\n", *lines[shift:], *lines[:shift], b"\r\n"])
        read = heads.read(data + b"[1,2]")
        assert read is not None
        assert read[1] == len(data)
        assert all(heads.read(data[:end]) is None for end in range(len(data)))
