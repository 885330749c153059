"""Finding the ComputeDomain that a claim names by its UID."""

import re

import msgspec

from rackloom.claim.domain.names import COMPUTE_DOMAIN_LABEL
from rackloom.claim.kube.api import KubeApi, NotFound
from rackloom.claim.kube.kinds import COMPUTE_DOMAIN
from rackloom.errors import Refused

_UID = re.compile(r"[0-9A-Za-z-]{1,63}")


class DomainName(msgspec.Struct, frozen=True):
    """Where a ComputeDomain is."""

    namespace: str
    name: str


class Domains:
    """ComputeDomains by UID. A UID is never used again, so what was found once is not asked for again."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._known: dict[str, DomainName] = {}

    async def of_workload(self, uid: str, namespace: str) -> DomainName:
        """The ComputeDomain `uid`, for a claim in `namespace`.

        Raises `Refused` when there is none, when it is being deleted (the label that a preparation puts on
        the node would outlive it), or when it is in another namespace: a claim that could name a foreign
        ComputeDomain would share memory with its pods.
        """
        found = await self._find(uid, namespace)
        if found.namespace != namespace:
            raise Refused(
                f"ComputeDomain {uid} is not in namespace {namespace} of the claim",
                nearest_fix="create the pod and its claim in the namespace of the ComputeDomain",
            )
        await self._require_staying(uid, found)
        return found

    async def _require_staying(self, uid: str, found: DomainName) -> None:
        try:
            meta = (await self._api.get(COMPUTE_DOMAIN, found.name, found.namespace))["metadata"]
        except NotFound:
            meta = {}
        if meta.get("uid") != uid or meta.get("deletionTimestamp") is not None:
            raise Refused(
                f"ComputeDomain {found.namespace}/{found.name} of this claim is deleted",
                nearest_fix="create it anew, and then the pods from the claim template that it makes",
            )

    async def of_daemon(self, uid: str) -> DomainName:
        """The ComputeDomain `uid`, wherever it is. Raises `Refused` when there is none."""
        return await self._find(uid, None)

    async def living(self) -> frozenset[str]:
        """UIDs of all ComputeDomains."""
        listed = await self._api.list(COMPUTE_DOMAIN)
        return frozenset(one["metadata"]["uid"] for one in listed.items)

    async def _find(self, uid: str, namespace: str | None) -> DomainName:
        """By the label that our controller puts on it; a ComputeDomain of another has to be searched for."""
        if uid not in self._known and _UID.fullmatch(uid):
            labelled = f"{COMPUTE_DOMAIN_LABEL}={uid}"
            for where, labels in ((namespace, labelled), (namespace, ""), (None, "")):
                await self._learn(uid, where, labels)
                if uid in self._known:
                    break
        if uid not in self._known:
            raise Refused(
                f"there is no ComputeDomain with UID {uid}",
                nearest_fix="create the ComputeDomain, and the pod from the claim template that it makes",
            )
        return self._known[uid]

    async def _learn(self, uid: str, namespace: str | None, labels: str) -> None:
        for one in (await self._api.list(COMPUTE_DOMAIN, namespace, labels=labels)).items:
            meta = one["metadata"]
            # Anybody may put a label on an object, but nobody chooses its UID.
            if meta["uid"] == uid:
                self._known[uid] = DomainName(meta["namespace"], meta["name"])
