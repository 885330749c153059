"""The resource claim controller of kube-controller-manager (DRA).

It creates the claims that a pod's templates describe and records their names in the pod's status. It
removes users that have ended from a claim's reservedFor. A claim that loses its last user, or has none
and is being deleted, is deallocated and then loses the delete-protection finalizer. A claim that was
made for a pod that has ended is deleted. Keys in the work queue are those of pods, and those of claims
with the prefix `claim/`.
"""

from collections.abc import Iterable, Iterator

from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import Object, ResourceKind, has_pod_ended
from rackloom.lab.kube.controllers.workloads import Controller, controller_reference, owner_keys
from rackloom.lab.kube.managed_fields import clone
from rackloom.lab.kube.store import ObjectKey, key_of

CLAIM_FINALIZER = "resource.kubernetes.io/delete-protection"
"""On a claim from its allocation until the end of its last use."""
POD_CLAIM_NAME = "resource.kubernetes.io/pod-claim-name"


class ResourceClaimController(Controller):
    """Keys are those of pods, and of claims with "claim/" before their name."""

    kinds = (objects.POD, objects.RESOURCE_CLAIM)

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

    async def _reconcile(self, key: ObjectKey) -> None:
        if key[1].startswith("claim/"):
            await self._release((key[0], key[1].removeprefix("claim/")))
        else:
            await self._create_claims(key)

    async def _create_claims(self, key: ObjectKey) -> None:
        """Create the claims that a pod's templates describe. Wait for a template that is missing."""
        pod = self._store.find(objects.POD, key)
        if pod is None or has_pod_ended(pod) or "deletionTimestamp" in pod["metadata"]:
            return
        names = claims_by_entry(pod)
        missing = [claim for claim in pod["spec"].get("resourceClaims") or () if not names[claim["name"]]]
        statuses = list(pod.get("status", {}).get("resourceClaimStatuses") or ())
        for entry in missing:
            name = await self._from_template(pod, entry)
            if name is not None:
                statuses.append({"name": entry["name"], "resourceClaimName": name})
        if len(statuses) > len(pod.get("status", {}).get("resourceClaimStatuses") or ()):
            patch = {"status": {"resourceClaimStatuses": statuses}}
            await self._api.patch(objects.POD, key[1], key[0], patch, subresource="status")

    async def _from_template(self, pod: Object, entry: Object) -> str | None:
        metadata = pod["metadata"]
        for kind, key, claim in self._store.dependents(metadata["uid"]):
            annotations = claim["metadata"].get("annotations") or {}
            if kind == objects.RESOURCE_CLAIM and annotations.get(POD_CLAIM_NAME) == entry["name"]:
                return key[1]
        key_of_template = (metadata["namespace"], entry["resourceClaimTemplateName"])
        template = self._store.find(objects.RESOURCE_CLAIM_TEMPLATE, key_of_template)
        if template is None:
            return None
        created = await self._api.create(
            objects.RESOURCE_CLAIM, _claim_from_template(pod, entry["name"], template)
        )
        return str(created["metadata"]["name"])

    async def _release(self, key: ObjectKey) -> None:
        """Remove users that have ended from a claim, and its devices when it has none left."""
        claim = self._store.find(objects.RESOURCE_CLAIM, key)
        if claim is None:
            return
        status = claim.get("status") or {}
        users = status.get("reservedFor") or []
        kept = [user for user in users if self._uses(claim, user)]
        is_leaving = "deletionTimestamp" in claim["metadata"]
        if kept != users or (not kept and "allocation" in status and is_leaving):
            status = {
                key: value for key, value in claim["status"].items() if key not in ("reservedFor", "devices")
            }
            if kept:
                status |= {"reservedFor": kept, "devices": claim["status"].get("devices", [])}
            else:
                status.pop("allocation", None)
            claim = await self._update_status(objects.RESOURCE_CLAIM, claim, status)
        if "allocation" not in (claim.get("status") or {}):
            await self._remove_finalizer(claim)
        owners = [self._store.find(objects.POD, key) for key in owner_keys(claim, objects.POD)]
        if not kept and any(pod is not None and has_pod_ended(pod) for pod in owners):
            await self._delete(objects.RESOURCE_CLAIM, claim)

    def _uses(self, claim: Object, user: Object) -> bool:
        pod = self._store.find(objects.POD, (claim["metadata"]["namespace"], user["name"]))
        return pod is not None and pod["metadata"]["uid"] == user["uid"] and not has_pod_ended(pod)

    async def _remove_finalizer(self, claim: Object) -> None:
        metadata = claim["metadata"]
        held = metadata.get("finalizers") or []
        if CLAIM_FINALIZER in held:
            kept = [finalizer for finalizer in held if finalizer != CLAIM_FINALIZER] or None
            patch = {"metadata": {"finalizers": kept, "resourceVersion": metadata["resourceVersion"]}}
            await self._api.patch(objects.RESOURCE_CLAIM, metadata["name"], metadata["namespace"], patch)


def claims_by_entry(pod: Object) -> dict[str, str]:
    """The claim of each entry of a pod's resourceClaims, or "" if it is still to be made."""
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
