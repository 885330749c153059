"""The API server itself: what becomes of a request, from its arrival to its answer.

Create: check the namespace, set identity, run admission, apply defaults and validation, record field
owners, commit. Update, patch and apply: compute the new object from the stored one, return early when
nothing changes, run admission, validate, and commit if the stored object is still the same; otherwise
start again (optimistic concurrency, five attempts). Delete: run admission, check the preconditions,
delete. A dry run goes the same way and stores nothing.

The namespaces exist from the first request on, because only then a loop runs that tells the time. UIDs
and generated names come from the seed.
"""

import asyncio
import random
import uuid
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from rackloom.core.kubernetes import objects as kubernetes_objects
from rackloom.core.kubernetes.objects import Object, ResourceKind, metav1_time
from rackloom.lab.kube import managed_fields, objects, refusals
from rackloom.lab.kube.deletion import Deletion, GarbageCollector
from rackloom.lab.kube.faults import ApiCall, DisorderedEvents, RequestFaults, StaleReads
from rackloom.lab.kube.managed_fields import FieldWriter, clone, with_last_applied
from rackloom.lab.kube.objects import TYPE_SCHEMAS, NewIdentity, TypeSchema, bound_pod
from rackloom.lab.kube.store import ObjectKey, ObjectStore
from rackloom.lab.kube.validation import RULES, ObjectRule
from rackloom.lab.virtual.event_loop import loop_wall_time

_SUFFIX_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
"""Generated names end in five of these (k8s.io/apimachinery, util/rand)."""
DEFAULT_NAMESPACES = (
    "default",
    "kube-system",
    "kube-public",
    "kube-node-lease",
    "rackloom-system",
    "rackloom-imex",
)
"""Those that every cluster has, and ours."""
_UPDATE_ATTEMPTS = 5
"""How often the server tries a change again that was overtaken while admission ran."""


@dataclass(frozen=True, slots=True)
class AdmissionReview:
    """A request for admission. `object` is None for a delete, `old` for a create."""

    operation: Literal["CREATE", "UPDATE", "DELETE"]
    kind: ResourceKind
    user: str
    object: Object | None
    old: Object | None
    subresource: str = ""
    dry_run: bool = False


AdmissionHook = Callable[[AdmissionReview], Awaitable[Object | None]]
"""Answers with the object as it shall be, or None to leave it; raises `Rejected` to refuse."""

Mutation = Callable[[Object], Object]
"""What a request makes of the stored object. It is called again when another write came between."""


