"""Placement rules on the same traces, the planner's speed, and its distance from the optimum.

    python benchmarks/placement.py rules [--seeds 12] [--span 10]
    python benchmarks/placement.py speed [--nodes 5000] [--plans 1000]
    python benchmarks/placement.py optimum --racks 32 --gangs 80 [--seeds 5] [--limit 60]
    python benchmarks/placement.py --quick        a short run of each: shows that it works

One JSON object a row. `rules`: racks of 18 trays of which 1 % are down, requests for 1, 2, 4, 8 or 16 trays
(40, 15, 20, 13, 12 %) that arrive at random, last for an exponential time of mean 1, and are lost where they
are refused: no queue, no preemption. `rack_wide` is the share of 16-tray requests that are accepted, `busy`
the share of trays in use over time, `idle_at_refusal` the share of all trays that are free when a 16-tray
request is refused, `plans_per_s` how many requests one processor decides in a second. Rules: `most_free`
(the emptiest domain), `first_pod` (a pod on any free tray; the others must follow it into its rack),
`first_fit`, `best_fit`, and `rackloom`, the planner itself.
`optimum` compares with a bound; where that proves nothing, HiGHS (highspy, optional) is asked about the same
gangs for at most `limit` seconds.
"""

import argparse
import gc
import heapq
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import goals
from msgspec.structs import replace
from site_figures import load as machine_load

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.core.place.packing_score import packing_score

from rackloom.core.cluster.state import TrayHold
from rackloom.core.cluster.trays import ClaimCapacity, Gang, GangGroup, PlacementSite, PlacementTray
from rackloom.core.place.gang_fixes import plan_gang
from rackloom.core.place.gang_planner import try_gang
from rackloom.core.place.search.packing import (
    TRAY_WORTH,
    PackingClique,
    PackingItem,
    best_fit_decreasing,
    pack,
)
from rackloom.core.place.search.site_view import SiteView
from rackloom.core.place.search.tray_assignment import SearchBudget
from rackloom.errors import Refused

RACKS, TRAYS, GPUS = 32, 18, 4
SIZES, WEIGHTS = (1, 2, 4, 8, 16), (40, 15, 20, 13, 12)
WIDE = 16
LOADS = (0.60, 0.75, 0.90)
QUICK: dict[str, dict[str, Any]] = {
    "rules": {"seeds": 1, "span": 0.2},
    "speed": {"nodes": 200, "plans": 10},
    "optimum": {"racks": 4, "gangs": 10, "seeds": 1, "limit": 0.0},
}
WARM_UP = 2.0
"""Mean lifetimes before anything is counted."""

Choose = Callable[[Sequence[int], int, random.Random], int | None]
"""The rack for so many trays, given the free trays of each; None: refused."""


def most_free(free: Sequence[int], size: int, _: random.Random) -> int | None:
    """The emptiest rack, if it is large enough."""
    rack = max(range(len(free)), key=lambda number: free[number])
    return rack if free[rack] >= size else None


def first_pod(free: Sequence[int], size: int, chance: random.Random) -> int | None:
    """Any free tray picks the rack; it is not taken back."""
    if not any(free):
        return None
    (rack,) = chance.choices(range(len(free)), free)
    return rack if free[rack] >= size else None


def first_fit(free: Sequence[int], size: int, _: random.Random) -> int | None:
    """The first rack that is large enough."""
    return next((rack for rack, trays in enumerate(free) if trays >= size), None)


def best_fit(free: Sequence[int], size: int, _: random.Random) -> int | None:
    """The rack that it fills most."""
    fitting = [rack for rack, trays in enumerate(free) if trays >= size]
    return min(fitting, key=lambda rack: free[rack], default=None)


def planned(free: Sequence[int], size: int, _: random.Random) -> int | None:
    """What the planner says about a site with these free trays."""
    plan = try_gang(site_with(free), gang_of(size), SearchBudget())
    return None if plan is None else int(plan.cliques[0])


RULES: dict[str, Choose] = {
    "most_free": most_free,
    "first_pod": first_pod,
    "first_fit": first_fit,
    "best_fit": best_fit,
    "rackloom": planned,
}


def gang_of(trays: int, **more: Any) -> Gang:
    """A gang of whole trays."""
    return Gang(name="gang", groups=(GangGroup(name="worker", members=trays, gpus=GPUS),), **more)


def site_with(free: Sequence[int]) -> PlacementSite:
    """Racks with so many open trays each."""
    return PlacementSite(
        tuple(
            PlacementTray(name=f"{rack}-{tray}", clique=str(rack), gpus=GPUS)
            for rack, trays in enumerate(free)
            for tray in range(trays)
        )
    )


