"""The nonce rule as transcripts: chunks in, events out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guestd.lane import LINE_LENGTH, Data, Framer, Opened

A = b"COCOON-LANE 1 " + b"a" * 32 + b"\n"
B = b"COCOON-LANE 1 " + b"b" * 32 + b"\n"
NOT_LINES = [
    b"",
    A[:-1],
    A[:-1] + b"\r",
    A[:-1] + b"a\n",
    A.replace(b"a", b"A"),
    A.replace(b" 1 ", b" 2 "),
    A.replace(b" 1 ", b"  1 "),
]


def test_line_length_is_that_of_a_line() -> None:
    assert len(A) == LINE_LENGTH


@pytest.mark.parametrize("line", NOT_LINES)
def test_framer_opens_only_for_a_well_formed_line(line: bytes) -> None:
    assert Framer().feed(line) == []


TRANSCRIPTS: dict[str, list[tuple[bytes, list[Opened | Data]]]] = {
    "line_alone": [(A, [Opened(A)])],
    "line_then_data": [(A + b"hello", [Opened(A), Data(b"hello")])],
    "data_keeps_its_chunks": [(A, [Opened(A)]), (b"one", [Data(b"one")]), (b"two", [Data(b"two")])],
    "nothing_opens_without_a_line": [(b"old bytes\n", []), (b"more", [])],
    "bytes_before_a_line_are_dropped": [(b"old bytes" + A + b"new", [Opened(A), Data(b"new")])],
    "line_over_two_chunks": [(b"old" + A[:20], []), (A[20:] + b"x", [Opened(A), Data(b"x")])],
    "half_line_before_a_whole_one": [(A[:30], []), (A, [Opened(A)])],
    "line_after_a_long_junk": [(b"j" * 100_000 + A[:-1], []), (b"\n", [Opened(A)])],
    "second_line_alone": [(A, [Opened(A)]), (B, [Opened(B)]), (b"x", [Data(b"x")])],
    "second_line_with_data_is_data": [(A, [Opened(A)]), (B + b"x", [Data(B + b"x")])],
    "of_lines_in_a_row_the_last_counts": [(A + B + b"x", [Opened(B), Data(b"x")])],
    "of_lines_in_a_row_the_last_counts_while_open": [(A, [Opened(A)]), (A + B, [Opened(B)])],
    "half_a_line_while_open_is_data": [(A, [Opened(A)]), (B[:20], [Data(B[:20])]), (B[20:], [Data(B[20:])])],
    "line_inside_data_is_data": [(A, [Opened(A)]), (b"x" + B, [Data(b"x" + B)])],
    "malformed_line_while_open_is_data": [(A, [Opened(A)]), (B[:-1] + b"!", [Data(B[:-1] + b"!")])],
    "empty_chunk": [(b"", []), (A, [Opened(A)]), (b"", [])],
}


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_framer_transcript(name: str) -> None:
    framer = Framer()
    for chunk, events in TRANSCRIPTS[name]:
        assert framer.feed(chunk) == events


def test_framer_drops_what_follows_a_close_until_the_next_line() -> None:
    framer = Framer()
    framer.feed(A)
    framer.closed()
    assert framer.feed(b"late bytes") == []
    assert framer.feed(B + b"x") == [Opened(B), Data(b"x")]


def test_framer_forgets_half_a_line_when_closed() -> None:
    framer = Framer()
    framer.feed(A[:20])
    framer.closed()
    assert framer.feed(A[20:]) == []


@given(
    junk=st.binary(max_size=200),
    content=st.binary(max_size=200),
    cuts=st.lists(st.integers(0, 500), max_size=12),
)
def test_framer_opens_at_the_same_place_however_the_stream_is_split(
    junk: bytes, content: bytes, cuts: list[int]
) -> None:
    stream = junk + A + content
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    framer = Framer()
    events = [e for a, b in pairwise(edges) for e in framer.feed(stream[a:b])]
    assert events[0] == Opened(A)
    assert b"".join(event.data for event in events[1:] if isinstance(event, Data)) == content
    assert len([event for event in events if isinstance(event, Opened)]) == 1


@given(st.lists(st.binary(max_size=300), max_size=20))
def test_framer_keeps_no_more_than_part_of_a_line(chunks: list[bytes]) -> None:
    framer = Framer()
    for chunk in chunks:
        framer.feed(chunk)
        assert len(framer._tail) < LINE_LENGTH
