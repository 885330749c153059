"""The simulated racks of an embedded site: which they are, and the switch controllers that serve them.

A switch keeps its partitions when the control plane dies. The twin lives in the same process, so what its
switches remember is kept in the home directory and given back to them at the next start.
"""

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from rackloom.app.home import Home, write_durably
from rackloom.errors import Refused
from rackloom.topology import profiles
from rackloom.topology.build import build_site
from rackloom.topology.rack import RackProfile, Site
from rackloom.twin.names import SeededNames
from rackloom.twin.switches.fabric import FabricSnapshot, SimulatedFabric
from rackloom.twin.switches.nmxc_server import NmxcServer
from rackloom.twin.switches.racks import MOST_RACKS, fabrics_of

T = TypeVar("T")


class Racks(msgspec.Struct, frozen=True):
    """What a home was made with; it cannot change later, as the records name its machines."""

    profile: str
    racks: int
    seed: str
    recorded: bool = False
    """Whether the store was given the machines: from then on neither may be there without the other."""


class TwinSite(msgspec.Struct, frozen=True):
    """The simulated site and where its switch controllers listen."""

    site: Site
    profile: RackProfile
    endpoints: dict[str, str]
    """Domain uuid to the URL of its NMX-C server."""
    servers: dict[str, NmxcServer]
    """Domain uuid to its NMX-C server, which has the fabric."""
    seed: str
    """All names of the site were drawn from it."""

    @property
    def fabrics(self) -> tuple[SimulatedFabric, ...]:
        """What the switches have, one for each domain."""
        return tuple(server.fabric for server in self.servers.values())


def declare(racks: int, profile_name: str, seed: str = "") -> Site:
    """The site of so many racks. Refused when there is no such profile, or they make no whole domains."""
    if racks > MOST_RACKS:
        raise Refused(f"{racks} racks are too many for one process", nearest_fix=f"use up to {MOST_RACKS}")
    return build_site(profiles.load_rack(profile_name), racks, SeededNames(seed))


def racks_of(home: Home, racks: int, profile_name: str, *, recorded: bool) -> Racks:
    """The racks of `home`, made now if it is new. `recorded`: whether its store knows any machine.

    Refused when the home was made with others, or when its store and its racks do not belong together.
    """
    file = home.twin / "racks.json"
    if not file.exists():
        if recorded:
            raise _torn(home, f"{file} is missing, though the store has machines")
        made = Racks(profile_name, racks, secrets.token_hex(16))
        write_durably(file, msgspec.json.encode(made))
        return made
    kept = _kept(file, Racks)
    if kept.recorded and not recorded:
        raise _torn(home, f"{home.path / 'site.db'} has lost its records")
    if (kept.profile, kept.racks) != (profile_name, racks):
        raise Refused(
            f"{home.path} was made with {kept.racks} racks of {kept.profile}",
            nearest_fix=f"use --racks {kept.racks} --profile {kept.profile}, or another --home",
        )
    return kept


def note_recorded(home: Home, racks: Racks) -> None:
    """Remember that the store was given the machines."""
    if not racks.recorded:
        kept = msgspec.structs.replace(racks, recorded=True)
        write_durably(home.twin / "racks.json", msgspec.json.encode(kept))


@asynccontextmanager
async def run_twin(home: Home, racks: Racks) -> AsyncIterator[TwinSite]:
    """Serve the racks of `home` on loopback until the context ends."""
    site = declare(racks.racks, racks.profile, racks.seed)
    async with AsyncExitStack() as stack:
        servers = {}
        for fabric in fabrics_of(site, racks.seed):
            _keep(fabric, home.twin / f"{fabric.domain}.json")
            servers[fabric.domain] = await stack.enter_async_context(NmxcServer(fabric))
        endpoints = {domain: server.url for domain, server in servers.items()}
        yield TwinSite(site, profiles.load_rack(racks.profile), endpoints, servers, racks.seed)


def _keep(fabric: SimulatedFabric, file: Path) -> None:
    """Give the fabric what it remembered, and write down what it does from now on."""
    if file.exists():
        fabric.restore(_kept(file, FabricSnapshot))
    fabric.on_change(lambda snapshot: write_durably(file, msgspec.json.encode(snapshot)))


def _kept(file: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except msgspec.MsgspecError as error:
        raise Refused(f"{file} is damaged: {error}", nearest_fix=_RESTORE) from error


_RESTORE = "restore the home from a backup, or start with another --home"


def _torn(home: Home, what: str) -> Refused:
    return Refused(f"{home.path} is not whole: {what}", nearest_fix=_RESTORE)