class FakeKube:
    """One API server. `DirectApi` and `KubeTransport` are its fronts.

    `namespaces` exist from the start; an object in any other is refused as a real server refuses it.
    `now` gives seconds since 1970. `window` is how many changes of each kind watches can go back.
    """

    def __init__(
        self,
        *,
        namespaces: Iterable[str] = DEFAULT_NAMESPACES,
        seed: int = 0,
        now: Callable[[], float] = loop_wall_time,
        window: int = 1000,
        bookmark_seconds: float = 60.0,
        watch_seconds: float = 1800.0,
    ) -> None:
        self.store = ObjectStore(window)
        self.faults = RequestFaults(seed)
        self.stale_reads = StaleReads()
        self.disordered_events = DisorderedEvents(seed)
        self.schemas: dict[ResourceKind, TypeSchema] = dict(TYPE_SCHEMAS)
        self.rules: defaultdict[ResourceKind, list[ObjectRule]] = defaultdict(list)
        self.admission: list[AdmissionHook] = []
        self.calls: Counter[ApiCall] = Counter()
        self.bookmark_seconds = bookmark_seconds
        self.watch_seconds = watch_seconds
        self._random = random.Random(seed)  # noqa: S311 (reproducible on purpose)
        self._now = now
        self._removal = Deletion(self.store, now, self._collect_later)
        self._collector = GarbageCollector(self._removal)
        for kind, rules in RULES.items():
            self.rules[kind].extend(rules)
        self._first_namespaces = tuple(namespaces)

    def serve(self, kind: ResourceKind, schema: TypeSchema) -> None:
        """Serve another type, or one with another schema."""
        self.schemas[kind] = schema

    def writes(self, user: str | None = None) -> int:
        """How many writes were sent, by one user or by all; those that failed too."""
        return sum(n for call, n in self.calls.items() if call.is_write and user in (None, call.user))

    def now(self) -> float:
        """Seconds since 1970, by this server's clock."""
        return self._now()

    def schema(self, kind: ResourceKind) -> TypeSchema:
        """What is known of a type. Raises `NotFound` for one that is not served."""
        self._open_namespaces()
        if kind not in self.schemas:
            raise refusals.not_served()
        return self.schemas[kind]

    def key(self, kind: ResourceKind, namespace: str | None, name: str) -> ObjectKey:
        """Under what an object of a request is stored."""
        self.schema(kind)
        if kind.namespaced and not namespace:
            raise refusals.bad_request("an empty namespace may not be set when a resource name is provided")
        return (namespace if kind.namespaced else None), name

    async def create(
        self, kind: ResourceKind, obj: Object, user: str, *, manager: str = "", dry_run: bool = False
    ) -> Object:
        """Create an object as `user`; its fields are the `manager`'s, or theirs."""
        writer = FieldWriter(manager or user, "Update", kind.api_version)
        created = self._new_object(kind, obj)
        created = await self._admit(AdmissionReview("CREATE", kind, user, created, None, dry_run=dry_run))
        return self._insert(kind, created, writer, dry_run=dry_run)

    def _new_object(self, kind: ResourceKind, obj: Object) -> Object:
        schema, namespace = self.schema(kind), (obj.get("metadata") or {}).get("namespace")
        if kind.namespaced:
            self._check_namespace(kind, namespace, (obj.get("metadata") or {}).get("name", ""))
        suffix = "".join(self._random.choices(_SUFFIX_LETTERS, k=5))
        identity = str(uuid.UUID(int=self._random.getrandbits(128), version=4))
        created = objects.new_object(
            kind, clone(obj), namespace, schema, NewIdentity(identity, self._time(), suffix)
        )
        if self.store.find(kind, (created["metadata"].get("namespace"), created["metadata"]["name"])):
            raise refusals.already_exists(kind, created["metadata"]["name"])
        return created

    def _insert(
        self, kind: ResourceKind, created: Object, writer: FieldWriter, *, dry_run: bool = False
    ) -> Object:
        created = self._ruled(kind, created, None)
        name = created["metadata"]["name"]
        if self.store.find(kind, (created["metadata"].get("namespace"), name)):
            raise refusals.already_exists(kind, name)
        if "managedFields" not in created["metadata"]:
            created = managed_fields.record_update(None, created, writer, self.schema(kind), self._time())
        return created if dry_run else self._removal.commit(kind, created)

    async def change(
        self,
        kind: ResourceKind,
        key: ObjectKey,
        change: Mutation,
        user: str,
        subresource: str = "",
        *,
        manager: str = "",
        dry_run: bool = False,
    ) -> Object:
        """Replace or patch an object as `user`: what `change` makes of it is stored, unless in a dry run.

        The fields that changed are the `manager`'s, or theirs.
        """
        writer = FieldWriter(manager or user, "Update", kind.api_version, subresource)

        def owned(old: Object) -> Object:
            new = self._settled(kind, old, change(clone(old)), subresource)
            return managed_fields.record_update(old, new, writer, self.schema(kind), self._time())

        return await self._commit(kind, key, owned, user, subresource, dry_run=dry_run)

    async def apply(
        self,
        kind: ResourceKind,
        key: ObjectKey,
        obj: Object,
        manager: str,
        user: str,
        *,
        force: bool,
        subresource: str,
        dry_run: bool = False,
    ) -> Object:
        """Server-side apply of `obj`; creates it where it is not there."""
        schema, writer = self.schema(kind), FieldWriter(manager, "Apply", kind.api_version, subresource)
        if self.store.find(kind, key) is None:
            if subresource:
                raise refusals.not_found(kind, key[1])
            return await self._apply_new(kind, obj, writer, user, dry_run=dry_run)
        applied = clone(obj) if not schema.status or subresource else _without_status(clone(obj))

        def owned(old: Object) -> Object:
            merged = managed_fields.apply_fields(old, applied, writer, schema, self._time(), force=force)
            merged = with_last_applied(merged, applied, manager)
            return self._settled(kind, old, merged, subresource)

        return await self._commit(kind, key, owned, user, subresource, dry_run=dry_run)

    async def _apply_new(
        self, kind: ResourceKind, obj: Object, writer: FieldWriter, user: str, *, dry_run: bool
    ) -> Object:
        schema, created = self.schema(kind), self._new_object(kind, obj)
        bare = {**created, "metadata": {**created["metadata"], "managedFields": []}}
        created = managed_fields.apply_fields(bare, created, writer, schema, self._time(), force=True)
        created = await self._admit(AdmissionReview("CREATE", kind, user, created, None, dry_run=dry_run))
        return self._insert(kind, created, writer, dry_run=dry_run)

    def _settled(self, kind: ResourceKind, old: Object, new: Object, subresource: str) -> Object:
        schema = self.schema(kind)
        if subresource and not (subresource == "status" and schema.status):
            raise refusals.not_served()
        return objects.updated_object(kind, old, new, schema, subresource)

    async def _commit(
        self,
        kind: ResourceKind,
        key: ObjectKey,
        make: Mutation,
        user: str,
        subresource: str,
        *,
        dry_run: bool,
    ) -> Object:
        # Optimistic concurrency: admission awaits, so another write may come between. The change is computed
        # again from the newest object, and stored only if that is still the one it was computed from.
        for _ in range(_UPDATE_ATTEMPTS):
            old = self.store.read(kind, key)
            new = make(old)
            if _changes_nothing(old, new):
                return old
            new = await self._admit(AdmissionReview("UPDATE", kind, user, new, old, subresource, dry_run))
            new = self._ruled(kind, new, old)
            if self.store.find(kind, key) is old:
                return new if dry_run else self._removal.commit(kind, new)
        raise refusals.stale_version(kind, key[1])

    def bind(self, key: ObjectKey, node: str, uid: str | None, *, dry_run: bool = False) -> Object:
        """Give a pod its node. No owner of fields changes, and no generation counts up."""
        pod = self.store.read(kubernetes_objects.POD, key)
        if uid not in (None, pod["metadata"]["uid"]):
            raise refusals.uid_conflict(kubernetes_objects.POD, key[1], str(uid), pod["metadata"]["uid"])
        given = bound_pod(pod, node, self._time())
        return given if dry_run else self._removal.commit(kubernetes_objects.POD, given)

    async def delete(
        self,
        kind: ResourceKind,
        key: ObjectKey,
        user: str,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
        propagation: str | None = None,
        grace_seconds: int | None = None,
        dry_run: bool = False,
    ) -> Object:
        """Ask an object to go; returns it as it is after that, or as it last was."""
        old = self.store.read(kind, key)
        # Preconditions are checked on the object as it is after admission, which awaits.
        await self._admit(AdmissionReview("DELETE", kind, user, None, old, dry_run=dry_run))
        old = self.store.read(kind, key)
        have = old["metadata"]
        if uid not in (None, have["uid"]):
            raise refusals.precondition_failed(kind, key[1], "UID", str(uid), have["uid"])
        if resource_version not in (None, have["resourceVersion"]):
            applied = str(resource_version)
            raise refusals.precondition_failed(
                kind, key[1], "ResourceVersion", applied, have["resourceVersion"]
            )
        if dry_run:
            return old
        return self._removal.delete(kind, key, propagation, grace_seconds) or old

    async def _admit(self, review: AdmissionReview) -> Object:
        obj = review.object
        for hook in self.admission:
            asked = AdmissionReview(
                review.operation, review.kind, review.user, clone(obj), clone(review.old),
                review.subresource, review.dry_run,
            )  # fmt: skip
            answer = await hook(asked)
            obj = obj if answer is None else clone(answer)
        return obj if obj is not None else {}

    def _ruled(self, kind: ResourceKind, new: Object, old: Object | None) -> Object:
        for rule in self.rules[kind]:
            new = rule(new, old)
        return new

    def _check_namespace(self, kind: ResourceKind, namespace: str | None, name: str) -> None:
        if not namespace:
            raise refusals.bad_request("namespace may not be empty")
        found = self.store.find(kubernetes_objects.NAMESPACE, (None, namespace))
        if found is None:
            raise refusals.not_found(kubernetes_objects.NAMESPACE, namespace)
        if "deletionTimestamp" in found["metadata"]:
            why = f"unable to create new content in namespace {namespace} because it is being terminated"
            raise refusals.forbidden(kind, name, why)

    def _open_namespaces(self) -> None:
        """The first request finds the namespaces there: only then is there a loop, and so a time."""
        names, self._first_namespaces = self._first_namespaces, ()
        for name in names:
            obj: Object = {"metadata": {"name": name}}
            self._insert(
                kubernetes_objects.NAMESPACE,
                self._new_object(kubernetes_objects.NAMESPACE, obj),
                FieldWriter("kube", "Update", "v1"),
            )

    def _collect_later(self, kind: ResourceKind, obj: Object) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(0.0, self._collector.follow, kind, obj, context=self.store.context.copy())

    def _time(self) -> str:
        return metav1_time(self._now())


def _changes_nothing(old: Object, new: Object) -> bool:
    """Whether a write would change nothing, times of ownership aside."""
    if _without_managed_fields(old) != _without_managed_fields(new):
        return False
    return {(owner.writer, owner.fields) for owner in managed_fields.owners_of(old)} == {
        (owner.writer, owner.fields) for owner in managed_fields.owners_of(new)
    }


def _without_managed_fields(obj: Object) -> Object:
    metadata = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
    return {**obj, "metadata": metadata}


def _without_status(obj: Object) -> Object:
    return {key: value for key, value in obj.items() if key != "status"}
