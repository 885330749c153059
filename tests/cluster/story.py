"""A whole cluster for ComputeDomains: deploy/kubernetes installed, trays, and programs in their pods."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from tests.cluster.control_plane import ControlPlane
from tests.cluster.installed import HOOKS, ROOT, called_at, is_trusted, shipped
from tests.cluster.kubectl import LEAVE, kubectl
from tests.cluster.story_programs import Programs
from tests.cluster.story_trays import CAPACITY, FOR_TRAYS, Tray, clique_name
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi, NotFound
from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import ComputeDomainStatus, read_compute_domain_status
from rackloom.core.cluster.names import ImexIsolation
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    DAEMON_SET,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    SECRET,
    SERVICE_ACCOUNT,
    Object,
    ResourceKind,
)
from rackloom.lab.nodes.kubelets import NodeSpec, SimulatedKubelets

PATIENCE = 480.0
"""Seconds: a rack of daemons shares two busy cores with a control plane here."""


@contextlib.asynccontextmanager
async def admission(cluster: ControlPlane, api: KubeApi, programs: Programs) -> AsyncIterator[None]:
    """The objects of deploy/kubernetes/webhook, with the webhook called for all its rules."""
    rest, hooks = await asyncio.to_thread(shipped)
    await asyncio.to_thread(kubectl, cluster, "apply", "--server-side", "-f", "-", given=rest)

    async def port() -> int:
        return programs.webhook_ports[0] if programs.webhook_ports else 0

    for hook in hooks:
        await api.create(HOOKS[hook["kind"]], called_at(hook, await until(port, "a webhook runs")))
    await until(lambda: is_trusted(api), "the webhook has its certificate")
    yield
    for hook in hooks:
        await api.delete(HOOKS[hook["kind"]], hook["metadata"]["name"])
    await asyncio.to_thread(kubectl, cluster, "delete", "-f", "-", *LEAVE, given=rest)


@dataclass
class Site:
    """The trays of a cluster and their pods."""

    cluster: ControlPlane
    api: KubeApi
    nodes: SimulatedKubelets
    trays: Mapping[str, Tray]
    programs: Programs

    async def power_on(self) -> None:
        """Register every tray."""
        await asyncio.gather(*map(self.register, self.trays))

    async def serves(self) -> None:
        """Wait until the plugin of every tray has published it and labelled it with its clique."""
        await until(self._are_labelled, "every tray has its clique label", PATIENCE)

    async def register(self, node: str) -> None:
        await self.nodes.register(NodeSpec(node, labels=FOR_TRAYS, capacity=CAPACITY))

    async def _are_labelled(self) -> bool:
        found = {
            node["metadata"]["name"]: node["metadata"]["labels"].get(names.GPU_CLIQUE_LABEL)
            for node in (await self.api.list(NODE)).items
        }
        return self.programs.serving >= self.trays.keys() and all(
            found.get(name) == clique_name(tray.clique) for name, tray in self.trays.items()
        )

    async def power_off(self) -> None:
        """The nodes leave, along with the slices that only a living plugin would delete."""
        for kind in (NODE, RESOURCE_SLICE):
            for item in (await self.api.list(kind)).items:
                with contextlib.suppress(NotFound):  # The node's kubelet deletes a plugin's slices too.
                    await self.api.delete(kind, item["metadata"]["name"])

    async def kubectl(self, *words: str) -> str:
        return await asyncio.to_thread(kubectl, self.cluster, *words)

    async def apply(self, example: str, namespace: str) -> None:
        """Apply a manifest of examples/ as it is."""
        await self.kubectl("apply", "-n", namespace, "-f", str(ROOT / "examples" / example))

    async def status(self, name: str, namespace: str) -> ComputeDomainStatus:
        return read_compute_domain_status(await self.api.get(COMPUTE_DOMAIN, name, namespace))

    async def ready(
        self, name: str, namespace: str, nodes: set[str], *, shared: bool = False
    ) -> ComputeDomainStatus:
        """The status of a ComputeDomain once it is Ready and meshed on these nodes.

        A domain that shares a warm clique has all nodes of it, and the warm domain shows if it is meshed.
        """

        async def look() -> ComputeDomainStatus | None:
            status = await self.status(name, namespace)
            conditions = {condition.type: condition.status for condition in status.conditions}
            found = {node.name for node in status.nodes}
            whole = conditions.get("Ready") == "True" and (shared or conditions.get("Meshed") == "True")
            return status if whole and (found >= nodes if shared else found == nodes) else None

        try:
            status = await until(look, f"{name} is Ready on {len(nodes)} nodes", PATIENCE)
        except AssertionError as error:
            seen = await self.api.get(COMPUTE_DOMAIN, name, namespace)
            raise AssertionError(f"{error}\n{json.dumps(seen.get('status'), indent=1)}") from error
        assert status is not None
        return status

    async def warm(self) -> None:
        """Wait until channels are offered on every tray."""

        async def look() -> bool:
            offered = (await self.api.list(NODE, labels=names.CHANNELS_READY_LABEL)).items
            return {slice_["metadata"]["name"] for slice_ in offered} == self.trays.keys()

        await until(look, "every tray offers channels", PATIENCE)

    async def cool_down(self) -> None:
        """Take every tray back to domain mode: the warm daemons go."""
        for node in self.trays:
            labels = {names.ISOLATION_LABEL: ImexIsolation.DOMAIN.value}
            await self.api.patch(NODE, node, None, {"metadata": {"labels": labels}})

    async def has_account(self, namespace: str) -> bool:
        """Whether pods can be made in a new namespace."""
        with contextlib.suppress(NotFound):
            await self.api.get(SERVICE_ACCOUNT, "default", namespace)
            return True
        return False

    async def running(self, namespace: str, prefix: str, count: int) -> list[Object]:
        """The pods of a job once all of them run."""

        async def look() -> list[Object]:
            pods = (await self.api.list(POD, namespace)).items
            found = [pod for pod in pods if pod["metadata"]["name"].startswith(prefix)]
            all_run = all(pod["status"]["phase"] == "Running" for pod in found)
            return found if all_run and len(found) == count else []

        return await until(look, f"{count} pods {prefix}* run", PATIENCE)

    def cliques_of(self, pods: list[Object]) -> set[int]:
        """Numbers of the cliques in which pods are."""
        return {self.trays[pod["spec"]["nodeName"]].clique for pod in pods}

    async def left_overs(self, namespace: str | None = None) -> dict[str, list[str]]:
        """The objects of ComputeDomains, in one namespace or anywhere. Empty once all are gone."""
        kinds = (COMPUTE_DOMAIN, RESOURCE_CLAIM_TEMPLATE, RESOURCE_CLAIM)
        found = {kind.kind: await self._of(kind, namespace) for kind in kinds}
        if namespace is None:
            found[COMPUTE_DOMAIN_CLIQUE.kind] = await self._of(COMPUTE_DOMAIN_CLIQUE)
            for kind in (DAEMON_SET, SECRET, NODE):
                found[kind.kind] = await self._of(kind, labels=names.COMPUTE_DOMAIN_LABEL)
            for label in (names.CHANNELS_READY_LABEL, names.WARM_CLIQUE_LABEL):
                found[label] = await self._of(NODE, labels=label)
            found["CDI"] = [file for tray in self.trays.values() for file in tray.cdi_files()]
            found["prepared"] = [uid for tray in self.trays.values() for uid in tray.prepared()]
        return {what: some for what, some in found.items() if some}

    async def _of(self, kind: ResourceKind, namespace: str | None = None, labels: str = "") -> list[str]:
        return [
            item["metadata"]["name"] for item in (await self.api.list(kind, namespace, labels=labels)).items
        ]

    async def give_up(self, namespace: str) -> None:
        """Remove the rest of a failed test, whose pods would never end without plugins and controller."""
        if not await self.left_overs():
            return
        for pod in (await self.api.list(POD, namespace)).items:
            with contextlib.suppress(NotFound):
                await self.api.delete(POD, pod["metadata"]["name"], namespace, grace_seconds=0)
        for item in (await self.api.list(COMPUTE_DOMAIN)).items:
            await self.api.delete(COMPUTE_DOMAIN, item["metadata"]["name"], item["metadata"]["namespace"])
        await self.is_clean()

    async def is_clean(self, namespace: str | None = None) -> None:
        """Wait until nothing is left over."""

        async def clean() -> bool:
            return not await self.left_overs(namespace)

        try:
            await until(clean, "nothing is left over", PATIENCE)
        except AssertionError as error:
            raise AssertionError(f"left over: {await self.left_overs(namespace)}") from error


class Reader:
    """The cluster as the doctor reads it."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api

    async def read(self, kind: ResourceKind) -> list[Object]:
        return list((await self._api.list(kind)).items)
