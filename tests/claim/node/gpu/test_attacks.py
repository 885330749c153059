"""Attacks on MIG devices on demand."""

import msgspec
import pytest
from tests.claim.node.gpu.test_partitions import (
    SMALLEST,
    built,  # noqa: F401
    driver,  # noqa: F401
    mig_plugin,
    node,  # noqa: F401
    partition,
    reported,
)

from rackloom.claim.node.gpu.nvml import NvmlGpus, read_gpus
from rackloom.claim.node.plugin import CheckpointEntry, ClaimRef, PrepareState


@pytest.mark.slow
def test_an_observer_of_the_whole_blocks_no_part(node):
    async def work(process, kubelet):
        watcher = await node.claim("watcher", "gpu-0", adminAccess=True)
        await kubelet.prepare(watcher)
        part = await node.claim("part", SMALLEST)
        answers = await process.requests.prepare([part.ref], 4.0)
        assert not answers[part.uid].error

    reported(node, work)


@pytest.mark.slow
def test_a_stale_attempt_that_is_undone_leaves_the_device_of_a_later_claim(node, monkeypatch):
    async def work(process, kubelet):
        old, new = await node.claim("old", SMALLEST), await node.claim("new", SMALLEST)
        # The old claim's prepare was begun and never completed (a crash, or a reboot since).
        plugin = process._plugin
        intent = {
            "sharing": {},
            "partitions": [msgspec.to_builtins(partition(node.mig_root, "1g.10gb", 0))],
        }
        process.checkpoint.put(
            CheckpointEntry(ref=old.ref, state=PrepareState.STARTED, fingerprint="f", record=intent)
        )
        await kubelet.prepare(new)
        (made,) = read_gpus(node.mig_root).gpus[0].migs
        answers = await process.requests.unprepare([old.ref])
        assert not answers[old.uid].error
        assert [mig.uuid for mig in read_gpus(node.mig_root).gpus[0].migs] == [made.uuid]
        await kubelet.unprepare(new)
        assert not read_gpus(node.mig_root).gpus[0].mig_mode

    reported(node, work)


@pytest.mark.slow
def test_a_completed_claim_whose_spec_is_gone_keeps_its_device(node):
    async def work(process, kubelet):
        claim = await node.claim("c", SMALLEST)
        await kubelet.prepare(claim)
        (made,) = read_gpus(node.mig_root).gpus[0].migs
        process.sweeper.preparer.cdi.remove(claim.uid)
        await process.requests.prepare([claim.ref])
        assert [mig.uuid for mig in read_gpus(node.mig_root).gpus[0].migs] == [made.uuid]

    reported(node, work)


@pytest.mark.slow
def test_an_operators_device_made_since_the_last_look_is_not_destroyed(node):
    async def work(process, kubelet):
        claim = await node.claim("c", SMALLEST)
        made = NvmlGpus(node.mig_root, dynamic_mig=True).make(partition(node.mig_root, "1g.10gb", 0))
        await process.requests.prepare([claim.ref], 3.0)
        assert made.uuid in [mig.uuid for mig in read_gpus(node.mig_root).gpus[0].migs]

    reported(node, work)


@pytest.mark.slow
def test_a_claim_ended_while_the_driver_is_away_leaks_nothing(node, monkeypatch):
    async def work(process, kubelet):
        from rackloom.errors import Refused

        claim = await node.claim("c", SMALLEST)
        await kubelet.prepare(claim)
        monitor = process._plugin._monitor
        read = monitor._reader.source.read

        def away():
            raise Refused("no libnvidia-ml.so.1")

        monitor._reader.source.read = away
        await monitor.observe()
        answers = await process.requests.unprepare([claim.ref], 3.0)
        monitor._reader.source.read = read
        await monitor.observe()
        left = read_gpus(node.mig_root).gpus[0].migs
        assert answers[claim.uid].error or not left, (claim.uid in process.checkpoint.claims, left)

    reported(node, work)
