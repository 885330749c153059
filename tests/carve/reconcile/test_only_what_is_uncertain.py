"""Doubt about one tenant's GPUs makes no other tenant's instance unknown."""

import asyncio
from pathlib import Path

import pytest
from tests.carve.reconcile.served_rack import make_fabric, served_rack
from tests.simulation.faults import write_between_lists

from rackloom.carve.reconcile import loop
from rackloom.core.partitions.domain import UNCERTAIN_REASON
from rackloom.lab.faults import put_partition
from rackloom.lab.switches.servers import NmxcServer


def test_answers_without_an_id_for_one_tenant_leave_another_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "FIRST_RETRY_SECONDS", 0.05)

    async def scenario() -> None:
        async with (
            NmxcServer(make_fabric()) as switch,
            served_rack(switch.url, tmp_path) as site,
            site.tenant("one") as first,
            site.tenant("two") as second,
            first.listening(),
            second.listening(),
        ):
            mine = await first.instance()
            await first.until_told(mine, "Ready")
            heard = len(first.events)
            for _ in range(1000):
                switch.faults.omit_id_of_next("CreatePartition")
            asked = switch.faults.calls["CreatePartition"]
            theirs = await second.instance()
            shown = set()
            while switch.faults.calls["CreatePartition"] < asked + 3:
                shown.add(await first.status(mine))
                domains = await first.get("nvlink-domain")
                shown.update(domain["status"] for domain in domains)
            assert shown == {"Ready", "Observed"}
            assert [event for _, event in first.events[heard:] if event["id"] == mine] == []
            assert await second.status(theirs) == "Provisioning"
            (row, *_) = await second.get(f"instance/{theirs}/nvlink-interface")
            assert "the outcome of create-partition on partition 'rl-" in row["statusMessage"]
            messages = [event["message"] for _, event in second.events if event["id"] == row["id"]]
            assert len(messages) == len(set(messages)), "a reason that was withdrawn came back"
            switch.faults.clear()
            site.reconciler.wake(frozenset({switch.fabric.domain}))
            await second.until(theirs, "Ready")

    asyncio.run(scenario())


def test_what_was_carried_out_without_a_valid_answer_is_found_in_the_same_pass(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            NmxcServer(make_fabric()) as switch,
            served_rack(switch.url, tmp_path) as site,
            site.tenant("one") as first,
        ):
            switch.faults.omit_id_of_next("CreatePartition", carried_out=True)
            mine = await first.instance()
            await first.until(mine, "Ready")
            assert switch.faults.calls["CreatePartition"] == 1

    asyncio.run(scenario())


def test_one_lost_call_of_a_reading_makes_nothing_unknown(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            NmxcServer(make_fabric()) as switch,
            served_rack(switch.url, tmp_path) as site,
            site.tenant("one") as first,
            first.listening(),
        ):
            mine = await first.instance()
            await first.until_told(mine, "Ready")
            heard = len(first.events)
            switch.faults.omit_header_of_next("GetGpuInfoList")
            read = switch.faults.calls["GetPartitionInfoList"]
            site.reconciler.wake(frozenset({switch.fabric.domain}))
            while switch.faults.calls["GetPartitionInfoList"] == read:
                assert await first.status(mine) == "Ready"
            assert await first.status(mine) == "Ready"
            assert [event for _, event in first.events[heard:] if event["id"] == mine] == []

    asyncio.run(scenario())


def test_a_change_between_two_lists_is_read_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            NmxcServer(make_fabric()) as switch,
            served_rack(switch.url, tmp_path) as site,
            site.tenant("one") as first,
            first.listening(),
        ):
            mine = await first.instance()
            await first.until_told(mine, "Ready")
            (partition,) = switch.fabric.partitions.values()
            free = max(gpu for gpu in switch.fabric.gpus if gpu not in partition.guids)
            foreign = put_partition(switch, [free])
            write_between_lists(switch, lambda fabric: fabric.delete(foreign.id))
            read = switch.faults.calls["GetGpuInfoList"]
            site.reconciler.wake(frozenset({switch.fabric.domain}))
            while switch.faults.calls["GetGpuInfoList"] < read + 2:
                assert await first.status(mine) == "Ready"
            assert "Unknown" not in {event["status"] for _, event in first.events}

    asyncio.run(scenario())


def test_a_list_that_omits_a_partition_leaves_the_other_tenants_ready(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            NmxcServer(make_fabric()) as switch,
            served_rack(switch.url, tmp_path) as site,
            site.tenant("one") as first,
            site.tenant("two") as second,
        ):
            mine, theirs = await first.instance(), await second.instance()
            await first.until(mine, "Ready")
            await second.until(theirs, "Ready")
            (row, *_) = await second.get(f"instance/{theirs}/nvlink-interface")
            omitted = switch.fabric.partition_of(int(row["gpuGuid"]))
            switch.faults.hide_partition(omitted, lists=1000)
            changes = switch.faults.calls["CreatePartition"]
            site.reconciler.wake(frozenset({switch.fabric.domain}))
            await second.until(theirs, "Unknown")
            (row, *_) = await second.get(f"instance/{theirs}/nvlink-interface")
            assert row["statusMessage"] == f"unknown: {UNCERTAIN_REASON}"
            assert await first.status(mine) == "Ready"
            (domain,) = await first.get("nvlink-domain")
            assert domain["status"] == "Observed"
            assert switch.faults.calls["CreatePartition"] == changes, "nothing is asked for in doubt"
            switch.faults.clear()
            site.reconciler.wake(frozenset({switch.fabric.domain}))
            await second.until(theirs, "Ready")

    asyncio.run(scenario())
