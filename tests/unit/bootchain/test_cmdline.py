"""What /init makes of a kernel command line.

Its own C is compiled here with sanitizers, which end it on any overflow, undefined operation or leak.
"""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bootchain

_SOURCES = Path(bootchain.__file__).parent / "init"
_NEEDED = "cocoon.layers=layer0 cocoon.cow=cow"

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


@dataclass(frozen=True)
class Boot:
    """The harness's account of a `struct boot`."""

    layers: tuple[str, ...] = ("layer0",)
    cow: str = "cow"
    timeout_s: int = 10
    hostname: str = ""
    init: str = "/sbin/init"
    debug: bool = False
    trace: bool = False


@dataclass(frozen=True)
class Fault:
    """The one sentence that refuses a command line, and whether debugging was asked for."""

    reason: str
    debug: bool


Parse = Callable[[bytes | str], Boot | Fault]


@pytest.fixture(scope="module")
def parse(tmp_path_factory: pytest.TempPathFactory) -> Parse:
    """The parser of /init as a function."""
    harness = tmp_path_factory.mktemp("cmdline") / "harness"
    sources = [Path(__file__).with_name("cmdline_harness.c"), _SOURCES / "cmdline.c"]
    subprocess.run(
        ["gcc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-g", "-O1", "-I", _SOURCES,
         "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-o", harness, *sources],
        check=True,
    )  # fmt: skip

    def run(text: bytes | str) -> Boot | Fault:
        line = text.encode() if isinstance(text, str) else text
        done = subprocess.run([harness], input=line, capture_output=True, check=False, timeout=20)
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        kind, *lines = done.stdout.decode("latin-1").removesuffix("\n").split("\n")
        if kind == "fault":
            return Fault(lines[0], lines[1] == "1")
        layers, cow, timeout, hostname, init, debug, trace = lines
        return Boot(tuple(layers.split(",")), cow, int(timeout), hostname, init, debug == "1", trace == "1")

    return run


@pytest.mark.parametrize(
    ("words", "boot"),
    [
        ("", Boot()),
        ("cocoon.layers=a,b,c", Boot(layers=("a", "b", "c"))),
        ("cocoon.layers=" + ",".join(f"layer{i:015d}" for i in range(16)),
         Boot(layers=tuple(f"layer{i:015d}" for i in range(16)))),
        ("cocoon.cow=12345678901234567890", Boot(cow="12345678901234567890")),
        ("cocoon.timeout=0", Boot(timeout_s=0)),
        ("cocoon.timeout=86400", Boot(timeout_s=86400)),
        ("cocoon.timeout=86401", Boot(timeout_s=86400)),
        ("cocoon.timeout=99999999999999999999999", Boot(timeout_s=86400)),
        ("cocoon.hostname=a.b-9", Boot(hostname="a.b-9")),
        ("cocoon.hostname=" + "h" * 64, Boot(hostname="h" * 64)),
        ("sandbox.init=/usr/bin/tini", Boot(init="/usr/bin/tini")),
        ("sandbox.init=/" + "i" * 254, Boot(init="/" + "i" * 254)),
        ("sandbox.debug", Boot(debug=True)),
        ("sandbox.debug=1 sandbox.trace=1", Boot(debug=True, trace=True)),
        ("sandbox.debug=0 sandbox.trace=0", Boot()),
        ("cocoon.cow=first cocoon.cow=last", Boot(cow="last")),
        ("boot=cocoon-overlay quiet cocoon.later=x cocoon.layersx=y xcocoon.cow=z =", Boot()),
        ("\t cocoon.hostname=tabs \r\n", Boot(hostname="tabs")),
    ],
)  # fmt: skip
def test_cmdline_reads(parse: Parse, words: str, boot: Boot) -> None:
    """Every key has its meaning and limit, the last of a repeated one counts, unknown ones do not."""
    assert parse(f"{_NEEDED} {words}") == boot


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("", "cocoon.layers is missing"),
        ("cocoon.cow=cow", "cocoon.layers is missing"),
        ("cocoon.layers=a", "cocoon.cow is missing"),
        ("cocoon.layers= cocoon.cow=cow", "cocoon.layers: each serial"),
        ("cocoon.layers cocoon.cow=cow", "cocoon.layers: each serial"),
        ("cocoon.layers=a,,b cocoon.cow=cow", "cocoon.layers: each serial"),
        ("cocoon.layers=a, cocoon.cow=cow", "cocoon.layers: each serial"),
        ("cocoon.layers=123456789012345678901 cocoon.cow=cow", "cocoon.layers: each serial"),
        ("cocoon.layers=" + ",".join("a" * 17) + " cocoon.cow=cow", "cocoon.layers: more than 16"),
        ("cocoon.layers=a cocoon.cow=", "cocoon.cow: a serial"),
        (f"{_NEEDED} cocoon.timeout=", "cocoon.timeout"),
        (f"{_NEEDED} cocoon.timeout=-1", "cocoon.timeout"),
        (f"{_NEEDED} cocoon.timeout=1s", "cocoon.timeout"),
        (f"{_NEEDED} cocoon.hostname=", "cocoon.hostname"),
        (f"{_NEEDED} cocoon.hostname=a_b", "cocoon.hostname"),
        (f"{_NEEDED} cocoon.hostname=" + "h" * 65, "cocoon.hostname"),
        (f"{_NEEDED} sandbox.init=sbin/init", "sandbox.init"),
        (f"{_NEEDED} sandbox.init=", "sandbox.init"),
        (f"{_NEEDED} sandbox.init=/" + "i" * 255, "sandbox.init"),
    ],
)  # fmt: skip
def test_cmdline_refuses(parse: Parse, line: str, key: str) -> None:
    """A required key that is missing and a value that is malformed are refused by the key's name."""
    fault = parse(line)
    assert isinstance(fault, Fault)
    assert fault.reason.startswith(key)


