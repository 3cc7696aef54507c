"""A node that was killed or stopped in the middle loses and leaks nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from cocoon.node.v1 import sandbox_service_pb2 as pb
from cocoon.node.v1 import (
    sandbox_service_pb2_grpc,
)
from cocoon_rpc.errors import CocoonError, from_rpc_error
from tests.framework.leaks import processes_naming
from tests.framework.node import NodeProcess, node_config


def until(look: Callable[[], Any], good: Callable[[Any], bool], limit_s: float = 20) -> Any:
    """Looks until what is seen is good; returns it."""
    end = time.monotonic() + limit_s
    while not good(seen := look()):
        assert time.monotonic() < end, seen
        time.sleep(0.02)
    return seen


def refused(call: Callable[[], object]) -> CocoonError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error = from_rpc_error(caught.value)
    assert isinstance(error, CocoonError)
    return error


@pytest.mark.parametrize(
    "engine", [pytest.param("local", marks=pytest.mark.root), pytest.param("qemu", marks=pytest.mark.vm)]
)
def test_a_killed_agents_machines_and_claims_go_with_the_next_start(tmp_path: Path, engine: str) -> None:
    config = node_config(tmp_path / "data", engine)
    node = NodeProcess(tmp_path, config)
    node.__enter__()
    with grpc.insecure_channel(node.address) as channel:
        stub = sandbox_service_pb2_grpc.SandboxServiceStub(channel)
        claimed = stub.Claim(pb.ClaimRequest(template="rt"), timeout=60)
    node.kill()
    machines = str(tmp_path / "data" / "machines")
    assert processes_naming(machines)
    with NodeProcess(tmp_path, config) as again, grpc.insecure_channel(again.address) as channel:
        assert processes_naming(machines) == []
        stub = sandbox_service_pb2_grpc.SandboxServiceStub(channel)
        error = refused(lambda: stub.Get(pb.GetRequest(name=claimed.sandbox.name)))
        assert error.reason_name() == "SANDBOX_NOT_FOUND"
        assert '"claim_lost"' in again.log.read_text()


@pytest.mark.vm
def test_a_stop_in_the_middle_of_a_boot_leaves_nothing(tmp_path: Path) -> None:
    # Leaving the block proves that nothing is left.
    with NodeProcess(tmp_path, node_config(tmp_path / "data", "qemu", (("rt", 2),))):
        machines = tmp_path / "data" / "machines"
        until(lambda: list(machines.glob("*/process.json")), bool)
