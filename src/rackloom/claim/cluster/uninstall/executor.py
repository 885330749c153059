"""Reads a cluster and carries out the uninstallation plan until nothing is left to do.

API discovery says which resource types are served, so that objects of types unknown to us are found as
well. Each round reads the cluster, plans, and does the first step that is left; it makes no choice. A
step is done when a read finds nothing of it any more, so it does not matter where a round is
interrupted. A step in which nothing changes for too long is given up. A missing right is reported with
what to change.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from rackloom.claim.cluster.controller_runtime import execute_write
from rackloom.claim.cluster.uninstall.blockers import UninstallPhase
from rackloom.claim.cluster.uninstall.inventory import (
    DOMAIN_KINDS,
    PART_OF,
    PART_OF_LABEL,
    PLUGINS,
    ClusterInventory,
)
from rackloom.claim.cluster.uninstall.plan import UninstallPlan, UninstallStep, build_uninstall_plan
from rackloom.claim.kube.api import KubeApi, KubeError, NotFound, Rejected
from rackloom.core.cluster.claims import allocated_devices, claim_consumers
from rackloom.core.cluster.names import COMPUTE_DOMAIN_LABEL
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    CRD,
    DAEMON_SET,
    DEPLOYMENT,
    DEVICE_CLASS,
    GANG_PLAN,
    MUTATING_WEBHOOK,
    NAMESPACE,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    SECRET,
    VALIDATING_WEBHOOK,
    Object,
    ObjectWrite,
    ResourceKind,
    namespace_of,
)
from rackloom.core.cluster.pods import GANG_LABEL, WATCHED_LABEL
from rackloom.errors import Refused

# API discovery: `/api/v1`, `/apis` and `/apis/<group>/<version>`.


_NEEDED_VERBS = frozenset({"list", "delete"})


class DocumentClient(Protocol):
    """A client that reads documents which are no objects."""

    async def document(self, path: str) -> Object:
        """Read the document at a path. Raises KubeError."""
        ...


class ServedTypes(msgspec.Struct, frozen=True, kw_only=True):
    """What an API server answered."""

    kinds: tuple[ResourceKind, ...]
    """Each type once, in the version that its group prefers, if its objects can be listed and deleted."""
    silent: tuple[str, ...] = ()
    """`group/version` of each API whose own server (an APIService) does not answer."""


async def discover_types(api: DocumentClient) -> ServedTypes:
    """Ask an API server for its types. Raises KubeError where it does not answer itself."""
    groups = (await api.document("apis"))["groups"]
    preferred = [group["preferredVersion"]["groupVersion"] for group in groups]
    versions = ["v1", *preferred]
    paths = ["api/v1", *(f"apis/{version}" for version in preferred)]
    lists = await asyncio.gather(*(_resource_list(api, path) for path in paths))
    kinds = (kind for document in lists if document is not None for kind in listable_kinds(document))
    return ServedTypes(
        kinds=tuple(dict.fromkeys(kinds)),
        silent=tuple(name for name, document in zip(versions, lists, strict=True) if document is None),
    )


def listable_kinds(document: Object) -> tuple[ResourceKind, ...]:
    """The types of an APIResourceList whose objects can be listed and deleted."""
    group, _, version = document["groupVersion"].rpartition("/")
    return tuple(
        ResourceKind(group, version, entry["kind"], entry["name"], namespaced=entry["namespaced"])
        for entry in document["resources"]
        if "/" not in entry["name"] and _NEEDED_VERBS.issubset(entry["verbs"])
    )


async def _resource_list(api: DocumentClient, path: str) -> Object | None:
    try:
        return await api.document(path)
    except NotFound:
        return {"groupVersion": path.removeprefix("apis/").removeprefix("api/"), "resources": []}
    except KubeError as error:
        if error.code in (0, 401, 403):
            raise
        return None


# Rounds of reading, planning and writing.


_FORBIDDEN, _UNAUTHORIZED = 403, 401
MOST_REQUESTS = 16
"""Requests under way."""
POLL_SECONDS = (0.2, 0.5, 1.0, 2.0, 3.0)
"""Seconds between two reads while nothing changes; the last value repeats."""
_WHOLE = (
    NODE, NAMESPACE, DEPLOYMENT, DAEMON_SET, RESOURCE_SLICE, RESOURCE_CLAIM, COMPUTE_DOMAIN_CLIQUE,
    DEVICE_CLASS, MUTATING_WEBHOOK, VALIDATING_WEBHOOK,
)  # fmt: skip
"""Kinds that are read whole, whatever labels their objects have."""
_WHOLE_GROUPS = frozenset({"rbac.authorization.k8s.io", "admissionregistration.k8s.io"})
_LAST = (COMPUTE_DOMAIN, GANG_PLAN)
"""Read after all that names them: what is named and not found is certainly gone."""
_CERTAIN = frozenset({"", "apps", "resource.k8s.io", "apiextensions.k8s.io", *_WHOLE_GROUPS})
"""Groups that the API server itself serves: if one cannot be read, nothing is decided."""
_KNOWN = (*_WHOLE, *DOMAIN_KINDS, CRD, *_LAST)
_DEFINITIONS = tuple(f"{kind.plural}.{kind.group}" for kind in (*_LAST, COMPUTE_DOMAIN_CLIQUE))
"""Read by name too, to report foreign ones; reading all definitions of a cluster would be too much."""


class InventoryReader:
    """Reads a cluster; `clock` gives seconds since the epoch, `helm_release` is that of this installation."""

    def __init__(
        self,
        api: KubeApi,
        served: ServedTypes,
        namespace: str,
        clock: Callable[[], float],
        helm_release: str | None = None,
    ) -> None:
        self._helm_release = helm_release
        self._api = api
        self._served = served
        self._namespace = namespace
        self._clock = clock
        self._gate = asyncio.Semaphore(MOST_REQUESTS)
        known = {(kind.group, kind.plural) for kind in _KNOWN}
        self._kinds = (
            *dict.fromkeys(_KNOWN),
            *(kind for kind in served.kinds if (kind.group, kind.plural) not in known),
        )

    async def read(self) -> ClusterInventory:
        """Everything that a plan is based on. Raises KubeError, and Refused for missing rights."""
        found: dict[ResourceKind, list[Object]] = {kind: [] for kind in self._kinds}
        unread: set[str] = set(self._served.silent)

        async def add(kind: ResourceKind, namespace: str | None = None, labels: str = "") -> None:
            found[kind] += await self._list(kind, namespace, labels, unread)

        async def define(name: str) -> None:
            with suppress(NotFound):
                found[CRD].append(await self._api.get(CRD, name))

        await _gather((*(add(*each) for each in self._first()), *map(define, _DEFINITIONS)))
        partial = ClusterInventory(found, namespace=self._namespace, now=self._clock())
        await _gather(
            add(kind, home) for home in sorted(partial.homes) for kind in self._kinds if kind.namespaced
        )
        await _gather(
            add(POD, place) for place in sorted(_namespaces_of_claims(found[RESOURCE_CLAIM]) - partial.homes)
        )
        await _gather(add(kind) for kind in _LAST)
        return ClusterInventory(
            found,
            namespace=self._namespace,
            now=self._clock(),
            unread=sorted(unread),
            helm_release=self._helm_release,
        )

    def _first(self) -> Iterable[tuple[ResourceKind, str | None, str]]:
        for kind in self._kinds:
            if kind in _WHOLE or (kind.group in _WHOLE_GROUPS and not kind.namespaced):
                yield kind, None, ""
            elif kind not in _LAST:
                yield kind, None, f"{PART_OF_LABEL}={PART_OF}"
        for kind in (RESOURCE_CLAIM_TEMPLATE, SECRET, POD):
            yield kind, None, COMPUTE_DOMAIN_LABEL
        for label in (GANG_LABEL, WATCHED_LABEL):
            yield POD, None, label

    async def _list(
        self, kind: ResourceKind, namespace: str | None, labels: str, unread: set[str]
    ) -> Sequence[Object]:
        try:
            async with self._gate:
                return (await self._api.list(kind, namespace, labels=labels)).items
        except NotFound:
            return ()  # A definition that is gone took its type along.
        except KubeError as error:
            if kind.group in _CERTAIN or kind in _KNOWN or error.code in (0, 401):
                raise access_error(error, f"list {kind.plural}") from error
            unread.add(f"{kind.plural}.{kind.group}")
            return ()


class UninstallLimits(msgspec.Struct, frozen=True):
    """Limits of time. `clock` and `pause` are those of the running loop, or of a test."""

    still_seconds: float
    """Seconds after which a step in which nothing changes is given up."""
    clock: Callable[[], float]
    pause: Callable[[float], Awaitable[None]]


class FinishedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step of which nothing remains."""

    phase: UninstallPhase
    objects: tuple[str, ...]
    """All objects of it, including those that came meanwhile."""
    seconds: float


class UninstallOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How far it came."""

    done: tuple[FinishedStep, ...]
    rest: UninstallPlan
    """What is left to do: nothing, or what is blocked, or what did not end in time."""
    timed_out: bool = False


class _CurrentStep:
    """The step that is under way."""

    def __init__(self, step: UninstallStep, now: float) -> None:
        self.phase = step.phase
        self.begun = self.changed = now
        self.objects: dict[str, None] = {}
        self.idle = 0
        self._last: UninstallStep | None = None

    def update(self, step: UninstallStep, now: float) -> None:
        """Record what remains of it, and whether that has changed."""
        self.objects |= dict.fromkeys(step.objects)
        last, self._last = self._last, step
        if last is None or (last.objects, last.waits) != (step.objects, step.waits):
            self.changed, self.idle = now, 0
        else:
            self.idle += 1


class Uninstallation:
    """`report` receives each finished step; `waiting` the current one, with its seconds so far."""

    def __init__(
        self,
        read: Callable[[], Awaitable[ClusterInventory]],
        api: KubeApi,
        limits: UninstallLimits,
        report: Callable[[FinishedStep], None],
        waiting: Callable[[UninstallStep, float], None],
    ) -> None:
        self._read = read
        self._api = api
        self._limits = limits
        self._report = report
        self._waiting = waiting

    async def run(self) -> UninstallOutcome:
        """Remove everything, up to what blocks it. Raises KubeError, and Refused for missing rights."""
        done: list[FinishedStep] = []
        current: _CurrentStep | None = None
        while True:
            plan = await self._planned()
            now = self._limits.clock()
            step = plan.steps[0] if plan.steps else None
            if current is not None and (step is None or step.phase is not current.phase):
                seconds = now - current.begun
                done.append(
                    FinishedStep(phase=current.phase, objects=tuple(current.objects), seconds=seconds)
                )
                self._report(done[-1])
                current = None
            if step is None or step.blockers:
                return UninstallOutcome(done=tuple(done), rest=plan)
            current = current or _CurrentStep(step, now)
            current.update(step, now)
            if now - current.changed > self._limits.still_seconds:
                return UninstallOutcome(done=tuple(done), rest=plan, timed_out=True)
            self._waiting(step, now - current.begun)
            for action in step.actions:
                await self._execute(action)
            await self._limits.pause(POLL_SECONDS[min(current.idle, len(POLL_SECONDS) - 1)])

    async def _planned(self) -> UninstallPlan:
        """A new plan. An API server that does not answer is asked again, for as long as a step may wait."""
        deadline = self._limits.clock() + self._limits.still_seconds
        while True:
            try:
                return build_uninstall_plan(await self._read())
            except KubeError as error:
                if isinstance(error, Rejected) or self._limits.clock() > deadline:
                    raise
            await self._limits.pause(POLL_SECONDS[-1])

    async def _execute(self, action: ObjectWrite) -> None:
        """Send one write. The next read shows the effect of one that was late, or whose answer was lost."""
        try:
            await execute_write(self._api, action)
        except Rejected as refusal:
            raise access_error(refusal, action.what) from refusal
        except KubeError:
            return


async def _gather(reads: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Read concurrently; the first failure cancels the others."""
    tasks = [asyncio.ensure_future(read) for read in reads]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _namespaces_of_claims(claims: Iterable[Object]) -> set[str]:
    """Namespaces in which pods hold devices of drivers that we serve."""
    return {
        namespace
        for claim in claims
        if claim_consumers(claim)
        and any(device.driver in PLUGINS for device in allocated_devices(claim))
        and (namespace := namespace_of(claim))
    }


def access_error(error: KubeError, what: str) -> Exception:
    """A refusal that says what to change, where a right or a credential is missing."""
    fix = "use a kubeconfig of an administrator of the whole cluster"
    if error.code == _FORBIDDEN:
        return Refused(f"this account may not {what}: {error.message}", nearest_fix=fix)
    if error.code == _UNAUTHORIZED:
        return Refused(f"the API server does not accept this account: {error.message}", nearest_fix=fix)
    return error
