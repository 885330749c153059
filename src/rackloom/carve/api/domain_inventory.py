"""REST: NVLink domains as contract 2.0.0 lists them for a provider, and their power and firmware.

/domain/nvlink shows the domains in which a site of the provider has machines, each with its trays. Capacity,
observations and blockers are at /nvlink-domain (`domains`), which tenants may read too.

- The id of a domain is its NVLink domain UUID, as everywhere else. The rack group has the same id.
- Its name is the name of its rack, or the names of all its racks.
- Its status is Unknown while no reading of it counts. Otherwise it is the first of Error, InUse,
  Initializing, Unknown and Ready that a tray of it has, and Unknown if no tray has any of these.
- An unknown value is an empty text or list, never null: the decoders of 2.0.0 refuse null in these fields.

A program behind the port `DomainOperations` does power and firmware. It answers with the ids of the tasks
that it began. A request is checked in this order: the role, the body, the site, whether a program is
configured (412 if not, as NVIDIA's service answers without one), and only then the domains. The order is
recorded as an operator's step before the program is called.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Literal
from uuid import UUID

import sqlalchemy as sa
from fastapi import Path
from pydantic import ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from rackloom.carve.api import access, routing, wire
from rackloom.carve.api.auth import Caller
from rackloom.carve.api.domain_operations import (
    BatchFirmwareUpdate,
    BatchPowerState,
    DomainOperations,
    FirmwareUpdate,
    Operation,
    PowerState,
)
from rackloom.carve.api.routing import ApiDeps, Deps, Page, Params, ProviderAdmin, ProviderReader, Row
from rackloom.carve.api.wire import NO_NUL, Answer, Json, PageQuery, shape
from rackloom.carve.observation import latest
from rackloom.carve.store import journal
from rackloom.carve.store.journal import OperatorOrder, Step
from rackloom.carve.store.prepared import find_row, require
from rackloom.carve.store.schema import endpoint, machine, site
from rackloom.carve.store.values import Status, forbidden, invalid, not_found
from rackloom.carve.tenancy import catalog, entitlements

# Query parameters.


class DomainRead(wire.Query):
    """The site, and whether to list trays. Other parameters are refused, as the contract does here."""

    model_config = ConfigDict(extra="forbid")

    site_id: UUID
    include_components: Annotated[bool, Field(json_schema_extra=access.shows("machines:read"))] = False


class DomainsQuery(PageQuery, DomainRead):
    """Filters on the domains of a site. With `name`, only domains that have one of these names."""

    name: wire.TextFilter = []


# Answers.


class DomainComponent(Answer):
    """A compute tray of a domain."""

    component_id: str
    type: Literal["Compute"]
    name: str
    rack_id: str
    slot_id: int
    tray_idx: int
    operation_status: Literal["Unknown", "Initializing", "Ready", "InUse", "Error"]


class RackDomain(Answer):
    """An NVLink domain in the inventory of a site."""

    id: str
    rack_group_id: str
    nmxc_cluster_id: str
    """The id of the domain, or empty until a switch controller has named it."""
    name: str
    topology: str
    """The profile of the rack. Always empty, because no reading names it."""
    operation_status: Literal["Unknown", "Initializing", "Ready", "InUse", "Error"]
    components: list[DomainComponent]


class TaskIds(Answer):
    """The tasks that were begun."""

    task_ids: list[UUID]


# From rows to answers.


PHASES = ("Error", "InUse", "Initializing", "Unknown", "Ready")
"""Statuses of a tray, as its machine has them. A domain has the first of them that one of its trays has.
A tray is Unknown if it is missing, or if no reading of the domain counts."""


def _statuses(trays: Iterable[Row], is_known: bool) -> set[str]:
    return {
        str(row.shown_status if is_known and row.missing_since is None else Status.UNKNOWN) for row in trays
    }


def _phase(statuses: Collection[str]) -> str:
    return next((phase for phase in PHASES if phase in statuses), "Unknown")


def _shapes(
    conn: sa.Connection, trays: Mapping[str, Sequence[Row]], query: DomainRead, valid_from: float
) -> list[Json]:
    latest_readings = latest.latest_of_domains(conn, list(trays), valid_from)
    known = {domain: reading.observation is not None for domain, reading in latest_readings.items()}
    named = set(conn.execute(sa.select(endpoint.c.domain).where(endpoint.c.domain.in_(trays))).scalars())
    return [
        shape(
            RackDomain,
            None,
            id=domain,
            rack_group_id=domain,
            nmxc_cluster_id=domain if domain in named else "",
            name=_name(rows),
            topology="",
            operation_status=_phase(_statuses(rows, known[domain])),
            components=[_component_shape(row, known[domain]) for row in rows]
            if query.include_components
            else [],
        )
        for domain, rows in trays.items()
    ]


def _name(trays: Sequence[Row]) -> str:
    return ", ".join(sorted({row.rack for row in trays}))


def _component_shape(row: Row, is_known: bool) -> Json:
    return shape(
        DomainComponent,
        row,
        component_id=row.id,
        type="Compute",
        name=row.id,
        rack_id=row.rack,
        slot_id=row.slot,
        tray_idx=row.tray_index,
        operation_status=_phase(_statuses([row], is_known)),
    )


# Routes.


router = routing.Operations("/domain/nvlink")

DomainId = Annotated[str, Path(alias="nvLinkDomainId", max_length=256, pattern=NO_NUL)]
ONE = "/{nvLinkDomainId}"
NOT_CONFIGURED = (
    "No provider of power and firmware operations is configured for this service, so nothing was changed: "
    "use the management network of the racks"
)
REFUSED: dict[int | str, dict[str, Any]] = {
    412: {"description": "No provider of such operations is configured"}
}


@router.page("", "get-all-domain-nvlink", list[RackDomain])
def list_domains(
    conn: sa.Connection, deps: Deps, caller: ProviderReader, query: Params[DomainsQuery]
) -> Page:
    """The NVLink domains in which a site has machines."""
    if query.order_by not in (None, "NAME_ASC", "NAME_DESC"):
        raise invalid("Invalid orderBy value in query", orderBy="must be one of NAME_ASC, NAME_DESC")
    named = sorted(
        (_name(rows), domain, rows) for domain, rows in _trays(conn, caller, query.site_id).items()
    )
    if query.order_by == "NAME_DESC":
        named.reverse()
    wanted = [(domain, rows) for name, domain, rows in named if not query.name or name in query.name]
    first = (query.page_number - 1) * query.page_size
    part = dict(wanted[first : first + query.page_size])
    return _shapes(conn, part, query, deps.valid_from()), len(wanted)


@router.patch("/power", "power-control-nvlink-domains", TaskIds, responses=REFUSED)
async def set_power_of_several(deps: Deps, caller: ProviderAdmin, body: BatchPowerState) -> Response:
    """Switch the power of domains."""
    return await _set_power(deps, caller, body.domain_ids, body)


@router.patch("/firmware", "firmware-update-nvlink-domains", TaskIds, responses=REFUSED)
async def update_several(deps: Deps, caller: ProviderAdmin, body: BatchFirmwareUpdate) -> Response:
    """Install firmware in domains."""
    return await _update_firmware(deps, caller, body.domain_ids, body)


@router.get(ONE, "get-domain-nvlink", RackDomain)
def get_domain(
    conn: sa.Connection,
    deps: Deps,
    caller: ProviderReader,
    domain: DomainId,
    query: Params[DomainRead],
) -> Json:
    """One NVLink domain of a site."""
    rows = require(
        _trays(conn, caller, query.site_id).get(domain), "Could not find NVLink Domain with specified ID"
    )
    return _shapes(conn, {domain: rows}, query, deps.valid_from())[0]


@router.patch(f"{ONE}/power", "power-control-nvlink-domain", TaskIds, responses=REFUSED)
async def set_power(deps: Deps, caller: ProviderAdmin, domain: DomainId, body: PowerState) -> Response:
    """Switch the power of a domain."""
    return await _set_power(deps, caller, [domain], body)


@router.patch(f"{ONE}/firmware", "firmware-update-nvlink-domain", TaskIds, responses=REFUSED)
async def update_firmware(
    deps: Deps, caller: ProviderAdmin, domain: DomainId, body: FirmwareUpdate
) -> Response:
    """Install firmware in a domain."""
    return await _update_firmware(deps, caller, [domain], body)


async def _set_power(deps: ApiDeps, caller: Caller, domains: Sequence[str], body: PowerState) -> Response:
    operations = await _order(deps, caller, domains, body, Step.SWITCH_POWER, body.state)
    return _task_response(await operations.set_power(domains, body))


async def _update_firmware(
    deps: ApiDeps, caller: Caller, domains: Sequence[str], body: FirmwareUpdate
) -> Response:
    version = body.version or "the default version"
    operations = await _order(deps, caller, domains, body, Step.UPDATE_FIRMWARE, version)
    return _task_response(await operations.update_firmware(domains, body))


async def _order(
    deps: ApiDeps, caller: Caller, domains: Sequence[str], body: Operation, step: Step, what: str
) -> DomainOperations:
    """The configured program, after the order is recorded: it may work on these domains for the caller."""
    operations = deps.domain_operations
    await deps.store.read(_check_site, caller, body.site_id)
    if operations is None:
        raise HTTPException(HTTPStatus.PRECONDITION_FAILED, NOT_CONFIGURED)

    def record(conn: sa.Connection) -> None:
        missing = sorted(set(domains) - _trays(conn, caller, body.site_id).keys())
        if missing:
            raise not_found(f"Could not find NVLink Domain with specified ID: {', '.join(missing)}")
        order = OperatorOrder(caller.subject, f"{what}, over REST", deps.clock())
        for domain in domains:
            journal.record_operator_step(conn, step, domain, domain, order)

    await deps.store.run(record)
    return operations


def _check_site(conn: sa.Connection, caller: Caller, site_id: UUID) -> None:
    catalog.check_site_registered(_site_of_provider(conn, caller, site_id))


def _task_response(begun: Sequence[UUID]) -> Response:
    return routing.json_response({"taskIds": [str(task) for task in begun]})


def _site_of_provider(conn: sa.Connection, caller: Caller, site_id: UUID) -> Row:
    found = find_row(conn, site, id=str(site_id))
    if found is None:
        raise invalid("Could not find Site with ID specified in request", siteId="does not exist")
    if found.provider_id != entitlements.provider_id_of(conn, caller.org):
        raise forbidden("Site specified in request doesn't belong to current org's Provider")
    return found


def _trays(conn: sa.Connection, caller: Caller, site_id: UUID) -> dict[str, list[Row]]:
    """The domains in which the site has machines, with these machines, in the order of the racks."""
    _site_of_provider(conn, caller, site_id)
    placed = catalog.machine_listing().where(machine.c.site_id == str(site_id), machine.c.domain.is_not(None))
    found = defaultdict[str, list[Row]](list)
    for row in conn.execute(placed.order_by(machine.c.domain, machine.c.chassis_serial, machine.c.slot)):
        found[row.domain].append(row)
    return dict(found)
