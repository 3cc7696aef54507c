"""The log is JSON lines, and no secret is in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from cocoon.guest.host.v1 import host_service_pb2
from cocoon.node.v1 import pool_service_pb2
from cocoon.node.v1 import sandbox_service_pb2 as pb
from cocoon.types.v1 import sandbox_pb2
from nodeagent.telemetry.logs import loggable

PROGRAM = """
import logging, structlog
from nodeagent.telemetry import logs
logs.configure("info")
log = structlog.get_logger()
log.debug("not_shown")
with structlog.contextvars.bound_contextvars(sandbox="sb_x"):
    log.info("happened", count=3, text="a\\nb")
logging.getLogger("grpc").warning("foreign %s", "text", extra={"rpc": "/a/B"})
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
"""


def test_secret_fields_are_left_out_at_any_depth() -> None:
    answer = pb.ClaimResponse(sandbox=sandbox_pb2.Sandbox(name="sandboxes/x"), token="hush")
    assert loggable(answer) == {"sandbox": {"name": "sandboxes/x"}}
    renewal = host_service_pb2.RenewIdentityRequest(generation=7, entropy=b"hush", hostname="m")
    assert loggable(renewal) == {"generation": 7, "hostname": "m"}


def test_lists_maps_and_bytes_are_loggable() -> None:
    pools = [pool_service_pb2.PoolSpec(template="a", warm=1), pool_service_pb2.PoolSpec(template="b")]
    facts = loggable(pool_service_pb2.SetRequest(pools=pools))
    assert facts == {"pools": [{"template": "a", "warm": 1}, {"template": "b"}]}
    facts = loggable(pb.ClaimRequest(template="rt", metadata={"k": "v"}))
    assert json.loads(json.dumps(facts)) == {"template": "rt", "metadata": [["k", "v"]]}


def test_every_line_is_json_with_its_facts() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert ended.stdout == ""
    happened, foreign, failed = [json.loads(line) for line in ended.stderr.splitlines()]
    assert (happened["event"], happened["count"], happened["sandbox"]) == ("happened", 3, "sb_x")
    assert happened["text"] == "a\nb"
    assert happened["timestamp"].endswith("Z")
    assert (foreign["event"], foreign["rpc"], foreign["level"]) == ("foreign text", "/a/B", "warning")
    assert "sandbox" not in foreign
    assert "ZeroDivisionError" in failed["exception"]
