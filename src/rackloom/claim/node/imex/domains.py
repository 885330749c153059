"""The state of ComputeDomains and IMEX daemons in the cluster, for which a channel waits.

A claim names its ComputeDomain by UID. `ComputeDomains` finds it by the controller's label, else by
listing, and compares UIDs: any client may set a label, but none can choose a UID. A workload's claim must be
in the namespace of the ComputeDomain, since a claim that could name a foreign one would share memory with
its pods. The ComputeDomain must not be in deletion, since the node label would outlive it. While the
controller reports that it waits for quota of Kueue and has nothing, no channel of it is prepared: nothing
else would stop a claim that is written by hand if it waits for no daemon.

`ImexDaemons` decides whether the daemon of a ComputeDomain, or the one kept warm for a clique, is READY on
this node, from ComputeDomainClique objects. After a power failure such an object still shows READY for a
daemon that has not started again. So a daemon writes the boot id of its node into a file on the host once
it has reported itself, and READY counts only if that file names this boot. Daemons that write no such
file (NVIDIA's, earlier releases) count without it. The file is written by a container, so links are not
followed, pipes not waited for, and no more bytes are read than an id has.

If the host runs nvidia-imex itself, `HostImexDaemon` queries nvidia-imex-ctl instead.
"""

import os
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import msgspec

from rackloom.claim.kube.api import KubeApi, NotFound
from rackloom.claim.node.imex.devices import ImexSettings
from rackloom.core.cluster.domain_objects import Readiness, read_clique
from rackloom.core.cluster.names import (
    BOOT_FILE,
    CLIQUE_ID_LABEL,
    COMPUTE_DOMAIN_LABEL,
    QUOTA_RESERVED,
    WAITING_FOR_QUOTA,
    WITHDRAWN,
    clique_object_name,
)
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    Object,
    condition_of,
    is_being_deleted,
    name_of,
    namespace_of,
    uid_of,
)
from rackloom.errors import Refused, Retry
from rackloom.runtime import programs

# ComputeDomains by UID.


QUOTA_RETRY_SECONDS = 3.0
_WITHOUT_QUOTA = (WAITING_FOR_QUOTA, WITHDRAWN)
"""Reasons of the condition QuotaReserved with which a ComputeDomain has nothing, or loses it."""
_UID = re.compile(r"[0-9A-Za-z-]{1,63}")


class DomainReference(msgspec.Struct, frozen=True):
    """The namespace and name of a ComputeDomain."""

    namespace: str
    name: str


