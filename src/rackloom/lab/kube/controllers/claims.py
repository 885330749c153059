"""The resource claim controller of kube-controller-manager (DRA).

It creates the claims that a pod's templates describe and records their names in the pod's status. It
removes users that have ended from a claim's reservedFor. A claim that loses its last user, or has none
and is being deleted, is deallocated and then loses the delete-protection finalizer. A claim that was
made for a pod that has ended is deleted. Keys in the work queue are those of pods, and those of claims
with the prefix `claim/`.
"""

import random
from collections.abc import Iterable, Iterator

from rackloom.claim.kube.api import Conflict, NotFound
from rackloom.core.kubernetes import objects
from rackloom.core.kubernetes.objects import Object, ResourceKind, has_pod_ended
from rackloom.lab.kube.controllers.workloads import controller_reference, owner_keys, run_controller
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.managed_fields import clone
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.kube.store import ObjectKey, key_of

CLAIM_FINALIZER = "resource.kubernetes.io/delete-protection"
"""On a claim from its allocation until nobody uses it."""
POD_CLAIM_NAME = "resource.kubernetes.io/pod-claim-name"


class ResourceClaimController:
    """Keys are those of pods, and of claims with a "claim/" before their name."""

    def __init__(self, kube: FakeKube, rng: random.Random) -> None:
        self._store = kube.store
        self._api = DirectApi(kube, "kube-controller-manager")
        self._random = rng

    async def run(self) -> None:
        """Work until cancelled."""
        first = [
            key
            for kind in (objects.POD, objects.RESOURCE_CLAIM)
            for obj in self._store.all(kind)
            for key in self._keys_of(kind, obj)
        ]
        await run_controller(self._store, first, self._keys_of, self._do, self._random)

    def _keys_of(self, kind: ResourceKind, obj: Object) -> Iterable[ObjectKey]:
        namespace, name = key_of(obj)
        if kind == objects.POD:
            used = [(namespace, f"claim/{name}") for name in claims_by_entry(obj).values() if name]
            return [(namespace, name), *used]
        if kind == objects.RESOURCE_CLAIM:
            return [(namespace, f"claim/{name}")]
        if kind == objects.RESOURCE_CLAIM_TEMPLATE:
            return [key_of(pod) for pod in self._waiting(namespace, name)]
        return ()

    def _waiting(self, namespace: str | None, template: str) -> Iterator[Object]:
        for pod in self._store.all(objects.POD):
            if pod["metadata"]["namespace"] == namespace and any(
                claim.get("resourceClaimTemplateName") == template
                for claim in pod["spec"].get("resourceClaims") or ()
            ):
                yield pod

    async def _do(self, key: ObjectKey) -> None:
        if key[1].startswith("claim/"):
            await self._tidy((key[0], key[1].removeprefix("claim/")))
        else:
            await self._make(key)

    async def _make(self, key: ObjectKey) -> None:
        """The claims of a pod that its templates give it. A template that is missing is waited for."""
        pod = self._store.find(objects.POD, key)
        if pod is None or has_pod_ended(pod) or "deletionTimestamp" in pod["metadata"]:
            return
        names = claims_by_entry(pod)
        missing = [claim for claim in pod["spec"].get("resourceClaims") or () if not names[claim["name"]]]
        statuses = list(pod.get("status", {}).get("resourceClaimStatuses") or ())
        for entry in missing:
            made = await self._from_template(pod, entry)
            if made is not None:
                statuses.append({"name": entry["name"], "resourceClaimName": made})
        if len(statuses) > len(pod.get("status", {}).get("resourceClaimStatuses") or ()):
            patch = {"status": {"resourceClaimStatuses": statuses}}
            await self._api.patch(objects.POD, key[1], key[0], patch, subresource="status")

    async def _from_template(self, pod: Object, entry: Object) -> str | None:
        metadata = pod["metadata"]
        for kind, key, claim in self._store.dependents(metadata["uid"]):
            annotations = claim["metadata"].get("annotations") or {}
            if kind == objects.RESOURCE_CLAIM and annotations.get(POD_CLAIM_NAME) == entry["name"]:
                return key[1]
        place = (metadata["namespace"], entry["resourceClaimTemplateName"])
        template = self._store.find(objects.RESOURCE_CLAIM_TEMPLATE, place)
        if template is None:
            return None
        made = await self._api.create(
            objects.RESOURCE_CLAIM, _claim_from_template(pod, entry["name"], template)
        )
        return str(made["metadata"]["name"])

    async def _tidy(self, key: ObjectKey) -> None:
        """Take users that have ended out of a claim, and its devices when it has none left."""
        claim = self._store.find(objects.RESOURCE_CLAIM, key)
        if claim is None:
            return
        status = claim.get("status") or {}
        users = status.get("reservedFor") or []
        kept = [user for user in users if self._uses(claim, user)]
        if kept != users or (not kept and "allocation" in status and self._is_over(claim)):
            claim = await self._unreserve(claim, kept)
        if "allocation" not in (claim.get("status") or {}):
            await self._let_go(claim)
        if not kept and self._was_made_for_an_ended_pod(claim):
            await self._delete(claim)

    def _uses(self, claim: Object, user: Object) -> bool:
        pod = self._store.find(objects.POD, (claim["metadata"]["namespace"], user["name"]))
        return pod is not None and pod["metadata"]["uid"] == user["uid"] and not has_pod_ended(pod)

    def _is_over(self, claim: Object) -> bool:
        return "deletionTimestamp" in claim["metadata"]

    async def _unreserve(self, claim: Object, kept: list[Object]) -> Object:
        status = {
            key: value for key, value in claim["status"].items() if key not in ("reservedFor", "devices")
        }
        if kept:
            status |= {"reservedFor": kept, "devices": claim["status"].get("devices", [])}
        else:
            status.pop("allocation", None)
        written = {**clone(claim), "status": status}
        return await self._api.replace(objects.RESOURCE_CLAIM, written, subresource="status")

    async def _let_go(self, claim: Object) -> None:
        metadata = claim["metadata"]
        held = metadata.get("finalizers") or []
        if CLAIM_FINALIZER in held:
            kept = [one for one in held if one != CLAIM_FINALIZER] or None
            patch = {"metadata": {"finalizers": kept, "resourceVersion": metadata["resourceVersion"]}}
            await self._api.patch(objects.RESOURCE_CLAIM, metadata["name"], metadata["namespace"], patch)

    def _was_made_for_an_ended_pod(self, claim: Object) -> bool:
        pods = [self._store.find(objects.POD, key) for key in owner_keys(claim, objects.POD)]
        return any(pod is not None and has_pod_ended(pod) for pod in pods)

    async def _delete(self, claim: Object) -> None:
        metadata = claim["metadata"]
        if "deletionTimestamp" in metadata:
            return
        try:
            await self._api.delete(
                objects.RESOURCE_CLAIM, metadata["name"], metadata["namespace"], uid=metadata["uid"]
            )
        except (NotFound, Conflict):
            return


def claims_by_entry(pod: Object) -> dict[str, str]:
    """The claim of each entry of a pod's resourceClaims; "" where it is still to be made."""
    made = {
        status["name"]: status.get("resourceClaimName", "")
        for status in pod.get("status", {}).get("resourceClaimStatuses") or ()
    }
    return {
        claim["name"]: claim.get("resourceClaimName") or made.get(claim["name"], "")
        for claim in pod["spec"].get("resourceClaims") or ()
    }


def _claim_from_template(pod: Object, entry: str, template: Object) -> Object:
    metadata = clone(template["spec"].get("metadata") or {})
    owner = pod["metadata"]
    metadata |= {"generateName": f"{owner['name']}-{entry}-", "namespace": owner["namespace"]}
    metadata["annotations"] = (metadata.get("annotations") or {}) | {POD_CLAIM_NAME: entry}
    metadata["ownerReferences"] = controller_reference(objects.POD, pod)
    return {"metadata": metadata, "spec": clone(template["spec"]["spec"])}
