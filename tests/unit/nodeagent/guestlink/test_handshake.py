"""The host's end of the nonce rule: chunks in, the connection's first bytes out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guestd.lane import Framer, Opened
from nodeagent.guestlink import handshake
from nodeagent.guestlink.handshake import LINE_LENGTH, Handshake
from nodeagent.guestlink.lanes import LaneError

OLD_LINE = b"COCOON-LANE 1 " + b"f" * 32 + b"\n"


def test_lines_are_what_the_guest_takes_for_lines() -> None:
    line = Handshake().next_line()
    assert len(line) == LINE_LENGTH
    assert Framer().feed(line) == [Opened(line)]


def test_lines_never_repeat() -> None:
    one, two = Handshake(), Handshake()
    lines = [shake.next_line() for _ in range(300) for shake in (one, two)]
    assert len(set(lines)) == len(lines)


@pytest.mark.parametrize("before", [b"", b"old frames", OLD_LINE, OLD_LINE * 3 + b"\n", b"COCOON-LANE 1 "])
def test_all_before_the_echo_is_dropped_and_all_after_it_kept(before: bytes) -> None:
    shake = Handshake()
    line = shake.next_line()
    assert shake.feed(before + line + b"first") == b"first"


def test_an_echo_alone_opens() -> None:
    shake = Handshake()
    assert shake.feed(shake.next_line()) == b""


def test_only_the_echo_of_the_last_line_opens() -> None:
    shake = Handshake()
    first, second = shake.next_line(), shake.next_line()
    assert shake.feed(first) is None
    assert shake.feed(second) == b""


def test_the_echo_of_an_earlier_line_is_heard_until_the_next() -> None:
    shake = Handshake()
    first, _ = shake.next_line(), shake.next_line()
    assert not shake.heard
    shake.feed(b"junk" + first[:30])
    shake.feed(first[30:])
    assert shake.heard
    shake.next_line()
    assert not shake.heard


def test_another_attempts_line_is_not_heard() -> None:
    shake = Handshake()
    shake.next_line()
    assert shake.feed(OLD_LINE + Handshake().next_line()) is None
    assert not shake.heard


def test_junk_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_JUNK_LIMIT", 1000)
    shake = Handshake()
    shake.next_line()
    for _ in range(10):
        assert shake.feed(b"x" * 100) is None
    with pytest.raises(LaneError, match="never echoes"):
        shake.feed(b"x")


@given(
    before=st.lists(
        st.sampled_from([b"junk", b"C", b"COCOON-LANE 1 ", OLD_LINE, b"\n", b"\x00" * 60]), max_size=8
    ),
    after=st.binary(max_size=100),
    cuts=st.lists(st.integers(0, 700), max_size=12),
)
def test_the_stream_opens_at_the_same_place_however_it_is_split(
    before: list[bytes], after: bytes, cuts: list[int]
) -> None:
    shake = Handshake()
    earlier, line = shake.next_line(), shake.next_line()
    stream = b"".join(before) + earlier + b"".join(before) + line + after
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    got: bytes | None = None
    for start, end in pairwise(edges):
        if got is None:
            got = shake.feed(stream[start:end])
            assert len(shake._tail) < LINE_LENGTH
        else:
            got += stream[start:end]
    assert got == after
