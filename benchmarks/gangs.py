"""The cost of placing gangs on a large cluster in use, one JSON object a row.

    python benchmarks/gangs.py [--quick] [--real] [--nodes N] [--pods-per-node P] [--pending G] [--new M]

N nodes of four GPUs are in use, G gangs of 16 trays wait for room, and part of a rack opens for each gang
that comes. Images, environments and field ownership make the objects as large as those of a real cluster.

By default the gang controller runs beside the fake API server in this process. The objects of the server lie
in a file, so that memory is the controller's, but for `before_mib` of the server and of modules. With
`--real`, a real kube-apiserver (tests/cluster) has the objects, and the controller is `rackloom controller`
in a process of its own.

- `start`: CPU seconds until all G gangs were refused, and memory.
- `rest`: CPU and lists while nothing changes but heartbeats of nodes.
- `refused`: CPU seconds for each gang that waits, when a pod has ended and none of them fits yet.
- `new`: milliseconds from the last pod of a gang to its plan, and the lists that M of them cause.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, BinaryIO, Protocol

import goals
import msgspec
import structlog
from site_figures import load, memory, spent

from rackloom.claim.cluster.gang_controller import GangController
from rackloom.claim.kube.api import EventRecorder, ObjectList
from rackloom.core.allocate.driver_slices import device_classes, slices_of
from rackloom.core.cluster.gang_objects import GANG_GATE, GROUP_LABEL
from rackloom.core.cluster.names import GPU_CLIQUE_LABEL
from rackloom.core.cluster.objects import (
    DEVICE_CLASS,
    GANG_PLAN,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_SLICE,
    Object,
    ResourceKind,
)
from rackloom.core.cluster.pods import GANG_LABEL, SIZE_ANNOTATION
from rackloom.core.cluster.projection import project_for_control as keep
from rackloom.core.gangs.snapshot import GangSettings
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube
from rackloom.topology.profiles import load_machine

PAGE = 500
TRAYS, MEMBERS, TEAM = 18, 16, "team"
MACHINE = "oci-bm.gpu.gb200-v3.4"
REST_SECONDS = {True: 5.0, False: 20.0}
GOAL_P99_MS, GOAL_MIB = 1000.0, 400.0


def node(number: int) -> Object:
    """A node as a kubelet reports it."""
    name = f"node-{number:05}"
    labels = {GPU_CLIQUE_LABEL: f"u.{number // TRAYS}", "kubernetes.io/hostname": name}
    meta = {
        "name": name,
        "uid": f"node-{number}",
        "resourceVersion": "1",
        "labels": labels,
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    meta |= {"annotations": {f"a{key}": "x" * 60 for key in range(10)}, "managedFields": _owned("kubelet")}
    there = {"nvidia.com/gpu": "4", "pods": "110", "cpu": "144", "memory": "960Gi"}
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    images = [{"names": [f"registry/image-{key}:v1", "x" * 80], "sizeBytes": key} for key in range(30)]
    status = {"allocatable": there, "capacity": there, "conditions": [ready], "images": images}
    return {"apiVersion": "v1", "kind": "Node", "metadata": meta, "spec": {}, "status": status}


def pod(name: str, where: int | None, gpus: int, **meta: Any) -> Object:
    """A pod that runs on a node, or that waits at the gate."""
    metadata = {"name": name, "namespace": TEAM, "uid": name, "resourceVersion": "1", "labels": {"app": "x"}}
    metadata |= {"creationTimestamp": "2026-01-01T00:00:00Z", "managedFields": _owned("kubelet")}
    metadata |= {"annotations": {f"a{key}": "x" * 60 for key in range(5)}} | meta
    resources = {
        "requests": {"cpu": "1", "memory": "2Gi"},
        "limits": {"nvidia.com/gpu": str(gpus)} if gpus else {},
    }
    environment = [{"name": f"E{key}", "value": "v" * 30} for key in range(10)]
    containers = [
        {"name": "main", "image": "registry/x:v1", "resources": resources, "env": environment},
        {
            "name": "log",
            "image": "registry/y:v1",
            "resources": {"requests": {"cpu": "1"}},
            "env": environment,
        },
    ]
    spec: Object = {"containers": containers, "tolerations": [{"key": "a", "operator": "Exists"}]}
    status: Object = {"phase": "Pending"}
    if where is None:
        spec["schedulingGates"] = [{"name": GANG_GATE}]
    else:
        spec["nodeName"] = f"node-{where:05}"
        types = ("Ready", "Initialized", "PodScheduled", "ContainersReady")
        at = "2026-01-01T00:00:00Z"
        conditions = [{"type": type_, "status": "True", "lastTransitionTime": at} for type_ in types]
        started = [{"name": name, "ready": True, "image": "x" * 60} for name in ("main", "log")]
        status = {"phase": "Running", "conditions": conditions, "containerStatuses": started}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status}


def _owned(manager: str) -> list[Object]:
    fields = {f"f:{number}": {} for number in range(40)}
    return [
        {
            "manager": manager,
            "operation": "Update",
            "apiVersion": "v1",
            "fieldsType": "FieldsV1",
            "fieldsV1": fields,
        }
    ]


def gang(name: str, members: int = MEMBERS) -> Iterator[Object]:
    """The pods of a gang."""
    for number in range(members):
        labels = {GANG_LABEL: name, GROUP_LABEL: "worker"}
        annotations = {SIZE_ANNOTATION: f"worker={members}"}
        yield pod(f"{name}-{number}", None, 4, labels=labels, annotations=annotations)


class BulkApi(DirectApi):
    """An API server whose pods, nodes and slices at the start lie in a file, as pages of a list.

    A list is decoded and reduced page by page, as by the client of the controller. Objects that change lie in
    the store of the fake server.
    """

    def __init__(self, kube: FakeKube, pages: BinaryIO) -> None:
        super().__init__(kube, "controller")
        self._pages = pages
        self._places: dict[ResourceKind, list[tuple[int, int]]] = {}

    def add(self, kind: ResourceKind, objects: Iterable[Object]) -> None:
        """Write objects to the file."""
        for page in batched(objects, PAGE):
            encoded = msgspec.json.encode(page)
            self._places.setdefault(kind, []).append((self._pages.seek(0, 2), len(encoded)))
            self._pages.write(encoded)
        self._pages.flush()

    async def list(
        self, kind: ResourceKind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> ObjectList:
        """The objects of the file are on no tray of a new gang, and of no gang."""
        found = await super().list(kind, namespace, labels=labels, fields=fields)
        items = [keep(kind, obj) for obj in found.items]
        for at, size in () if labels or fields else self._places.get(kind, ()):
            page = msgspec.json.decode(os.pread(self._pages.fileno(), size, at))
            items += [keep(kind, obj) for obj in page]
            await asyncio.sleep(0)
        return ObjectList(tuple(items), found.resource_version)


def batched(objects: Iterable[Object], size: int) -> Iterator[list[Object]]:
    """The objects in lists of this size."""
    rest = iter(objects)
    while page := list(islice(rest, size)):
        yield page


def row(measure: str, **figures: Any) -> None:
    """Print a row."""
    rounded = {
        name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()
    }
    print(json.dumps(goals.judged("gangs", {"measure": measure} | rounded | load())), flush=True)


class Site(Protocol):
    """An API server with a gang controller."""

    async def add(self, kind: ResourceKind, objects: Iterable[Object]) -> None:
        """Create many objects, before the controller starts."""

    async def start(self) -> float:
        """Start the controller. Returns the MiB that do not count as its memory."""

    async def write(self, kind: ResourceKind, obj: Object) -> None:
        """Create an object, or change it as far as this benchmark changes objects."""

    def plans(self) -> Iterable[Object]:
        """All GangPlans."""

    async def lists(self) -> int:
        """Lists of `WHOLE` so far."""

    def spent(self) -> float:
        """CPU seconds of the controller so far."""

    def memory(self, field: str) -> float:
        """VmRSS or VmHWM of the controller's process, in MiB."""

    def check(self) -> None:
        """Raise if the controller has ended."""


