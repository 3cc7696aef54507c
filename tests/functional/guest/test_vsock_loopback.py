"""The vsock lane as it is reached from inside a guest: root may, a user may not."""

from __future__ import annotations

import secrets

import pytest

from nodeagent.pool.provision import Guest
from tests.functional.guest.calls import python

# Prints the echo, then the type of the first HTTP/2 frame; `closed` where nothing comes.
TALK = """
import socket, sys
line = f"COCOON-LANE 1 {sys.argv[1]}\\n".encode()
sock = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
sock.settimeout(20)
if sys.argv[2] == "privileged":
    sock.bind((socket.VMADDR_CID_ANY, 1023))
sock.connect((1, 2048))
def take(count):
    got = b""
    while len(got) < count:
        try:
            part = sock.recv(count - len(got))
        except ConnectionResetError:
            part = b""
        if not part:
            print("closed after", len(got))
            sys.exit()
        got += part
    return got
try:
    sock.sendall(line)
except OSError:
    pass
print(take(47).decode().strip())
sock.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes(3) + b"\\x04" + bytes(5))
print("frame", take(9)[3])
"""


@pytest.mark.vm
async def test_vsock_from_a_privileged_port_reaches_guestd(vm_guest: Guest) -> None:
    nonce = secrets.token_hex(16)
    lines = (await python(vm_guest, TALK, nonce, "privileged")).splitlines()
    assert lines == [f"COCOON-LANE 1 {nonce}", "frame 4"]


@pytest.mark.vm
async def test_vsock_of_a_user_is_closed_without_an_echo(vm_guest: Guest) -> None:
    said = await python(vm_guest, TALK, secrets.token_hex(16), "any", user="sandbox")
    assert said == "closed after 0"


@pytest.mark.vm
async def test_vsock_of_a_user_cannot_have_a_privileged_port(vm_guest: Guest) -> None:
    script = (
        "import socket\n"
        "try: socket.socket(socket.AF_VSOCK).bind((socket.VMADDR_CID_ANY, 1023))\n"
        "except OSError as error: print(error.errno)\n"
    )
    assert await python(vm_guest, script, user="sandbox") == "13"
