"""Slices on an API server that drops unknown fields: published and reported once, never in a loop."""

import asyncio

import pytest
import structlog

from rackloom.claim.kube.api import Rejected
from rackloom.claim.node.plugin import DevicePool
from rackloom.claim.node.prepare import PluginMetrics
from rackloom.claim.node.slices import DroppedFields, SlicePublisher
from rackloom.core.allocate.objects import (
    CapacityRequestPolicy,
    Counter,
    CounterConsumption,
    CounterSet,
    Device,
    DeviceAttribute,
    DeviceCapacity,
    DeviceTaint,
)
from rackloom.core.cluster.objects import NODE, RESOURCE_SLICE
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.virtual import event_loop

TAINT = DeviceTaint(key="d.example.com/lost", effect="NoSchedule")


def device(number):
    return Device(
        name=f"dev-{number}",
        attributes={"a": DeviceAttribute(int_=number)},
        capacity={
            "memory": DeviceCapacity(value="1024Mi", request_policy=CapacityRequestPolicy(default="1024Mi"))
        },
        taints=(TAINT,),
    )


class Plugin:
    driver = "d.example.com"
    kinds = ("d",)

    def __init__(self):
        self.devices = [device(0), device(1)]

    async def pools(self):
        return (DevicePool(name="n1", devices=tuple(self.devices)),)


def dropping(*fields):
    """A server of a version or setting that does not know these fields of a device, or of its capacity."""

    def rule(new, old):
        devices = [without(device, fields) for device in new["spec"]["devices"]]
        for device in devices:
            device["capacity"] = {name: without(value, fields) for name, value in device["capacity"].items()}
        return {**new, "spec": {**new["spec"], "devices": devices}}

    return rule


def without(obj, fields):
    return {key: value for key, value in obj.items() if key not in fields}


