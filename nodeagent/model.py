"""Domain types that every room of the node agent shares. No I/O, no gRPC."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

MIB = 1024 * 1024


class Net(enum.Enum):
    """The network lane of a sandbox."""

    NONE = "none"
    EGRESS = "egress"


class Tier(enum.Enum):
    """How a claim was served."""

    WARM = "warm"
    CLONE = "clone"
    COLD = "cold"


class Isolation(enum.Enum):
    """What separates a sandbox from its host."""

    VM_HARDWARE = "vm_hardware"
    VM_EMULATED = "vm_emulated"
    NONE = "none"


class Accelerator(enum.Enum):
    """How an engine runs machines."""

    KVM = "kvm"
    TCG = "tcg"
    NONE = "none"


class Size(enum.Enum):
    """The five machine sizes; the value is (name, cpus, memory in bytes)."""

    SMALL = ("small", 1, 512 * MIB)
    MEDIUM = ("medium", 2, 1024 * MIB)
    LARGE = ("large", 4, 4096 * MIB)
    XLARGE = ("xlarge", 4, 8192 * MIB)
    XXLARGE = ("2xlarge", 8, 16384 * MIB)

    @property
    def label(self) -> str:
        """The name in configuration, logs and metrics."""
        return self.value[0]

    @property
    def cpus(self) -> int:
        """Virtual cpus."""
        return self.value[1]

    @property
    def memory_bytes(self) -> int:
        """Guest memory in bytes."""
        return self.value[2]


@dataclass(frozen=True, slots=True)
class Image:
    """An OS image on this node. An image *is* its digest; the name is an alias."""

    name: str
    digest: str
    """`sha256:` and 64 hexadecimal digits, over the manifest."""
    layers: tuple[Path, ...]
    """EROFS files, bottom layer first."""


@dataclass(frozen=True, slots=True, order=True)
class PoolKey:
    """What makes two machines interchangeable."""

    template: str
    net: Net
    size: Size

    def __str__(self) -> str:
        """`template/net/size`, for people."""
        return f"{self.template}/{self.net.value}/{self.size.label}"
