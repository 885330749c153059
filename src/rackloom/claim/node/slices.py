"""ResourceSlices of a node: the plan that writes them, and its loop.

A pool is complete when all slices of its highest generation exist. So a change raises the generation and
rewrites all slices of the pool: changed and new slices first, surplus ones last, so that the pool
stays complete for as long as possible if the plan is cut off. Nothing is written while nothing differs. A
slice has at most 128 devices, 64 if any device has taints or consumes counters, or 8 counter sets (limits
of resource.k8s.io/v1). Slices with the counters of a pool come first. A taint that stays keeps its
`timeAdded`.

An API server drops fields that it does not know or has switched off. `DroppedFields` compares each answer
with the request and remembers the difference. Without it the publisher would write for ever, each time
under a new generation, and schedulers would never find the pool at rest. Comparison ignores fields that the
server adds and treats quantities by value (`1024Mi` equals `1Gi`).

`SlicePublisher` publishes at the start, when the driver reports a change, when a watch shows that
another client changed a slice (kubelet deletes the slices of a plugin that it lost), and every ten
minutes. After an outage of the API server it wakes `PodSync`.

A server that would store no counters (before Kubernetes 1.36 they are behind a feature gate) gets the devices
that need none: with the counters dropped, a scheduler would allocate parts of a GPU that overlap. A dry run
of the first slice of each kind shows it.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import msgspec
import structlog

from rackloom.claim.kube.api import Conflict, KubeApi, KubeError, NotFound, ObjectList, Rejected
from rackloom.claim.node.plugin import DevicePool, NodePlugin
from rackloom.claim.node.prepare import PluginMetrics
from rackloom.claim.node.tasks import beside, pause_until
from rackloom.core.allocate.objects import CounterSet, Device
from rackloom.core.allocate.quantity import Quantity
from rackloom.core.cluster.nodes import slice_content, slice_pool
from rackloom.core.cluster.objects import NODE, RESOURCE_SLICE, Object, name_of, uid_of
from rackloom.errors import Refused, Retry

# Fields that the API server does not store.


Content = Mapping[str, Any]
"""The published content of a slice: the fields `devices` and `sharedCounters` of its spec."""


class DroppedFields:
    """The fields of written slices that the API server did not store.

    Not kept across restarts: after an upgrade a server may store a field that it dropped before.
    """

    def __init__(self) -> None:
        self._of: dict[str, Content] = {}

    def record(self, sent: Object, stored: Object) -> tuple[str, ...]:
        """Compare an answer with the request. Returns the paths that the server dropped."""
        wanted, found = comparable_content(slice_content(sent)), comparable_content(slice_content(stored))
        dropped = tuple(dict.fromkeys(_dropped_paths(wanted, found, "")))
        self._of.pop(repr(wanted), None)
        if dropped:
            self._of[repr(wanted)] = found
        return dropped

    def forget(self, sent: Object) -> None:
        """Assume that the server stores everything in `sent`."""
        self._of.pop(repr(comparable_content(slice_content(sent))), None)

    def of(self, content: Content) -> Content:
        """The content of a slice as the server has it once it is written."""
        wanted = comparable_content(content)
        return self._of.get(repr(wanted), wanted)


def comparable_content(content: Content) -> Content:
    """The content of a slice without the additions of the API server, and with its wording normalized."""
    return {
        "devices": [_comparable_device(device) for device in content.get("devices", ())],
        "sharedCounters": [_comparable_counters(counters) for counters in content.get("sharedCounters", ())],
    }


def without_time_added(taint: Mapping[str, Any]) -> dict[str, Any]:
    """A taint without the time that the server put on it."""
    return {key: value for key, value in taint.items() if key != "timeAdded" and value != ""}


def _comparable_device(device: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in device.items() if value not in ({}, [], None)}
    if "taints" in found:
        found["taints"] = [without_time_added(taint) for taint in found["taints"]]
    if "capacity" in found:
        found["capacity"] = {name: _quantities(entry) for name, entry in found["capacity"].items()}
    if "consumesCounters" in found:
        found["consumesCounters"] = [_comparable_counters(part) for part in found["consumesCounters"]]
    return found


def _comparable_counters(part: Mapping[str, Any]) -> dict[str, Any]:
    """A counter set, or the amounts that a device draws from it."""
    return {**part, "counters": {name: _quantities(entry) for name, entry in part["counters"].items()}}


def _quantities(value: Any) -> Any:
    """A capacity with every quantity parsed: `1024Mi` comes back as `1Gi`, in policies too."""
    if isinstance(value, Mapping):
        return {key: _quantities(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_quantities(part) for part in value]
    return Quantity.parse(value)


def _dropped_paths(sent: Any, stored: Any, path: str) -> Iterator[str]:
    """Paths that `stored` lacks. None if a value differs, since then another client changed it."""
    if isinstance(sent, Mapping) and isinstance(stored, Mapping):
        for key, value in sent.items():
            if key not in stored:
                yield f"{path}.{key}".removeprefix(".")
            else:
                yield from _dropped_paths(value, stored[key], f"{path}.{key}".removeprefix("."))
    elif isinstance(sent, list) and isinstance(stored, list):
        # A field that is dropped altogether is compared with nothing.
        if sent and not stored:
            yield path
        if len(sent) != len(stored):
            return
        for sent_item, stored_item in zip(sent, stored, strict=True):
            yield from _dropped_paths(sent_item, stored_item, path)


# The plan: a pure function from pools and existing slices to writes.


MAX_DEVICES = 128
MAX_DEVICES_WITH_EXTRAS = 64
MAX_COUNTER_SETS = 8


class SliceOwner(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of the slices."""

    driver: str
    node: str
    node_uid: str