@pytest.mark.parametrize("fields", [(), ("taints",), ("requestPolicy",), ("taints", "requestPolicy")])
def test_what_a_server_does_not_keep_is_not_written_again_and_again(fields):
    async def story():
        kube, plugin = FakeKube(), Plugin()
        kube.rules[RESOURCE_SLICE].append(dropping(*fields))
        api = DirectApi(kube, "plugin")
        await api.create(NODE, {"metadata": {"name": "n1"}})
        publisher = SlicePublisher(plugin, api, "n1", PluginMetrics(plugin.driver, "n1", plugin.kinds))
        task = asyncio.create_task(publisher.run())
        kube.calls.clear()
        await asyncio.sleep(3600)
        assert publisher.published.is_set()
        assert kube.writes("plugin") == 1
        plugin.devices.append(device(2))
        publisher.wake()
        await asyncio.sleep(3600)
        assert publisher.published.is_set()
        assert kube.writes("plugin") == 2
        (stored,) = (await api.list(RESOURCE_SLICE)).items
        assert [device["name"] for device in stored["spec"]["devices"]] == ["dev-0", "dev-1", "dev-2"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with structlog.testing.capture_logs() as logs:
        event_loop.run_simulation(1, story)
    output = [log["fields"] for log in logs if log["event"] == "node.slice-fields-dropped"]
    assert len(output) == (2 if fields else 0)
    assert all(any(path.endswith(field) for path in paths) for paths in output for field in fields)


def test_a_slice_that_somebody_else_stripped_is_written_again():
    """Only the server's own answer to a write shows all that it can keep."""

    async def story():
        kube, plugin = FakeKube(), Plugin()
        api = DirectApi(kube, "plugin")
        await api.create(NODE, {"metadata": {"name": "n1"}})
        publisher = SlicePublisher(plugin, api, "n1", PluginMetrics(plugin.driver, "n1", plugin.kinds))
        await publisher.publish()
        (stored,) = (await api.list(RESOURCE_SLICE)).items
        await DirectApi(kube, "other").replace(RESOURCE_SLICE, dropping("taints")(stored, None))
        await publisher.publish()
        (stored,) = (await api.list(RESOURCE_SLICE)).items
        assert all(device["taints"] for device in stored["spec"]["devices"])

    event_loop.run_simulation(1, story)


def test_a_server_that_has_learned_a_field_is_believed():
    kept = DroppedFields()
    sent = {"spec": {"devices": [{"name": "a", "taints": [{"key": "k", "effect": "NoSchedule"}]}]}}
    assert kept.record(sent, {"spec": {"devices": [{"name": "a"}]}}) == ("devices.taints",)
    assert kept.of(sent["spec"])["devices"] == [{"name": "a"}]
    assert kept.record(sent, sent) == ()
    assert kept.of(sent["spec"])["devices"] == sent["spec"]["devices"]


class Partitioned(Plugin):
    """A GPU that is published whole and in two parts."""

    async def pools(self):
        draws = [CounterConsumption(counter_set="gpu", counters={"memory": Counter(value="16000")})]
        parts = tuple(Device(name=f"part-{number}", consumes_counters=tuple(draws)) for number in range(2))
        counters = (CounterSet(name="gpu", counters={"memory": Counter(value="32000")}),)
        whole = (Device(name="gpu"),)
        return (DevicePool(name="n1", devices=(*whole, *parts), counters=counters, without_counters=whole),)


def gate_is_off(new, old):
    spec = without(new["spec"], ("sharedCounters",))
    devices = [without(device, ("consumesCounters",)) for device in spec.get("devices", ())]
    return {**new, "spec": {**spec, "devices": devices}}


def refuses_shared_counters(new, old):
    """Kubernetes 1.34: counters are in the slice of the devices that draw from them."""
    if any("consumesCounters" in device for device in new["spec"].get("devices", ())):
        raise Rejected(422, "Invalid", "spec.devices[1].consumesCounters[0].counterSet: Invalid value")
    return new


@pytest.mark.parametrize(
    ("rules", "names"),
    [((), ["gpu", "part-0", "part-1"]), ((gate_is_off,), ["gpu"]), ((refuses_shared_counters,), ["gpu"])],
)
def test_parts_are_published_only_where_their_counters_are_kept(rules, names):
    """A scheduler that sees no counters would allocate parts that overlap."""

    async def story():
        kube, plugin = FakeKube(), Partitioned()
        kube.rules[RESOURCE_SLICE].extend(rules)
        api = DirectApi(kube, "plugin")
        await api.create(NODE, {"metadata": {"name": "n1"}})
        publisher = SlicePublisher(plugin, api, "n1", PluginMetrics(plugin.driver, "n1", plugin.kinds))
        await publisher.publish()
        slices = (await api.list(RESOURCE_SLICE)).items
        await publisher.publish()
        assert (await api.list(RESOURCE_SLICE)).items == slices
        assert [device["name"] for part in slices for device in part["spec"].get("devices", ())] == names
        assert sum("sharedCounters" in part["spec"] for part in slices) == (len(names) > 1)

    event_loop.run_simulation(1, story)


def test_counters_that_are_dropped_after_the_dry_run_take_the_parts_back():
    """Of several API servers, or after a downgrade, one that writes may keep less than the one that tried."""

    async def story():
        kube, plugin = FakeKube(), Partitioned()
        api = DirectApi(kube, "plugin")
        await api.create(NODE, {"metadata": {"name": "n1"}})
        create = api.create

        async def with_gate(kind, obj, *, dry_run=False):
            return obj if dry_run else await create(kind, obj)

        api.create = with_gate
        kube.rules[RESOURCE_SLICE].append(gate_is_off)
        publisher = SlicePublisher(plugin, api, "n1", PluginMetrics(plugin.driver, "n1", plugin.kinds))

        async def published():
            await publisher.publish()
            slices = (await api.list(RESOURCE_SLICE)).items
            return [device["name"] for part in slices for device in part["spec"].get("devices", ())]

        assert await published() == ["gpu"]
        kube.rules[RESOURCE_SLICE].remove(gate_is_off)
        assert await published() == ["gpu", "part-0", "part-1"]

    event_loop.run_simulation(1, story)
