"""Slices: the plan makes the wanted ones, in as few writes as there are differences."""

import copy

from hypothesis import given
from hypothesis import strategies as st

from rackloom.claim.node.plugin import DevicePool
from rackloom.claim.node.slices import Create, Delete, SliceOwner, Update, plan_slices, split_into_slices
from rackloom.core.allocate.objects import (
    CapacityRequestPolicy,
    Counter,
    CounterSet,
    Device,
    DeviceAttribute,
    DeviceCapacity,
    DeviceTaint,
)

OWNER = SliceOwner(driver="d.example.com", node="n1", node_uid="node-uid")
TAINT = DeviceTaint(key="d.example.com/lost", effect="NoSchedule")
device_lists = st.lists(
    st.builds(
        Device,
        name=st.integers(0, 300).map(lambda number: f"dev-{number}"),
        attributes=st.dictionaries(
            st.sampled_from(["a", "b"]), st.builds(DeviceAttribute, int_=st.integers(0, 3))
        ),
        capacity=st.just(
            {"memory": DeviceCapacity(value="1024Mi", request_policy=CapacityRequestPolicy(default="1024Mi"))}
        ),
        taints=st.just(()) | st.just((TAINT,)),
    ),
    unique_by=lambda device: device.name,
    max_size=5,
)
counter_sets = st.lists(st.integers(1, 20), max_size=10).map(
    lambda amounts: tuple(
        CounterSet(name=f"gpu-{number}", counters={"memory": Counter(value=str(1000 * amount))})
        for number, amount in enumerate(amounts)
    )
)
device_pools = st.builds(
    DevicePool, name=st.sampled_from(["p1", "p2"]), devices=device_lists.map(tuple), counters=counter_sets
)
pools = st.lists(device_pools, max_size=2, unique_by=lambda pool: pool.name).map(tuple)


class Server:
    """Slices as an API server keeps them: it words quantities its own way and dates taints."""

    def __init__(self):
        self.slices = {}
        self.count = 0

    def run(self, actions):
        for action in actions:
            match action:
                case Create(new):
                    self.count += 1
                    name = f"{new['metadata']['generateName']}{self.count:05}"
                    meta = {**new["metadata"], "name": name, "uid": f"u{self.count}"}
                    self.slices[name] = self.admit({**new, "metadata": meta})
                case Update(changed):
                    assert changed["metadata"]["name"] in self.slices
                    self.slices[changed["metadata"]["name"]] = self.admit(changed)
                case Delete(name, uid):
                    assert self.slices.pop(name)["metadata"]["uid"] == uid

    def admit(self, obj):
        obj = copy.deepcopy(obj)
        # Kubernetes 1.35 and later: a slice has devices or counters.
        assert len({"devices", "sharedCounters"} & obj["spec"].keys()) == 1
        for part in obj["spec"].get("sharedCounters", ()):
            part["counters"]["memory"]["value"] = f"{int(part['counters']['memory']['value']) // 1000}k"
        for device in obj["spec"].get("devices", ()):
            for capacity in device.get("capacity", {}).values():
                capacity["value"] = capacity["requestPolicy"]["default"] = "1Gi"
            for taint in device.get("taints", ()):
                self.count += 1
                taint.setdefault("timeAdded", f"t{self.count}")
        # Kubernetes 1.34 writes the field out even if it is empty.
        obj["spec"].setdefault("devices", None)
        return obj

    def all(self):
        return list(self.slices.values())

    def names(self, pool):
        """As the scheduler reads them: the newest generation, if it is complete."""
        mine = [slice_["spec"] for slice_ in self.all() if slice_["spec"]["pool"]["name"] == pool]
        newest = max((spec["pool"]["generation"] for spec in mine), default=0)
        found = [spec for spec in mine if spec["pool"]["generation"] == newest]
        complete = found and len(found) == found[0]["pool"]["resourceSliceCount"]
        fields = ("devices", "sharedCounters")
        names = (part["name"] for spec in found for field in fields for part in spec.get(field) or ())
        return sorted(names) if complete else None


@given(st.lists(pools, min_size=1, max_size=4))
def test_the_plan_makes_what_is_wanted_and_then_rests(changes):
    server = Server()
    for wanted in changes:
        server.run(plan_slices(wanted, server.all(), OWNER))
        for pool in wanted:
            assert server.names(pool.name) == names(pool)
        assert {slice_["spec"]["pool"]["name"] for slice_ in server.all()} == {pool.name for pool in wanted}
        assert plan_slices(wanted, server.all(), OWNER) == ()


@given(pools, pools, st.integers(0, 6))
def test_a_plan_that_was_cut_off_is_finished_by_the_next(before, after, done):
    server = Server()
    server.run(plan_slices(before, server.all(), OWNER))
    server.run(plan_slices(after, server.all(), OWNER)[:done])
    server.run(plan_slices(after, server.all(), OWNER))
    assert plan_slices(after, server.all(), OWNER) == ()
    for pool in after:
        assert server.names(pool.name) == names(pool)


def names(pool):
    return sorted(part.name for part in (*pool.devices, *pool.counters))


def devices(count, taints=()):
    return tuple(Device(name=f"dev-{number}", taints=taints) for number in range(count))


def test_a_slice_has_at_most_as_many_devices_as_the_api_takes():
    def sizes(devices, counters=()):
        contents = split_into_slices(DevicePool(name="n1", devices=devices, counters=counters))
        return [(field, len(part)) for content in contents for field, part in content.items()]

    assert sizes(devices(300)) == [("devices", 128), ("devices", 128), ("devices", 44)]
    assert sizes(devices(130, (TAINT,))) == [("devices", 64), ("devices", 64), ("devices", 2)]
    assert sizes(()) == [("devices", 0)]
    counters = tuple(CounterSet(name=f"c{number}") for number in range(9))
    assert sizes(devices(1), counters) == [("sharedCounters", 8), ("sharedCounters", 1), ("devices", 1)]


def test_a_new_slice_belongs_to_the_node():
    (action,) = plan_slices([DevicePool(name="n1", devices=devices(1))], [], OWNER)
    assert action.slice["metadata"]["generateName"] == "00000-d.example.com-n1-"
    (owner,) = action.slice["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("Node", "node-uid", True)
    assert action.slice["spec"]["pool"] == {"name": "n1", "generation": 1, "resourceSliceCount": 1}


def test_a_taint_that_stays_keeps_its_time():
    server = Server()
    server.run(plan_slices([DevicePool(name="n1", devices=devices(1, (TAINT,)))], [], OWNER))
    since = server.all()[0]["spec"]["devices"][0]["taints"][0]["timeAdded"]
    server.run(plan_slices([DevicePool(name="n1", devices=devices(2, (TAINT,)))], server.all(), OWNER))
    first, second = server.all()[0]["spec"]["devices"]
    assert first["taints"][0]["timeAdded"] == since
    assert second["taints"][0]["timeAdded"] != since


def test_removals_come_last():
    server = Server()
    server.run(plan_slices([DevicePool(name="old", devices=devices(1))], [], OWNER))
    kinds = [
        type(slice_)
        for slice_ in plan_slices([DevicePool(name="new", devices=devices(1))], server.all(), OWNER)
    ]
    assert kinds == [Create, Delete]
