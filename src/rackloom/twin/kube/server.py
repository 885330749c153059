"""The fake API server: what becomes of a request, from its arrival to its answer."""

import asyncio
import random
import uuid
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from rackloom.claim.kube import kinds
from rackloom.claim.kube.api import Kind, Object
from rackloom.claim.kube.timestamps import whole_time
from rackloom.twin.kube import answers, lifecycle, ownership
from rackloom.twin.kube.binding import bound
from rackloom.twin.kube.client_applied import remembered
from rackloom.twin.kube.collector import Collector
from rackloom.twin.kube.faults import Call, Faults
from rackloom.twin.kube.lifecycle import Birth
from rackloom.twin.kube.ownership import Writer, clone
from rackloom.twin.kube.reading import Lag, Tangle
from rackloom.twin.kube.removal import Removal
from rackloom.twin.kube.rules import RULES, Rule
from rackloom.twin.kube.shapes import SHAPES, Shape
from rackloom.twin.kube.store import Key, Store
from rackloom.twin.kube.times import loop_time

_SUFFIX_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
"""Generated names end in five of these (k8s.io/apimachinery, util/rand)."""
NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease", "rackloom-system", "rackloom-imex")
"""Those that every cluster has, and ours."""
_ATTEMPTS = 5
"""How often the server tries a change again that was overtaken while admission ran."""


@dataclass(frozen=True, slots=True)
class Review:
    """What admission is asked about. `object` is None for a delete, `old` for a create."""

    operation: Literal["CREATE", "UPDATE", "DELETE"]
    kind: Kind
    user: str
    object: Object | None
    old: Object | None
    subresource: str = ""
    dry_run: bool = False


Admission = Callable[[Review], Awaitable[Object | None]]
"""Answers with the object as it shall be, or None to leave it; raises `Rejected` to refuse."""

Change = Callable[[Object], Object]
"""What a request makes of the stored object. It is called again when another write came between."""


