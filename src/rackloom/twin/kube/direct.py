"""A `KubeApi` that calls the fake server without a wire between."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

from rackloom.claim.kube.api import Kind, Listed, Object, WatchEvent
from rackloom.twin.kube import answers, patches
from rackloom.twin.kube.faults import Call, resource_of
from rackloom.twin.kube.history import Feed, Scope
from rackloom.twin.kube.ownership import clone
from rackloom.twin.kube.selectors import matcher, required_fields
from rackloom.twin.kube.server import FakeKube


class DirectApi:
    """What `user` may ask of a fake server. `user` is also the field manager of its creates and patches."""

    def __init__(self, kube: FakeKube, user: str) -> None:
        self._kube = kube
        self._user = user

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
        return Listed(tuple(clone(obj) for obj in listed.items), listed.resource_version)

    async def _listed(self, kind: Kind, namespace: str | None, labels: str, fields: str) -> Listed:
        call = await self._enter("list", kind)
        self._kube.shape(kind)
        scope = Scope(namespace, matcher(labels, fields))
        found = self._kube.store.narrowed(kind, required_fields(fields))
        self._kube.faults.strike(call, "reply")
        return Listed(tuple(obj for obj in found if scope.holds(obj)), str(self._kube.store.version))

    async def watch(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        resource_version: str,
        labels: str = "",
        fields: str = "",
    ) -> AsyncGenerator[WatchEvent, None]:
        """Yield changes after a version; from "0" or "" on, everything there is comes first."""
        await self._enter("watch", kind)
        self._kube.shape(kind)
        scope = Scope(namespace, matcher(labels, fields))
        store, version = self._kube.store, resource_version
        if version in ("", "0"):
            for obj in store.all(kind):
                if scope.holds(obj):
                    yield WatchEvent("ADDED", clone(obj))
        if not version.isdigit() and version:
            raise answers.bad_request(f"invalid resource version {version!r}")
        feed = store.open(kind, scope, int(version) if version.strip("0") else store.version)
        deadline = asyncio.get_running_loop().time() + self._kube.watch_seconds
        try:
            while (event := await self._next(kind, feed, deadline)) is not None:
                yield event
        finally:
            store.close(kind, feed)

    async def _next(self, kind: Kind, feed: Feed, deadline: float) -> WatchEvent | None:
        """The next change, a bookmark after a while without one, None when its time is up."""
        if asyncio.get_running_loop().time() >= deadline:
            return None
        try:
            async with asyncio.timeout(self._kube.bookmark_seconds):
                event = await feed.queue.get()
        except TimeoutError:
            return self._bookmark(kind)
        return None if event is None else WatchEvent(event.type, clone(event.object))

    def _bookmark(self, kind: Kind) -> WatchEvent:
        version = {"resourceVersion": str(self._kube.store.version)}
        return WatchEvent(
            "BOOKMARK", {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": version}
        )

    async def create(self, kind: Kind, obj: Object, *, dry_run: bool = False) -> Object:
        """Create an object."""
        call = await self._enter("create", kind)
        return self._leave(call, await self._kube.create(kind, obj, self._user, dry_run=dry_run))

    async def replace(self, kind: Kind, obj: Object, *, subresource: str = "") -> Object:
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

        return self._leave(call, await self._kube.change(kind, key, change, self._user, subresource))

    async def apply(
        self, kind: Kind, obj: Object, *, manager: str, force: bool = False, subresource: str = ""
    ) -> Object:
        """Server-side apply."""
        call = await self._enter("apply", kind, subresource)
        key = self._kube.key(kind, obj["metadata"].get("namespace"), obj["metadata"]["name"])
        applied = await self._kube.apply(
            kind, key, obj, manager, self._user, force=force, subresource=subresource
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
    ) -> Object:
        """Change an object by a merge patch or a JSON patch."""
        call = await self._enter("patch", kind, subresource)
        key = self._kube.key(kind, namespace, name)

        def change(old: Object) -> Object:
            if isinstance(patch, Mapping):
                changed: Object = patches.merge(old, clone(dict(patch)))
            else:
                changed = patches.json_patch(old, clone(list(patch)))
            return changed

        return self._leave(call, await self._kube.change(kind, key, change, self._user, subresource))

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