class Create(msgspec.Struct, frozen=True):
    """Write a new slice."""

    slice: Object


class Update(msgspec.Struct, frozen=True):
    """Write a slice back, at the resourceVersion that was read."""

    slice: Object


class Delete(msgspec.Struct, frozen=True):
    """Delete the slice that was read."""

    name: str
    uid: str


SliceWrite = Create | Update | Delete


def plan_slices(
    pools: Iterable[DevicePool],
    existing: Iterable[Object],
    owner: SliceOwner,
    kept: DroppedFields | None = None,
) -> tuple[SliceWrite, ...]:
    """The writes that turn `existing` (the owner's slices) into those of `pools`, given dropped fields."""
    dropped = kept or DroppedFields()
    by_pool: dict[str, list[Object]] = {}
    for slice_ in sorted(existing, key=name_of):
        by_pool.setdefault(slice_pool(slice_).name, []).append(slice_)
    actions = [
        action for pool in pools for action in _plan_pool(pool, by_pool.pop(pool.name, []), owner, dropped)
    ]
    surplus = [_delete(slice_) for slices in by_pool.values() for slice_ in slices]
    # A plan may be cut off: with deletions last, the pool stays complete for as long as possible.
    return (*sorted(actions, key=lambda action: isinstance(action, Delete)), *surplus)


def split_into_slices(pool: DevicePool) -> tuple[Content, ...]:
    """The content of each slice: counters, then devices.

    A pool without devices has one empty slice, which shows that the pool is known.
    """
    sets = _encoded(pool.counters)
    counters = ({"sharedCounters": part} for part in _chunks(sets, MAX_COUNTER_SETS) if part)
    extras = any(device.taints or device.consumes_counters for device in pool.devices)
    most = MAX_DEVICES_WITH_EXTRAS if extras else MAX_DEVICES
    devices = ({"devices": part} for part in _chunks(_encoded(pool.devices), most))
    return (*counters, *devices)


