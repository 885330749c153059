"""Runs allocator cases (one JSON file each, see data/dra-allocator/README.md) through one node and a fleet.

    python tests/conformance/run.py FOLDER

prints one line per failed case and ends with `N passed, N failed`.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rackloom.core.allocate.allocator import allocate
from rackloom.core.allocate.fleet import Fleet
from rackloom.core.allocate.inputs import DeviceId, Features, InUse
from rackloom.core.allocate.objects import (
    AllocationResult,
    DeviceAllocationResult,
    DeviceClass,
    DeviceResult,
    Node,
    ResourceClaim,
    ResourceSlice,
)
from rackloom.core.allocate.outcome import Allocation, Fault, Outcome, Refusal
from rackloom.core.allocate.quantity import Quantity

Case = dict[str, Any]


def outcome_of(case: Case) -> Outcome:
    """The answer of one node to a case."""
    return allocate(
        msgspec.convert(case["node"], Node),
        msgspec.convert(case["classes"], list[DeviceClass]),
        msgspec.convert(case["slices"], list[ResourceSlice]),
        msgspec.convert(case["claims"], list[ResourceClaim]),
        state=_state(case.get("allocatedState") or {}),
        features=msgspec.convert(case["features"], Features),
    )


def outcome_of_fleet(case: Case) -> Outcome:
    """The answer of a fleet that has the node: the placement, or the node's refusal if there is none."""
    node = msgspec.convert(case["node"], Node)
    fleet = Fleet(
        [node],
        msgspec.convert(case["classes"], list[DeviceClass]),
        msgspec.convert(case["slices"], list[ResourceSlice]),
        features=msgspec.convert(case["features"], Features),
    )
    fleet.occupy([_as_result(_state(case.get("allocatedState") or {}))])
    claims = msgspec.convert(case["claims"], list[ResourceClaim])
    placed = fleet.find(claims)
    return fleet.answer_on(node.metadata.name, claims) if isinstance(placed, Refusal) else placed


def _as_result(state: InUse) -> AllocationResult:
    """The devices in use as an allocation would list them."""
    whole = [DeviceResult(request="", **device._asdict()) for device in state.dedicated]
    shared = [
        DeviceResult(
            request="", **device._asdict(), share_id="any", consumed_capacity=state.consumed.get(device)
        )
        for device in state.shared | state.consumed.keys()
    ]
    return AllocationResult(devices=DeviceAllocationResult(results=(*whole, *shared)))


def difference(case: Case, outcome: Callable[[Case], Outcome] = outcome_of) -> str | None:
    """How the library's answer differs from every accepted one, or None if it matches one."""
    answer = outcome(case)
    accepted = [case["expect"], *_also(case)]
    differences = [
        _differs(answer, expect, case["expect"].get("compare", "unordered")) for expect in accepted
    ]
    return None if None in differences else differences[0]


def _also(case: Case) -> list[dict[str, Any]]:
    """Other right answers: expectations, outcomes by name, or bare lists of results."""
    others = case.get("alsoAcceptable") or case["expect"].get("alsoAcceptable") or []
    return [_expectation(other) for other in (others if isinstance(others, list) else [others])]


def _expectation(other: Any) -> dict[str, Any]:
    if isinstance(other, str):
        return {"outcome": other, "results": []}
    if isinstance(other, list):
        return {"outcome": "allocated", "results": other}
    return {"outcome": "allocated", "results": [], **other}


def _state(state: dict[str, Any]) -> InUse:
    def ids(name: str) -> frozenset[DeviceId]:
        return frozenset(_device(device) for device in state.get(name) or [])

    consumed = {_device(device): device["capacity"] for device in state.get("aggregatedCapacity") or []}
    return InUse(dedicated=ids("devices"), shared=ids("sharedDevices"), consumed=consumed)


def _device(device: dict[str, str]) -> DeviceId:
    return DeviceId(device["driver"], device["pool"], device["device"])


def _differs(answer: Outcome, expect: dict[str, Any], compare: str) -> str | None:
    if isinstance(answer, Fault):
        found = "error"
    else:
        found = "allocated" if isinstance(answer, Allocation) else "unsatisfiable"
    if found != expect["outcome"]:
        reason = f" ({answer.reason})" if isinstance(answer, Fault) else ""
        return f"{found}{reason}, not {expect['outcome']}"
    if not isinstance(answer, Allocation):
        return None
    if not _shares_differ(answer):
        return "share ids are not distinct"
    results = msgspec.json.decode(msgspec.json.encode(answer.results))
    ours = [_normal(result, compare) for result in results]
    theirs = [_normal(result, expect.get("compare", compare)) for result in expect["results"]]
    return None if ours == theirs else f"got {ours}\n    not {theirs}"


def _shares_differ(answer: Allocation) -> bool:
    ids = [
        device.share_id for result in answer.results for device in result.devices.results if device.share_id
    ]
    return len(ids) == len(set(ids))


def _normal(result: dict[str, Any], compare: str) -> Any:
    """A result in which only real differences are left: quantities by value, nothing empty."""
    devices = [_normal_device(device) for device in result.get("devices", {}).get("results") or []]
    config = [_without_empty(entry) for entry in result.get("devices", {}).get("config") or []]
    terms = (result.get("nodeSelector") or {}).get("nodeSelectorTerms") or []
    selector = _as_multiset([_normal_term(term) for term in terms])
    return (devices if compare == "exact" else _as_multiset(devices)), config, selector


def _normal_device(device: dict[str, Any]) -> dict[str, Any]:
    fields = _without_empty(device)
    if "shareID" in fields:
        fields["shareID"] = "any"
    if "consumedCapacity" in fields:
        fields["consumedCapacity"] = {
            name: hash(Quantity.parse(amount)) for name, amount in fields["consumedCapacity"].items()
        }
    return fields


def _normal_term(term: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _as_multiset(
            [
                {**requirement, "values": sorted(requirement.get("values") or [])}
                for requirement in term.get(name) or []
            ]
        )
        for name in ("matchFields", "matchExpressions")
    }


def _without_empty(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, [], {}, "")}


def _as_multiset(values: list[Any]) -> Counter[str]:
    return Counter(json.dumps(value, sort_keys=True, default=repr) for value in values)


def main(folder: Path) -> int:
    """Run every case under `folder`. Returns 0 if all passed."""
    passed = failed = 0
    for path in sorted(folder.rglob("*.json")):
        case = json.loads(path.read_text())
        wrong = difference(case) or difference(case, outcome_of_fleet)
        if wrong is None:
            passed += 1
        else:
            failed += 1
            print(f"FAILED {case.get('name', path.stem)}: {wrong}")  # noqa: T201
    print(f"{passed} passed, {failed} failed")  # noqa: T201
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
