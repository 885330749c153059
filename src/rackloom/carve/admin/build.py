"""Which build answers: the first call of upstream's clients, by which they see that they are connected."""

from importlib.metadata import version

from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin.deps import AdminDeps


async def tell(_deps: AdminDeps, _request: pb.VersionRequest) -> pb.BuildInfo:
    """The version of this service; how it was built and configured is nobody's business here."""
    return pb.BuildInfo(build_version=f"rackloom {version('rackloom')}")
