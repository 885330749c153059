"""Effects of DeviceTaintRules on a snapshot: tainted devices, and pods that wait because of them."""

import asyncio

import pytest

from rackloom.app.snapshot.assemble import site_snapshot
from rackloom.app.snapshot.cache import ReadCache
from rackloom.core.allocate.taint_rules import WithheldDevice
from rackloom.core.cluster.names import GPU_DRIVER
from rackloom.core.cluster.objects import (
    DEVICE_CLASS,
    DEVICE_TAINT_RULES,
    NAMESPACE,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_SLICE,
)
from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.index import SnapshotIndex
from rackloom.core.diagnosis.snapshot import Layer
from rackloom.lab.kube import refusals
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.objects import TypeSchema
from rackloom.lab.kube.server import FakeKube

V1, BETA = DEVICE_TAINT_RULES[:2]
OPERATOR = [{"operator": "Exists"}]


class Cluster:
    """Two nodes with two GPUs each, and pods that claim some."""

    def __init__(self, kind=V1, api=DirectApi):
        self.kube, self.kind = FakeKube(seed=1), kind
        self.kube.serve(kind, TypeSchema(status=True, generation=True))
        self.admin, self.reader = DirectApi(self.kube, "admin"), api(self.kube, "map")
        self.cache = ReadCache()

    async def begin(self):
        await self.admin.create(NAMESPACE, {"metadata": {"name": "team"}})
        selector = {"cel": {"expression": f"device.driver == '{GPU_DRIVER}'"}}
        await self.admin.create(
            DEVICE_CLASS, {"metadata": {"name": "gpu"}, "spec": {"selectors": [selector]}}
        )
        for node in ("n1", "n2"):
            ready = {"type": "Ready", "status": "True"}
            await self.admin.create(NODE, {"metadata": {"name": node}, "status": {"conditions": [ready]}})
            gpu = {"attributes": {"type": {"string": "gpu"}}}
            spec = {
                "driver": GPU_DRIVER,
                "nodeName": node,
                "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
                "devices": [{"name": f"gpu-{number}", **gpu} for number in range(2)],
            }
            await self.admin.create(RESOURCE_SLICE, {"metadata": {"name": node}, "spec": spec})
        return self

    async def taint(self, name, effect="NoSchedule", **selector):
        taint = {"key": "example.com/checked", "effect": effect, "timeAdded": "2026-11-27T03:00:07Z"}
        spec = {"deviceSelector": selector, "taint": taint}
        await self.admin.create(self.kind, {"metadata": {"name": name}, "spec": spec})

    async def wait(self, name, count, **exactly):
        """A pod that waits for `count` GPUs of one node."""
        exactly |= {"deviceClassName": "gpu", "allocationMode": "ExactCount", "count": count}
        request = {"name": "gpus", "exactly": exactly}
        meta = {"name": name, "namespace": "team"}
        spec = {"devices": {"requests": [request]}}
        await self.admin.create(RESOURCE_CLAIM, {"metadata": meta, "spec": spec})
        spec = {"containers": [], "resourceClaims": [{"name": "gpus", "resourceClaimName": name}]}
        await self.admin.create(POD, {"metadata": meta, "spec": spec})

    async def snapshot(self):
        return await site_snapshot(1.0, cluster=self.reader, known=self.cache)


def play(story):
    return asyncio.run(story())


def withheld(snapshot):
    return {claim.name: claim.withheld for claim in snapshot.claims if claim.withheld}


def findings(snapshot, check):
    return [finding for finding in examine(snapshot) if finding.check == check]


@pytest.mark.parametrize("kind", [V1, BETA])
def test_a_device_that_a_rule_taints_is_not_free_and_the_finding_names_the_rule(kind):
    async def story():
        cluster = await Cluster(kind).begin()
        before = await cluster.snapshot()
        assert SnapshotIndex(before).free_devices["n1"][GPU_DRIVER, "gpu"] == 2
        await cluster.taint("quarantine", pool="n1", device="gpu-1")
        await cluster.taint("preview", effect="None", pool="n2")
        after = await cluster.snapshot()
        free = SnapshotIndex(after).free_devices
        assert [free[node][GPU_DRIVER, "gpu"] for node in ("n1", "n2")] == [1, 2]
        (found,) = findings(after, Check.DEVICE_TAINT)
        assert found.subject == "n1/gpu-1"
        assert "DeviceTaintRule quarantine keeps workloads off it" in found.message
        assert found.fix.startswith("kubectl describe devicetaintrule quarantine")
        assert found.since == 1795748407
        await cluster.admin.delete(kind, "quarantine")
        assert not findings(await cluster.snapshot(), Check.DEVICE_TAINT)

    play(story)


def test_only_the_nodes_that_a_new_rule_may_concern_are_read_again():
    async def story():
        cluster = await Cluster().begin()
        before = {device.device_id: device for device in (await cluster.snapshot()).devices}
        await cluster.taint("quarantine", pool="n1")
        after = {device.device_id: device for device in (await cluster.snapshot()).devices}
        same = {key[1] for key, device in after.items() if device is before[key]}
        assert same == {"n2"}

    play(story)


def test_a_pod_that_a_rule_holds_up_is_found_with_the_rule_and_the_device():
    async def story():
        cluster = await Cluster().begin()
        await cluster.wait("pair", 2)
        assert not withheld(await cluster.snapshot()), "there is no rule"
        await cluster.taint("first", pool="n1", device="gpu-0")
        assert not withheld(await cluster.snapshot()), "the other node serves it"
        await cluster.taint("second", pool="n2", device="gpu-1")
        await cluster.wait("tolerant", 2, tolerations=OPERATOR)
        await cluster.wait("too-large", 3)
        snapshot = await cluster.snapshot()
        assert withheld(snapshot) == {"pair": (WithheldDevice("first", "n1", GPU_DRIVER, "gpu-0"),)}
        by_subject = {finding.subject: finding for finding in findings(snapshot, Check.CLAIMS)}
        held = by_subject["Pod team/pair"]
        assert "DeviceTaintRule first withholds n1/gpu-0" in held.message
        assert held.fix.startswith("kubectl describe devicetaintrule first")
        assert "DeviceTaintRule" not in by_subject["Pod team/too-large"].message

    play(story)


def test_a_user_who_may_not_list_rules_sees_the_rest_and_why_this_is_missing():
    class Narrow(DirectApi):
        async def list(self, kind, namespace=None, **how):
            if kind in (DEVICE_CLASS, *DEVICE_TAINT_RULES):
                raise refusals.forbidden(kind, "", "not yours to see")
            return await super().list(kind, namespace, **how)

    async def story():
        cluster = await Cluster(api=Narrow).begin()
        await cluster.taint("quarantine", pool="n1")
        snapshot = await cluster.snapshot()
        assert len(snapshot.devices) == 4
        assert "DeviceTaintRules may not be listed" in snapshot.layer(Layer.CLUSTER).problem

    play(story)
