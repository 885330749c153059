"""The cost of placing gangs on a large cluster in use, one JSON object a row.

    python benchmarks/gangs.py [--quick] [--nodes N] [--pods-per-node P] [--pending G] [--new M] [--waiting W]

The gang controller runs beside the fake API server in this process. N nodes of four GPUs are in use, G gangs
of 16 trays wait for room, and part of a rack opens for each gang that comes. Images, environments and field
ownership make the objects as large as those of a real cluster. What the server has of them lies in a file, so
that memory is the controller's, but for `before_mib` of the server and of modules.

- `start`: CPU seconds until all G gangs were refused, and memory.
- `rest`: CPU and lists while nothing changes but heartbeats of nodes.
- `refused`: CPU seconds for each gang that waits, when a pod has ended and none of them fits yet.
- `new`: milliseconds from the last pod of a gang to its plan, and the lists that M of them cause.

Then Kueue's check runs beside such a server. Half of the nodes are in use, and W workloads of four trays
wait.

- `kueue_waiting`: CPU seconds until all of them have a verdict.
- `kueue_rest`: CPU and lists while nothing changes but heartbeats of nodes.
- `kueue_new`: milliseconds from the reservation of quota to the verdict, for one workload at a time.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter as Count
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import structlog
from site_figures import load, spent

from rackloom.claim.cluster.gang_controller import GangController
from rackloom.claim.cluster.gang_placer import GangCaches
from rackloom.claim.cluster.kueue_controller import KueueController
from rackloom.claim.kube.api import EventRecorder, ObjectList
from rackloom.core.allocate.driver_slices import device_classes, slices_of
from rackloom.core.cluster.gang_objects import GANG_GATE, GROUP_LABEL
from rackloom.core.cluster.names import GPU_CLIQUE_LABEL
from rackloom.core.cluster.objects import (
    ADMISSION_CHECK,
    DEVICE_CLASS,
    GANG_PLAN,
    NODE,
    POD,
    RESOURCE_FLAVOR,
    RESOURCE_SLICE,
    WORKLOAD,
    Object,
    ResourceKind,
)
from rackloom.core.cluster.pods import GANG_LABEL, SIZE_ANNOTATION
from rackloom.core.cluster.projection import project_for_control as keep
from rackloom.core.gangs.snapshot import BesideKueue, GangSettings
from rackloom.core.kueue.plans import CONTROLLER_NAME
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.objects import TypeSchema
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


def memory(field: str) -> float:
    """VmRSS or VmHWM of this process, in MiB."""
    text = Path("/proc/self/status").read_text()
    return round(int(text.partition(f"{field}:")[2].split()[0]) / 1024, 1)


def lists(kube: FakeKube) -> int:
    """Lists of whole kinds so far, but for kinds that are not served."""
    calls = kube.calls.items()
    whole = ("nodes", "resourceslices", "resourceclaims", "gangplans", "deviceclasses", "workloads")
    return sum(n for call, n in calls if call.verb == "list" and call.resource in whole)


async def quiet(seconds: float = 1.5) -> None:
    """Wait until the controller does nothing."""
    last = -1.0
    while (now := spent()) - last > 0.05 * seconds:
        last = now
        await asyncio.sleep(seconds)


def row(measure: str, **figures: Any) -> None:
    """Print a row."""
    rounded = {
        name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()
    }
    print(json.dumps({"measure": measure} | rounded | load()), flush=True)


async def until(holds: Callable[[], bool], seconds: float = 1200.0) -> None:
    """Wait for something that the server sees."""
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 (the store of the server is read)
            await asyncio.sleep(0.005)


def plans(kube: FakeKube) -> dict[str, Object]:
    """The GangPlans by name."""
    return {plan["metadata"]["name"]: plan for plan in kube.store.all(GANG_PLAN)}


def has_plan(kube: FakeKube, name: str) -> bool:
    """Whether the plan of a gang is written."""
    return bool((plans(kube).get(name, {}).get("spec") or {}).get("plan"))


def refused(kube: FakeKube) -> int:
    """How many gangs were refused."""
    conditions = (
        entry for plan in plans(kube).values() for entry in (plan.get("status") or {}).get("conditions") or ()
    )
    return sum(entry["type"] == "Placed" and entry["reason"] == "DoesNotFit" for entry in conditions)


async def measure(options: argparse.Namespace, pages: BinaryIO) -> None:
    """All rows."""
    kube = FakeKube(namespaces=("default", TEAM), window=10**6)
    nodes, per_node, pending, new = options.nodes, options.pods_per_node, options.pending, options.new
    api, machine = BulkApi(kube, pages), load_machine(MACHINE)
    # The last racks are free, one for each gang that comes. They are cordoned at first.
    free = (nodes // TRAYS - new) * TRAYS
    api.add(NODE, map(node, range(free)))
    used = ((number, place) for number in range(free) for place in range(per_node))
    api.add(POD, (pod(f"pod-{n}-{place}", n, 0 if place else 4) for n, place in used))
    published = (slice_ for n in range(nodes) for slice_ in slices_of(machine, f"node-{n:05}"))
    api.add(RESOURCE_SLICE, map(stored, published))
    for device_class in device_classes():
        kube.store.put(DEVICE_CLASS, stored(device_class))
    for number in range(free, nodes):
        kube.store.put(NODE, {**node(number), "spec": {"unschedulable": True}})
    for number in range(pending):
        for member in gang(f"waits-{number}"):
            kube.store.put(POD, member)
    server, began, rng = memory("VmRSS"), spent(), random.Random(1)  # noqa: S311 (jitter)
    recorder = EventRecorder(api, "benchmark", "benchmark", time.time)
    controller = GangController(api, recorder, time.time, rng, GangSettings())
    running = asyncio.create_task(controller.run())
    sizes = {"nodes": nodes, "pods": nodes * per_node, "pending": pending}
    await until(lambda: refused(kube) >= pending or running.done())
    used_mib = {"resident_mib": memory("VmRSS"), "peak_mib": memory("VmHWM"), "before_mib": server}
    row("start", **sizes, cpu_s=spent() - began, **used_mib, goal_mib=GOAL_MIB)
    rows = asyncio.create_task(_rows(options, kube, sizes, free))
    # A controller that ends has failed.
    await asyncio.wait([running, rows], return_when=asyncio.FIRST_COMPLETED)
    await (running if running.done() else rows)
    running.cancel()


def stored(value: msgspec.Struct) -> Object:
    """An object as a server stores it."""
    obj = msgspec.to_builtins(value)
    meta = obj["metadata"] | {"uid": obj["metadata"]["name"], "resourceVersion": "1"}
    return {**obj, "metadata": meta}


async def _rows(options: argparse.Namespace, kube: FakeKube, sizes: dict[str, int], free: int) -> None:
    nodes, pending, new = options.nodes, options.pending, options.new
    await quiet()
    # Heartbeats: a node writes its status every five minutes.
    cpu, listed, began = spent(), lists(kube), time.monotonic()
    beats = 0
    while time.monotonic() - began < REST_SECONDS[options.quick]:
        obj = node(beats % free)
        kube.store.put(NODE, {**obj, "metadata": {**obj["metadata"], "annotations": {"beat": str(beats)}}})
        beats += 1
        await asyncio.sleep(300 / nodes)
    cores = (spent() - cpu) / (time.monotonic() - began)
    row("rest", **sizes, cores=cores, lists=lists(kube) - listed, beats=beats)
    # A pod ends that had a tray: still no rack has room.
    rounds, cpu = 3, spent()
    for number in range(rounds):
        kube.store.put(
            POD, {**pod(f"pod-{number * TRAYS}-0", number * TRAYS, 4), "status": {"phase": "Succeeded"}}
        )
        await asyncio.sleep(1.5)
        await quiet()
    used = (spent() - cpu) / rounds
    row("refused", **sizes, cpu_s=used, cpu_ms_per_gang=1000 * used / pending)
    # Part of a rack opens, and a smaller gang that comes then is to have it.
    delays, listed = [], lists(kube)
    for number in range(new):
        name, first = f"new-{number}", free + number * TRAYS
        for place in range(first, first + MEMBERS - 4):
            kube.store.put(NODE, node(place))
        await quiet()
        *others, last = gang(name, MEMBERS - 4)
        for member in others:
            kube.store.put(POD, member)
        await quiet()
        kube.store.put(POD, last)
        came = time.monotonic()
        await until(lambda: has_plan(kube, name))  # noqa: B023 (awaited in this turn)
        delays.append(1000 * (time.monotonic() - came))
        await quiet()
    ordered = sorted(delays)
    p50, p99 = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    figures = {"gangs": new, "p50_ms": p50, "p99_ms": p99, "goal_p99_ms": GOAL_P99_MS}
    row("new", **sizes, **figures, lists=lists(kube) - listed, peak_mib=memory("VmHWM"))


# Kueue's check.


CHECK, ASKED = "rackloom", 4
GOAL_WAITING_S, GOAL_VERDICT_MS = 30.0, 200.0


def workload(name: str) -> Object:
    """A workload of four trays that has quota and waits for the check."""
    template = {"metadata": {}, "spec": pod(name, None, 4)["spec"]}
    pending = {"name": CHECK, "state": "Pending", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    reserved = {"type": "QuotaReserved", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    return {
        "apiVersion": WORKLOAD.api_version,
        "kind": WORKLOAD.kind,
        "metadata": {"name": name, "namespace": TEAM, "uid": name},
        "spec": {"podSets": [{"name": "main", "count": ASKED, "template": template}], "queueName": "q"},
        "status": {"admissionChecks": [pending], "conditions": [reserved]},
    }


def verdict(obj: Object | None) -> str:
    """The state of the check on a workload."""
    return "" if obj is None else obj["status"]["admissionChecks"][0]["state"]


async def measure_checks(options: argparse.Namespace, pages: BinaryIO) -> None:
    """The rows of Kueue's check."""
    kube, nodes, waiting = (
        FakeKube(namespaces=("default", TEAM), window=10**6),
        options.nodes,
        options.waiting,
    )
    lists_of = {"status.conditions": ("type",), "status.admissionChecks": ("name",)}
    for kind in (WORKLOAD, ADMISSION_CHECK, RESOURCE_FLAVOR):
        kube.serve(kind, TypeSchema(status=kind != RESOURCE_FLAVOR, lists=lists_of))
    api = BulkApi(kube, pages)
    for number in range(nodes):
        kube.store.put(NODE, node(number))
    used = ((number, place) for number in range(nodes) for place in range(options.pods_per_node))
    has_gpus = ((n, place, 4 if place == 0 and n // TRAYS % 2 else 0) for n, place in used)
    api.add(POD, (pod(f"pod-{n}-{place}", n, gpus) for n, place, gpus in has_gpus))
    kube.store.put(
        ADMISSION_CHECK,
        {"metadata": {"name": CHECK, "uid": CHECK}, "spec": {"controllerName": CONTROLLER_NAME}},
    )
    for number in range(waiting):
        kube.store.put(WORKLOAD, workload(f"waits-{number:04}"))
    rng, settings = random.Random(1), GangSettings()  # noqa: S311 (jitter)
    caches = GangCaches(api, rng, settings, BesideKueue(has_plans=True))
    informers = [asyncio.create_task(informer.run()) for informer in caches.informers]
    await caches.synced()
    await quiet()
    sizes = {"nodes": nodes, "pods": nodes * options.pods_per_node, "waiting": waiting}
    before = spent()
    controller = KueueController(api, time.time, rng, settings, caches)
    running = asyncio.create_task(controller.run())
    last = f"waits-{waiting - 1:04}"
    await until(lambda: verdict(kube.store.find(WORKLOAD, (TEAM, last))) != "Pending" or running.done())
    found = {state.lower(): count for state, count in Count(map(verdict, kube.store.all(WORKLOAD))).items()}
    row("kueue_waiting", **sizes, **found, cpu_s=spent() - before, goal_cpu_s=GOAL_WAITING_S)
    await quiet()
    cpu, listed, began, beats = spent(), lists(kube), time.monotonic(), 0
    while time.monotonic() - began < REST_SECONDS[options.quick]:
        obj = node(beats % nodes)
        kube.store.put(NODE, {**obj, "metadata": {**obj["metadata"], "annotations": {"beat": str(beats)}}})
        beats += 1
        await asyncio.sleep(300 / nodes)
    cores = (spent() - cpu) / (time.monotonic() - began)
    row("kueue_rest", **sizes, cores=cores, lists=lists(kube) - listed, beats=beats)
    # Some workloads end, so that a part of those that come has room.
    for number in range(0, waiting, 10):
        over = {"type": "Finished", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        ended = kube.store.read(WORKLOAD, (TEAM, f"waits-{number:04}"))
        kube.store.put(WORKLOAD, {**ended, "status": {**ended["status"], "conditions": [over]}})
    delays, listed, used_s = [], lists(kube), 0.0
    for number in range(options.new * 5):
        name = f"new-{number:04}"
        await quiet(0.2)
        came, before = time.monotonic(), spent()
        kube.store.put(WORKLOAD, workload(name))
        await until(lambda: verdict(kube.store.find(WORKLOAD, (TEAM, name))) != "Pending")  # noqa: B023
        delays.append(1000 * (time.monotonic() - came))
        used_s += spent() - before
    ordered = sorted(delays)
    p50, p99 = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    goal = {"goal_p99_ms": GOAL_VERDICT_MS, "lists": lists(kube) - listed}
    each = {"workloads": len(delays), "cpu_ms": 1000 * used_s / len(delays)}
    row("kueue_new", **sizes, **each, p50_ms=p50, p99_ms=p99, **goal)
    for task in (running, *informers):
        task.cancel()
    await asyncio.gather(running, *informers, return_exceptions=True)


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--pods-per-node", type=int, default=10)
    parser.add_argument("--pending", type=int)
    parser.add_argument("--new", type=int)
    parser.add_argument("--waiting", type=int)
    parser.add_argument("--only-kueue", action="store_true")
    options = parser.parse_args()
    options.nodes = options.nodes or (360 if options.quick else 5000)
    options.pending = options.pending or (10 if options.quick else 200)
    options.new = options.new or (3 if options.quick else 20)
    options.waiting = options.waiting or (50 if options.quick else 1000)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    for rows in (measure_checks,) if options.only_kueue else (measure, measure_checks):
        with tempfile.TemporaryFile() as pages:
            asyncio.run(rows(options, pages))


if __name__ == "__main__":
    main()