class FakeKube:
    """One API server. `DirectApi` and `KubeTransport` are its fronts.

    `namespaces` exist from the start; an object in any other is refused as a real server refuses it.
    `now` gives seconds since 1970. `window` is how many changes of each kind watches can go back.
    """

    def __init__(
        self,
        *,
        namespaces: Iterable[str] = NAMESPACES,
        seed: int = 0,
        now: Callable[[], float] = loop_time,
        window: int = 1000,
        bookmark_seconds: float = 60.0,
        watch_seconds: float = 1800.0,
    ) -> None:
        self.store = Store(window)
        self.faults = Faults(seed)
        self.lag = Lag()
        self.tangle = Tangle(seed)
        self.shapes: dict[Kind, Shape] = dict(SHAPES)
        self.rules: defaultdict[Kind, list[Rule]] = defaultdict(list)
        self.admission: list[Admission] = []
        self.calls: Counter[Call] = Counter()
        self.bookmark_seconds = bookmark_seconds
        self.watch_seconds = watch_seconds
        self._random = random.Random(seed)  # noqa: S311 (reproducible on purpose)
        self._now = now
        self._removal = Removal(self.store, now, self._collect_later)
        self._collector = Collector(self._removal)
        for kind, rules in RULES.items():
            self.rules[kind].extend(rules)
        self._first_namespaces = tuple(namespaces)

    def serve(self, kind: Kind, shape: Shape) -> None:
        """Serve a type more, or one in another shape."""
        self.shapes[kind] = shape

    def writes(self, user: str | None = None) -> int:
        """How many writes were sent, by one user or by all; those that failed too."""
        return sum(n for call, n in self.calls.items() if call.is_write and user in (None, call.user))

    def now(self) -> float:
        """Seconds since 1970, as this server tells time."""
        return self._now()

    def shape(self, kind: Kind) -> Shape:
        """What is known of a type. Raises `NotFound` for one that is not served."""
        self._open_namespaces()
        if kind not in self.shapes:
            raise answers.not_served()
        return self.shapes[kind]

    def key(self, kind: Kind, namespace: str | None, name: str) -> Key:
        """Under what an object of a request is stored."""
        self.shape(kind)
        if kind.namespaced and not namespace:
            raise answers.bad_request("an empty namespace may not be set when a resource name is provided")
        return (namespace if kind.namespaced else None), name

    async def create(
        self, kind: Kind, obj: Object, user: str, *, manager: str = "", dry_run: bool = False
    ) -> Object:
        """Create an object as `user`; its fields are the `manager`'s, or theirs."""
        writer = Writer(manager or user, "Update", kind.api_version)
        born = self._born(kind, obj)
        born = await self._admit(Review("CREATE", kind, user, born, None, dry_run=dry_run))
        return self._insert(kind, born, writer, dry_run=dry_run)

    def _born(self, kind: Kind, obj: Object) -> Object:
        shape, namespace = self.shape(kind), (obj.get("metadata") or {}).get("namespace")
        if kind.namespaced:
            self._check_namespace(kind, namespace, (obj.get("metadata") or {}).get("name", ""))
        suffix = "".join(self._random.choices(_SUFFIX_LETTERS, k=5))
        identity = str(uuid.UUID(int=self._random.getrandbits(128), version=4))
        born = lifecycle.created(kind, clone(obj), namespace, shape, Birth(identity, self._time(), suffix))
        if self.store.find(kind, (born["metadata"].get("namespace"), born["metadata"]["name"])):
            raise answers.exists(kind, born["metadata"]["name"])
        return born

    def _insert(self, kind: Kind, born: Object, writer: Writer, *, dry_run: bool = False) -> Object:
        born = self._ruled(kind, born, None)
        name = born["metadata"]["name"]
        if self.store.find(kind, (born["metadata"].get("namespace"), name)):
            raise answers.exists(kind, name)
        if "managedFields" not in born["metadata"]:
            born = ownership.updated(None, born, writer, self.shape(kind), self._time())
        return born if dry_run else self._removal.commit(kind, born)

    async def change(
        self,
        kind: Kind,
        key: Key,
        change: Change,
        user: str,
        subresource: str = "",
        *,
        manager: str = "",
        dry_run: bool = False,
    ) -> Object:
        """Replace or patch an object as `user`: what `change` makes of it is stored, unless in a dry run.

        The fields that changed are the `manager`'s, or theirs.
        """
        writer = Writer(manager or user, "Update", kind.api_version, subresource)

        def owned(old: Object) -> Object:
            new = self._settled(kind, old, change(clone(old)), subresource)
            return ownership.updated(old, new, writer, self.shape(kind), self._time())

        return await self._commit(kind, key, owned, user, subresource, dry_run=dry_run)

    async def apply(
        self,
        kind: Kind,
        key: Key,
        obj: Object,
        manager: str,
        user: str,
        *,
        force: bool,
        subresource: str,
        dry_run: bool = False,
    ) -> Object:
        """Server-side apply of `obj`; creates it where it is not there."""
        shape, writer = self.shape(kind), Writer(manager, "Apply", kind.api_version, subresource)
        if self.store.find(kind, key) is None:
            if subresource:
                raise answers.not_found(kind, key[1])
            return await self._apply_new(kind, obj, writer, user, dry_run=dry_run)
        wanted = clone(obj) if not shape.status or subresource else _without_status(clone(obj))

        def owned(old: Object) -> Object:
            merged = ownership.applied(old, wanted, writer, shape, self._time(), force=force)
            merged = remembered(merged, wanted, manager)
            return self._settled(kind, old, merged, subresource)

        return await self._commit(kind, key, owned, user, subresource, dry_run=dry_run)

    async def _apply_new(
        self, kind: Kind, obj: Object, writer: Writer, user: str, *, dry_run: bool
    ) -> Object:
        shape, born = self.shape(kind), self._born(kind, obj)
        bare = {**born, "metadata": {**born["metadata"], "managedFields": []}}
        born = ownership.applied(bare, born, writer, shape, self._time(), force=True)
        born = await self._admit(Review("CREATE", kind, user, born, None, dry_run=dry_run))
        return self._insert(kind, born, writer, dry_run=dry_run)

    def _settled(self, kind: Kind, old: Object, new: Object, subresource: str) -> Object:
        shape = self.shape(kind)
        if subresource and not (subresource == "status" and shape.status):
            raise answers.not_served()
        return lifecycle.changed(kind, old, new, shape, subresource)

    async def _commit(
        self, kind: Kind, key: Key, make: Change, user: str, subresource: str, *, dry_run: bool
    ) -> Object:
        for _ in range(_ATTEMPTS):
            old = self.store.read(kind, key)
            new = make(old)
            if _same(old, new):
                return old
            new = await self._admit(Review("UPDATE", kind, user, new, old, subresource, dry_run))
            new = self._ruled(kind, new, old)
            if self.store.find(kind, key) is old:
                return new if dry_run else self._removal.commit(kind, new)
        raise answers.stale(kind, key[1])

    def bind(self, key: Key, node: str, uid: str | None, *, dry_run: bool = False) -> Object:
        """Give a pod its node. No owner of fields changes, and no generation counts up."""
        pod = self.store.read(kinds.POD, key)
        if uid not in (None, pod["metadata"]["uid"]):
            raise answers.another(kinds.POD, key[1], str(uid), pod["metadata"]["uid"])
        given = bound(pod, node, self._time())
        return given if dry_run else self._removal.commit(kinds.POD, given)

    async def delete(
        self,
        kind: Kind,
        key: Key,
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
        await self._admit(Review("DELETE", kind, user, None, old, dry_run=dry_run))
        old = self.store.read(kind, key)
        have = old["metadata"]
        if uid not in (None, have["uid"]):
            raise answers.not_meant(kind, key[1], "UID", str(uid), have["uid"])
        if resource_version not in (None, have["resourceVersion"]):
            wanted = str(resource_version)
            raise answers.not_meant(kind, key[1], "ResourceVersion", wanted, have["resourceVersion"])
        if dry_run:
            return old
        return self._removal.delete(kind, key, propagation, grace_seconds) or old

    async def _admit(self, review: Review) -> Object:
        obj = review.object
        for hook in self.admission:
            asked = Review(
                review.operation, review.kind, review.user, clone(obj), clone(review.old),
                review.subresource, review.dry_run,
            )  # fmt: skip
            answer = await hook(asked)
            obj = obj if answer is None else clone(answer)
        return obj if obj is not None else {}

    def _ruled(self, kind: Kind, new: Object, old: Object | None) -> Object:
        for rule in self.rules[kind]:
            new = rule(new, old)
        return new

    def _check_namespace(self, kind: Kind, namespace: str | None, name: str) -> None:
        if not namespace:
            raise answers.bad_request("namespace may not be empty")
        found = self.store.find(kinds.NAMESPACE, (None, namespace))
        if found is None:
            raise answers.not_found(kinds.NAMESPACE, namespace)
        if "deletionTimestamp" in found["metadata"]:
            why = f"unable to create new content in namespace {namespace} because it is being terminated"
            raise answers.forbidden(kind, name, why)

    def _open_namespaces(self) -> None:
        """The first request finds the namespaces there: only then is there a loop, and so a time."""
        names, self._first_namespaces = self._first_namespaces, ()
        for name in names:
            obj: Object = {"metadata": {"name": name}}
            self._insert(kinds.NAMESPACE, self._born(kinds.NAMESPACE, obj), Writer("kube", "Update", "v1"))

    def _collect_later(self, kind: Kind, obj: Object) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(0.0, self._collector.follow, kind, obj, context=self.store.context.copy())

    def _time(self) -> str:
        return whole_time(self._now())


def _same(old: Object, new: Object) -> bool:
    """Whether a write would change nothing, times of ownership aside."""
    if _without_owners(old) != _without_owners(new):
        return False
    return {(one.writer, one.fields) for one in ownership.holdings_of(old)} == {
        (one.writer, one.fields) for one in ownership.holdings_of(new)
    }


def _without_owners(obj: Object) -> Object:
    metadata = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
    return {**obj, "metadata": metadata}


def _without_status(obj: Object) -> Object:
    return {key: value for key, value in obj.items() if key != "status"}
