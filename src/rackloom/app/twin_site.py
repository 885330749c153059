"""The simulated racks of an embedded site: which they are, and the switch controllers that serve them.

A switch keeps its partitions when the control plane dies. The twin lives in the same process, so what its
switches remember is kept in the home directory and given back to them at the next start.
"""

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from rackloom.app.home import Home, write_durably
from rackloom.errors import Refused
from rackloom.topology import profiles
from rackloom.topology.build import build_site
from rackloom.topology.rack import RackProfile, Site
from rackloom.twin.fabric import FabricSnapshot, SimulatedFabric
from rackloom.twin.names import SeededNames
from rackloom.twin.nmxc_server import NmxcServer
from rackloom.twin.racks import fabrics_of


class Racks(msgspec.Struct, frozen=True):
    """What a home was made with; it cannot change later, as the records name its machines."""

    profile: str
    racks: int
    seed: str


class TwinSite(msgspec.Struct, frozen=True):
    """The simulated site and where its switch controllers listen."""

    site: Site
    profile: RackProfile
    endpoints: dict[str, str]
    """Domain uuid to the URL of its NMX-C server."""


@asynccontextmanager
async def run_twin(home: Home, racks: int, profile_name: str) -> AsyncIterator[TwinSite]:
    """Serve the racks of `home` on loopback until the context ends."""
    profile = profiles.load_rack(profile_name)
    names = SeededNames(_racks_of(home, racks, profile_name).seed)
    site = build_site(profile, racks, names)
    async with AsyncExitStack() as stack:
        endpoints = {}
        for fabric in fabrics_of(site, names.seed):
            _keep(fabric, home.twin / f"{fabric.domain}.json")
            server = await stack.enter_async_context(NmxcServer(fabric))
            endpoints[fabric.domain] = server.url
        yield TwinSite(site, profile, endpoints)


def _racks_of(home: Home, racks: int, profile_name: str) -> Racks:
    file = home.twin / "racks.json"
    if not file.exists():
        made = Racks(profile_name, racks, secrets.token_hex(16))
        write_durably(file, msgspec.json.encode(made))
        return made
    kept = msgspec.json.decode(file.read_bytes(), type=Racks)
    if (kept.profile, kept.racks) != (profile_name, racks):
        raise Refused(
            f"{home.path} was made with {kept.racks} racks of {kept.profile}",
            nearest_fix=f"use --racks {kept.racks} --profile {kept.profile}, or another --home",
        )
    return kept


def _keep(fabric: SimulatedFabric, file: Path) -> None:
    """Give the fabric what it remembered, and write down what it does from now on."""
    if file.exists():
        fabric.restore(msgspec.json.decode(file.read_bytes(), type=FabricSnapshot))
    fabric.on_change(lambda snapshot: write_durably(file, msgspec.json.encode(snapshot)))
