"""The RPC about NVLink domains: what is known of each, and what stands in the way of wishes there."""

from typing import Any

import sqlalchemy as sa

from rackloom.carve.admin import operator_pb2 as pb
from rackloom.carve.admin.deps import AdminDeps
from rackloom.carve.admin.words import timestamp
from rackloom.carve.site import blocks, endpoints, knowledge, pauses
from rackloom.carve.site.knowledge import Knowledge
from rackloom.carve.site.problems import not_found


async def show(deps: AdminDeps, request: pb.DomainsRequest) -> pb.DomainList:
    """Every domain by uuid, or one; NOT_FOUND when no switch controller ever answered as that one."""
    return await deps.store.read(_show, request.domain)


def _show(conn: sa.Connection, wanted: str) -> pb.DomainList:
    known = {one.domain for one in endpoints.every(conn) if one.domain is not None}
    if wanted and wanted not in known:
        raise not_found(f"no switch controller speaks for domain {wanted}")
    chosen = sorted(known & {wanted} if wanted else known)
    told = knowledge.of_domains(conn, chosen)
    blocked = blocks.of_domains(conn, chosen)
    states = [_state(one, told[one], pauses.reason(conn, one), blocked[one]) for one in chosen]
    return pb.DomainList(domains=states)


def _state(domain: str, known: Knowledge, paused: str | None, blocked: list[sa.Row[Any]]) -> pb.DomainState:
    seen = known.observation
    return pb.DomainState(
        domain=domain,
        observed_at=None if seen is None else timestamp(seen.observed_at),
        doubt=known.operators_doubt,
        pause_reason=paused,
        blocked=[
            pb.BlockedGpu(guid=int(row.guid), reason=row.reason, fix=row.fix, since=timestamp(row.since))
            for row in blocked
        ],
    )
