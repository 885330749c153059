"""A gang of which each block (a share, or a segment) has a clique that no other block of it uses."""

from collections.abc import Collection

from msgspec.structs import replace

from rackloom.claim.place.search.blocks import Block, blocks_of
from rackloom.claim.place.search.effort import Effort
from rackloom.claim.place.search.fit import plan_in, try_gang
from rackloom.claim.place.values import Gang, Plan, Site


def plan_alone(site: Site, gang: Gang, effort: Effort) -> Plan | None:
    """The plan, or None where there are too few cliques."""
    cliques = cliques_alone(site, gang, effort)
    return plan_in(site, gang, cliques) if len(cliques) == len(blocks_of(gang)) else None


def cliques_alone(site: Site, gang: Gang, effort: Effort) -> list[str]:
    """A clique for each block, the largest first, up to the first block that finds none.

    Whatever clique takes a block could have taken any smaller one, so none is taken from a block that needs
    it: replicas and segments of one job are alike but for a smaller last one.
    """
    cliques: list[str] = []
    for block in blocks_of(gang):
        plan = try_gang(without_cliques(site, cliques), _only(gang, block), effort)
        if plan is None:
            break
        cliques += plan.cliques
    return cliques


def shares_a_clique(gang: Gang, plan: Plan) -> bool:
    """Whether two blocks of the gang are in one clique."""
    return len(plan.cliques) < len(blocks_of(gang))


def without_cliques(site: Site, cliques: Collection[str]) -> Site:
    """The site with nothing new in some of its cliques."""
    why = "in a clique that another group has to itself"
    trays = tuple(
        replace(tray, shut=tray.shut or why, is_unfit=True) if tray.sharing in cliques else tray
        for tray in site.trays
    )
    return Site(trays, site.holds)


def _only(gang: Gang, block: Block) -> Gang:
    groups = tuple(replace(part.group, members=part.members, share="") for part in block)
    return replace(gang, groups=groups, segment=None)
