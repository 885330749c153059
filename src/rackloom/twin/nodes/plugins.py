"""Nodes whose devices are prepared by DRA plugins over their sockets, as on a real node."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from rackloom.claim.kube.api import Object
from rackloom.errors import Retry
from rackloom.twin.kubelet.calls import NotPrepared
from rackloom.twin.kubelet.kubelet import Kubelet
from rackloom.twin.nodes.claim_users import ClaimUsers, need_plugins

_AGAIN_S = 1.0


class PluginDevices:
    """`Devices` that asks the plugins which are registered with each node's kubelet.

    It remembers who uses which claim as the disks of the nodes do: keep it where kubelets are restarted.
    """

    def __init__(self, kubelets: Mapping[str, Kubelet]) -> None:
        self._kubelets = kubelets
        self._users: defaultdict[str, ClaimUsers] = defaultdict(ClaimUsers)

    async def prepare(self, node: str, pod: Object, claims: Sequence[Object]) -> None:
        """Raises `Retry` with what a plugin said: a kubelet asks again whatever it was."""
        kubelet, users = self._kubelets[node], self._users[node]
        users.meet(pod)
        need_plugins(kubelet.plugins, claims)
        fresh = users.begin(pod, claims)
        try:
            await kubelet.prepare(*fresh)
        except NotPrepared as error:
            raise Retry(str(error), after=_AGAIN_S) from error
        users.note_started(pod, fresh)

    async def unprepare(self, node: str, pod: Object, claims: Sequence[Object]) -> None:
        """Raises `Retry` where a plugin still holds something."""
        users = self._users[node]
        last = users.end(pod, claims)
        try:
            await self._kubelets[node].unprepare(*last)
        except NotPrepared as error:
            raise Retry(str(error), after=_AGAIN_S) from error
        users.forget(last)
