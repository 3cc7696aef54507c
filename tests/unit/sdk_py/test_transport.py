from __future__ import annotations

import ssl
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from cocoon.node.v1 import node_service_pb2, node_service_pb2_grpc
from cocoonsandbox import APIError, Client, SandboxError
from cocoonsandbox._transport import Channels, check_token, credentials, parse_address


@pytest.mark.parametrize(
    ("addr", "expected"),
    [
        ("127.0.0.1:7777", ("127.0.0.1:7777", "")),
        ("node-1.example:1", ("node-1.example:1", "")),
        ("[::1]:7777", ("[::1]:7777", "")),
        (" a:1 , b:2,c:3", ("a:1", "")),
        ("http://a:8080", ("a:8080", "http")),
        ("http://a/", ("a:80", "http")),
        ("https://a", ("a:443", "https")),
        ("HTTPS://a:65535", ("a:65535", "https")),
    ],
)
def test_address_is_host_and_port_or_an_origin(addr: str, expected: tuple[str, str]) -> None:
    assert parse_address(addr) == expected


@pytest.mark.parametrize(
    "addr",
    [
        "", ",", " ", "host", ":7777", "host:", "host:0", "http://host:0", "host:65536", "host:-1", "host:x",
        "::1:7777", "a\n:1", "a\x00:1", "a b:1", "a\x7f:1", "http://a:1/path", "a:1/path", "a:1?q=1", "a:1?",
        "http://a:1#f", "user@a:1", "http://user:pw@a:1", "ftp://a:1", "unix:/tmp/socket", "http://", "//a:1",
    ],
)  # fmt: skip
def test_address_of_another_form_is_refused(addr: str) -> None:
    with pytest.raises(ValueError):
        Client(addr)


@pytest.mark.parametrize("addr", ["http://me:hunter2@a:1", "me:hunter2@a:1", "a:1/?token=hunter2"])
def test_address_refused_for_a_secret_does_not_repeat_it(addr: str) -> None:
    with pytest.raises(ValueError) as caught:
        Client(addr)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("token", ["secret\n", " secret", "sec\x00ret", "secrét", "sec\tret"])
def test_token_that_cannot_travel_is_refused_without_repeating_it(token: str) -> None:
    with pytest.raises(ValueError) as caught:
        Client("a:1", token)
    assert "sec" not in str(caught.value)
    with Client("a:1") as client, pytest.raises(ValueError) as caught:
        client.attach("a:1", "sb_a", token)
    assert "sec" not in str(caught.value)


def test_token_may_be_empty_or_printable() -> None:
    check_token("", "token")
    check_token("A1-_.~+/=", "token")


def test_ssl_context_that_grpc_cannot_honour_is_refused() -> None:
    lax = ssl.create_default_context()
    lax.check_hostname = False
    with pytest.raises(ValueError, match="verifies"):
        credentials("https", lax)
    lax.verify_mode = ssl.CERT_NONE
    with pytest.raises(ValueError, match="verifies"):
        credentials("", lax)
    with pytest.raises(ValueError, match="http://"):
        credentials("http", ssl.create_default_context())


def test_tls_is_used_for_https_and_for_a_context_only() -> None:
    assert credentials("", None) is None
    assert credentials("http", None) is None
    assert credentials("https", None) is not None
    assert credentials("", ssl.create_default_context()) is not None


class _Node(node_service_pb2_grpc.NodeServiceServicer):
    def GetInfo(self, request: object, context: object) -> node_service_pb2.GetInfoResponse:
        return node_service_pb2.GetInfoResponse(name="nodes/tls")


def test_tls_reaches_a_node_with_the_roots_of_a_context(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", str(key), "-out", str(certificate), "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        node_service_pb2_grpc.add_NodeServiceServicer_to_server(_Node(), server)
        pair = [(key.read_bytes(), certificate.read_bytes())]
        port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials(pair))
        server.start()
        trusting = ssl.create_default_context(cafile=str(certificate))
        with Client(f"https://localhost:{port}", ssl_context=trusting, timeout=10) as client:
            assert client.info()["name"] == "nodes/tls"
        with Client(f"https://localhost:{port}", timeout=10) as client, pytest.raises(APIError) as caught:
            client.info()
        assert caught.value.status == 0
        server.stop(None).wait(10)


def test_channels_are_one_for_each_endpoint_until_closed() -> None:
    channels = Channels(None, 30.0)
    first = channels.get("127.0.0.1:1")
    assert channels.get("127.0.0.1:1") is first
    assert channels.get("127.0.0.1:2") is not first
    channels.close()
    channels.close()
    with pytest.raises(SandboxError, match="closed"):
        channels.get("127.0.0.1:1")


@pytest.mark.parametrize("keep_alive", [0, 0.5, 1e12])
def test_keep_alive_takes_every_length_from_zero(keep_alive: float) -> None:
    Channels(None, keep_alive).get("127.0.0.1:1").close()