class ComputeDomains:
    """ComputeDomains by UID. A UID is never used again, so its namespace and name are kept."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._known: dict[str, DomainReference] = {}

    async def of_workload(self, uid: str, namespace: str) -> DomainReference:
        """The ComputeDomain `uid`, for a claim in `namespace`.

        Raises `Refused` when there is none, when it is being deleted (the label that a preparation puts on
        the node would outlive it), or when it is in another namespace: a claim that could name a foreign
        ComputeDomain would share memory with its pods. Raises `Retry` while it waits for quota.
        """
        found = await self.find(uid, namespace)
        if found.namespace != namespace:
            raise Refused(
                f"ComputeDomain {uid} is not in namespace {namespace} of the claim",
                nearest_fix="create the pod and its claim in the namespace of the ComputeDomain",
            )
        await self._require_usable(uid, found)
        return found

    async def _require_usable(self, uid: str, found: DomainReference) -> None:
        try:
            obj = await self._api.get(COMPUTE_DOMAIN, found.name, found.namespace)
        except NotFound:
            obj = {}
        if uid_of(obj) != uid or is_being_deleted(obj):
            raise Refused(
                f"ComputeDomain {found.namespace}/{found.name} of this claim is deleted",
                nearest_fix="create it anew, and then the pods from the claim template that it makes",
            )
        quota = condition_of(obj, QUOTA_RESERVED)
        if quota is not None and quota.reason in _WITHOUT_QUOTA:
            why = quota.message or "waits for quota"
            raise Retry(f"ComputeDomain {found.namespace}/{found.name} {why}", after=QUOTA_RETRY_SECONDS)

    async def living(self) -> frozenset[str]:
        """UIDs of all ComputeDomains."""
        listed = await self._api.list(COMPUTE_DOMAIN)
        return frozenset(map(uid_of, listed.items))

    async def find(self, uid: str, namespace: str | None = None) -> DomainReference:
        """The ComputeDomain `uid`, in this namespace first. Raises `Refused` when there is none.

        The label of Rackloom's controller finds it. A ComputeDomain of another controller is searched for.
        """
        if uid not in self._known and _UID.fullmatch(uid):
            for where, labels in ((namespace, domain_selector(uid)), (namespace, ""), (None, "")):
                for item in (await self._api.list(COMPUTE_DOMAIN, where, labels=labels)).items:
                    # Any client may put a label on an object, but none can choose its UID.
                    if uid_of(item) == uid:
                        self._known[uid] = DomainReference(namespace_of(item) or "", name_of(item))
                if uid in self._known:
                    break
        if uid not in self._known:
            raise Refused(
                f"there is no ComputeDomain with UID {uid}",
                nearest_fix="create the ComputeDomain, and the pod from the claim template that it makes",
            )
        return self._known[uid]


# Readiness of daemons.


READY_RETRY_SECONDS = 0.25
CTL_SECONDS = 10.0


class ImexDaemons:
    """IMEX daemons of this node, as the clique objects in their namespaces describe them."""

    def __init__(self, api: KubeApi, settings: ImexSettings) -> None:
        self._api = api
        self._settings = settings

    async def need_own(self, uid: str, clique_id: str) -> None:
        """Raise `Retry` unless the daemon of ComputeDomain `uid` is READY here."""
        name = clique_object_name(uid, clique_id)
        for namespace in self._settings.namespaces:
            with suppress(NotFound):
                if self._is_ready(await self._api.get(COMPUTE_DOMAIN_CLIQUE, name, namespace)):
                    return
        raise _not_ready(f"ComputeDomain {uid}")

    async def need_warm(self, clique_id: str) -> None:
        """Raise `Retry` unless the daemon that is kept warm for the clique is READY here."""
        for namespace in self._settings.namespaces:
            listed = await self._api.list(COMPUTE_DOMAIN_CLIQUE, namespace, labels=clique_selector(clique_id))
            if any(self._is_ready(clique_object) for clique_object in listed.items):
                return
        raise _not_ready(f"clique {clique_id}")

    async def changes(self, labels: str) -> AsyncIterator[None]:
        """Yield when a daemon of the clique objects selected by `labels` is READY here.

        Of the namespace for new daemons alone: those of earlier installations run already, and if one
        starts again the next attempt finds it.
        """
        namespace = self._settings.namespaces[0]
        listed = await self._api.list(COMPUTE_DOMAIN_CLIQUE, namespace, labels=labels)
        if any(self._is_ready(item) for item in listed.items):
            yield
        events = self._api.watch(
            COMPUTE_DOMAIN_CLIQUE, namespace, resource_version=listed.resource_version, labels=labels
        )
        async for event in events:
            if event.type in ("ADDED", "MODIFIED") and self._is_ready(event.object):
                yield

    def _is_ready(self, obj: Object) -> bool:
        value = read_clique(obj)
        here = value.on(self._settings.node)
        ready = here is not None and here.status is Readiness.READY
        return ready and self._is_of_this_boot(value.compute_domain)

    def _is_of_this_boot(self, uid: str) -> bool:
        """Whether its file names this boot, or there is none.

        The daemon's container can write anything there. So a link is not followed (O_NOFOLLOW), a pipe not
        waited for (O_NONBLOCK), and no more is read than an id has.
        """
        wanted = self._settings.boot_id.encode()
        if not wanted:
            return True
        path = self._settings.domains / uid / BOOT_FILE
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        try:
            return os.read(file, len(wanted) + 1) == wanted
        except OSError:
            return False
        finally:
            os.close(file)


def _not_ready(whose: str) -> Retry:
    return Retry(f"the IMEX daemon of {whose} is not ready on this node", after=READY_RETRY_SECONDS)


def domain_selector(uid: str) -> str:
    """Selects the clique objects of a ComputeDomain."""
    return f"{COMPUTE_DOMAIN_LABEL}={uid}"


def clique_selector(clique_id: str) -> str:
    """Selects the clique objects of a clique."""
    return f"{CLIQUE_ID_LABEL}={clique_id}"


class HostImexDaemon(msgspec.Struct, frozen=True, kw_only=True):
    """An nvidia-imex that the host runs itself."""

    root: Path
    """The mount point of the host's root, with nvidia-imex-ctl in it."""
    socket: str = "/etc/nvidia-imex/imex_ctrl.sock"

    async def need_ready(self) -> None:
        """Raise `Retry` unless nvidia-imex-ctl prints READY."""
        command = (*programs.chroot_prefix(self.root), "nvidia-imex-ctl", "-q", "-u", self.socket)
        result = await programs.run_program(*command, seconds=CTL_SECONDS, again=READY_RETRY_SECONDS)
        if result.output != "READY":
            raise Retry(
                f"the host's nvidia-imex says {result.output!r}, not READY", after=READY_RETRY_SECONDS
            )
