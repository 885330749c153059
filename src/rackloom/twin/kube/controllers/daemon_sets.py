"""The DaemonSet controller: one pod on every node that the template selects."""

import random
from collections.abc import Iterable

from rackloom.claim.kube import kinds
from rackloom.claim.kube.api import Conflict, Kind, NotFound, Object
from rackloom.claim.kube.pods import has_ended, is_ready
from rackloom.claim.place.reading.node_rules import REQUIRED, is_selected
from rackloom.twin.kube.controllers.loops import work_on_changes
from rackloom.twin.kube.controllers.owning import owned_by, owner_keys
from rackloom.twin.kube.direct import DirectApi
from rackloom.twin.kube.ownership import clone
from rackloom.twin.kube.server import FakeKube
from rackloom.twin.kube.store import Key, key_of

_GENERATION = "pod-template-generation"


class DaemonSets:
    """Pods come and go with labels of nodes. A changed template is for new pods only (OnDelete)."""

    def __init__(self, kube: FakeKube, rng: random.Random) -> None:
        self._store = kube.store
        self._api = DirectApi(kube, "kube-controller-manager")
        self._random = rng

    async def run(self) -> None:
        """Work until cancelled."""
        await work_on_changes(self._store, self._all(), self._keys_of, self._do, self._random)

    def _all(self) -> list[Key]:
        return [key_of(one) for one in self._store.all(kinds.DAEMON_SET)]

    def _keys_of(self, kind: Kind, obj: Object) -> Iterable[Key]:
        if kind == kinds.NODE:
            return self._all()
        if kind == kinds.DAEMON_SET:
            return [key_of(obj)]
        return owner_keys(obj, kinds.DAEMON_SET) if kind == kinds.POD else ()

    async def _do(self, key: Key) -> None:
        daemon_set = self._store.find(kinds.DAEMON_SET, key)
        if daemon_set is None or "deletionTimestamp" in daemon_set["metadata"]:
            return
        wanted = self._wanted(daemon_set)
        for node, pods in self._pods(daemon_set).items():
            surplus = pods[1:] if node in wanted else pods
            for pod in [*surplus, *(one for one in pods[:1] if has_ended(one))]:
                await self._remove(pod)
        for node in sorted(wanted - self._pods(daemon_set).keys()):
            await self._api.create(kinds.POD, _pod(daemon_set, node))
        await self._tell(key, wanted)

    def _wanted(self, daemon_set: Object) -> set[str]:
        spec = daemon_set["spec"]["template"]["spec"]
        nodes = self._store.all(kinds.NODE)
        return {node["metadata"]["name"] for node in nodes if is_selected(spec, node)}

    def _pods(self, daemon_set: Object) -> dict[str, list[Object]]:
        found: dict[str, list[Object]] = {}
        for kind, _, pod in self._store.dependents(daemon_set["metadata"]["uid"]):
            if kind == kinds.POD:
                found.setdefault(_node_of(pod), []).append(pod)
        return found

    async def _remove(self, pod: Object) -> None:
        if "deletionTimestamp" in pod["metadata"]:
            return
        metadata = pod["metadata"]
        try:
            await self._api.delete(kinds.POD, metadata["name"], metadata["namespace"], uid=metadata["uid"])
        except (NotFound, Conflict):
            return

    async def _tell(self, key: Key, wanted: set[str]) -> None:
        daemon_set = self._store.find(kinds.DAEMON_SET, key)
        if daemon_set is None:
            return
        pods = [pods[0] for node, pods in self._pods(daemon_set).items() if node in wanted]
        ready = sum(is_ready(pod) for pod in pods)
        status = {
            "currentNumberScheduled": len(pods),
            "desiredNumberScheduled": len(wanted),
            "numberAvailable": ready,
            "numberMisscheduled": 0,
            "numberReady": ready,
            "observedGeneration": daemon_set["metadata"]["generation"],
        }
        if daemon_set.get("status") != status:
            await self._api.replace(
                kinds.DAEMON_SET, {**clone(daemon_set), "status": status}, subresource="status"
            )


def _pod(daemon_set: Object, node: str) -> Object:
    """The pod for one node: bound there by the scheduler, through its name (as the real controller does)."""
    template, owner = clone(daemon_set["spec"]["template"]), daemon_set["metadata"]
    spec, metadata = template["spec"], template.get("metadata") or {}
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    here = {"key": "metadata.name", "operator": "In", "values": [node]}
    affinity[REQUIRED] = {"nodeSelectorTerms": [{"matchFields": [here]}]}
    spec.setdefault("tolerations", []).append({"operator": "Exists"})
    metadata |= {"generateName": f"{owner['name']}-", "namespace": owner["namespace"]}
    metadata["labels"] = (metadata.get("labels") or {}) | {_GENERATION: str(owner["generation"])}
    metadata["ownerReferences"] = owned_by(kinds.DAEMON_SET, daemon_set)
    return {"metadata": metadata, "spec": spec}


def _node_of(pod: Object) -> str:
    terms = pod["spec"]["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    return str(terms[0]["matchFields"][0]["values"][0])
