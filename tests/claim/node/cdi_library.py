"""CDI specs read by the library that containerd has, in a small Go program that is built once."""

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tests.claim.node.go_programs import go_program
from tests.cluster.build import Tools

READER = Tools(Path(__file__).parent / "cdi_reader", {"cdi-reader": "."})


class Container(msgspec.Struct, frozen=True):
    """The result for one container: its OCI spec, or the reason that there is none."""

    refused: str
    spec: dict[str, Any] | None

    @property
    def devices(self) -> list[dict[str, Any]]:
        assert self.spec is not None, self.refused
        return list(self.spec["linux"].get("devices", ()))

    @property
    def mounts(self) -> dict[str, str]:
        """Paths on the host by path in the container."""
        assert self.spec is not None, self.refused
        return {mount["destination"]: mount["source"] for mount in self.spec.get("mounts") or ()}

    @property
    def allowed(self) -> set[tuple[int, int, str]]:
        """The devices that the cgroup allows: major, minor, access."""
        assert self.spec is not None, self.refused
        rules = self.spec["linux"].get("resources", {}).get("devices", ())
        return {(rule["major"], rule["minor"], rule["access"]) for rule in rules if rule["allow"]}


class Reading(msgspec.Struct, frozen=True):
    """The library's reading of a directory of specs."""

    minimum: dict[str, str]
    """The oldest version that each file may carry."""
    errors: dict[str, list[str]]
    """Errors by file."""
    containers: list[Container]


ReadSpecs = Callable[..., Reading]


def program() -> Path:
    """The reader, built if it is missing."""
    return go_program(READER, "cdi-reader", "containerd's CDI library")


def read_specs(binary: Path, directory: Path, *containers: Sequence[str]) -> Reading:
    """Load the specs of `directory`, and make each container with the CDI IDs that it is given."""
    done = subprocess.run(
        [binary, directory, *(",".join(ids) for ids in containers)], capture_output=True, check=True
    )
    return msgspec.convert(json.loads(done.stdout), Reading)
