"""The node model: a machine with a disk, its boots, and the DRA plugins that answer its kubelet.

`SimulatedNode` is the part that all simulated nodes have. The disk outlives a boot. Plugins end with the
boot and read their files again. `lab.nodes.trays` adds GPUs, NICs and labels for the trays of a site, with
thousands of nodes in one process. The ComputeDomain stories of the tests (`tests/simulation`) add processes
that die and restart.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path

from rackloom.claim.kube.api import KubeApi
from rackloom.claim.node.plugin import NodePlugin
from rackloom.claim.node.requests import ClaimAnswer, Requests
from rackloom.claim.node.run import PluginDirectories, PluginHost, PluginProcess
from rackloom.core.cluster.claims import ClaimRef
from rackloom.errors import Retry
from rackloom.lab.nodes.dra_manager import PodClaim

CALL_RETRY_SECONDS = 1.0
"""Seconds after which a call that failed is repeated."""
PluginCall = Callable[[Requests], Awaitable[Mapping[str, ClaimAnswer]]]


class SimulatedNode:
    """A node with its files below `disk`. `wall` is seconds since the epoch."""

    def __init__(self, name: str, disk: Path, wall: Callable[[], float]) -> None:
        self.name = name
        self.disk = disk
        self.places = PluginDirectories(
            registry=disk / "registry", plugins=disk / "plugins", cdi=disk / "cdi"
        )
        """The directories in which plugins meet kubelet and the container runtime."""
        self.boots = 0
        self.running: dict[str, PluginProcess] = {}
        """The plugins that answer kubelet now, by driver."""
        self._wall = wall

    @property
    def boot_id(self) -> str:
        """As the kernel names this boot."""
        return f"{self.name}-{self.boots}"

    @property
    def drivers(self) -> Collection[str]:
        """The drivers whose plugins are registered with its kubelet."""
        return self.running.keys()

    def plugin_process(self, plugin: NodePlugin, api: KubeApi) -> PluginProcess:
        """The process that answers kubelet for a plugin, without sockets. Reads the disk's checkpoint."""
        self.places.home(plugin.driver).mkdir(parents=True, exist_ok=True)
        host = PluginHost(node=self.name, boot_id=self.boot_id, directories=self.places, wall=self._wall)
        return PluginProcess(plugin, api, host)

    def cdi_files(self, claim_uid: str) -> tuple[Path, ...]:
        """The CDI specs that a claim has here, which a container runtime would read."""
        return tuple(sorted(self.places.cdi.glob(f"*-claim_{claim_uid}.yaml")))

    async def prepare(self, claims: Sequence[PodClaim]) -> None:
        """NodePrepareResources, as kubelet calls it. Raises `Retry` with the plugins' errors."""
        for driver, refs in _claims_by_driver(claims).items():
            _require_success(await self._call(driver, lambda plugin, refs=refs: plugin.prepare(refs)))  # type: ignore[misc]

    async def unprepare(self, claims: Sequence[PodClaim]) -> None:
        """NodeUnprepareResources, as kubelet calls it. Raises `Retry` with the plugins' errors."""
        for driver, refs in _claims_by_driver(claims).items():
            _require_success(await self._call(driver, lambda plugin, refs=refs: plugin.unprepare(refs)))  # type: ignore[misc]

    async def _call(self, driver: str, call: PluginCall) -> Mapping[str, ClaimAnswer]:
        return await call(self._plugin(driver).requests)

    def _plugin(self, driver: str) -> PluginProcess:
        if driver not in self.running:
            raise Retry(f"DRA driver {driver} is not registered", after=CALL_RETRY_SECONDS)
        return self.running[driver]


def _claims_by_driver(claims: Sequence[PodClaim]) -> dict[str, list[ClaimRef]]:
    drivers = sorted({driver for claim in claims for driver in claim.drivers})
    return {driver: [claim.ref for claim in claims if driver in claim.drivers] for driver in drivers}


def _require_success(answers: Mapping[str, ClaimAnswer]) -> None:
    problems = [answer.error for answer in answers.values() if answer.error]
    if problems:
        raise Retry("; ".join(problems), after=CALL_RETRY_SECONDS)