WHOLE = (NODE, RESOURCE_SLICE, RESOURCE_CLAIM, GANG_PLAN, DEVICE_CLASS)
"""The controller lists them at its start."""


class FakeSite:
    """The controller and its API server in this process."""

    def __init__(self, pages: BinaryIO) -> None:
        self._kube = FakeKube(namespaces=("default", TEAM), window=10**6)
        self._api = BulkApi(self._kube, pages)
        self._controller: asyncio.Task[None] | None = None

    async def add(self, kind: ResourceKind, objects: Iterable[Object]) -> None:
        self._api.add(kind, objects)

    async def start(self) -> float:
        before, rng = memory("VmRSS"), random.Random(1)  # noqa: S311 (jitter)
        recorder = EventRecorder(self._api, "benchmark", "benchmark", time.time)
        controller = GangController(self._api, recorder, time.time, rng, GangSettings())
        self._controller = asyncio.create_task(controller.run())
        return before

    async def write(self, kind: ResourceKind, obj: Object) -> None:
        self._kube.store.put(kind, obj)

    def plans(self) -> Iterable[Object]:
        return self._kube.store.all(GANG_PLAN)

    async def lists(self) -> int:
        calls = self._kube.calls.items()
        whole = {kind.plural for kind in WHOLE}
        return sum(n for call, n in calls if call.verb == "list" and call.resource in whole)

    def spent(self) -> float:
        return spent()

    def memory(self, field: str) -> float:
        return memory(field)

    def check(self) -> None:
        if self._controller is not None and self._controller.done():
            self._controller.result()
            raise SystemExit("the controller has ended")


