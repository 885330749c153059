"""Carries out decisions: in order, without a choice, up to the first action that fails."""

import structlog

from rackloom.claim.cluster.actions import Action, Create, Delete, Patch
from rackloom.claim.kube.api import Conflict, Kind, KubeApi, NotFound, Object, Rejected

log = structlog.get_logger(__name__)


async def carry_out(api: KubeApi, action: Action) -> Object | None:
    """Do one action; returns the object as it was written, None for a deletion.

    That an object to change or delete is gone is what a later look would have found: nothing is done then.
    Raises KubeError for anything else.
    """
    try:
        written = await _ask(api, action)
    except NotFound:
        if isinstance(action, Create):
            raise
        return None
    log.info("cluster.action", what=action.what)
    return written


async def write_status(api: KubeApi, kind: Kind, read: Object, status: Object) -> Object:
    """Write the status of just the object that was read. Raises KubeError."""
    meta = read["metadata"]
    patch = {"metadata": {"uid": meta["uid"]}, "status": status}
    return await api.patch(kind, meta["name"], meta.get("namespace"), patch, subresource="status")


async def _ask(api: KubeApi, action: Action) -> Object | None:
    match action:
        case Create(kind=kind, obj=obj):
            return await api.create(kind, obj)
        case Patch():
            return await _patch(api, action)
        case Delete():
            await api.delete(
                action.kind,
                action.name,
                action.namespace,
                uid=action.uid,
                resource_version=action.resource_version,
                propagation="Background",
                grace_seconds=action.grace_seconds,
            )
            return None


async def _patch(api: KubeApi, action: Patch) -> Object:
    try:
        return await api.patch(
            action.kind, action.name, action.namespace, action.patch, subresource=action.subresource
        )
    except Rejected as refusal:
        if isinstance(action.patch, tuple) and refusal.code == 422:
            # A `test` that does not hold: somebody changed the object since it was read.
            raise Conflict(409, "Conflict", refusal.message) from refusal
        raise
