"""RPCs about credentials: those of NMX-M, the only controllers that take a password."""

from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin.deps import AdminDeps
from rackloom.carve.site.problems import invalid

NMX_M = "nmxm/default/auth"
"""Upstream's path."""


async def create(deps: AdminDeps, request: pb.CredentialCreationRequest) -> pb.CredentialCreationResult:
    """Keep the name and password for NMX-M."""
    _check(request.credential_type)
    if not request.username or not request.password:
        raise invalid("username and password must not be empty")
    await deps.credentials.keep(NMX_M, {"username": request.username, "password": request.password})
    return pb.CredentialCreationResult()


async def delete(deps: AdminDeps, request: pb.CredentialDeletionRequest) -> pb.CredentialDeletionResult:
    """Forget them."""
    _check(request.credential_type)
    await deps.credentials.forget(NMX_M)
    return pb.CredentialDeletionResult()


def _check(kind: pb.CredentialType.ValueType) -> None:
    if kind != pb.NmxM:
        raise invalid("credential_type must be NmxM: switch controllers take no other password")