def _encoded(values: tuple[Device, ...] | tuple[CounterSet, ...]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = msgspec.json.decode(msgspec.json.encode(values))
    return found


def _chunks(values: list[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    """At least one, which may be empty."""
    return (values[start : start + size] for start in range(0, max(len(values), 1), size))


def _plan_pool(
    pool: DevicePool, existing: list[Object], owner: SliceOwner, kept: DroppedFields
) -> Iterator[SliceWrite]:
    newest = max((slice_pool(slice_).generation for slice_ in existing), default=0)
    wanted = split_into_slices(pool)
    current = [slice_ for slice_ in existing if slice_pool(slice_).generation == newest]
    if _is_published([kept.of(content) for content in wanted], current):
        yield from (_delete(slice_) for slice_ in existing if slice_pool(slice_).generation != newest)
        return
    spec = {
        "driver": owner.driver,
        "nodeName": owner.node,
        "pool": {"name": pool.name, "generation": newest + 1, "resourceSliceCount": len(wanted)},
    }
    for index, (content, old) in enumerate(zip_longest(wanted, existing)):
        if content is None:
            yield _delete(old)
        elif old is None:
            yield Create(_new_slice(index, {**spec, **content}, owner))
        else:
            yield Update({**old, "spec": {**spec, **_keep_times(content, old)}})


def _is_published(wanted: list[Content], existing: list[Object]) -> bool:
    if len(wanted) != len(existing):
        return False
    counted = all(slice_pool(slice_).count == len(wanted) for slice_ in existing)
    found = [comparable_content(slice_content(slice_)) for slice_ in existing]
    return counted and sorted(wanted, key=repr) == sorted(found, key=repr)


def _keep_times(content: Content, old: Object) -> Content:
    """A taint that stays keeps its `timeAdded`."""

    def key(device: Mapping[str, Any], taint: Mapping[str, Any]) -> tuple[str, str]:
        return device["name"], repr(sorted(without_time_added(taint).items()))

    times = {
        key(device, taint): {"timeAdded": taint["timeAdded"]}
        for device in slice_content(old)["devices"]
        for taint in device.get("taints", ())
        if "timeAdded" in taint
    }
    devices = [
        {**device, "taints": [{**taint, **times.get(key(device, taint), {})} for taint in device["taints"]]}
        if "taints" in device
        else device
        for device in content.get("devices", ())
    ]
    return {**content, "devices": devices} if devices else content


def _new_slice(index: int, spec: dict[str, Any], owner: SliceOwner) -> Object:
    node = {"apiVersion": NODE.api_version, "kind": NODE.kind, "name": owner.node, "uid": owner.node_uid}
    return {
        "apiVersion": RESOURCE_SLICE.api_version,
        "kind": RESOURCE_SLICE.kind,
        "metadata": {
            "generateName": f"{index:05x}-{owner.driver}-{owner.node}-",
            # With the Node as owner, the slices go when the node is deleted.
            "ownerReferences": [{**node, "controller": True}],
        },
        "spec": spec,
    }


def _delete(slice_: Object) -> Delete:
    return Delete(name_of(slice_), uid_of(slice_))


# The loop that reads, plans and writes.


log = structlog.get_logger(__name__)

RESYNC_SECONDS = 600.0
RETRY_SECONDS = 5.0
ROUNDS = 3


@dataclass(eq=False)
class SlicePublisher:
    """Publishes the pools of one plugin. `published` is set while the API server shows the wanted slices.

    `trouble` is the reason why nothing was ever published, or None after the first publication.

    `on_recovery` is called when the API server answers again after a time when it did not.
    """

    plugin: NodePlugin
    api: KubeApi
    node: str
    metrics: PluginMetrics
    on_recovery: Callable[[], None] = lambda: None
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _selector: str = field(init=False)
    _owner: SliceOwner | None = field(default=None, init=False)
    _kept: DroppedFields = field(default_factory=DroppedFields, init=False)
    _is_cut_off: bool = field(default=False, init=False)
    published: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    trouble: str | None = field(default="they were not written yet", init=False)

    def __post_init__(self) -> None:
        self._selector = f"spec.driver={self.plugin.driver},spec.nodeName={self.node}"

    def wake(self) -> None:
        """Publish again soon: the devices have changed."""
        self._wake.set()

    async def run(self) -> None:
        """Publish, and again whenever the devices or the slices change. Never returns."""
        while True:
            try:
                listed = await self.publish()
            except (Retry, Refused, KubeError) as trouble:
                self._is_cut_off |= _no_answer(trouble)
                self.published.clear()
                if self.trouble is not None:
                    self.trouble = str(trouble)
                self.metrics.not_published()
                log.warning("node.not-published", driver=self.plugin.driver, reason=str(trouble))
                await pause_until(self._wake, RETRY_SECONDS)
                continue
            self.published.set()
            self.trouble = None
            # kubelet could not read claims during the outage either: sync the pods that failed on it.
            if self._is_cut_off:
                self._is_cut_off = False
                self.on_recovery()
            # Until the plugin wakes this loop, another client changes a slice, or a long time has passed.
            async with beside(self._watch(listed.resource_version)):
                await pause_until(self._wake, RESYNC_SECONDS)

    async def publish(self) -> ObjectList:
        """Bring the slices up to date. The returned list shows that they are.

        Raises `KubeError`, and `Retry` if another client keeps changing them.
        """
        if self._owner is None:
            node = await self.api.get(NODE, self.node)
            self._owner = SliceOwner(driver=self.plugin.driver, node=self.node, node_uid=uid_of(node))
        owner = self._owner
        pools = [await self._storable(pool, owner) for pool in await self.plugin.pools()]
        # The list after the writes shows whether they are there: kubelet or another writer may interfere.
        for _ in range(ROUNDS):
            listed = await self.api.list(RESOURCE_SLICE, fields=self._selector)
            actions = plan_slices(pools, listed.items, owner, self._kept)
            if not actions:
                return listed
            if not await self._write_all(actions):
                pools = [
                    self._without_counters(pool, "it dropped them when they were written") for pool in pools
                ]
        raise Retry(f"the slices of {owner.driver} do not stay as they are written", after=RETRY_SECONDS)

    async def _storable(self, pool: DevicePool, owner: SliceOwner) -> DevicePool:
        """The pool, or the devices that need no counters if the server would not store counters.

        Raises `KubeError`.
        """
        if not pool.counters:
            return pool
        contents = split_into_slices(pool)
        firsts = (contents[0], next(content for content in contents if "devices" in content))
        place = {"name": pool.name, "generation": 1, "resourceSliceCount": len(contents)}
        for content in firsts:
            spec = {"driver": owner.driver, "nodeName": owner.node, "pool": place, **content}
            sent = _new_slice(0, spec, owner)
            try:
                stored = await self.api.create(RESOURCE_SLICE, sent, dry_run=True)
            except Rejected as refusal:
                return self._without_counters(pool, refusal.message)
            if lost := _lost_counters(DroppedFields().record(sent, stored)):
                return self._without_counters(pool, f"the API server drops {', '.join(lost)}")
        return pool

    def _without_counters(self, pool: DevicePool, reason: str) -> DevicePool:
        if not pool.counters:
            return pool
        log.warning("node.no-counters", driver=self.plugin.driver, reason=reason)
        return DevicePool(name=pool.name, devices=pool.without_counters)

    async def _write_all(self, actions: Iterable[SliceWrite]) -> bool:
        """Whether the server kept all counters. Nothing is written after the first that it dropped.

        Another API server may have answered the dry run, or the same one before a downgrade.
        """
        for action in actions:
            is_kept = True
            # kubelet deletes slices of a plugin that it lost. The next list shows deletions and changes.
            with suppress(Conflict, NotFound):
                match action:
                    case Create(new):
                        is_kept = self._keeps(new, await self.api.create(RESOURCE_SLICE, new))
                    case Update(changed):
                        is_kept = self._keeps(changed, await self.api.replace(RESOURCE_SLICE, changed))
                    case Delete(name, uid):
                        await self.api.delete(RESOURCE_SLICE, name, uid=uid)
            log.info("node.slice", driver=self.plugin.driver, action=type(action).__name__.lower())
            if not is_kept:
                return False
        return True

    def _keeps(self, sent: Object, stored: Object) -> bool:
        """Whether the server stored all counters that were sent."""
        dropped = self._kept.record(sent, stored)
        if dropped:
            log.warning("node.slice-fields-dropped", driver=self.plugin.driver, fields=list(dropped))
        if not _lost_counters(dropped):
            return True
        # It must never count as published as it is, not even in a later call.
        self._kept.forget(sent)
        return False

    async def _watch(self, resource_version: str) -> None:
        events = self.api.watch(RESOURCE_SLICE, resource_version=resource_version, fields=self._selector)
        try:
            async for event in events:
                if event.type != "BOOKMARK":
                    self.wake()
        except KubeError as error:
            log.info("node.slice-watch-ended", driver=self.plugin.driver, reason=error.message)
            self._is_cut_off |= _no_answer(error)
            await asyncio.sleep(RETRY_SECONDS)
        self.wake()


def _lost_counters(dropped: Iterable[str]) -> list[str]:
    return [path for path in dropped if "Counters" in path]


def _no_answer(trouble: Exception) -> bool:
    """Whether the API server could not be reached, or could not serve."""
    return isinstance(trouble, KubeError) and (trouble.code == 0 or trouble.code >= 500)
