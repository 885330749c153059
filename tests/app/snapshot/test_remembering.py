"""A map with a cache equals a map without one after any changes."""

import asyncio

import pytest
import sqlalchemy as sa
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.app.snapshot.test_fabric_reading import DOMAIN, FRESH, NOW, observed, partition, seeded

from rackloom.app.snapshot.assemble import site_snapshot
from rackloom.app.snapshot.cache import ReadCache
from rackloom.carve.observation import latest
from rackloom.carve.reconcile import records
from rackloom.carve.store import journal
from rackloom.carve.store.database import Store
from rackloom.carve.store.schema import (
    domain_dispute,
    domain_pause,
    foreign_tray,
    instance,
    machine,
    machine_gpu,
    moved_gpu,
    observation,
    tenant,
    vpc,
)
from rackloom.claim.kube.api import ObjectList
from rackloom.claim.kube.decoding import unreachable_error
from rackloom.core.cluster.objects import NODE, POD, RESOURCE_CLAIM, RESOURCE_SLICE
from rackloom.core.diagnosis.incremental import JoinedShares, join_shares
from rackloom.core.diagnosis.snapshot import Layer
from rackloom.core.partitions.domain import GpuHealth
from rackloom.web.frames import ColourMode
from rackloom.web.live import LiveReading
from rackloom.web.model import SiteMapCache, SiteReading, site_map, update_site_map
from rackloom.web.painters import Painter

GUIDS = [gpu.guid for gpu in observed().gpus]


class Cluster:
    """Lists of an API server that may not answer. Every change of an object gives it a new version."""

    def __init__(self):
        self.objects = {}
        self.answers = True
        self.version = 0

    def put(self, kind, name, **reported):
        self.version += 1
        meta = {"name": name, "namespace": "ops", "uid": f"{kind.plural}-{name}"}
        meta["resourceVersion"] = str(self.version)
        self.objects[kind, name] = {"metadata": meta, **reported}

    def drop(self, kind, name):
        self.objects.pop((kind, name), None)

    async def list(self, kind, namespace=None, *, labels="", fields=""):
        if not self.answers:
            raise unreachable_error(OSError("no route"))
        return ObjectList(
            tuple(obj for (of, _), obj in self.objects.items() if of == kind), str(self.version)
        )


class Site:
    """A store and a cluster, and the events that may happen to them."""

    def __init__(self):
        self.store, self.cluster, self.endpoint = Store.inline(), Cluster(), ""

    async def observe(self, number):
        healths = (GpuHealth.HEALTHY, GpuHealth.DEGRADED)
        members = GUIDS[: number % 5]
        seen = observed(NOW - 5 + number / 1000, [partition(7, "found", *members)], healths[number % 2])
        await self.store.run(records.record_observation, self.endpoint, seen, NOW)

    async def lose(self, number):
        await self.store.run(latest.mark_unreadable, self.endpoint, "no answer", NOW + number, 0.0)

    async def move(self, number):
        tray = DOMAIN.trays[number % len(DOMAIN.trays)]
        await self.store.run(_moved, tray.slot, f"row {number % 3}")

    async def rename(self, number):
        await self.store.run(_renamed, f"org-{number % 3}")

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

    async def sicken(self, number):
        health = (GpuHealth.HEALTHY, GpuHealth.DEGRADED)[number % 2]
        await self.store.run(told_of, DOMAIN.trays[number % len(DOMAIN.trays)].slot, 1 + number % 4, health)

    async def contradict(self, number):
        await self.store.run(_in_dispute if number % 2 else _agreed)

    async def pause(self, number):
        await self.store.run(_paused if number % 2 else _resumed)

    async def take_over(self, number):
        await self.store.run(assigned_to, DOMAIN.trays[number % 4].slot, f"org-{number % 3}")

    async def release(self, number):
        await self.store.run(_released)

    async def retire(self, number):
        await self.store.run(_forgotten, self.endpoint)

    async def remove(self, number):
        await self.store.run(_removed, DOMAIN.trays[number % len(DOMAIN.trays)].slot)


def _named(conn):
    """Have the journals name the domain and its machines, as each change does."""
    journal.increment_revisions(conn, [DOMAIN.uuid])
    machines = conn.execute(sa.select(machine.c.id)).scalars()
    journal.begin_histories(conn, [journal.StatusEntry(id_, "Ready", "") for id_ in machines], NOW)


def _moved(conn, slot, rack):
    _named(conn)
    conn.execute(sa.update(machine).where(machine.c.slot == slot).values(rack=rack))


