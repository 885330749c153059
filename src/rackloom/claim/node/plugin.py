"""The contract between the kubelet plugin framework and a driver: its values and `NodePlugin`.

A driver implements `NodePlugin`: it lists devices as pools, prepares and unprepares one claim, and
reports the health of devices. The framework does the rest: kubelet's gRPC calls, deadlines and retries,
the checkpoint, CDI files, ResourceSlices and metrics.

`prepare` and `unprepare` are single attempts. They must be idempotent, since the process may die after
any step. They raise `Retry` for a reason that may pass and `Refused` for one that will not. `intent`
returns, before anything is touched, the data that `unprepare` needs to undo a prepare that was cut off.

A driver gets an `AllocatedClaim` of `core.cluster.claims`: its own devices and opaque configurations.
`ContainerEdits` are CDI containerEdits and are written to CDI files. `CheckpointEntry` is stored on disk as
JSON, with all values in it. So the names of their fields are a file format.
"""

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from enum import StrEnum
from typing import Any, Literal, Protocol

import msgspec

from rackloom.core.allocate.objects import CounterSet, Device
from rackloom.core.cluster.claims import AllocatedClaim, AllocatedDevice, ClaimRef

# CDI edits, checkpoint entries, pools and health.


class NodeValue(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the values of node plugins."""


class DeviceNode(NodeValue, frozen=True, kw_only=True, rename="camel"):
    """A character device to make in the container (CDI deviceNodes), always written in full.

    If the type or the major number is missing, a runtime looks at the host's file. The host need not have
    one for IMEX channels and capabilities. There is no owner: CDI then takes the user of the container, so
    that user can open a file which only its owner may open.
    """

    path: str
    type: Literal["c"] = "c"
    major: int
    minor: int
    file_mode: int
    permissions: str = "rwm"
    """The access that the cgroup allows: read, write, mknod."""


class ContainerMount(NodeValue, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """A bind mount from the host (CDI mounts)."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = ()


class ContainerHook(NodeValue, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """A program of the host that the runtime calls (CDI hooks)."""

    hook_name: str
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()


class ContainerEdits(NodeValue, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """The changes that a runtime makes in a container that gets the device (CDI containerEdits)."""

    env: tuple[str, ...] = ()
    """`NAME=value`."""
    device_nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[ContainerMount, ...] = ()
    hooks: tuple[ContainerHook, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is anything to change."""
        return bool(self.env or self.device_nodes or self.mounts or self.hooks)


class PreparedDevice(NodeValue, frozen=True, kw_only=True):
    """One device of a claim, ready for containers."""

    result: AllocatedDevice
    kind: str
    """The kind under which it is counted: `channel`, `daemon`, `gpu`, `nic`."""
    edits: ContainerEdits = ContainerEdits()
    shared_cdi_ids: tuple[str, ...] = ()
    """Devices of specs that outlive the claim, which it also needs."""


class PreparedClaim(NodeValue, frozen=True, kw_only=True):
    """A claim as a plugin prepared it."""

    devices: tuple[PreparedDevice, ...]
    record: Mapping[str, Any] = {}
    """Data that the plugin needs at unprepare, as JSON."""


class PrepareState(StrEnum):
    """How far a claim got."""

    STARTED = "PrepareStarted"
    COMPLETED = "PrepareCompleted"
    ABORTED = "PrepareAborted"


class ReadyDevice(NodeValue, frozen=True, kw_only=True):
    """A prepared device as reported to kubelet."""

    requests: tuple[str, ...]
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    share_id: str | None = None
    admin_access: bool = False
    kind: str = ""


class CheckpointEntry(NodeValue, frozen=True, kw_only=True):
    """One claim as the checkpoint holds it."""

    ref: ClaimRef
    state: PrepareState
    fingerprint: str
    devices: tuple[ReadyDevice, ...] = ()
    record: Mapping[str, Any] = {}
    undoing: bool = False
    """Whether it is being unprepared, so that it no longer counts as prepared."""
    aborted_at: float | None = None
    """Seconds since the epoch."""


class DevicePool(NodeValue, frozen=True, kw_only=True):
    """Devices that are published as one pool of this node."""

    name: str
    devices: tuple[Device, ...]
    counters: tuple[CounterSet, ...] = ()
    """The counter sets that `devices` consume, as partitionable devices do (KEP-4815)."""
    without_counters: tuple[Device, ...] = ()
    """Published in place of all this by an API server that keeps no counters."""


class Health(StrEnum):
    """Whether a device works. Unknown if that could not be observed."""

    HEALTHY = "Healthy"
    UNHEALTHY = "Unhealthy"
    UNKNOWN = "Unknown"


class DeviceHealth(NodeValue, frozen=True, kw_only=True):
    """The health of one published device, and when it was last observed (seconds since the epoch)."""

    pool: str
    device: str
    health: Health
    observed_at: float
    message: str = ""


class NodePlugin(Protocol):
    """The devices of one driver on one node.

    `prepare` and `unprepare` are single attempts: they are called again, so they must be idempotent, and they
    may be cut off after any step. They raise `Retry` for a reason that may pass and `Refused` for others.
    """

    @property
    def driver(self) -> str:
        """Name of the driver, as device classes and claims spell it."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Every `PreparedDevice.kind` that it can prepare."""

    def missing(self) -> str | None:
        """The part that this node needs before it has any devices, such as a driver. None if none is missing.

        The plugin waits for it, and still answers kubelet: earlier claims must be unprepared.
        """
        return None

    def resume(self, claims: Callable[[], Collection[CheckpointEntry]]) -> None:
        """Called before anything else. `claims` returns the checkpoint's entries at any later time."""
        return

    async def pools(self) -> tuple[DevicePool, ...]:
        """The pools to publish now. Raises `Retry` if the devices cannot be read at present."""

    def intent(self, claim: AllocatedClaim) -> Mapping[str, Any]:
        """The data that `unprepare` needs to undo a cut-off `prepare`, stored before the first attempt.

        Raises `Refused` for a claim that can never be prepared. Touches nothing.
        """

    async def prepare(self, claim: AllocatedClaim) -> PreparedClaim:
        """Make the devices of `claim` usable."""

    async def changes(self, claim: AllocatedClaim) -> AsyncIterator[None]:
        """Yield whenever a waiting claim is worth an early attempt. By default never."""
        for _ in ():
            yield

    async def unprepare(self, entry: CheckpointEntry, others: Collection[CheckpointEntry]) -> None:
        """Undo `prepare`, whether it was finished or not, but leave everything that `others` here still use.

        The claim may be gone from the API server.
        """

    async def tidy(self, claims: Collection[CheckpointEntry]) -> None:
        """Remove everything that no claim uses any more, and everything that `unprepare` could not remove."""

    async def run(self, wake: Callable[[], None]) -> None:
        """Watch the devices for as long as the plugin runs. `wake` makes the plugin publish them again."""

    async def health(self) -> tuple[DeviceHealth, ...]:
        """Health of every published device."""