def test_cmdline_tells_the_first_fault_and_still_sees_debug(parse: Parse) -> None:
    """Of two faults the first is told; `sandbox.debug` counts even behind it."""
    assert parse("cocoon.timeout=x sandbox.init=y sandbox.debug") == Fault(
        "cocoon.timeout: not a whole number of seconds", debug=True
    )


_serials = st.text(
    st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters=","), min_size=1, max_size=20
)
_hosts = st.from_regex(r"[A-Za-z0-9.-]{1,64}", fullmatch=True)
_inits = st.from_regex(r"/[!-~]{0,254}", fullmatch=True)
_strangers = st.from_regex(r"[a-z]{1,9}(=[!-~]{0,30})?", fullmatch=True)


@settings(deadline=None)  # a process per example
@given(
    layers=st.lists(_serials, min_size=1, max_size=16),
    cow=_serials,
    timeout=st.integers(0, 86400),
    hostname=_hosts,
    init=_inits,
    strangers=st.lists(_strangers, max_size=5),
    data=st.data(),
)
def test_cmdline_reads_back_what_was_written(
    parse: Parse,
    layers: list[str],
    cow: str,
    timeout: int,
    hostname: str,
    init: str,
    strangers: list[str],
    data: st.DataObject,
) -> None:
    """Any valid values come back unchanged, whatever the order and the words between them."""
    words = [
        f"cocoon.layers={','.join(layers)}",
        f"cocoon.cow={cow}",
        f"cocoon.timeout={timeout}",
        f"cocoon.hostname={hostname}",
        f"sandbox.init={init}",
        *strangers,
    ]
    assert parse(" ".join(data.draw(st.permutations(words)))) == Boot(
        tuple(layers), cow, timeout, hostname, init
    )


_KEYS = ["cocoon.layers", "cocoon.cow", "cocoon.timeout", "cocoon.hostname", "sandbox.init", "sandbox.debug"]
_pieces = st.one_of(
    st.sampled_from([k.encode() + e for k in _KEYS for e in (b"=", b"", b"=,", b" ")]),
    st.binary(max_size=40),
    st.integers(1, 6000).map(lambda n: b"x" * n),
    st.integers(1, 3000).map(lambda n: b"a," * n),
)


@settings(deadline=None)  # a process per example
@given(st.lists(_pieces, max_size=30).map(b"".join))
def test_cmdline_survives_anything(parse: Parse, line: bytes) -> None:
    """No bytes make the parser overflow: it answers, with limits kept, or refuses in one bounded sentence."""
    answer = parse(line)
    if isinstance(answer, Fault):
        assert 0 < len(answer.reason) < 256
    else:
        assert 1 <= len(answer.layers) <= 16
        assert all(1 <= len(serial) <= 20 for serial in (*answer.layers, answer.cow))
        assert answer.init.startswith("/")
