"""A `KubeApi` that calls the simulated server directly, without a wire.

Each call is counted, takes the declared latency, and may be struck by a fault before or after it is
carried out. Every answer is a copy. `user` is who asks; `manager` (the user, where none is given) owns
the fields.

A watch starts at a version, or with everything that exists. It ends after the server's watch timeout,
sends a bookmark after a silent minute, and reads through the stale-read and disorder faults.

`SharedReadApi` is for callers that list much and change nothing: it hands out the stored objects
themselves.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

from rackloom.claim.kube.api import ObjectList, WatchEvent
from rackloom.core.kubernetes import objects as kubernetes_objects
from rackloom.core.kubernetes.objects import Object, ResourceKind
from rackloom.lab.kube import objects, patches, refusals
from rackloom.lab.kube.faults import ApiCall, call_resource
from rackloom.lab.kube.managed_fields import clone
from rackloom.lab.kube.objects import BINDING_SUBRESOURCE
from rackloom.lab.kube.queries import (
    ListOptions,
    WatchOptions,
    check_field_selector,
    required_fields,
    selector_predicate,
    starts_with_all,
)
from rackloom.lab.kube.server import FakeKube, Mutation
from rackloom.lab.kube.store import WatchFeed, WatchScope

_INITIAL_EVENTS_END = "k8s.io/initial-events-end"
"""On the bookmark after everything that was there when a watch began."""


class DirectApi:
    """What `user` may ask of a fake server. `manager`, or else `user`, has the fields that it writes."""

    def __init__(self, kube: FakeKube, user: str, manager: str = "") -> None:
        self._kube = kube
        self._user = user
        self._manager = manager or user

    async def get(self, kind: ResourceKind, name: str, namespace: str | None = None) -> Object:
        """Read one object."""
        call = await self._enter("get", kind)
        found = self._kube.store.read(kind, self._kube.key(kind, namespace, name))
        return self._leave(call, found)

    async def list(
        self, kind: ResourceKind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> ObjectList:
        """Read all objects of a kind, at one resourceVersion."""
        listed = await self._listed(kind, namespace, labels, fields)
        return _copy_list(listed)

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
        asked, newest = int(options.version or 0), self._kube.store.version
        if asked > newest:
            raise refusals.from_the_future(asked, newest)
        if not options.is_exact:
            return _copy_list(await self._listed(kind, namespace, labels, fields, options.version))
        call = await self._enter("list", kind)
        scope = self._scope(kind, namespace, labels, fields)
        found = self._kube.store.at(kind, asked)
        self._kube.faults.strike(call, "reply")
        return _copy_list(ObjectList(tuple(filter(scope.holds, found)), options.version))

    def _scope(self, kind: ResourceKind, namespace: str | None, labels: str, fields: str) -> WatchScope:
        check_field_selector(kind, fields, self._kube.schema(kind).selectable)
        return WatchScope(namespace, selector_predicate(labels, fields))

    async def _listed(
        self, kind: ResourceKind, namespace: str | None, labels: str, fields: str, asked: str = ""
    ) -> ObjectList:
        call = await self._enter("list", kind)
        scope = self._scope(kind, namespace, labels, fields)
        old = self._kube.stale_reads.view(self._user, asked)
        found = old.all(kind) if old else self._kube.store.narrowed(kind, required_fields(fields))
        version = (old or self._kube.store).version
        self._kube.faults.strike(call, "reply")
        # Unfiltered lists of a large cluster are frequent: skip the predicate.
        held = filter(scope.holds, found) if namespace or labels or fields else found
        return ObjectList(tuple(held), str(version))

    def watch(
        self,
        kind: ResourceKind,
        namespace: str | None = None,
        *,
        resource_version: str,
        labels: str = "",
        fields: str = "",
    ) -> AsyncGenerator[WatchEvent, None]:
        """Yield changes after a version; from "0" or "" on, everything there is comes first."""
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
        """Yield changes; `options` say whether existing objects come first."""
        await self._enter("watch", kind)
        scope = self._scope(kind, namespace, labels, fields)
        store = self._kube.store
        is_new = options.has_first or starts_with_all(options.version)
        stale = self._kube.stale_reads.view(self._user, options.version) if options.has_first else None
        view = stale or store
        feed = store.open(kind, scope, view.version if is_new else int(options.version))
        first = list(filter(scope.holds, view.all(kind))) if options.has_first else []
        deadline = asyncio.get_running_loop().time() + (options.seconds or self._kube.watch_seconds)
        try:
            for obj in first:
                yield WatchEvent("ADDED", clone(obj))
            if options.ends_first:
                yield _bookmark_event(kind, feed.after, {"annotations": {_INITIAL_EVENTS_END: "true"}})
            while (event := await self._next(kind, feed, deadline, options)) is not None:
                await self._kube.stale_reads.wait(self._user, event)
                for delivered in await self._kube.disordered_events.delivered(self._user, event, feed.queue):
                    yield WatchEvent(delivered.type, clone(delivered.object))
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
            if options.has_bookmarks and loop.time() < deadline:
                return _bookmark_event(kind, max(feed.after, self._kube.store.version), {})
        return None

    async def create(self, kind: ResourceKind, obj: Object, *, dry_run: bool = False) -> Object:
        """Create an object."""
        call = await self._enter("create", kind)
        return self._leave(
            call, await self._kube.create(kind, obj, self._user, manager=self._manager, dry_run=dry_run)
        )

    async def replace(
        self, kind: ResourceKind, obj: Object, *, subresource: str = "", dry_run: bool = False
    ) -> Object:
        """Write a whole object back."""
        call = await self._enter("replace", kind, subresource)
        metadata = obj["metadata"]
        if not metadata.get("resourceVersion") and not self._kube.schema(kind).blind_writes:
            problem = "metadata.resourceVersion: Invalid value: 0: must be specified for an update"
            raise refusals.invalid(kind, metadata["name"], problem)
        key = self._kube.key(kind, metadata.get("namespace"), metadata["name"])
        whole = clone(obj)

        def change(old: Object) -> Object:
            return _keep_field_owners(old, whole)

        written = await self._kube.change(
            kind, key, change, self._user, subresource, manager=self._manager, dry_run=dry_run
        )
        return self._leave(call, written)

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
        call = await self._enter("apply", kind, subresource)
        key = self._kube.key(kind, obj["metadata"].get("namespace"), obj["metadata"]["name"])
        applied = await self._kube.apply(
            kind, key, obj, manager, self._user, force=force, subresource=subresource, dry_run=dry_run
        )
        return self._leave(call, applied)

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
            if isinstance(patch, Mapping):
                changed: Object = patches.merge_patch(old, clone(dict(patch)))
            else:
                changed = patches.json_patch(old, clone(list(patch)))
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
        call = await self._enter("patch", kind, subresource)
        key = self._kube.key(kind, namespace, name)

        def same(old: Object) -> Object:
            new = change(old)
            objects.keep_uid(kind, old, new)
            return new

        patched = await self._kube.change(
            kind, key, same, self._user, subresource, manager=self._manager, dry_run=dry_run
        )
        return self._leave(call, patched)

    async def bind(
        self, name: str, namespace: str, node: str, *, uid: str | None = None, dry_run: bool = False
    ) -> None:
        """Give a pod, of just this `uid`, its node; `Conflict` where it has one, or may not have one yet."""
        call = await self._enter("create", kubernetes_objects.POD, BINDING_SUBRESOURCE)
        self._kube.bind(self._kube.key(kubernetes_objects.POD, namespace, name), node, uid, dry_run=dry_run)
        self._kube.faults.strike(call, "reply")

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
        call = await self._enter("delete", kind)
        await self._kube.delete(
            kind,
            self._kube.key(kind, namespace, name),
            self._user,
            uid=uid,
            resource_version=resource_version,
            propagation=propagation,
            grace_seconds=grace_seconds,
            dry_run=dry_run,
        )
        self._kube.faults.strike(call, "reply")

    async def _enter(self, verb: str, kind: ResourceKind, subresource: str = "") -> ApiCall:
        call = ApiCall(self._user, verb, call_resource(kind, subresource))
        self._kube.calls[call] += 1
        await self._kube.faults.pass_time(call)
        self._kube.faults.strike(call, "request")
        return call

    def _leave(self, call: ApiCall, answer: Object) -> Object:
        self._kube.faults.strike(call, "reply")
        copy: Object = clone(answer)
        return copy


def _bookmark_event(kind: ResourceKind, version: int, metadata: Object) -> WatchEvent:
    metadata = {"resourceVersion": str(version)} | metadata
    return WatchEvent("BOOKMARK", {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata})


def _copy_list(listed: ObjectList) -> ObjectList:
    return ObjectList(tuple(clone(obj) for obj in listed.items), listed.resource_version)


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
        return await self._listed(kind, namespace, labels, fields)
