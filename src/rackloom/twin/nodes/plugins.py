"""Nodes whose devices are prepared by DRA plugins over their sockets, as on a real node."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rackloom.errors import Retry
from rackloom.twin.kubelet.calls import NotPrepared
from rackloom.twin.kubelet.claims import PodClaim
from rackloom.twin.kubelet.kubelet import Kubelet
from rackloom.twin.nodes.claim_devices import ClaimDevices

_AGAIN_S = 1.0


class PluginDevices(ClaimDevices):
    """`Devices` that asks the plugins which are registered with each node's kubelet."""

    def __init__(self, kubelets: Mapping[str, Kubelet]) -> None:
        super().__init__(lambda node: _Registered(kubelets[node]))


class _Registered:
    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet

    @property
    def drivers(self) -> Collection[str]:
        return self._kubelet.plugins.keys()

    async def prepare(self, claims: Sequence[PodClaim]) -> None:
        with _asked_again():
            await self._kubelet.prepare(*claims)

    async def unprepare(self, claims: Sequence[PodClaim]) -> None:
        with _asked_again():
            await self._kubelet.unprepare(*claims)


@contextmanager
def _asked_again() -> Iterator[None]:
    """A kubelet asks again whatever a plugin said."""
    try:
        yield
    except NotPrepared as error:
        raise Retry(str(error), after=_AGAIN_S) from error
