"""What a daemon reports on its own pod: its clique, the peers it reaches, why nvidia-imex does not run."""

import asyncio
from typing import Any

import structlog

from rackloom.claim.domain import names
from rackloom.claim.imex.member import Place
from rackloom.claim.kube.api import KubeApi, KubeError, NotFound
from rackloom.claim.kube.kinds import POD

LABEL_SECONDS = 5.0
"""For so long the clique is left to the first report of the mesh, which says it in the same write."""
RETRY_SECONDS = 5.0

_log = structlog.get_logger(__name__)


class OwnPod:
    """Writes to one pod."""

    def __init__(self, api: KubeApi, place: Place) -> None:
        self._api = api
        self._place = place
        self._has_label = False

    async def is_going(self) -> bool:
        """Whether it is being deleted, or gone. Raises `KubeError`."""
        pod = self._place.pod
        try:
            meta = (await self._api.get(POD, pod.name, self._place.namespace))["metadata"]
        except NotFound:
            return True
        return meta["uid"] != pod.uid or "deletionTimestamp" in meta

    async def report(self, mesh: str | None, error: str | None) -> None:
        """Which peers are reached, as JSON, and how nvidia-imex ended; None: nothing. Raises `KubeError`."""
        annotations = {names.MESH_ANNOTATION: mesh, names.IMEX_ERROR_ANNOTATION: error}
        await self._write({**_clique(self._place), "annotations": annotations})

    async def tell_clique(self) -> None:
        """The clique alone, where nothing was reported for a while; then return."""
        await asyncio.sleep(LABEL_SECONDS)
        while not self._has_label:
            try:
                await self._write(_clique(self._place))
            except NotFound:
                return  # deleted by force: the daemon is about to end
            except KubeError as error:
                _log.warning("imex.clique_untold", reason=error.message)
                await asyncio.sleep(error.retry_after or RETRY_SECONDS)

    async def _write(self, metadata: dict[str, Any]) -> None:
        pod = self._place.pod
        await self._api.patch(POD, pod.name, self._place.namespace, {"metadata": metadata})
        self._has_label = True


async def label_pod(api: KubeApi, place: Place) -> None:
    """Say at once which clique a pod is in; an empty value means a node without a fabric."""
    await api.patch(POD, place.pod.name, place.namespace, {"metadata": _clique(place)})


def _clique(place: Place) -> dict[str, Any]:
    return {"labels": {names.CLIQUE_ID_LABEL: place.clique_id}}
