"""What each segment size would cost a site, and sizes that cannot be meant."""

from collections import Counter

from rackloom.claim.place.segments import usable_share
from rackloom.claim.place.values import Gang, Site
from rackloom.cli.place_page import Segment
from rackloom.errors import Refused


def segments_of(site: Site, down: float) -> tuple[Segment, ...]:
    """Every size up to the largest clique of the site, in cliques of that size."""
    trays = max(Counter(tray.sharing for tray in site.trays).values(), default=0)
    return tuple(
        Segment(trays=size, outside=trays % size, usable=usable_share(trays, size, down))
        for size in range(1, trays + 1)
    )


def check_segment(gang: Gang, site: Site) -> None:
    """Refuse a segment that no group fills, or that is larger than any clique when it is empty."""
    serious = [group for group in gang.groups if not group.is_helper]
    if gang.segment is None or not serious:
        return
    largest = max(serious, key=lambda group: group.members)
    if gang.segment > largest.members:
        raise Refused(
            f"{gang.name}: a segment of {gang.segment} members, and {largest.name} has {largest.members}",
            nearest_fix="leave --segment out: all of them share a clique then",
        )
    room = Counter[str]()
    for tray in site.trays:
        room[tray.sharing] += tray.gpus // largest.gpus if largest.gpus else gang.segment
    most = max(room.values(), default=0)
    if gang.segment > most:
        raise Refused(
            f"{gang.name}: a segment of {gang.segment} {largest.name}, and the largest clique takes {most}"
            " when it is empty",
            nearest_fix=f"use --segment {most} or less" if most else "name a site with GPUs",
        )
