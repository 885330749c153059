"""Random clusters and claims with compatibility groups and derived attributes, beside upstream's allocator.

    python tests/conformance/random_scenarios.py --compare COUNT [--seed SEED]
    python tests/conformance/random_scenarios.py --record

Upstream is `upstream outcomes` of benchmarks/peers, built as `benchmarks/upstream.py` builds it. `--compare`
answers COUNT scenarios on both sides and prints those that differ. `--record` writes upstream's answers to
the scenarios of `RECORDED` beside their digest, for tests that have no Go.
"""

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from rackloom.core.allocate.checker import AllocationChecker
from rackloom.core.allocate.fleet import Fleet
from rackloom.core.allocate.inputs import Features, in_use_by
from rackloom.core.allocate.objects import (
    DeviceClass,
    Node,
    ResourceClaim,
    ResourceClaimStatus,
    ResourceSlice,
)
from rackloom.core.allocate.outcome import Allocation, Fault

HERE = Path(__file__).parent
RECORDED = HERE / "data" / "random-answers.json"
COUNT, SEED = 400, 37
"""Number and seed of the scenarios whose answers are recorded."""
FEATURES = Features(list_type_attributes=True)
Fields = dict[str, Any]

_SELECTORS = [
    "device.attributes['d'].kind == 'a'",
    "device.attributes['d'].kind == 'b'",
    "has(device.attributes['d'].num)",
]
_DERIVED = [
    "device.attributes['d'].place",
    "int(device.attributes['d'].path.substring(2))",
    "device.attributes['d'].path.split('-')",
    "device.attributes['d'].num % 2",
    "device.attributes['d'].links",
    "[device.attributes['d'].place, 7]",
    "device.attributes['d'].?num.orValue(0) == 1",
    "device.attributes['d'].version",
    "semver('1.0.0')",
    "[]",
    "dyn(1.5)",
    "device.attributes['d'].place + ",
]
_LIKELY = _DERIVED[:3]


def scenarios(seed: int, count: int) -> list[Fields]:
    """A number of scenarios, the same ones for the same seed."""
    return [_scenario(Random(f"{seed}-{number}")) for number in range(count)]


def _scenario(rng: Random) -> Fields:
    names = [f"n{number}" for number in range(rng.randint(1, 2))]
    grouped, derives = rng.random() < 0.7, rng.random() < 0.7
    claims = [_claim(rng, number, derives) for number in range(rng.randint(2, 6))]
    live: list[int] = []
    releases: list[list[int]] = []
    for number in range(len(claims)):
        ends = bool(live) and rng.random() < 0.25
        releases.append([live.pop(rng.randrange(len(live)))] if ends else [])
        live.append(number)
    features = FEATURES if rng.random() < 0.7 else Features()
    return {
        "nodes": [{"metadata": {"name": name}} for name in names],
        "classes": [{"metadata": {"name": "any"}, "spec": {}}],
        "slices": [slice_ for name in names for slice_ in _slices(rng, name, grouped)],
        "claims": claims,
        "releases": releases,
        "features": msgspec.to_builtins(features),
    }


def _slices(rng: Random, node: str, grouped: bool) -> list[Fields]:
    pool = {"name": node, "generation": 1, "resourceSliceCount": 2}
    counters = [{"name": name, "counters": {"m": {"value": "4"}}} for name in "xy"]
    devices = [_device(rng, number, grouped) for number in range(rng.randint(2, 7))]
    specs: list[Fields] = [{"sharedCounters": counters}, {"devices": devices}]
    return [
        {
            "metadata": {"name": f"{node}-{number}"},
            "spec": {"driver": "d", "pool": pool, "nodeName": node, **spec},
        }
        for number, spec in enumerate(specs)
    ]


