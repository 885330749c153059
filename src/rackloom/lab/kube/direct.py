"""A `KubeApi` that calls the simulated server directly, without a wire.

Each call is counted, takes the declared latency, and may be struck by a fault before or after it is
carried out. Every answer is a copy. `user` sends the call. `manager` (by default the user) owns the fields.

A watch starts at a version, or with everything that exists. It ends after the server's watch timeout,
sends a bookmark after a silent minute, and reads through the stale-read and disorder faults.

`SharedReadApi` is for callers that list much and change nothing: it hands out the stored objects
themselves.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, Literal

from rackloom.claim.kube.api import ObjectList, WatchEvent
from rackloom.core.cluster import objects as kubernetes_objects
from rackloom.core.cluster.objects import Object, ResourceKind
from rackloom.lab.kube import patches, refusals
from rackloom.lab.kube.faults import ApiCall
from rackloom.lab.kube.managed_fields import clone, copied
from rackloom.lab.kube.objects import BINDING_SUBRESOURCE
from rackloom.lab.kube.queries import (
    DeleteOptions,
    ListOptions,
    Preconditions,
    WatchOptions,
    check_field_selector,
    required_trait,
    selector_predicate,
    starts_with_all,
)
from rackloom.lab.kube.server import FakeKube, Mutation, WriteRequest
from rackloom.lab.kube.store import WatchFeed, WatchScope

_INITIAL_EVENTS_END = "k8s.io/initial-events-end"
"""On the bookmark after everything that was there when a watch began."""


class DirectApi:
    """The API of a fake server for `user`. `manager`, or else `user`, owns the fields that it writes."""

    def __init__(self, kube: FakeKube, user: str, manager: str = "") -> None:
        self._kube = kube
        self._user = user
        self._manager = manager or user

    async def get(self, kind: ResourceKind, name: str, namespace: str | None = None) -> Object:
        """Read one object."""
        async with self._call("get", kind):
            return copied(self._kube.store.read(kind, self._kube.key(kind, namespace, name)))

    async def list(
        self, kind: ResourceKind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> ObjectList:
        """Read all objects of a kind, at one resourceVersion."""
        return await self.list_of(kind, namespace, ListOptions(), labels=labels, fields=fields)

    async def list_of(
        self,
        kind: ResourceKind,
        namespace: str | None,
        options: ListOptions,
        *,
        labels: str = "",
        fields: str = "",
    ) -> ObjectList:
        """Read all objects of a kind as of a version: the newest is not older than any but those to come."""
        listed = await self._listed(kind, namespace, options, labels, fields)
        return ObjectList(tuple(copied(obj) for obj in listed.items), listed.resource_version)

    async def _listed(
        self, kind: ResourceKind, namespace: str | None, options: ListOptions, labels: str, fields: str
    ) -> ObjectList:
        store, version = self._kube.store, options.version
        if int(version or 0) > store.version:
            raise refusals.from_the_future(int(version), store.version)
        async with self._call("list", kind):
            scope = self._scope(kind, namespace, labels, fields)
            found: Sequence[Object]
            if options.is_exact:
                found = store.at(kind, int(version))
            else:
                old = self._kube.stale_reads.view(self._user, version)
                found = old.all(kind) if old else store.narrowed(kind, namespace, scope.trait)
                version = str((old or store).version)
        # Unfiltered lists of a large cluster are frequent: skip the predicate.
        held = filter(scope.holds, found) if namespace or labels or fields else found
        return ObjectList(tuple(held), version)

    def _scope(self, kind: ResourceKind, namespace: str | None, labels: str, fields: str) -> WatchScope:
        check_field_selector(kind, fields, self._kube.schema(kind).selectable)
        return WatchScope(namespace, selector_predicate(labels, fields), required_trait(labels, fields))

    def watch(
        self,
        kind: ResourceKind,
        namespace: str | None = None,
        *,
        resource_version: str,
        labels: str = "",
        fields: str = "",
    ) -> AsyncGenerator[WatchEvent, None]:
        """Yield changes after a version. With "0" or "", all existing objects come first."""
        options = WatchOptions(resource_version, has_first=starts_with_all(resource_version))
        return self.follow(kind, namespace, options, labels=labels, fields=fields)

    async def follow(
        self,
        kind: ResourceKind,
        namespace: str | None,
        options: WatchOptions,
        *,
        labels: str = "",
        fields: str = "",
    ) -> AsyncGenerator[WatchEvent, None]:
        """Yield changes. `options` decide whether existing objects come first."""
        await self._begin("watch", kind)
        scope = self._scope(kind, namespace, labels, fields)
        store = self._kube.store
        is_new = options.has_first or starts_with_all(options.version)
        stale = self._kube.stale_reads.view(self._user, options.version) if options.has_first else None
        view = stale or store
        feed = store.open(kind, scope, view.version if is_new else int(options.version))
        found = stale.all(kind) if stale else store.narrowed(kind, namespace, scope.trait)
        first = list(filter(scope.holds, found)) if options.has_first else []
        deadline = asyncio.get_running_loop().time() + (options.seconds or self._kube.watch_seconds)
        try:
            for obj in first:
                yield WatchEvent("ADDED", copied(obj))
            if options.ends_first:
                yield _bookmark_event(kind, feed.after, {"annotations": {_INITIAL_EVENTS_END: "true"}})
            while (event := await self._next(kind, feed, deadline, options)) is not None:
                await self._kube.stale_reads.wait(self._user, event)
                for delivered in await self._kube.disordered_events.delivered(self._user, event, feed.queue):
                    yield WatchEvent(delivered.type, copied(delivered.object))
        finally:
            store.close(kind, feed)

    async def _next(
        self, kind: ResourceKind, feed: WatchFeed, deadline: float, options: WatchOptions
    ) -> WatchEvent | None:
        """The next change, a bookmark after a while without one, None when its time is up."""
        loop = asyncio.get_running_loop()
        while loop.time() < deadline:
            quiet = loop.time() + self._kube.bookmark_seconds if options.has_bookmarks else deadline
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(quiet, deadline)):
                    return await feed.queue.get()
            # A change, or the end of the watch, may have come in the moment in which the wait was over.
            if options.has_bookmarks and loop.time() < deadline and feed.queue.empty():
                return _bookmark_event(kind, max(feed.after, self._kube.store.version), {})
        return None

    async def create(self, kind: ResourceKind, obj: Object, *, dry_run: bool = False) -> Object:
        """Create an object."""
        async with self._call("create", kind):
            return copied(await self._kube.create(self._write(kind, dry_run=dry_run), obj))

    async def replace(
        self, kind: ResourceKind, obj: Object, *, subresource: str = "", dry_run: bool = False
    ) -> Object:
        """Write a whole object back."""
        async with self._call("replace", kind, subresource):
            metadata, whole = obj["metadata"], clone(obj)
            if not metadata.get("resourceVersion") and not self._kube.schema(kind).blind_writes:
                problem = "metadata.resourceVersion: Invalid value: 0: must be specified for an update"
                raise refusals.invalid(kind, metadata["name"], problem)
            key = self._kube.key(kind, metadata.get("namespace"), metadata["name"])
            write = self._write(kind, subresource, dry_run=dry_run)
            return copied(await self._kube.change(write, key, lambda old: _keep_field_owners(old, whole)))

    async def apply(
        self,
        kind: ResourceKind,
        obj: Object,
        *,
        manager: str,
        force: bool = False,
        subresource: str = "",
        dry_run: bool = False,
    ) -> Object:
        """Server-side apply."""
        async with self._call("apply", kind, subresource):
            key = self._kube.key(kind, obj["metadata"].get("namespace"), obj["metadata"]["name"])
            write = WriteRequest(kind, self._user, manager, subresource, dry_run)
            return copied(await self._kube.apply(write, key, obj, force=force))

    async def patch(
        self,
        kind: ResourceKind,
        name: str,
        namespace: str | None,
        patch: Mapping[str, Any] | tuple[Mapping[str, Any], ...],
        *,
        subresource: str = "",
        dry_run: bool = False,
    ) -> Object:
        """Change an object by a merge patch or a JSON patch."""

        def change(old: Object) -> Object:
            changed: Object = (
                patches.merge_patch(old, clone(patch))
                if isinstance(patch, Mapping)
                else patches.json_patch(old, clone(patch))
            )
            return changed

        return await self.modify(kind, name, namespace, change, subresource=subresource, dry_run=dry_run)

    async def modify(
        self,
        kind: ResourceKind,
        name: str,
        namespace: str | None,
        change: Mutation,
        *,
        subresource: str = "",
        dry_run: bool = False,
    ) -> Object:
        """Patch an object: `change` computes the new object from the stored one."""

        def same(old: Object) -> Object:
            new = change(old)
            # A patch with another UID is invalid. In a replace, the UID is a precondition, so it conflicts.
            uid = (new.get("metadata") or {}).get("uid") or old["metadata"]["uid"]
            if uid != old["metadata"]["uid"]:
                problem = f'metadata.uid: Invalid value: "{uid}": field is immutable'
                raise refusals.invalid(kind, old["metadata"]["name"], problem)
            return new

        async with self._call("patch", kind, subresource):
            write = self._write(kind, subresource, dry_run=dry_run)
            return copied(await self._kube.change(write, self._kube.key(kind, namespace, name), same))

    async def bind(
        self, name: str, namespace: str, node: str, *, uid: str | None = None, dry_run: bool = False
    ) -> None:
        """Give a pod, of just this `uid`, its node. `Conflict` if it has one, or may not have one yet."""
        kind = kubernetes_objects.POD
        async with self._call("create", kind, BINDING_SUBRESOURCE):
            self._kube.bind(self._kube.key(kind, namespace, name), node, uid, dry_run=dry_run)

    async def delete(
        self,
        kind: ResourceKind,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
        propagation: Literal["Background", "Foreground", "Orphan"] | None = None,
        grace_seconds: int | None = None,
        dry_run: bool = False,
    ) -> None:
        """Ask for deletion."""
        options = DeleteOptions(
            preconditions=Preconditions(uid=uid, resource_version=resource_version),
            grace_period_seconds=grace_seconds,
            propagation_policy=propagation,
        )
        await self.delete_with(kind, name, namespace, options, dry_run=dry_run)

    async def delete_with(
        self, kind: ResourceKind, name: str, namespace: str | None, options: DeleteOptions, *, dry_run: bool
    ) -> None:
        """Ask for deletion, with options as a request's body has them."""
        async with self._call("delete", kind):
            key = self._kube.key(kind, namespace, name)
            await self._kube.delete(self._write(kind, dry_run=dry_run), key, options)

    def _write(self, kind: ResourceKind, subresource: str = "", *, dry_run: bool) -> WriteRequest:
        return WriteRequest(kind, self._user, self._manager, subresource, dry_run)

    @contextlib.asynccontextmanager
    async def _call(self, verb: str, kind: ResourceKind, subresource: str = "") -> AsyncIterator[None]:
        """One request: counted, delayed, and struck by faults before or after it is carried out."""
        call = await self._begin(verb, kind, subresource)
        yield
        self._kube.faults.strike(call, "reply")

    async def _begin(self, verb: str, kind: ResourceKind, subresource: str = "") -> ApiCall:
        # A resource as calls name it.
        call = ApiCall(self._user, verb, f"{kind.plural}/{subresource}" if subresource else kind.plural)
        self._kube.calls[call] += 1
        await self._kube.faults.pass_time(call)
        self._kube.faults.strike(call, "request")
        return call


def _bookmark_event(kind: ResourceKind, version: int, metadata: Object) -> WatchEvent:
    metadata = {"resourceVersion": str(version)} | metadata
    return WatchEvent("BOOKMARK", {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata})


def _keep_field_owners(old: Object, whole: Object) -> Object:
    """A replace keeps the owners that the server knows: they are its own record."""
    owners = old["metadata"].get("managedFields", [])
    return {**whole, "metadata": {**whole["metadata"], "managedFields": owners}}


class SharedReadApi(DirectApi):
    """For readers with many lists: these return the stored objects themselves, which must not be changed."""

    async def list(
        self, kind: ResourceKind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> ObjectList:
        """Read all objects of a kind, at one resourceVersion."""
        return await self._listed(kind, namespace, ListOptions(), labels, fields)
