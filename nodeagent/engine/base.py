"""The port behind which every engine stands.

Glossary. *machine*: one running guest and all that belongs to it (process,
sockets, disks), in one directory that the engine owns while the machine lives.
*golden*: a stopped snapshot of a booted, probed machine, in a directory of its
own, from which any number of machines are cloned. *lane*: how bytes reach the
guest daemon (`nodeagent.guestlink.lanes`).

Life: `prepare` once; then `boot` or `clone` give a machine; `capture` turns a
machine into a golden (and ends it); `kill` ends a machine. An engine that cannot
snapshot says so in its facts and raises CapabilityMissingError.

Ownership: the caller owns the machine it gets and must `kill` it. If `boot`,
`clone` or `capture` raise or are cancelled, the engine has already taken down
what it had begun; nothing is left.

`tests/conformance/test_engine.py` is the specification: every engine passes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nodeagent.guestlink.lanes import Lane
from nodeagent.model import Accelerator, Image, Isolation, Size


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What `prepare` found out."""

    name: str
    version: str
    accelerator: Accelerator
    isolation: Isolation
    snapshots: bool
    """Whether `capture` and `clone` work."""


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """What to make."""

    machine_id: str
    """`m-` and 16 characters of [a-z0-9]; unique on the node."""
    image: Image
    size: Size
    directory: Path
    """Does not exist yet, its parent does; the engine makes it, `kill` removes it."""
    capturable: bool = False
    """Whether `boot` makes a machine that `capture` takes; one from `clone` always is."""


@dataclass(frozen=True, slots=True)
class Golden:
    """A snapshot that clones are made from. Immutable once made.

    One captured from a clone may stand on that clone's golden, which must be kept.
    """

    directory: Path
    image: Image
    size: Size


class Machine(Protocol):
    """A running guest. Not safe for concurrent verbs; the owner serialises."""

    @property
    def machine_id(self) -> str:
        """The id from the spec."""
        ...

    @property
    def lane(self) -> Lane:
        """The way to its guest daemon; usable from the moment it is returned."""
        ...

    @property
    def pid(self) -> int:
        """The host process that is the machine."""
        ...

    async def pause(self) -> None:
        """Stops the guest's cpus. Idempotent."""
        ...

    async def resume(self) -> None:
        """Lets them run. Idempotent."""
        ...

    async def wait(self) -> None:
        """Returns when the machine's process has ended, by whatever cause."""
        ...

    async def console(self) -> str:
        """Returns the last line its console showed, printable; "" if there is none."""
        ...

    async def kill(self) -> None:
        """Ends the machine: no process, socket, mount or file of it is left.

        Idempotent; never raises because the machine is already dead. Completes
        even if the caller is cancelled.
        """
        ...


class Engine(Protocol):
    """Makes machines."""

    async def prepare(self) -> EngineFacts:
        """Checks host and artifacts, once; decides the accelerator.

        Raises:
            ImageMissingError: the kernel or initramfs is not there.
            ProvisionFailedError: the host lacks something; says what to install.
        """
        ...

    async def boot(self, spec: MachineSpec) -> Machine:
        """Boots a machine from its image; returns before the guest answers.

        Raises:
            ProvisionFailedError: it did not start.
            NodeAtCapacityError: no disk space or memory for it.
        """
        ...

    async def capture(self, machine: Machine, directory: Path) -> Golden:
        """Snapshots the machine into `directory` (made by this) and ends it.

        The directory appears complete or not at all.

        Raises:
            CapabilityMissingError: this engine cannot, or the machine was booted without `capturable`.
            ProvisionFailedError, NodeAtCapacityError: it failed; the machine is gone.
        """
        ...

    async def clone(self, golden: Golden, spec: MachineSpec) -> Machine:
        """Makes a running machine from a golden; returns when its cpus run.

        Raises: as `boot`, and CapabilityMissingError.
        """
        ...

    async def reap(self, directory: Path) -> None:
        """Removes what a former agent's machine left in `directory`.

        Ends its process only if it is provably that machine's (a recycled pid is
        left alone). Idempotent.
        """
        ...
