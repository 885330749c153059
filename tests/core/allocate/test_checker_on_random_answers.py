"""The checker on random answers: it passes valid answers, and sees each kind of planted fault.

RACKLOOM_RANDOM_ANSWERS sets how many answers are judged (a few thousand without it). The answers are the same
for the same number.
"""

import os
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec
import pytest

from rackloom.core.allocate.checker import AllocationChecker
from rackloom.core.allocate.inputs import DeviceId, InUse
from rackloom.core.allocate.objects import (
    AllocationResult,
    DeviceAllocationResult,
    DeviceClass,
    DeviceResult,
    Node,
    ResourceClaim,
    ResourceSlice,
)

ANSWERS = int(os.environ.get("RACKLOOM_RANDOM_ANSWERS", "4000"))
PER_CLUSTER = 200
NODE = msgspec.convert({"metadata": {"name": "n"}}, Node)
CLASSES = msgspec.convert([{"metadata": {"name": "any"}, "spec": {}}], list[DeviceClass])
TOTAL = 6
Device = dict[str, Any]


class World:
    """A random node and claim, and the rules of both as plain numbers."""

    def __init__(self, random: Random) -> None:
        self.devices = [self._device(random, number) for number in range(random.randint(4, 12))]
        self.held = {device["name"] for device in self.devices if random.random() < 0.15}
        self.count = random.randint(1, 3)
        self.kind = random.choice("ab")
        self.matched, self.tolerant = random.random() < 0.4, random.random() < 0.3
        self.checker = AllocationChecker(NODE, CLASSES, self._slices(), state=self._state())
        self.claim = self._claim()
        self.named = {device["name"]: device for device in self.devices}

    def _device(self, random: Random, number: int) -> Device:
        return {
            "name": f"d{number}",
            "kind": random.choice("aab"),
            "root": random.randint(0, 2),
            "draw": random.choice([0, 0, 1, 2, 3]),
            "tainted": random.random() < 0.15,
        }

    def _slices(self) -> list[ResourceSlice]:
        pool = {"name": "p", "generation": 1, "resourceSliceCount": 2}
        counters = [{"name": "x", "counters": {"m": {"value": str(TOTAL)}}}]
        specs: list[dict[str, Any]] = [
            {"sharedCounters": counters},
            {"devices": list(map(_published, self.devices))},
        ]
        return [
            msgspec.convert(
                {
                    "metadata": {"name": f"s{at}"},
                    "spec": {"driver": "d", "pool": pool, "nodeName": "n", **spec},
                },
                ResourceSlice,
            )
            for at, spec in enumerate(specs)
        ]

    def _state(self) -> InUse:
        return InUse(dedicated=frozenset(DeviceId("d", "p", name) for name in self.held))

    def _claim(self) -> ResourceClaim:
        ask = {
            "deviceClassName": "any",
            "allocationMode": "ExactCount",
            "count": self.count,
            "selectors": [{"cel": {"expression": f"device.attributes['d'].kind == '{self.kind}'"}}],
            "tolerations": [{"key": "t", "operator": "Exists"}] if self.tolerant else [],
        }
        devices = {
            "requests": [{"name": "r", "exactly": ask}],
            "constraints": [{"matchAttribute": "d/root"}] if self.matched else [],
        }
        return msgspec.convert({"metadata": {"name": "c"}, "spec": {"devices": devices}}, ResourceClaim)

    def valid(self, names: Sequence[str]) -> bool:
        """The rules again, in their plainest form."""
        if len(names) != self.count or len(set(names)) != len(names) or not set(names) <= set(self.named):
            return False
        given = [self.named[name] for name in names]
        drawn = sum(self.named[name]["draw"] for name in {*names, *self.held})
        before = sum(self.named[name]["draw"] for name in self.held)
        return (
            not self.held & set(names)
            and all(device["kind"] == self.kind for device in given)
            and (self.tolerant or not any(device["tainted"] for device in given))
            and (not self.matched or len({device["root"] for device in given}) == 1)
            and (drawn <= TOTAL or drawn == before)
        )


def _published(device: Device) -> dict[str, Any]:
    draws = [{"counterSet": "x", "counters": {"m": {"value": str(device["draw"])}}}] if device["draw"] else []
    return {
        "name": device["name"],
        "attributes": {"kind": {"string": device["kind"]}, "root": {"int": device["root"]}},
        "consumesCounters": draws,
        "taints": [{"key": "t", "effect": "NoSchedule"}] if device["tainted"] else [],
    }


def _answer(names: Sequence[str], request: str = "r") -> list[AllocationResult]:
    results = tuple(DeviceResult(request=request, driver="d", pool="p", device=name) for name in names)
    return [AllocationResult(devices=DeviceAllocationResult(results=results))]


def test_the_checker_judges_random_answers_as_the_rules_do() -> None:
    random = Random(ANSWERS)
    passed = 0
    for _ in range(-(-ANSWERS // PER_CLUSTER)):
        world = World(random)
        fitting = [
            device["name"]
            for device in world.devices
            if world.valid([device["name"]] * 1) or random.random() < 0.5
        ]
        for _ in range(PER_CLUSTER):
            some = fitting if fitting and random.random() < 0.8 else [*world.named, "ghost"]
            names = random.choices(some, k=world.count if random.random() < 0.9 else random.randint(0, 4))
            expected = world.valid(names)
            found = list(world.checker.violations([world.claim], _answer(names)))
            assert (not found) == expected, (names, found, world.__dict__)
            passed += expected
    assert 0 < passed < ANSWERS


Plant = Callable[[World, list[str]], list[str] | None]


def _held(world: World, names: list[str]) -> list[str] | None:
    return [*names[1:], min(world.held)] if world.held else None


def _other_kind(world: World, names: list[str]) -> list[str] | None:
    others = [device["name"] for device in world.devices if device["kind"] != world.kind]
    return [*names[1:], others[0]] if others else None


def _twice(_: World, names: list[str]) -> list[str] | None:
    return [names[0], *names[:-1]] if len(names) > 1 else None


PLANTS: dict[str, Plant] = {
    "one missing": lambda _, names: names[1:],
    "one too many": lambda world, names: [*names, next(iter(set(world.named) - set(names)), "ghost")],
    "no such device": lambda _, names: [*names[1:], "ghost"],
    "in use": _held,
    "of another kind": _other_kind,
    "one twice": _twice,
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_seen(plant: str) -> None:
    random = Random(plant)
    planted = 0
    while planted < max(20, ANSWERS // 100):
        world = World(random)
        names = random.sample(sorted(world.named), world.count)
        if not world.valid(names):
            continue
        assert not list(world.checker.violations([world.claim], _answer(names)))
        wrong = PLANTS[plant](world, names)
        if wrong is not None:
            assert list(world.checker.violations([world.claim], _answer(wrong)))
            planted += 1
