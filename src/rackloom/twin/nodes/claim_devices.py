"""What a kubelet's DRA manager does with the claims of a pod: whose plugins it asks, and when."""

from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from typing import Protocol

from rackloom.claim.kube.api import Object
from rackloom.twin.kubelet.claims import PodClaim
from rackloom.twin.nodes.claim_users import ClaimUsers, need_plugins


class NodePlugins(Protocol):
    """The DRA plugins of one node, wherever they run."""

    @property
    def drivers(self) -> Container[str]:
        """Those that are registered."""

    async def prepare(self, claims: Sequence[PodClaim]) -> None:
        """Prepare each claim. Raises `Retry` with what a plugin said."""

    async def unprepare(self, claims: Sequence[PodClaim]) -> None:
        """Give each back. Raises `Retry` with what a plugin said."""


class ClaimDevices:
    """`Devices` of kubelets: the plugins of each node, and on its disk who uses which claim.

    `plugins_of` finds those of a node by its name, or raises `Retry`. Keep this where kubelets are restarted:
    it is what their disks remember.
    """

    def __init__(self, plugins_of: Callable[[str], NodePlugins]) -> None:
        self._plugins_of = plugins_of
        self._users: defaultdict[str, ClaimUsers] = defaultdict(ClaimUsers)

    async def prepare(self, node: str, pod: Object, claims: Sequence[Object]) -> None:
        """Raises `Retry` with what a plugin said."""
        plugins, users = self._plugins_of(node), self._users[node]
        users.meet(pod)
        need_plugins(plugins.drivers, claims)
        fresh = users.begin(pod, claims)
        await plugins.prepare(fresh)
        users.note_started(pod, fresh)

    async def unprepare(self, node: str, pod: Object, claims: Sequence[Object]) -> None:
        """Raises `Retry` where a plugin still holds something."""
        plugins, users = self._plugins_of(node), self._users[node]
        last = users.end(pod, claims)
        await plugins.unprepare(last)
        users.forget(last)