def _device(rng: Random, number: int, grouped: bool) -> Fields:
    place = rng.randint(0, 2)
    attributes: Fields = {
        "kind": {"string": rng.choice("ab")},
        "place": {"int": place},
        "path": {"string": f"p-{rng.choice([place, rng.randint(0, 2)])}"},
        "version": {"version": rng.choice(["1.0.0", "1.2.0"])},
    }
    if rng.random() < 0.8:
        attributes["num"] = {"int": rng.randint(0, 3)}
    if rng.random() < 0.8:
        attributes["links"] = {"ints": sorted(rng.sample(range(4), rng.randint(1, 2)))}
    device: Fields = {"name": f"d{number}", "attributes": attributes}
    fate = rng.choice(["whole", "part", "part", "part", "shared"])
    if fate != "whole" and (fate == "part" or rng.random() < 0.6):
        device["consumesCounters"] = [
            {
                "counterSet": name,
                "counters": {"m": {"value": str(rng.randint(0, 2))}},
                **({"compatibilityGroups": groups} if (groups := _groups(rng, grouped)) else {}),
            }
            for name in rng.choice(["x", "x", "y", "xy"])
        ]
    if fate == "shared":
        device |= {"allowMultipleAllocations": True}
        if rng.random() < 0.8:
            device["capacity"] = {"mem": {"value": "4", "requestPolicy": {"default": "1"}}}
    if rng.random() < 0.1:
        device["taints"] = [{"key": "t", "effect": "NoSchedule"}]
    return device


def _groups(rng: Random, grouped: bool) -> list[str]:
    return list(rng.choice(["", "", "g", "g", "h", "gh", "hi"])) if grouped else []


def _claim(rng: Random, number: int, derives: bool) -> Fields:
    requests = [_request(rng, f"r{at}", derives) for at in range(rng.randint(1, 3))]
    constraints = []
    for _ in range(rng.choice([0, 1, 1, 2])):
        kind = rng.choice(["matchAttribute", "matchAttribute", "distinctAttribute"])
        attribute = rng.choice(["d/place", "d/place", "e/derived"] if derives else ["d/place", "d/links"])
        covered = rng.choice([[], [], [requests[0]["name"]], [requests[-1]["name"]]])
        constraints.append({kind: attribute, **({"requests": covered} if covered else {})})
    devices = {"requests": requests, "constraints": constraints}
    return {"metadata": {"name": f"c{number}", "uid": f"c{number}"}, "spec": {"devices": devices}}


def _request(rng: Random, name: str, derives: bool) -> Fields:
    if rng.random() < 0.2:
        alternatives = [{"name": f"a{at}", **_ask(rng, derives)} for at in range(2)]
        return {"name": name, "firstAvailable": alternatives}
    ask = _ask(rng, derives)
    if rng.random() < 0.08:
        ask["adminAccess"] = True
    return {"name": name, "exactly": ask}


def _ask(rng: Random, derives: bool) -> Fields:
    ask: Fields = {
        "deviceClassName": "any",
        "allocationMode": "ExactCount",
        "count": rng.choice([1, 1, 1, 2, 3]),
    }
    if rng.random() < 0.1:
        ask = {"deviceClassName": "any", "allocationMode": "All"}
    selectors = rng.sample(_SELECTORS, rng.choice([0, 0, 1, 2]))
    if ask["allocationMode"] == "All":
        # Upstream 1.36 and 1.37 disagree about the meaning of mode All if capacity is used up.
        selectors.append("!device.allowMultipleAllocations")
    if selectors:
        ask["selectors"] = [{"cel": {"expression": selector}} for selector in selectors]
    if rng.random() < 0.3:
        ask["tolerations"] = [{"key": "t", "operator": "Exists"}]
    if derives:
        pick = _LIKELY if rng.random() < 0.6 else _DERIVED
        derived = [
            {"name": attribute, "expression": rng.choice(pick)}
            for attribute, share in (("d/place", 0.3), ("e/derived", 0.9))
            if rng.random() < share
        ]
        if derived:
            ask["derivedAttributes"] = derived
    return ask


# The answers of both sides: per claim {"place": ...}, {"error": ...} or {}.


