"""What the framework and a plugin tell each other."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal

import msgspec

from rackloom.claim.allocate.objects import Device


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the values of this room."""


class ClaimRef(Value, frozen=True, kw_only=True):
    """A claim as kubelet names it."""

    namespace: str
    name: str
    uid: str


class Result(Value, frozen=True, kw_only=True):
    """One device that the scheduler gave to the claim, of this driver."""

    request: str
    """As allocated, `request` or `request/subrequest`."""
    pool: str
    device: str
    admin_access: bool = False
    share_id: str | None = None

    @property
    def main_request(self) -> str:
        """The request without its subrequest, as kubelet wants it."""
        return self.request.partition("/")[0]


class Config(Value, frozen=True, kw_only=True):
    """One opaque configuration for this driver, of the device class or of the claim."""

    source: Literal["FromClass", "FromClaim"]
    requests: tuple[str, ...]
    """Requests that it is for; none means all."""
    parameters: Mapping[str, Any]

    def applies_to(self, result: Result) -> bool:
        """Whether it was written for the request of `result`, or for all."""
        return not self.requests or result.request in self.requests or result.main_request in self.requests


class Consumer(Value, frozen=True, kw_only=True):
    """Who may use a claim; `resource` is `pods` for a pod."""

    resource: str
    name: str
    uid: str


class Claim(Value, frozen=True, kw_only=True):
    """An allocated claim, as far as this driver is concerned."""

    ref: ClaimRef
    results: tuple[Result, ...]
    configs: tuple[Config, ...]
    """In the order in which they count: a later one wins."""
    fingerprint: str
    """Changes with the allocation and with who may use it."""
    of_pod: str | None = None
    """The pod for which a template made it; None for a claim that somebody wrote."""
    consumers: tuple[Consumer, ...] = ()

    def configs_for(self, result: Result) -> tuple[Config, ...]:
        """Configurations of one result, the one that wins last."""
        return tuple(config for config in self.configs if config.applies_to(result))


class DeviceNode(Value, frozen=True, kw_only=True, rename="camel"):
    """A character device to make in the container (CDI deviceNodes), always written in full.

    Where the type or the major number is missing, a runtime looks at the host's file. The host has none for
    IMEX channels and capabilities until somebody makes one. There is no owner: CDI then takes the user of the
    container, who can so open what its owner alone may.
    """

    path: str
    type: Literal["c"] = "c"
    major: int
    minor: int
    file_mode: int
    permissions: str = "rwm"
    """What the cgroup allows: read, write, mknod."""


class Mount(Value, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """A bind mount from the host (CDI mounts)."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = ()


class Hook(Value, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """A program of the host that the runtime calls (CDI hooks)."""

    hook_name: str
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()


class Edits(Value, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """What a runtime changes in a container that gets the device (CDI containerEdits)."""

    env: tuple[str, ...] = ()
    """`NAME=value`."""
    device_nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[Mount, ...] = ()
    hooks: tuple[Hook, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is anything to change."""
        return bool(self.env or self.device_nodes or self.mounts or self.hooks)


class PreparedDevice(Value, frozen=True, kw_only=True):
    """One device of a claim, ready for containers."""

    result: Result
    kind: str
    """What it is counted as: `channel`, `daemon`, `gpu`, `nic`."""
    edits: Edits = Edits()
    shared_cdi_ids: tuple[str, ...] = ()
    """Devices of specs that outlive the claim, which it also needs."""


class Prepared(Value, frozen=True, kw_only=True):
    """What a plugin made of a claim."""

    devices: tuple[PreparedDevice, ...]
    record: Mapping[str, Any] = {}
    """What the plugin wants back at unprepare; JSON."""


class State(StrEnum):
    """How far a claim got."""

    STARTED = "PrepareStarted"
    COMPLETED = "PrepareCompleted"
    ABORTED = "PrepareAborted"


class ReadyDevice(Value, frozen=True, kw_only=True):
    """A prepared device as kubelet is told of it."""

    requests: tuple[str, ...]
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    share_id: str | None = None
    admin_access: bool = False
    kind: str = ""


class Entry(Value, frozen=True, kw_only=True):
    """What the checkpoint holds of one claim."""

    ref: ClaimRef
    state: State
    fingerprint: str
    devices: tuple[ReadyDevice, ...] = ()
    record: Mapping[str, Any] = {}
    undoing: bool = False
    """Whether it is being given back, so that it can no longer be counted on."""
    aborted_at: float | None = None
    """Seconds since the epoch."""


class Pool(Value, frozen=True, kw_only=True):
    """Devices that are published together for this node."""

    name: str
    devices: tuple[Device, ...]


class Health(StrEnum):
    """Whether a device works: it does, it does not, or nobody can tell."""

    HEALTHY = "Healthy"
    UNHEALTHY = "Unhealthy"
    UNKNOWN = "Unknown"


class DeviceHealth(Value, frozen=True, kw_only=True):
    """The health of one published device, and when it was last looked at (seconds since the epoch)."""

    pool: str
    device: str
    health: Health
    observed_at: float
    message: str = ""
