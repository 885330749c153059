"""Placements of random requests, recorded so that a change of the chooser shows each answer that it changes.

    python -m tests.core.place.golden_placements            the cases with another answer than the record
    python -m tests.core.place.golden_placements --write    record the present answers

Each kind of request has a generator, and each case has a seed. The record has a line for each case: the
answer, or the first digits of its hash if it is long.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path
from random import Random

from tests.core.place.place_sites import outcome_of
from tests.web.snapshots import snapshot
from tests.web.test_what_tenants_see import seen_by

from rackloom.core.cluster.state import TrayHold
from rackloom.core.cluster.trays import Gang, GangGroup, PlacementSite, PlacementTray
from rackloom.core.place.batch import plan_batch
from rackloom.core.place.gang_fixes import plan_gang
from rackloom.core.place.instance_trays import DomainFreeTrays, FreeTray, TrayRequest, choose_trays
from rackloom.core.place.job_moves import plan_defragmentation
from rackloom.errors import Refused
from rackloom.web.make_room import room_plan
from rackloom.web.model import SiteReading, site_map

RECORD = Path(__file__).with_name("golden_placements.json")


def short(value: object) -> str:
    return hashlib.sha256(str(value).encode()).hexdigest()[:6]


# Instances.


def instance_case(chance: Random) -> tuple[TrayRequest, list[DomainFreeTrays[str]]]:
    """Up to seven domains. Trays are healthy or not, some shut or reserved. A third has racks of 18."""
    most = chance.choice((4, 4, 18))
    domains = []
    for number in range(chance.randint(0, 7)):
        trays = tuple(
            FreeTray(
                f"d{number}t{tray}",
                chance.choice((None,) * 7 + ("GPU 0 degraded",)),
                chance.choice((None,) * 9 + ("paused",)),
                chance.choice((None, None, None, "mine", "other")) if number % 2 else None,
            )
            for tray in range(chance.randint(0, most))
        )
        domains.append(DomainFreeTrays(f"d{number}", trays, chance.choice((0, 0, 0, 4, 8))))
    if chance.random() < 0.3:
        unknown = tuple(FreeTray(f"x{tray}") for tray in range(chance.randint(1, 2)))
        domains.append(DomainFreeTrays(None, unknown, 0))
    chance.shuffle(domains)
    request = TrayRequest(
        chance.randint(1, chance.choice((2, most, most + 3))),
        chance.random() < 0.5,
        beside_members=chance.random() < 0.2,
        allow_sick=chance.random() < 0.2,
        tenant=chance.choice((None, "mine")),
        most_unreserved=chance.choice((None, None, None, 0, 1, 3)),
    )
    return request, domains


def instance_answer(chance: Random) -> str:
    """The trays by domain, with the hash of the reason, or the hashes of a refusal and its fix."""
    request, domains = instance_case(chance)
    found = outcome_of(lambda: choose_trays(request, domains))
    if isinstance(found, Refused):
        return f"refused {short(found.reason)} {short(found.nearest_fix)}"
    return f"{' '.join(found.trays).replace('d', '').replace('t', '.')} {short(found.reason)}"


# Gangs, batches and moves.


def site_case(chance: Random, most: int, trays: int) -> PlacementSite:
    """Cliques that are partly in use."""
    found, holds = [], []
    for clique in range(chance.randint(1, most)):
        for number in range(chance.randint(1, trays)):
            name = f"n{clique}-{number}"
            shut = "cordoned" if chance.random() < 0.1 else None
            found.append(PlacementTray(name=name, clique=f"c{clique}", gpus=4, shut=shut))
            if (used := chance.choice((0, 0, 0, 1, 2, 4))) and shut is None:
                owner, priority = f"job-{chance.randint(0, 5)}", chance.randint(0, 2)
                movable = chance.random() < 0.5
                holds.append(TrayHold(owner=owner, tray=name, gpus=used, priority=priority, movable=movable))
    return PlacementSite(tuple(found), tuple(holds))


def gang_case(chance: Random, name: str) -> Gang:
    groups = [GangGroup(name="worker", members=chance.randint(1, 9), gpus=chance.choice((1, 2, 4)))]
    if chance.random() < 0.3:
        share = chance.choice(("", "decode"))
        groups.append(GangGroup(name="decode", members=chance.randint(1, 4), gpus=4, share=share))
    return Gang(
        name=name,
        groups=tuple(groups),
        priority=chance.randint(0, 2),
        segment=chance.choice((None, None, 1, 2, 3)),
        spares=chance.choice((0, 0, 0, 1)),
        exclusive=chance.random() < 0.3,
    )


def gang_answer(chance: Random) -> str:
    """Clique and hash of the plan, or the hashes of a refusal and its fix."""
    site = site_case(chance, *chance.choice(((4, 6), (4, 18), (12, 4))))
    gang = gang_case(chance, "gang")
    found = outcome_of(lambda: plan_gang(site, gang))
    if isinstance(found, Refused):
        return f"refused {short(found.reason)} {short(found.nearest_fix)}"
    return f"{' '.join(found.cliques)} {short(found)}"


def batch_answer(chance: Random) -> str:
    """Trays by gang, and the hash of the plans. Most gangs take whole trays."""
    site = site_case(chance, *chance.choice(((4, 6), (5, 18), (9, 12))))
    gangs = [
        Gang(
            name=f"g{number}",
            groups=(GangGroup(name="worker", members=chance.randint(1, 9), gpus=4),),
            priority=chance.randint(0, 2),
            segment=chance.choice((None, None, None, 4)),
        )
        if chance.random() < 0.9
        else gang_case(chance, f"g{number}")
        for number in range(chance.randint(2, 12))
    ]
    plans = plan_batch(site, gangs)
    return f"{' '.join(f'{plan.gang}:{len(plan.trays)}' for plan in plans)} {short(plans)}"


def moves_answer(chance: Random) -> str:
    """The moves of a defragmentation."""
    found = plan_defragmentation(site_case(chance, 6, 6))
    return f"{len(found.moves)} {short(found.moves)}"


# The map.


def room_answer(chance: Random) -> str:
    """The places on the map in which a job fits, for an operator or a tenant."""
    racks, trays = chance.randint(1, 6), chance.choice((2, 4, 18))
    holders = tuple(chance.choice((None, None, None, "red", "blue")) for _ in range(racks * trays))
    whole = site_map(SiteReading(snapshot=snapshot(racks, trays, holders)))
    viewer = chance.choice((None, "red"))
    asked = chance.randint(1, trays + 1)
    plan = room_plan(whole if viewer is None else seen_by(whole, viewer), asked)
    where = " ".join(f"{domain.racks[0][-2:]}:{domain.free}" for domain in plan.domains)
    return f"{'fits' if plan.fits else 'not'} {where} {short(plan)}"


KINDS: dict[str, tuple[int, Callable[[Random], str]]] = {
    "instances": (2000, instance_answer),
    "gangs": (600, gang_answer),
    "batches": (250, batch_answer),
    "moves": (150, moves_answer),
    "map": (120, room_answer),
}
"""Cases, and the answer of each."""


def answers(kind: str) -> list[str]:
    """The present answers."""
    cases, answer = KINDS[kind]
    return [answer(Random(f"{kind} {number}")) for number in islice(count(), cases)]


def recorded() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(RECORD.read_text())
    return found


def differing(kind: str) -> list[str]:
    """A line for each case with an answer that differs from the record."""
    return [
        f"{kind} {number}: {before} -> {now}"
        for number, (before, now) in enumerate(zip(recorded()[kind], answers(kind), strict=True))
        if before != now
    ]


if __name__ == "__main__":
    if "--write" in sys.argv:
        RECORD.write_text(json.dumps({kind: answers(kind) for kind in KINDS}, indent=0) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for kind in KINDS for line in differing(kind))
