"""Kubelets in whose cluster the address of a pod that went is given to another."""

import random
from collections.abc import Callable

from rackloom.claim.domain.names import COMPUTE_DOMAIN_LABEL
from rackloom.claim.kube.api import KubeApi, Object
from rackloom.twin.nodes.hooks import Containers, Devices
from rackloom.twin.nodes.kubelets import Kubelets


class AddressedKubelets(Kubelets):
    """As other kubelets; `planned` is the address (by node) of the next IMEX daemon's pod there."""

    def __init__(
        self,
        planned: dict[str, str],
        api: KubeApi,
        wall: Callable[[], float],
        rng: random.Random,
        *,
        devices: Devices,
        containers: Containers,
    ) -> None:
        super().__init__(api, wall, rng, devices=devices, containers=containers)
        self._planned = planned

    def _address(self, pod: Object) -> str:
        has_none = not pod.get("status", {}).get("podIP")
        is_daemon = COMPUTE_DOMAIN_LABEL in pod["metadata"].get("labels", {})
        if has_none and is_daemon and pod["spec"]["nodeName"] in self._planned:
            return self._planned.pop(pod["spec"]["nodeName"])
        return super()._address(pod)