def ours(scenario: Fields) -> list[Fields]:
    """The answers of a fleet. The checker checks every placement."""
    nodes = msgspec.convert(scenario["nodes"], list[Node])
    classes = msgspec.convert(scenario["classes"], list[DeviceClass])
    slices = msgspec.convert(scenario["slices"], list[ResourceSlice])
    features = msgspec.convert(scenario["features"], Features)
    fleet = Fleet(nodes, classes, slices, features=features)
    held: dict[int, ResourceClaim] = {}
    answers: list[Fields] = []
    for number, claim in enumerate(msgspec.convert(scenario["claims"], list[ResourceClaim])):
        for earlier in scenario["releases"][number]:
            if earlier in held:
                back = held.pop(earlier).status.allocation
                fleet.release([back] if back else [])
        outcome = fleet.place([claim])
        if isinstance(outcome, Fault):
            answers.append({"error": outcome.reason})
        elif isinstance(outcome, Allocation):
            node = next(node for node in nodes if node.metadata.name == outcome.node)
            state = in_use_by(held.values())
            checker = AllocationChecker(node, classes, slices, state=state, features=features)
            broken = list(checker.violations([claim], outcome.results))
            if broken:
                raise AssertionError(f"the checker says {broken} of {outcome.results}")
            status = ResourceClaimStatus(allocation=outcome.results[0])
            held[number] = msgspec.structs.replace(claim, status=status)
            devices = [
                [device.request, device.driver, device.pool, device.device]
                for device in outcome.results[0].devices.results
            ]
            answers.append({"place": {"node": outcome.node, "devices": devices}})
        else:
            answers.append({})
    return answers


def differs(here: list[Fields], there: list[Fields]) -> str | None:
    """The first difference between the answers. Errors are compared by their subject."""
    for number, (our, their) in enumerate(zip(here, there, strict=True)):
        if "error" in our and "error" in their:
            if about(our["error"]) != about(their["error"]):
                return f"claim {number}: {our['error']!r}, not {their['error']!r}"
        elif our != their:
            return f"claim {number}: {our}, not {their}"
    return None


def about(error: str) -> str:
    """The subject of an error, from the words of either side."""
    for kind, words in {
        "compile": ("does not compile", "compile derived attribute", "compile error"),
        "derive": ("the derived attribute", "evaluate derived attribute"),
        "constraint": ("would break a constraint", "constraint would not be satisfied"),
        "selector": ("fails on device", "CEL runtime error"),
    }.items():
        if any(word in error for word in words):
            return kind
    return error


def upstream(asked: list[Fields], command: str = "outcomes") -> Any:
    """The answers of upstream's own allocator. Raises NotBuilt if it cannot be built."""
    from tests.cluster.build import Tools, made

    peer = Tools(HERE.parents[1] / "benchmarks" / "peers", {"upstream": "."})
    words = [str(made(peer) / "upstream"), command]
    done = subprocess.run(words, input=json.dumps(asked), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def digest(asked: list[Fields]) -> str:
    """Tells whether scenarios are those that were recorded."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def main() -> int:
    """Compare or record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compare", type=int, metavar="COUNT")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--seed", type=int, default=SEED)
    asked = parser.parse_args()
    if asked.record:
        made = scenarios(SEED, COUNT)
        answers = upstream(made)
        lines = ",\n".join(json.dumps(answer, separators=(",", ":")) for answer in answers)
        RECORDED.write_text(f'{{"digest": "{digest(made)}", "answers": [\n{lines}\n]}}\n')
        return 0
    made = scenarios(asked.seed, asked.compare or COUNT)
    wrong, kinds = 0, {"place": 0, "error": 0, "refused": 0}
    for number, (scenario, theirs) in enumerate(zip(made, upstream(made), strict=True)):
        for answer in theirs:
            kinds[next(iter(answer), "refused")] += 1
        difference = differs(ours(scenario), theirs)
        if difference:
            wrong += 1
            print(f"scenario {number}: {difference}")  # noqa: T201
    print(f"{len(made)} scenarios, {wrong} differ; claims: {kinds}")  # noqa: T201
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
