"""The API server itself: the way of a request, from its arrival to its answer.

Create: check the namespace, set identity, run admission, apply defaults and validation, record field
owners, commit. Update, patch and apply: compute the new object from the stored one, return early when
nothing changes, run admission, validate, and commit if the stored object is still the same. Otherwise
start again (optimistic concurrency, five attempts). Delete: run admission, check the preconditions,
delete. A dry run goes the same way and stores nothing.

The namespaces exist from the first request on, because only then a loop with a clock runs. UIDs
and generated names come from the seed.
"""

import random
import uuid
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from rackloom.core.cluster import objects as kubernetes_objects
from rackloom.core.cluster.objects import Object, ResourceKind, metav1_time
from rackloom.lab.kube import managed_fields, objects, refusals
from rackloom.lab.kube.deletion import Deletion
from rackloom.lab.kube.faults import ApiCall, DisorderedEvents, RequestFaults, StaleReads
from rackloom.lab.kube.managed_fields import FieldWriter, clone, copied, with_last_applied
from rackloom.lab.kube.objects import TYPE_SCHEMAS, TypeSchema, bound_pod
from rackloom.lab.kube.queries import DeleteOptions
from rackloom.lab.kube.store import ObjectKey, ObjectStore, key_of
from rackloom.lab.kube.validation import RULES, ObjectRule, dated_taints
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
class WriteRequest:
    """One write: the type, the sender, and the target. `manager` owns the fields that change."""

    kind: ResourceKind
    user: str
    manager: str
    subresource: str = ""
    dry_run: bool = False

    def writer(self, operation: Literal["Apply", "Update"]) -> FieldWriter:
        """The owner of the fields that are written."""
        return FieldWriter(self.manager, operation, self.kind.api_version, self.subresource)


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
"""Returns the changed object, or None to leave it as it is. Raises `Rejected` to refuse."""

Mutation = Callable[[Object], Object]
"""The effect of a request on the stored object. It is called again when another write came between."""


