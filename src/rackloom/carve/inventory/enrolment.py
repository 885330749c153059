"""Enrolment: the site record, and machines from a file, a controller or a topology.

`ensure_site` creates the configured site, or refuses a database that holds another site.
`enrol_machines` adds machines and refuses all of them when one contradicts a known machine: identity is
never guessed. `enrol_observed_machines` adds the trays that a controller lists. `declare_gpus` writes
the place and GUIDs of a machine as an operator declares them. It is a repair, and the next observation
overrules it. A machine that carries an instance can be neither declared again nor removed. Each GPU
records the source of its GUID: `declared` by an operator, or `nmx` for a controller.

`seed_embedded_site` creates the records of an embedded site from a topology. It leaves domains and
GUIDs unknown, and is idempotent: repeating it adds only new records.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.inventory import endpoints, sync
from rackloom.carve.observation import latest
from rackloom.carve.store import journal
from rackloom.carve.store.journal import OperatorOrder, Step
from rackloom.carve.store.prepared import delete_rows, find_row, insert_row, require, update_rows
from rackloom.carve.store.schema import (
    allocation,
    cordon,
    drain,
    endpoint,
    foreign_tray,
    instance_type,
    machine,
    machine_gpu,
    moved_gpu,
    reserved_tray,
    site,
)
from rackloom.carve.store.values import Changed, IdFactory, Status, conflict, invalid
from rackloom.carve.tenancy import catalog, entitlements, status
from rackloom.carve.tenancy.placement import check_unreserved
from rackloom.core.partitions.domain import DefaultPartitionPolicy, DomainObservation, GpuHealth
from rackloom.errors import Refused
from rackloom.topology.join_key import Source
from rackloom.topology.rack import ComputeTray, RackProfile, RackSite

# The site record.


def ensure_site(
    conn: sa.Connection,
    name: str,
    provider_org: str,
    policy: DefaultPartitionPolicy,
    now: float,
    ids: IdFactory,
) -> str:
    """The id of the site `name`, made now if the records are empty. Its default partition policy is set.

    Refused if the records belong to another site: a database serves one.
    """
    provider = entitlements.ensure_provider(conn, provider_org.lower(), now, ids)
    found = find_row(conn, site)
    if found is None:
        return _insert_site(conn, provider.id, name, policy, now, ids)
    if found.name != name:
        raise Refused(
            f"the database holds the records of site {found.name!r}, not of {name!r}",
            nearest_fix=f'set site.name = "{found.name}", or use another database',
        )
    if found.default_partition != policy:
        conn.execute(sa.update(site).values(default_partition=policy, updated=now))
        journal.increment_revisions(
            conn, conn.execute(sa.select(endpoint.c.domain).distinct()).scalars().all()
        )
    return str(found.id)


def _insert_site(
    conn: sa.Connection,
    provider_id: str,
    name: str,
    policy: DefaultPartitionPolicy,
    now: float,
    ids: IdFactory,
) -> str:
    new = ids()
    insert_row(
        conn,
        site,
        id=new,
        provider_id=provider_id,
        name=name,
        status=Status.REGISTERED,
        capabilities={"nvLinkPartition": True},
        default_partition=policy,
        created=now,
        updated=now,
    )
    journal.record_status(conn, new, Status.REGISTERED, "Site is registered", now)
    return new


# Machines from files and observations.


class MachineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A compute tray: its place and its number of GPUs."""

    chassis_serial: str
    slot: int
    tray_index: int
    rack: str
    gpus: int
    id: str = ""
    """Made from chassis serial and slot where empty."""

    @property
    def machine_id(self) -> str:
        """The id to use."""
        return self.id or machine_id_of_tray(self)


class DeclaredGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU as an operator declares it. `module_id` counts from 1."""

    module_id: int
    guid: int


def get_enrolled_machine(conn: sa.Connection, machine_id: str) -> sa.Row[Any]:
    """The machine with its instance and maintenance. Refused (not found) if there is none."""
    row = conn.execute(catalog.machine_listing().where(machine.c.id == machine_id)).one_or_none()
    return require(row, f"there is no machine {machine_id}")


def enrol_machines(
    conn: sa.Connection,
    site_id: str,
    records: Iterable[MachineRecord],
    source: Source,
    status: str,
    now: float,
) -> tuple[list[str], list[str]]:
    """Add machines that are new. Return the ids of the new ones, and of those that are recorded already.

    `status` is that of their hosts: Ready if no host state provider is configured, else Unknown.
    All are refused if a record contradicts a known machine.
    """
    created: list[str] = []
    unchanged: list[str] = []
    for record in records:
        known = _recorded_machine(conn, record)
        if known is None:
            if not record.chassis_serial or not 1 <= record.gpus <= 64:
                raise invalid(f"machine {record.machine_id} needs a chassis serial, and 1 to 64 GPUs")
            row = _machine_row(record.machine_id, record, now)
            insert_row(conn, machine, **row, site_id=site_id, status=status)
            modules: dict[int, int | None] = dict.fromkeys(range(1, record.gpus + 1))
            _insert_gpus(conn, record.machine_id, modules, source)
            created.append(record.machine_id)
        else:
            unchanged.append(known)
    return created, unchanged


def enrol_observed_machines(
    conn: sa.Connection, site_id: str, observation: DomainObservation, status: str, now: float
) -> list[str]:
    """Add the trays that a controller lists and the records lack. Return their ids."""
    trays: dict[tuple[str, int], list[int]] = {}
    index: dict[tuple[str, int], int] = {}
    for gpu in observation.gpus:
        trays.setdefault((gpu.chassis_serial, gpu.slot), []).append(gpu.module_id)
        index[gpu.chassis_serial, gpu.slot] = gpu.tray_index
    known = conn.execute(
        sa.select(machine.c.chassis_serial, machine.c.slot).where(
            machine.c.chassis_serial.in_({serial for serial, _ in trays})
        )
    )
    new = sorted(trays.keys() - {(row.chassis_serial, row.slot) for row in known})
    records = [
        # The rack is not on this wire. An operator finds the tray by its chassis.
        MachineRecord(chassis_serial=at[0], slot=at[1], tray_index=index[at], rack=at[0], gpus=max(trays[at]))
        for at in new
    ]
    return enrol_machines(conn, site_id, records, Source.NMX, status, now)[0]


def enrol_machines_of_domain(conn: sa.Connection, site_id: str, domain: str, status: str, now: float) -> None:
    """Add the trays of the latest observation of `domain`, unless its controllers conflict."""
    readings = latest.latest_of_domain(conn, domain).shown
    if readings and enrol_observed_machines(conn, site_id, readings[0], status, now):
        # The observation was applied to the machines of before: apply it to the new ones too.
        sync.apply_observations(conn, readings, now)


def declare_gpus(
    conn: sa.Connection,
    machine_id: str,
    location: tuple[str, int, int],
    domain: str | None,
    gpus: Iterable[DeclaredGpu],
    now: float,
) -> Changed[None]:
    """Write a machine's location (chassis serial, slot, tray index), domain and GPUs as declared.

    It is a repair: the next observation of the domain overrules it. Refused while the machine carries an
    instance, because its GPUs would change under it, and for a GUID that another machine has.
    """
    found = get_enrolled_machine(conn, machine_id)
    if found.instance_id is not None:
        raise conflict(
            f"machine {machine_id} carries instance {found.instance_id}",
            nearest_fix="release the instance first",
        )
    guids = {gpu.module_id: gpu.guid for gpu in gpus}
    serial, slot, tray = location
    there = sa.select(machine.c.id).where(machine.c.chassis_serial == serial, machine.c.slot == slot)
    for occupant in conn.execute(there.where(machine.c.id != machine_id)).scalars():
        raise conflict(f"{serial} slot {slot} is recorded as machine {occupant}", id=occupant)
    if len(set(guids.values())) < len(guids) or 0 in guids.values():
        raise invalid("each GPU needs a GUID of its own")
    taken = sa.select(machine_gpu.c.machine_id, machine_gpu.c.guid).where(
        machine_gpu.c.guid.in_([str(guid) for guid in guids.values()]), machine_gpu.c.machine_id != machine_id
    )
    for row in conn.execute(taken):
        raise conflict(f"GPU {int(row.guid):#x} is recorded on machine {row.machine_id}", id=row.machine_id)
    values = {"chassis_serial": serial, "slot": slot, "tray_index": tray, "domain": domain, "updated": now}
    update_rows(conn, machine, {"id": machine_id}, **values)
    delete_rows(conn, machine_gpu, machine_id=machine_id)
    _insert_gpus(conn, machine_id, guids, Source.DECLARED)
    return Changed(None, _update_domains(conn, {found.domain, domain}, now))


def remove_machine(conn: sa.Connection, machine_id: str, now: float) -> frozenset[str]:
    """Delete a machine that carries nothing. Return the domains with an intent that this changes."""
    found = get_enrolled_machine(conn, machine_id)
    if found.instance_id is not None:
        raise conflict(f"machine {machine_id} carries instance {found.instance_id}")
    check_unreserved(conn, [machine_id], now)
    for table in (machine_gpu, moved_gpu, foreign_tray, reserved_tray, cordon, drain):
        delete_rows(conn, table, machine_id=machine_id)
    delete_rows(conn, machine, id=machine_id)
    return _update_domains(conn, {found.domain}, now)


def delete_missing_machine(conn: sa.Connection, machine_id: str, order: OperatorOrder) -> frozenset[str]:
    """Delete a machine that its controllers do not list. One that they list would be enrolled again.

    Refused while the domain is unknown: the tray may be back, and would be enrolled without its type, its
    labels and its maintenance.
    """
    found = get_enrolled_machine(conn, machine_id)
    if found.domain is not None:
        if found.missing_since is None:
            raise conflict(
                "Machine is listed by the switch controller of its NVLink domain",
                nearest_fix="take the tray out of the rack first, or put the machine into maintenance",
            )
        known = latest.latest_of_domain(conn, found.domain, order.valid_from)
        if known.observation is None:
            raise conflict(
                f"the NVLink domain of the machine is unknown, so it may be back: {known.doubt}",
                nearest_fix="wait until a switch controller of the domain is read again",
            )
    journal.record_operator_step(conn, Step.DELETE_MACHINE, machine_id, found.domain, order)
    return remove_machine(conn, machine_id, order.now)


def _update_domains(conn: sa.Connection, domains: Collection[str | None], now: float) -> frozenset[str]:
    # A GPU that is on no machine any more may be in a tenant's partition: that tenant is not isolated.
    for domain in sorted(filter(None, domains)):
        status.update_statuses(conn, domain, now)
    return journal.increment_revisions(conn, domains)


def _recorded_machine(conn: sa.Connection, record: MachineRecord) -> str | None:
    at_place = sa.and_(machine.c.chassis_serial == record.chassis_serial, machine.c.slot == record.slot)
    rows = conn.execute(sa.select(machine).where(sa.or_(at_place, machine.c.id == record.machine_id))).all()
    for row in rows:
        if (row.chassis_serial, row.slot) != (record.chassis_serial, record.slot):
            raise conflict(f"machine {row.id} is recorded at {row.chassis_serial} slot {row.slot}", id=row.id)
        if record.id and row.id != record.id:
            raise conflict(
                f"{record.chassis_serial} slot {record.slot} is recorded as machine {row.id}", id=row.id
            )
        return str(row.id)
    return None


def _machine_row(machine_id: str, tray: MachineRecord | ComputeTray, now: float) -> dict[str, Any]:
    row: dict[str, Any] = {"id": machine_id, "chassis_serial": tray.chassis_serial, "slot": tray.slot}
    row |= {"tray_index": tray.tray_index, "rack": tray.rack, "created": now, "updated": now}
    return row


def _insert_gpus(
    conn: sa.Connection, machine_id: str, gpus: Mapping[int, int | None], source: Source
) -> None:
    rows = [
        {
            "machine_id": machine_id,
            "module_id": module,
            "guid": None if guid is None else str(guid),
            "source": source.value,
            "health": GpuHealth.UNKNOWN,
        }
        for module, guid in sorted(gpus.items())
    ]
    if rows:
        conn.execute(sa.insert(machine_gpu), rows)


# An embedded site from a topology.


DEMO_ORG = "demo"


def seed_embedded_site(
    conn: sa.Connection,
    racks: RackSite,
    profile: RackProfile,
    endpoint_urls: Mapping[str, str],
    *,
    now: float,
    ids: IdFactory,
    org: str = DEMO_ORG,
) -> str:
    """Create the records of `racks`, with all trays of `profile`. Return the site id.

    `endpoint_urls` maps domain uuid to the URL of its controller. Repeating it adds new records and
    changes nothing else.
    """
    provider = entitlements.ensure_provider(conn, org, now, ids)
    found = find_row(conn, site, name=racks.name)
    policy = DefaultPartitionPolicy.NONE
    site_id = str(found.id) if found else _insert_site(conn, provider.id, racks.name, policy, now, ids)
    type_id = _seed_instance_type(conn, provider.id, site_id, profile, now, ids)
    _seed_machines(conn, site_id, type_id, [tray for domain in racks.domains for tray in domain.trays], now)
    for domain in racks.domains:
        serials = {tray.chassis_serial for tray in domain.trays}
        endpoints.register_endpoint(conn, endpoint_urls[domain.uuid], serials, now, ids)
    # The embedding org, and every tenant that has an allocation of everything.
    own = entitlements.ensure_tenant(conn, org, now, ids).id
    everything = allocation.c.name == entitlements.EVERYTHING_ALLOCATION
    held = conn.execute(sa.select(allocation.c.tenant_id).where(everything).distinct()).scalars()
    for tenant_id in sorted({own, *held}):
        entitlements.grant_everything(conn, tenant_id, now, ids)
    return site_id


def machine_id_of_tray(tray: MachineRecord | ComputeTray) -> str:
    """The machine id of a tray: its place, in letters that are safe in a URL."""
    return f"{tray.chassis_serial}-{tray.slot}".lower()


def _seed_instance_type(
    conn: sa.Connection, provider_id: str, site_id: str, profile: RackProfile, now: float, ids: IdFactory
) -> str:
    found = find_row(conn, instance_type, site_id=site_id, name=profile.name)
    if found is not None:
        return str(found.id)
    gpus = {"type": "GPU", "name": profile.product, "count": profile.gpus_per_tray, "deviceType": "NVLink"}
    wanted = catalog.NewInstanceType(site_id, profile.name, profile.note, {}, [gpus])
    return catalog.create_instance_type(conn, provider_id, wanted, now, ids)


def _seed_machines(
    conn: sa.Connection, site_id: str, type_id: str, trays: list[ComputeTray], now: float
) -> None:
    known = set(conn.execute(sa.select(machine.c.id).where(machine.c.site_id == site_id)).scalars())
    new = [tray for tray in trays if machine_id_of_tray(tray) not in known]
    if not new:
        return
    columns = {"site_id": site_id, "instance_type_id": type_id, "status": Status.READY}
    rows = [{**_machine_row(machine_id_of_tray(tray), tray, now), **columns} for tray in new]
    conn.execute(sa.insert(machine), rows)
    gpus = [
        {"machine_id": machine_id_of_tray(tray), "module_id": module, "health": GpuHealth.UNKNOWN}
        for tray in new
        for module in range(1, len(tray.gpus) + 1)
    ]
    conn.execute(sa.insert(machine_gpu), gpus)
