"""A `KubeApi` that calls the fake server without a wire between."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

from rackloom.claim.kube import kinds
from rackloom.claim.kube.api import Kind, Listed, Object, WatchEvent
from rackloom.twin.kube import answers, lifecycle, patches
from rackloom.twin.kube.binding import SUBRESOURCE
from rackloom.twin.kube.faults import Call, resource_of
from rackloom.twin.kube.history import Feed, Scope
from rackloom.twin.kube.options import ListOptions, WatchOptions, starts_with_all
from rackloom.twin.kube.ownership import clone
from rackloom.twin.kube.selectors import check_fields, matcher, required_fields
from rackloom.twin.kube.server import Change, FakeKube

_FIRST_END = "k8s.io/initial-events-end"
"""On the bookmark after everything that was there when a watch began."""


class DirectApi:
    """What `user` may ask of a fake server. `manager`, or else `user`, has the fields that it writes."""

    def __init__(self, kube: FakeKube, user: str, manager: str = "") -> None:
        self._kube = kube
        self._user = user
        self._manager = manager or user

    async def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object:
        """Read one object."""
        call = await self._enter("get", kind)
        found = self._kube.store.read(kind, self._kube.key(kind, namespace, name))
        return self._leave(call, found)

    async def list(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> Listed:
        """Read all objects of a kind, at one resourceVersion."""
        listed = await self._listed(kind, namespace, labels, fields)
        return _copied(listed)

    async def list_of(
        self, kind: Kind, namespace: str | None, options: ListOptions, *, labels: str = "", fields: str = ""
    ) -> Listed:
        """Read all objects of a kind as of a version: the newest is not older than any but those to come."""
        asked, newest = int(options.version or 0), self._kube.store.version
        if asked > newest:
            raise answers.from_the_future(asked, newest)
        if not options.is_exact:
            return _copied(await self._listed(kind, namespace, labels, fields, options.version))
        call = await self._enter("list", kind)
        scope = self._scope(kind, namespace, labels, fields)
        found = self._kube.store.at(kind, asked)
        self._kube.faults.strike(call, "reply")
        return _copied(Listed(tuple(filter(scope.holds, found)), options.version))

    def _scope(self, kind: Kind, namespace: str | None, labels: str, fields: str) -> Scope:
        check_fields(kind, fields, self._kube.shape(kind).selectable)
        return Scope(namespace, matcher(labels, fields))

    async def _listed(
        self, kind: Kind, namespace: str | None, labels: str, fields: str, asked: str = ""
    ) -> Listed:
        call = await self._enter("list", kind)
        scope = self._scope(kind, namespace, labels, fields)
        old = self._kube.lag.view(self._user, asked)
        found = old.all(kind) if old else self._kube.store.narrowed(kind, required_fields(fields))
        version = (old or self._kube.store).version
        self._kube.faults.strike(call, "reply")
        # Everything of a large cluster is asked for often, and holds as it is.
        held = filter(scope.holds, found) if namespace or labels or fields else found
        return Listed(tuple(held), str(version))

    def watch(
        self,
        kind: Kind,
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
        self, kind: Kind, namespace: str | None, options: WatchOptions, *, labels: str = "", fields: str = ""
    ) -> AsyncGenerator[WatchEvent, None]:
        """Yield changes, and before them what `options` say."""
        await self._enter("watch", kind)
        scope = self._scope(kind, namespace, labels, fields)
        store = self._kube.store
        is_new = options.has_first or starts_with_all(options.version)
        seen = (self._kube.lag.view(self._user, options.version) if options.has_first else None) or store
        feed = store.open(kind, scope, seen.version if is_new else int(options.version))
        first = list(filter(scope.holds, seen.all(kind))) if options.has_first else []
        deadline = asyncio.get_running_loop().time() + (options.seconds or self._kube.watch_seconds)
        try:
            for obj in first:
                yield WatchEvent("ADDED", clone(obj))
            if options.ends_first:
                yield _bookmark(kind, feed.after, {"annotations": {_FIRST_END: "true"}})
            while (event := await self._next(kind, feed, deadline, options)) is not None:
                await self._kube.lag.wait(self._user, event)
                for told in await self._kube.tangle.told(self._user, event, feed.queue):
                    yield WatchEvent(told.type, clone(told.object))
        finally:
            store.close(kind, feed)

    async def _next(
        self, kind: Kind, feed: Feed, deadline: float, options: WatchOptions
    ) -> WatchEvent | None:
        """The next change, a bookmark after a while without one, None when its time is up."""
        loop = asyncio.get_running_loop()
        while loop.time() < deadline:
            quiet = loop.time() + self._kube.bookmark_seconds if options.has_bookmarks else deadline
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(quiet, deadline)):
                    return await feed.queue.get()
            if options.has_bookmarks and loop.time() < deadline:
                return _bookmark(kind, max(feed.after, self._kube.store.version), {})
        return None

    async def create(self, kind: Kind, obj: Object, *, dry_run: bool = False) -> Object:
        """Create an object."""
        call = await self._enter("create", kind)
        return self._leave(
            call, await self._kube.create(kind, obj, self._user, manager=self._manager, dry_run=dry_run)
        )

    async def replace(
        self, kind: Kind, obj: Object, *, subresource: str = "", dry_run: bool = False
    ) -> Object:
        """Write a whole object back."""
        call = await self._enter("replace", kind, subresource)
        metadata = obj["metadata"]
        if not metadata.get("resourceVersion") and not self._kube.shape(kind).blind_writes:
            problem = "metadata.resourceVersion: Invalid value: 0: must be specified for an update"
            raise answers.invalid(kind, metadata["name"], problem)
        key = self._kube.key(kind, metadata.get("namespace"), metadata["name"])
        whole = clone(obj)

        def change(old: Object) -> Object:
            return _written(old, whole)

        written = await self._kube.change(
            kind, key, change, self._user, subresource, manager=self._manager, dry_run=dry_run
        )
        return self._leave(call, written)

    async def apply(
        self,
        kind: Kind,
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
        kind: Kind,
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
                changed: Object = patches.merge(old, clone(dict(patch)))
            else:
                changed = patches.json_patch(old, clone(list(patch)))
            return changed

        return await self.modify(kind, name, namespace, change, subresource=subresource, dry_run=dry_run)

    async def modify(
        self,
        kind: Kind,
        name: str,
        namespace: str | None,
        change: Change,
        *,
        subresource: str = "",
        dry_run: bool = False,
    ) -> Object:
        """Patch an object: `change` makes of it what it shall be."""
        call = await self._enter("patch", kind, subresource)
        key = self._kube.key(kind, namespace, name)

        def same(old: Object) -> Object:
            new = change(old)
            lifecycle.keep_uid(kind, old, new)
            return new

        patched = await self._kube.change(
            kind, key, same, self._user, subresource, manager=self._manager, dry_run=dry_run
        )
        return self._leave(call, patched)

    async def bind(
        self, name: str, namespace: str, node: str, *, uid: str | None = None, dry_run: bool = False
    ) -> None:
        """Give a pod, of just this `uid`, its node; `Conflict` where it has one, or may not have one yet."""
        call = await self._enter("create", kinds.POD, SUBRESOURCE)
        self._kube.bind(self._kube.key(kinds.POD, namespace, name), node, uid, dry_run=dry_run)
        self._kube.faults.strike(call, "reply")

    async def delete(
        self,
        kind: Kind,
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

    async def _enter(self, verb: str, kind: Kind, subresource: str = "") -> Call:
        call = Call(self._user, verb, resource_of(kind, subresource))
        self._kube.calls[call] += 1
        await self._kube.faults.pass_time(call)
        self._kube.faults.strike(call, "request")
        return call

    def _leave(self, call: Call, answer: Object) -> Object:
        self._kube.faults.strike(call, "reply")
        copy: Object = clone(answer)
        return copy


def _bookmark(kind: Kind, version: int, metadata: Object) -> WatchEvent:
    told = {"resourceVersion": str(version)} | metadata
    return WatchEvent("BOOKMARK", {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": told})


def _copied(listed: Listed) -> Listed:
    return Listed(tuple(clone(obj) for obj in listed.items), listed.resource_version)


def _written(old: Object, whole: Object) -> Object:
    """A replace keeps the owners that the server knows: they are its own record."""
    owners = old["metadata"].get("managedFields", [])
    return {**whole, "metadata": {**whole["metadata"], "managedFields": owners}}


class ReadingApi(DirectApi):
    """For who only reads, and much: lists are the stored objects themselves, which nobody may change."""

    async def list(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> Listed:
        """Read all objects of a kind, at one resourceVersion."""
        return await self._listed(kind, namespace, labels, fields)
