"""Nodes whose devices are prepared by DRA plugins over their sockets, as on a real node."""

from collections.abc import Mapping, Sequence

from rackloom.claim.kube.api import Object
from rackloom.errors import Retry
from rackloom.twin.kubelet.calls import NotPrepared
from rackloom.twin.kubelet.claims import pod_claim
from rackloom.twin.kubelet.kubelet import Kubelet

_AGAIN_S = 1.0


class PluginDevices:
    """`Devices` that asks the plugins which are registered with each node's kubelet."""

    def __init__(self, kubelets: Mapping[str, Kubelet]) -> None:
        self._kubelets = kubelets

    async def prepare(self, node: str, pod: Object, claims: Sequence[Object]) -> None:
        """Raises `Retry` with what a plugin said: a kubelet asks again whatever it was."""
        try:
            await self._kubelets[node].prepare(*map(pod_claim, claims))
        except NotPrepared as error:
            raise Retry(str(error), after=_AGAIN_S) from error

    async def unprepare(self, node: str, pod: Object, claims: Sequence[Object]) -> None:
        """Raises `Retry` where a plugin still holds something."""
        try:
            await self._kubelets[node].unprepare(*map(pod_claim, claims))
        except NotPrepared as error:
            raise Retry(str(error), after=_AGAIN_S) from error
