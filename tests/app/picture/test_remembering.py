"""A reading that remembers earlier ones is the reading that knows nothing, whatever changed in between."""

import asyncio

import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.app.picture.test_fabric_reading import DOMAIN, FRESH, NOW, observed, partition, seeded

from rackloom.app.picture.known import Known
from rackloom.app.picture.look import site_picture
from rackloom.carve.plan.values import GpuHealth
from rackloom.carve.site import fabric_book, knowledge
from rackloom.carve.site.store import Store
from rackloom.carve.site.tables import machine, tenant
from rackloom.claim.kube.api import Listed
from rackloom.claim.kube.kinds import NODE, POD, RESOURCE_CLAIM, RESOURCE_SLICE
from rackloom.claim.kube.refusals import unreachable
from rackloom.prove.picture.values import Layer

GUIDS = [gpu.guid for gpu in observed().gpus]


class Cluster:
    """Lists of an API server that may not answer; every change of an object gives it a new version."""

    def __init__(self):
        self.objects = {}
        self.answers = True
        self.version = 0

    def put(self, kind, name, **told):
        self.version += 1
        meta = {"name": name, "namespace": "ops", "uid": f"{kind.plural}-{name}"}
        meta["resourceVersion"] = str(self.version)
        self.objects[kind, name] = {"metadata": meta, **told}

    def drop(self, kind, name):
        self.objects.pop((kind, name), None)

    async def list(self, kind, namespace=None, *, labels="", fields=""):
        if not self.answers:
            raise unreachable(OSError("no route"))
        return Listed(tuple(one for (of, _), one in self.objects.items() if of == kind), str(self.version))


class Site:
    """A store and a cluster, and what may happen to them."""

    def __init__(self):
        self.store, self.cluster, self.endpoint = Store.inline(), Cluster(), ""

    async def observe(self, number):
        healths = (GpuHealth.HEALTHY, GpuHealth.DEGRADED)
        members = GUIDS[: number % 5]
        seen = observed(NOW - 5 + number / 1000, [partition(7, "found", *members)], healths[number % 2])
        await self.store.run(fabric_book.record_observation, self.endpoint, seen, NOW)

    async def lose(self, number):
        await self.store.run(knowledge.lose, self.endpoint, "no answer", NOW + number)

    async def move(self, number):
        tray = DOMAIN.trays[number % len(DOMAIN.trays)]
        await self.store.run(_moved, tray.slot, f"row {number % 3}")

    async def rename(self, number):
        await self.store.run(_named, f"org-{number % 3}")

    async def label(self, number):
        name = f"node-{number % 2}"
        self.cluster.put(NODE, name, spec={"unschedulable": bool(number % 3)}, status={})

    async def unlabel(self, number):
        self.cluster.drop(NODE, f"node-{number % 2}")

    async def publish(self, number):
        devices = [{"name": f"gpu-{n}", "attributes": {"type": {"string": "gpu"}}} for n in range(number % 3)]
        node = f"node-{number % 2}"
        pool = {"name": node, "generation": 1}
        spec = {"driver": "gpu.nvidia.com", "nodeName": node, "pool": pool, "devices": devices}
        self.cluster.put(RESOURCE_SLICE, node, spec=spec)

    async def allocate(self, number):
        result = {"driver": "gpu.nvidia.com", "pool": f"node-{number % 2}", "device": "gpu-0"}
        status = {"allocation": {"devices": {"results": [result]}}}
        status["reservedFor"] = [{"uid": f"pods-pod-{number % 2}", "name": f"pod-{number % 2}"}]
        self.cluster.put(RESOURCE_CLAIM, f"claim-{number % 3}", spec={}, status=status)

    async def start(self, number):
        status = {"startTime": f"2026-01-01T00:00:{number % 60:02}Z"} if number % 3 else {}
        self.cluster.put(POD, f"pod-{number % 2}", spec={"containers": []}, status=status)

    async def end(self, number):
        self.cluster.drop(POD, f"pod-{number % 2}")

    async def partition_network(self, number):
        self.cluster.answers = not self.cluster.answers


def _moved(conn, slot, rack):
    conn.execute(sa.update(machine).where(machine.c.slot == slot).values(rack=rack))


def _named(conn, org):
    conn.execute(sa.update(tenant).values(org=org))


HAPPENS = [one for name, one in vars(Site).items() if not name.startswith("_")]


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(HAPPENS), st.integers(0, 99)), min_size=1, max_size=8))
def test_what_is_remembered_changes_nothing(story):
    async def told():
        site, known = Site(), Known()
        site.endpoint = await seeded(site.store)
        for happens, number in story:
            await happens(site, number)
            asked = {"records": site.store, "stale": FRESH, "cluster": site.cluster}
            remembering = await site_picture(NOW, **asked, known=known)
            assert remembering == await site_picture(NOW, **asked)
            lost = remembering.layer(Layer.CLUSTER).unknown_since is not None
            assert lost is not site.cluster.answers
        await site.store.close()

    asyncio.run(told())