@dataclass
class Tally:
    """What one rule did with the traces."""

    wide: int = 0
    wide_accepted: int = 0
    requests: int = 0
    stuck: int = 0
    """Refused although another rack had room."""
    busy: list[float] = field(default_factory=list)
    idle_at_refusal: list[float] = field(default_factory=list)
    seconds: float = 0.0
    """Of the processor, for choosing alone."""


def trace(load: float, span: float, seed: int) -> Iterator[tuple[float, int, float]]:
    """Arrival, trays and lifetime of each request; the same for every rule."""
    chance = random.Random(seed)  # noqa: S311 (reproducible on purpose)
    mean = sum(size * weight for size, weight in zip(SIZES, WEIGHTS, strict=True)) / sum(WEIGHTS)
    now = 0.0
    while (now := now + chance.expovariate(load * RACKS * TRAYS / mean)) < WARM_UP + span:
        yield now, chance.choices(SIZES, WEIGHTS)[0], chance.expovariate(1.0)


def replay(choose: Choose, load: float, span: float, seed: int, tally: Tally) -> None:
    """One trace under one rule."""
    chance = random.Random(-seed)  # noqa: S311 (reproducible on purpose)
    free = [sum(chance.random() >= 0.01 for _ in range(TRAYS)) for _ in range(RACKS)]
    ending: list[tuple[float, int, int]] = []
    for now, size, lifetime in trace(load, span, seed):
        while ending and ending[0][0] <= now:
            _, rack, trays = heapq.heappop(ending)
            free[rack] += trays
        start = time.process_time()
        rack_or_none = choose(free, size, chance)
        tally.seconds += time.process_time() - start
        if now >= WARM_UP:
            count(tally, free, size, rack_or_none is not None)
        tally.requests += 1
        if rack_or_none is not None:
            free[rack_or_none] -= size
            heapq.heappush(ending, (now + lifetime, rack_or_none, size))


def count(tally: Tally, free: Sequence[int], size: int, accepted: bool) -> None:
    """Note one request; the trays in use are those that it met, so averages are over time (PASTA)."""
    idle = sum(free) / (RACKS * TRAYS)
    tally.busy.append(1 - idle)
    tally.stuck += not accepted and max(free) >= size
    if size == WIDE:
        tally.wide += 1
        tally.wide_accepted += accepted
        if not accepted:
            tally.idle_at_refusal.append(idle)


def rules(seeds: int, span: float) -> Iterator[dict[str, Any]]:
    """A row for each load and rule."""
    for load in LOADS:
        for name, choose in RULES.items():
            tally = Tally()
            for seed in range(1, seeds + 1):
                replay(choose, load, span, seed, tally)
            refusals = tally.idle_at_refusal
            yield {
                "benchmark": "rules",
                "load": load,
                "rule": name,
                "rack_wide": round(tally.wide_accepted / tally.wide, 4),
                "busy": round(sum(tally.busy) / len(tally.busy), 4),
                "idle_at_refusal": round(sum(refusals) / len(refusals), 4) if refusals else None,
                "stuck": round(tally.stuck / len(tally.busy), 4),
                "plans_per_s": round(tally.requests / tally.seconds),
            }