def _renamed(conn, org):
    conn.execute(sa.update(tenant).values(org=org))


def told_of(conn, slot, module, health):
    """The health of one GPU in the records."""
    _named(conn)
    trays = sa.select(machine.c.id).where(machine.c.slot == slot)
    where = machine_gpu.c.machine_id.in_(trays), machine_gpu.c.module_id == module
    conn.execute(sa.update(machine_gpu).where(*where).values(health=health))


def _agreed(conn):
    conn.execute(sa.delete(domain_dispute))


def _in_dispute(conn):
    _agreed(conn)
    conn.execute(sa.insert(domain_dispute).values(domain=DOMAIN.uuid, reason="two say so", since=NOW - 9))


def _resumed(conn):
    conn.execute(sa.delete(domain_pause))


def _paused(conn):
    _resumed(conn)
    row = {"domain": DOMAIN.uuid, "reason": "by hand", "asked_by": "ops", "created": NOW}
    conn.execute(sa.insert(domain_pause).values(row))


def assigned_to(conn, slot, org):
    """Assign one machine to a tenant, after the machine of the tenant before it is released."""
    _released(conn)
    found = conn.execute(sa.select(machine.c.id, machine.c.site_id).where(machine.c.slot == slot)).first()
    if found is None:
        return
    holder = conn.execute(sa.select(tenant.c.id)).scalars().first()
    whose = {"tenant_id": holder, "site_id": found.site_id, "created": NOW, "updated": NOW}
    row = {"status": "Ready", "intent_at": NOW, "extra": {}, **whose}
    conn.execute(sa.insert(vpc).values(id="vpc", name=org, **{k: v for k, v in row.items() if k in vpc.c}))
    row |= {"vpc_id": "vpc", "machine_id": found.id, "name": org, "placement": "any"}
    conn.execute(sa.insert(instance).values(id="instance", **row))


def _released(conn):
    _named(conn)
    conn.execute(sa.delete(instance))
    conn.execute(sa.delete(vpc))


def _forgotten(conn, endpoint_id):
    conn.execute(sa.delete(observation).where(observation.c.endpoint_id == endpoint_id))


def _removed(conn, slot):
    _released(conn)
    gone = sa.select(machine.c.id).where(machine.c.slot == slot)
    for table in (machine_gpu, moved_gpu, foreign_tray):
        conn.execute(sa.delete(table).where(table.c.machine_id.in_(gone)))
    conn.execute(sa.delete(machine).where(machine.c.slot == slot))


HAPPENS = [var for name, var in vars(Site).items() if not name.startswith("_")]


class Followed:
    """The values of the readings before, to compare the next ones with."""

    def __init__(self):
        self.known, self.joined, self.seated = ReadCache(), JoinedShares(), SiteMapCache()
        self.painter = Painter(None, ColourMode.TENANT, 9)

    def drawn(self, snapshot, number):
        """The map as the service draws it: joined, laid out, rendered."""
        self.joined = join_shares(snapshot, self.joined)
        whole, self.seated = update_site_map(SiteReading(snapshot=snapshot, joined=self.joined), self.seated)
        return whole, self.painter.follow(LiveReading(number=number, whole=whole))


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@example([(happen, 1) for happen in HAPPENS])
@given(st.lists(st.tuples(st.sampled_from(HAPPENS), st.integers(0, 99)), min_size=1, max_size=8))
def test_what_is_remembered_changes_nothing(story):
    async def reported():
        site, followed = Site(), Followed()
        site.endpoint = await seeded(site.store)
        for number, (happens, with_) in enumerate(story, 1):
            await happens(site, with_)
            asked = {"records": site.store, "stale": FRESH, "cluster": site.cluster}
            remembering = await site_snapshot(NOW, **asked, known=followed.known)
            anew = await site_snapshot(NOW, **asked)
            assert remembering == anew
            lost = remembering.layer(Layer.CLUSTER).unknown_since is not None
            assert lost is not site.cluster.answers
            whole, sheet = followed.drawn(remembering, number)
            assert whole == site_map(SiteReading(snapshot=anew))
            forgetful = Painter(None, ColourMode.TENANT, 9)
            forgetful._colours = followed.painter._colours
            again = forgetful.follow(LiveReading(number=number, whole=site_map(SiteReading(snapshot=anew))))
            assert markup(sheet) == markup(again)
        await site.store.close()

    asyncio.run(reported())


def markup(sheet):
    return dict(sheet.all())
