"""The site as one gang meets it: what each clique and tray has left for its members.

`SiteCapacity` is immutable and remembers each answer, so all searches for a gang share it. Holds of the
gang itself do not count. A closed tray has no slots; an exclusive gang sees only empty trays. It is made from
a `SiteView`; what it computes about cliques in general stays with the view and serves later gangs.
"""

from collections.abc import Mapping
from typing import NamedTuple

from rackloom.core.cluster.trays import PlacementSite, PlacementTray
from rackloom.core.place.placement_values import Gang, PlacementTerms
from rackloom.core.place.search.gang_needs import TrayState
from rackloom.core.place.search.site_view import CliqueShape, CliqueState, CliqueStates, SiteView


class TrayPosition(NamedTuple):
    """A tray of a site."""

    clique: str
    number: int
    """Among the trays of its clique."""


class SiteCapacity:
    """Cliques and their trays, for one gang."""

    def __init__(self, site: PlacementSite | SiteView, *, owner: str = "", exclusive: bool = False) -> None:
        """Holds of `owner` do not count. `exclusive`: trays that others use in part count as full."""
        self.view = SiteView.of(site)
        self.states: CliqueStates = self.view.states(owner, exclusive)
        self.cliques: Mapping[str, CliqueState] = self.states.cliques
        """In the order of their first trays."""
        self._owner = owner

    def shape(self, clique: str) -> CliqueShape:
        """What the clique has in common with others."""
        return self.cliques[clique].shape

    def tray(self, at: TrayPosition) -> PlacementTray:
        """The tray."""
        return self.cliques[at.clique].trays[at.number]

    def state(self, at: TrayPosition) -> TrayState:
        """What it has left."""
        return self.cliques[at.clique].states[at.number]

    def why_barred(self, at: TrayPosition, terms: PlacementTerms) -> str | None:
        """Why a member with these terms may not go on a tray; None where the terms allow it."""
        tray, state = self.tray(at), self.state(at)
        if not state.bars(terms):
            return None
        if state.free < 0 or terms.where in tray.closed:
            return tray.shut or tray.closed.get(terms.where, "in use")
        return "its IMEX channel is in use" if tray.gpus or tray.clique else "it has no IMEX channel"


def capacity_for(site: PlacementSite | SiteView | SiteCapacity, gang: Gang) -> SiteCapacity:
    """The site as the gang meets it. A capacity is returned as it is."""
    if isinstance(site, SiteCapacity):
        return site
    return SiteCapacity(site, owner=gang.name, exclusive=gang.exclusive)
