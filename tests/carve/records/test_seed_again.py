"""Seeding a site: what is there afterwards, and that repeating it only adds."""

from typing import Any

import sqlalchemy as sa

from rackloom.carve.inventory import endpoints
from rackloom.carve.inventory.enrolment import seed_embedded_site
from rackloom.carve.store import schema
from rackloom.topology.join_key import GpuKey
from rackloom.topology.rack import ComputeTray, NvlinkDomain, RackProfile, RackSite

PROFILE = RackProfile(
    name="small-rack",
    product="NVIDIA GB200",
    racks_per_domain=1,
    domains_per_rack=1,
    trays_per_domain=1,
    gpus_per_tray=4,
    nvlink_links_per_gpu=18,
    nvlink_gbytes_per_s_per_gpu=1800,
    switch_trays_per_domain=2,
    tray_machine=None,
    note="made for tests",
    origin=(),
)


def contents(site: Any) -> dict[str, list[Any]]:
    def everything(conn: sa.Connection) -> dict[str, list[Any]]:
        found = {}
        for table in schema.metadata.sorted_tables:
            if table.name != "allocation_constraint":
                found[table.name] = [tuple(row) for row in conn.execute(sa.select(table))]
        return found

    loaded: dict[str, list[Any]] = site.read(everything)
    return loaded


def seed(site: Any, *domains: NvlinkDomain) -> None:
    topology = RackSite(name="small", domains=domains)
    urls = {domain.uuid: f"http://switch/{domain.uuid}" for domain in domains}
    site.run(seed_embedded_site, topology, PROFILE, urls, now=site.tick(), ids=site.ids)


def tray(serial: str, slot: int, rack: str) -> ComputeTray:
    return ComputeTray(chassis_serial=serial, slot=slot, tray_index=slot, rack=rack, gpus=())


def test_seeding_again_changes_nothing(small_site: Any) -> None:
    small_site.observe_all()
    before = contents(small_site)
    domains = [
        NvlinkDomain(
            uuid=uuid,
            racks=(f"rack{number}",),
            trays=tuple(tray(f"CHASSIS{number}", slot, f"rack{number}") for slot in range(3)),
        )
        for number, uuid in enumerate(small_site.partitions)
    ]
    seed(small_site, *domains)
    assert contents(small_site) == before


def test_a_new_domain_is_added_and_every_tenant_may_use_it(small_site: Any, rival: Any) -> None:
    gpus = (GpuKey(),) * 4
    new = ComputeTray(chassis_serial="NEW", slot=0, tray_index=0, rack="rack9", gpus=gpus)
    seed(small_site, NvlinkDomain(uuid="d9", racks=("rack9",), trays=(new,)))
    urls = {endpoint.url: endpoint.chassis_serials for endpoint in small_site.read(endpoints.all_endpoints)}
    assert urls["http://switch/d9"] == ("NEW",)
    values = small_site.read(
        lambda conn: conn.execute(sa.select(schema.allocation_constraint.c.value)).scalars().all()
    )
    assert values == [7, 7]
