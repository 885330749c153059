"""A controller that led and has yielded belongs to its domain again, so requests to it are judged."""

import asyncio
import random

from tests.simulation.carving.racks import ExecutedChange, JudgedRack

from rackloom.carve.fabric.nmxc import nmx_c_pb2 as pb
from rackloom.lab.switches.fabric import SeededNames, fabrics_of
from rackloom.topology import profiles
from rackloom.topology.rack import build_site


def test_what_is_asked_of_one_that_yielded_is_told_again() -> None:
    async def main() -> None:
        site = build_site(profiles.load_rack("gb200-nvl72"), 1, SeededNames("old"))
        (fabric,) = fabrics_of(site, "old")
        rack = JudgedRack(site.domains[0], fabric, random.Random(1))
        changes: list[ExecutedChange] = []
        rack.watchers.append(lambda _, event: changes.append(event))
        await rack.move()
        removal = pb.DeletePartitionRequest().SerializeToString()
        old = rack.switch_at(await rack.old_leader_returns())
        await old.unary("DeletePartition", removal, 5.0)
        assert changes == []
        await rack.old_leader_yields()
        await old.unary("DeletePartition", removal, 5.0)
        assert [change.rpc for change in changes] == ["DeletePartition"]

    asyncio.run(main())