async def until(site: Site, holds: Callable[[], bool], seconds: float = 1200.0) -> None:
    """Wait for something that the server sees."""
    async with asyncio.timeout(seconds):
        while not holds():
            site.check()
            await asyncio.sleep(0.005)


async def quiet(site: Site, seconds: float = 1.5) -> None:
    """Wait until the controller does nothing."""
    last = -1.0
    while (now := site.spent()) - last > 0.05 * seconds:
        last = now
        await asyncio.sleep(seconds)


def has_plan(site: Site, name: str) -> bool:
    """Whether the plan of a gang is written."""
    named = (plan for plan in site.plans() if plan["metadata"]["name"] == name)
    return any((plan.get("spec") or {}).get("plan") for plan in named)


def refused(site: Site) -> int:
    """How many gangs were refused."""
    statuses = (plan.get("status") or {} for plan in site.plans())
    conditions = (entry for status in statuses for entry in status.get("conditions") or ())
    return sum(entry["type"] == "Placed" and entry["reason"] == "DoesNotFit" for entry in conditions)


async def measure(options: argparse.Namespace, site: Site) -> None:
    """All rows."""
    nodes, per_node, pending, new = options.nodes, options.pods_per_node, options.pending, options.new
    machine = load_machine(MACHINE)
    # The last racks are free, one for each gang that comes. They are cordoned at first.
    free = (nodes // TRAYS - new) * TRAYS
    await site.add(NODE, map(node, range(free)))
    used = ((number, place) for number in range(free) for place in range(per_node))
    await site.add(POD, (pod(f"pod-{n}-{place}", n, 0 if place else 4) for n, place in used))
    published = (slice_ for n in range(nodes) for slice_ in slices_of(machine, f"node-{n:05}"))
    await site.add(RESOURCE_SLICE, map(stored, published))
    for device_class in device_classes():
        await site.write(DEVICE_CLASS, stored(device_class))
    for number in range(free, nodes):
        await site.write(NODE, {**node(number), "spec": {"unschedulable": True}})
    for number in range(pending):
        for member in gang(f"waits-{number}"):
            await site.write(POD, member)
    began, before = site.spent(), await site.start()
    sizes = {"nodes": nodes, "pods": nodes * per_node, "pending": pending}
    await until(site, lambda: refused(site) >= pending)
    used_mib = {"resident_mib": site.memory("VmRSS"), "peak_mib": site.memory("VmHWM"), "before_mib": before}
    row("start", **sizes, cpu_s=site.spent() - began, **used_mib, goal_mib=GOAL_MIB)
    await _rows(options, site, sizes, free)


def stored(value: msgspec.Struct) -> Object:
    """An object as a server stores it."""
    obj = msgspec.to_builtins(value)
    meta = obj["metadata"] | {"uid": obj["metadata"]["name"], "resourceVersion": "1"}
    return {**obj, "metadata": meta}


async def _rows(options: argparse.Namespace, site: Site, sizes: dict[str, int], free: int) -> None:
    nodes, pending, new = options.nodes, options.pending, options.new
    await quiet(site)
    # Heartbeats: a node writes its status every five minutes.
    cpu, listed, began = site.spent(), await site.lists(), time.monotonic()
    beats = 0
    while time.monotonic() - began < REST_SECONDS[options.quick]:
        obj = node(beats % free)
        annotations = obj["metadata"]["annotations"] | {"beat": str(beats)}
        await site.write(NODE, {**obj, "metadata": {**obj["metadata"], "annotations": annotations}})
        beats += 1
        await asyncio.sleep(300 / nodes)
    cores = (site.spent() - cpu) / (time.monotonic() - began)
    row("rest", **sizes, cores=cores, lists=await site.lists() - listed, beats=beats)
    # A pod ends that had a tray: still no rack has room.
    rounds, cpu = 3, site.spent()
    for number in range(rounds):
        ended = pod(f"pod-{number * TRAYS}-0", number * TRAYS, 4)
        await site.write(POD, {**ended, "status": {"phase": "Succeeded"}})
        await asyncio.sleep(1.5)
        await quiet(site)
    used = (site.spent() - cpu) / rounds
    row("refused", **sizes, cpu_s=used, cpu_ms_per_gang=1000 * used / pending)
    # Part of a rack opens, and a smaller gang that comes then is to have it.
    delays, listed = [], await site.lists()
    for number in range(new):
        name, first = f"new-{number}", free + number * TRAYS
        for place in range(first, first + MEMBERS - 4):
            await site.write(NODE, node(place))
        await quiet(site)
        *others, last = gang(name, MEMBERS - 4)
        for member in others:
            await site.write(POD, member)
        await quiet(site)
        await site.write(POD, last)
        came = time.monotonic()
        await until(site, lambda: has_plan(site, name))  # noqa: B023 (awaited in this turn)
        delays.append(1000 * (time.monotonic() - came))
        await quiet(site)
    ordered = sorted(delays)
    p50, p99 = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    figures = {"gangs": new, "p50_ms": p50, "p99_ms": p99, "goal_p99_ms": GOAL_P99_MS}
    row("new", **sizes, **figures, lists=await site.lists() - listed, peak_mib=site.memory("VmHWM"))


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--pods-per-node", type=int, default=10)
    parser.add_argument("--pending", type=int)
    parser.add_argument("--new", type=int)
    options = parser.parse_args()
    options.nodes = options.nodes or (360 if options.quick else 5000)
    options.pending = options.pending or (10 if options.quick else 200)
    options.new = options.new or (3 if options.quick else 20)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    with tempfile.TemporaryFile() as pages:
        asyncio.run(measured(options, pages))


async def measured(options: argparse.Namespace, pages: BinaryIO) -> None:
    """All rows, of the chosen site."""
    if not options.real:
        await measure(options, FakeSite(pages))
        return
    # Imported here: it needs the tests.
    from gangs_real import real_site

    async with real_site(TEAM, WHOLE) as site:
        await measure(options, site)


if __name__ == "__main__":
    main()