def speed(nodes: int, plans: int) -> Iterator[dict[str, Any]]:
    """Latencies of single gangs, and of explained refusals, on a site that is half in use.

    The planner keeps its view of the site. Before each plan one job has left its tray, and another came to
    a second tray: the view is changed by that, which counts as a part of the plan.
    """
    chance = random.Random(1)  # noqa: S311 (reproducible on purpose)
    empty = site_with([TRAYS] * (nodes // TRAYS))
    holds = (
        TrayHold(owner=f"job-{at}", tray=tray.name, gpus=GPUS, movable=chance.random() < 0.3)
        for at, tray in enumerate(empty.trays)
        if chance.random() < 0.5
    )
    site = PlacementSite(empty.trays, tuple(holds))
    gangs = [gang_of(chance.choice(SIZES[:4])) for _ in range(plans * 9 // 10)]
    gangs += [gang_of(128, segment=4) for _ in range(plans - len(gangs))]
    yield timed("one gang", site, gangs)
    yield timed(
        "explained refusal", site, [gang_of(trays) for trays in (16, 17, 18, 36)] * max(1, plans // 20)
    )
    mixed, kinds = site_in_parts(nodes), [(4, 4), (10, 12), (12, 12), (16, 16), (18, 18)]
    serving = [unlike(*some, spares=spares) for some in kinds for spares in (0, 1)]
    serving += [unlike(*some, segment=8) for some in kinds]
    yield timed("two device kinds", mixed, serving * max(1, plans // 100))
    refused = [unlike(*some, spares=spares) for some in ((20, 30), (36, 36)) for spares in (0, 1)]
    yield timed("two device kinds, explained refusal", mixed, refused * max(1, plans // 100))


def site_in_parts(nodes: int) -> PlacementSite:
    """Trays of 4 GPUs and NICs, half of them in use in part; `pair` is 2 of each, `single` one."""
    chance = random.Random(1)  # noqa: S311 (reproducible on purpose)
    trays, holds = [], []
    for at in range(nodes // TRAYS * TRAYS):
        used = chance.choice((1, 2, 4)) if chance.random() < 0.5 else 0
        free = GPUS - used
        rooms = {"pair": ClaimCapacity(free // 2, GPUS // 2), "single": ClaimCapacity(free, GPUS)}
        trays.append(PlacementTray(name=f"n{at}", clique=str(at // TRAYS), gpus=GPUS, rooms=rooms))
        movable = chance.random() < 0.3
        holds += [TrayHold(owner=f"job-{at}", tray=f"n{at}", gpus=used, movable=movable)] if used else []
    return PlacementSite(tuple(trays), tuple(holds))


def unlike(prefill: int, decode: int, **more: Any) -> Gang:
    """Two groups that compete for the trays of one clique."""
    groups = (
        GangGroup(name="prefill", members=prefill, gpus=2, devices="pair"),
        GangGroup(name="decode", members=decode, gpus=1, devices="single"),
    )
    return Gang(name="gang", groups=groups, **more)


def timed(what: str, site: PlacementSite, gangs: Sequence[Gang]) -> dict[str, Any]:
    """Milliseconds of planning each gang after a change of the site: on the clock, and of the processor."""
    times, processor, refused = [], [], 0
    begun = time.process_time()
    view = SiteView.of(site)
    for exclusive in {gang.exclusive for gang in gangs}:
        view.states(exclusive=exclusive)
    first = (time.process_time() - begun) * 1e3
    # What a long-lived process does once it has read the site.
    gc.freeze()
    changes = changes_of(site)
    for gang in gangs:
        left, came = next(changes)
        start, begun = time.perf_counter(), time.process_time()
        view = view.changed(freed=[left], taken=[came])
        try:
            plan_gang(view, gang)
        except Refused:
            refused += 1
        times.append((time.perf_counter() - start) * 1e3)
        processor.append((time.process_time() - begun) * 1e3)
    gc.unfreeze()
    times.sort()
    processor.sort()
    return {
        "benchmark": "speed",
        "what": what,
        "nodes": len(site.trays),
        "plans": len(times),
        "refused": refused,
        "cpu_ms_of_a_new_view": round(first, 1),
        "p50_ms": round(times[len(times) // 2], 2),
        "p99_ms": round(times[int(len(times) * 0.99)], 2),
        "cpu_p50_ms": round(processor[len(processor) // 2], 2),
        "cpu_p99_ms": round(processor[int(len(processor) * 0.99)], 2),
        **machine_load(),
    }


def changes_of(site: PlacementSite) -> Iterator[tuple[TrayHold, TrayHold]]:
    """A hold that ends, and one that begins on a tray that nobody has: then the same way back."""
    chance = random.Random(2)  # noqa: S311 (reproducible on purpose)
    held = {hold.tray for hold in site.holds}
    free = [tray.name for tray in site.trays if tray.name not in held]
    while True:
        left = chance.choice(site.holds)
        came = replace(left, tray=chance.choice(free))
        yield left, came
        yield came, left


def optimum(racks: int, gangs: int, seeds: int, limit: float) -> Iterator[dict[str, Any]]:
    """More gangs than fit, with three priorities: our score beside what no assignment can exceed.

    HiGHS is asked for `limit` seconds where a gap remains; 0: never.
    """
    for seed in range(1, seeds + 1):
        chance = random.Random(seed)  # noqa: S311 (reproducible on purpose)
        cliques = [PackingClique(sum(chance.random() >= 0.01 for _ in range(TRAYS))) for _ in range(racks)]
        sizes = (1, 2, 4, 5, 6, 8, 9, 12, 16, 17)
        items = [PackingItem((chance.choice(sizes),), chance.choice((1, 2, 3))) for _ in range(gangs)]
        start, begun = time.perf_counter(), time.process_time()
        ours = packing_score(cliques, items, pack(cliques, items))
        row = {
            "benchmark": "optimum",
            "racks": racks,
            "gangs": gangs,
            "seed": seed,
            "best_fit": packing_score(cliques, items, best_fit_decreasing(cliques, items)),
            "ours": ours,
            "seconds": round(time.perf_counter() - start, 2),
            "cpu_seconds": round(time.process_time() - begun, 2),
            "bound": (bound := upper_bound(cliques, items)),
        }
        if ours == bound:
            yield row | {"verdict": "optimal, proven by the bound"}
            continue
        row["below_bound_percent"] = round(100 * (bound - ours) / bound, 3)
        yield row | (
            solved(cliques, items, limit, ours) if limit else {"verdict": "a gap: HiGHS was not asked"}
        )


def upper_bound(cliques: Sequence[PackingClique], items: Sequence[PackingItem]) -> int:
    """What no assignment of gangs of one block to unused cliques can exceed.

    Trays are filled by weight as if all were in one clique; no fewer cliques are opened than the largest ones
    that have as many trays. Whatever places less loses a tray's worth, and saves at most all cliques.
    """
    empty = sorted((clique.empty for clique in cliques), reverse=True)
    trays, worth, left = 0, 0, sum(empty)
    for item in sorted(items, key=lambda packed: -packed.weight):
        taken = min(item.sizes[0], left) if item.sizes[0] <= empty[0] else 0
        trays, worth, left = trays + taken, worth + TRAY_WORTH * item.weight * taken, left - taken
    opened = next(count for count in range(len(empty) + 1) if sum(empty[:count]) >= trays)
    return max(worth - opened, worth - TRAY_WORTH)


def solved(
    cliques: Sequence[PackingClique], items: Sequence[PackingItem], limit: float, ours: int
) -> dict[str, Any]:
    """HiGHS's best solution and bound, and how far below them ours is (negative: above)."""
    import highspy

    model = highspy.Highs()
    for option, value in (("output_flag", False), ("time_limit", limit), ("threads", 2)):
        model.setOptionValue(option, value)
    placed = {
        (item, clique): model.addBinary()
        for item in range(len(items))
        for clique in range(len(cliques))
        if items[item].sizes[0] <= cliques[clique].empty
    }
    opened = [model.addBinary() for _ in cliques]
    for item in range(len(items)):
        model.addConstr(sum(variable for (number, _), variable in placed.items() if number == item) <= 1)
    for clique, is_open in enumerate(opened):
        trays = sum(
            items[item].sizes[0] * variable for (item, where), variable in placed.items() if where == clique
        )
        model.addConstr(trays <= cliques[clique].empty * is_open)
    start = time.perf_counter()
    model.maximize(sum(items[item].worth * variable for (item, _), variable in placed.items()) - sum(opened))
    info = model.getInfo()
    best, bound = info.objective_function_value, info.mip_dual_bound
    return {
        "verdict": "optimal, proven by HiGHS" if ours >= round(bound) else "a gap is left",
        "highs": round(best),
        "highs_bound": round(bound),
        "highs_seconds": round(time.perf_counter() - start, 1),
        "below_highs_percent": round(100 * (best - ours) / best, 3),
        "below_highs_bound_percent": round(100 * (bound - ours) / bound, 3),
    }


def main() -> None:
    """Print the rows of one benchmark as they come."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a short run of each: shows that it works")
    commands = parser.add_subparsers(dest="command")
    command = commands.add_parser("rules")
    command.add_argument("--seeds", type=int, default=12)
    command.add_argument("--span", type=float, default=10.0)
    command = commands.add_parser("speed")
    command.add_argument("--nodes", type=int, default=5000)
    command.add_argument("--plans", type=int, default=1000)
    command = commands.add_parser("optimum")
    command.add_argument("--racks", type=int, default=32)
    command.add_argument("--gangs", type=int, default=80)
    command.add_argument("--seeds", type=int, default=5)
    command.add_argument(
        "--limit", type=float, default=60.0, help="seconds of HiGHS for a gap; 0: it is not asked"
    )
    given = vars(parser.parse_args())
    command, quick = given.pop("command"), given.pop("quick")
    if quick == (command is not None):
        parser.error("say one of rules, speed and optimum, or --quick")
    for name, rows in {"rules": rules, "speed": speed, "optimum": optimum}.items():
        for row in rows(**QUICK[name]) if quick else rows(**given) if name == command else ():
            print(json.dumps(goals.judged("placement", row)), flush=True)


if __name__ == "__main__":
    main()