class FakeKube:
    """One API server. `DirectApi` and `KubeTransport` are its fronts.

    `namespaces` exist from the start. An object in any other is refused as a real server refuses it.
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
        self.rules = defaultdict[ResourceKind, list[ObjectRule]](list)
        self.admission: list[AdmissionHook] = []
        self.calls: Counter[ApiCall] = Counter()
        self.bookmark_seconds = bookmark_seconds
        self.watch_seconds = watch_seconds
        self.now = now
        """Seconds since 1970, by this server's clock."""
        self._random = random.Random(seed)  # noqa: S311 (reproducible on purpose)
        self._deletion = Deletion(self.store, now)
        for kind, rules in RULES.items():
            self.rules[kind].extend(rules)
        self.rules[kubernetes_objects.RESOURCE_SLICE].append(dated_taints(self._time))
        self._first_namespaces = tuple(namespaces)

    def serve(self, kind: ResourceKind, schema: TypeSchema) -> None:
        """Serve another type, or one with another schema."""
        self.schemas[kind] = schema

    def writes(self, user: str | None = None) -> int:
        """How many writes were sent, by one user or by all, including those that failed."""
        return sum(n for call, n in self.calls.items() if call.is_write and user in (None, call.user))

    def schema(self, kind: ResourceKind) -> TypeSchema:
        """The schema of a type. Raises `NotFound` for one that is not served."""
        # The first request finds the namespaces there: only then is there a loop, and so a time.
        names, self._first_namespaces = self._first_namespaces, ()
        write = WriteRequest(kubernetes_objects.NAMESPACE, "kube", "kube")
        for name in names:
            self._insert(write, self._new_object(write.kind, {"metadata": {"name": name}}))
        if kind not in self.schemas:
            raise refusals.not_served()
        return self.schemas[kind]

    def key(self, kind: ResourceKind, namespace: str | None, name: str) -> ObjectKey:
        """The key under which an object of a request is stored."""
        self.schema(kind)
        if kind.namespaced and not namespace:
            raise refusals.bad_request("an empty namespace may not be set when a resource name is provided")
        return (namespace if kind.namespaced else None), name

    async def create(self, write: WriteRequest, obj: Object) -> Object:
        """Create an object."""
        return self._insert(write, await self._admit(write, "CREATE", self._new_object(write.kind, obj)))

    def _new_object(self, kind: ResourceKind, obj: Object) -> Object:
        schema, namespace = self.schema(kind), (obj.get("metadata") or {}).get("namespace")
        if kind.namespaced:
            self._check_namespace(kind, namespace, (obj.get("metadata") or {}).get("name", ""))
        suffix = "".join(self._random.choices(_SUFFIX_LETTERS, k=5))
        uid = str(uuid.UUID(int=self._random.getrandbits(128), version=4))
        created = objects.new_object(
            kind, clone(obj), namespace, schema, uid=uid, time=self._time(), suffix=suffix
        )
        self._require_free_name(kind, created)
        return created

    def _require_free_name(self, kind: ResourceKind, created: Object) -> None:
        if self.store.find(kind, key_of(created)):
            raise refusals.already_exists(kind, created["metadata"]["name"])

    def _insert(self, write: WriteRequest, created: Object) -> Object:
        kind = write.kind
        created = self._ruled(kind, created, None)
        self._require_free_name(kind, created)
        if "managedFields" not in created["metadata"]:
            writer, schema = write.writer("Update"), self.schema(kind)
            created = managed_fields.record_update(None, created, writer, schema, self._time())
        return created if write.dry_run else self._deletion.commit(kind, created)

    async def change(self, write: WriteRequest, key: ObjectKey, change: Mutation) -> Object:
        """Replace or patch an object: what `change` makes of it is stored."""

        def owned(old: Object) -> Object:
            new, writer = self._settled(write, old, change(copied(old))), write.writer("Update")
            return managed_fields.record_update(old, new, writer, self.schema(write.kind), self._time())

        return await self._commit(write, key, owned)

    async def apply(self, write: WriteRequest, key: ObjectKey, obj: Object, *, force: bool) -> Object:
        """Server-side apply of `obj`. Creates it if it is not there."""
        schema, writer = self.schema(write.kind), write.writer("Apply")
        if self.store.find(write.kind, key) is None:
            if write.subresource:
                raise refusals.not_found(write.kind, key[1])
            created = self._new_object(write.kind, obj)
            bare = {**created, "metadata": {**created["metadata"], "managedFields": []}}
            created = managed_fields.apply_fields(bare, created, writer, schema, self._time(), force=True)
            return self._insert(write, await self._admit(write, "CREATE", created))
        applied = clone(obj)
        if schema.status and not write.subresource:
            applied.pop("status", None)

        def owned(old: Object) -> Object:
            merged = managed_fields.apply_fields(old, applied, writer, schema, self._time(), force=force)
            return self._settled(write, old, with_last_applied(merged, applied, write.manager))

        return await self._commit(write, key, owned)

    def _settled(self, write: WriteRequest, old: Object, new: Object) -> Object:
        schema = self.schema(write.kind)
        if write.subresource and not (write.subresource == "status" and schema.status):
            raise refusals.not_served()
        return objects.updated_object(write.kind, old, new, schema, write.subresource)

    async def _commit(self, write: WriteRequest, key: ObjectKey, make: Mutation) -> Object:
        # Optimistic concurrency: admission awaits, so another write may come between. The change is computed
        # again from the newest object, and stored only if that is still the one it was computed from.
        for _ in range(_UPDATE_ATTEMPTS):
            old = self.store.read(write.kind, key)
            new = make(old)
            if _changes_nothing(old, new):
                return old
            new = self._ruled(write.kind, await self._admit(write, "UPDATE", new, old), old)
            if self.store.find(write.kind, key) is old:
                return new if write.dry_run else self._deletion.commit(write.kind, new)
        raise refusals.stale_version(write.kind, key[1])

    def bind(self, key: ObjectKey, node: str, uid: str | None, *, dry_run: bool = False) -> Object:
        """Give a pod its node. No owner of fields changes, and no generation counts up."""
        pod = self.store.read(kubernetes_objects.POD, key)
        if uid not in (None, pod["metadata"]["uid"]):
            raise refusals.uid_conflict(kubernetes_objects.POD, key[1], str(uid), pod["metadata"]["uid"])
        given = bound_pod(pod, node, self._time())
        return given if dry_run else self._deletion.commit(kubernetes_objects.POD, given)

    async def delete(self, write: WriteRequest, key: ObjectKey, options: DeleteOptions) -> Object:
        """Delete an object. Returns it as it is after that, or as it last was."""
        kind = write.kind
        # Preconditions are checked on the object as it is after admission, which awaits.
        await self._admit(write, "DELETE", None, self.store.read(kind, key))
        old = self.store.read(kind, key)
        have, wanted = old["metadata"], options.meant
        for what, asked, found in (
            ("UID", wanted.uid, have["uid"]),
            ("ResourceVersion", wanted.resource_version, have["resourceVersion"]),
        ):
            if asked not in (None, found):
                raise refusals.precondition_failed(kind, key[1], what, str(asked), found)
        if write.dry_run:
            return old
        gone = self._deletion.delete(kind, key, options.propagation_policy, options.grace_period_seconds)
        return gone or old

    async def _admit(
        self,
        write: WriteRequest,
        operation: Literal["CREATE", "UPDATE", "DELETE"],
        obj: Object | None,
        old: Object | None = None,
    ) -> Object:
        kind, user, where = write.kind, write.user, write.subresource
        for hook in self.admission:
            review = AdmissionReview(operation, kind, user, clone(obj), clone(old), where, write.dry_run)
            answer = await hook(review)
            obj = obj if answer is None else clone(answer)
        return obj or {}

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

    def _time(self) -> str:
        return metav1_time(self.now())


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
