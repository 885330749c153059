"""Devices out of slices: what our plugins and others publish, with as much of the join key as there is."""

from rackloom.app.snapshot.devices import DeviceCache
from rackloom.topology.join_key import SlotKey


def slice_of(driver, node, devices, generation=1, name=None):
    pool = {"name": name or node, "generation": generation, "resourceSliceCount": 1}
    spec = {"driver": driver, "nodeName": node, "pool": pool, "devices": devices}
    return {"metadata": {"uid": f"{driver}-{node}", "resourceVersion": str(generation)}, "spec": spec}


def text(**values):
    return {name: {"string": value} for name, value in values.items()}


def device(name, attributes, **more):
    return {"name": name, "attributes": attributes, **more}


GPU = device(
    "gpu-0",
    text(type="gpu", uuid="GPU-1", chassisSerial="C1", fabricGUID="0xff", clique="c.1", nicPartner="mlx5_0")
    | text(nicPartnerPCIBusID="0002:03:00.0", nicPartnerClass="PIX")
    | {"slot": {"int": 3}, "moduleID": {"int": 2}, "resource.kubernetes.io/numaNode": {"int": 1}}
    | {"resource.kubernetes.io/pciBusID": {"string": "0008:01:00.0"}},
    taints=[{"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"}],
)


def test_a_gpu_of_our_plugin_says_who_it_is_and_where():
    (found,) = DeviceCache().of([slice_of("gpu.nvidia.com", "n1", [GPU])]).devices
    assert found.kind == "gpu"
    assert found.key.place.value == SlotKey("C1", 3, 2)
    assert found.key.fabric_guid.value == 0xFF
    assert found.key.gpu_uuid.value == "GPU-1"
    assert found.key.pci_address.value == "0008:01:00.0"
    assert (found.clique, found.numa, found.partner_address, found.partner_class) == (
        "c.1",
        1,
        "0002:03:00.0",
        "PIX",
    )
    assert found.taints == ("gpu.nvidia.com/xid=79:NoSchedule",)


def test_a_device_is_tainted_since_the_first_taint_that_keeps_pods_away():
    def since(*taints):
        named = [{"key": "a", "effect": effect, "timeAdded": time} for effect, time in taints]
        slices = [slice_of("gpu.nvidia.com", "n1", [{**GPU, "taints": named}])]
        return DeviceCache().of(slices).devices[0].tainted_since

    warned = ("None", "2026-11-27T00:00:00Z")
    assert (
        since(warned, ("NoExecute", "2026-11-27T03:00:09Z"), ("NoSchedule", "2026-11-27T03:00:07Z"))
        == 1795748407
    )
    assert since(warned) is None
    assert since(("NoSchedule", "")) is None


def test_a_gpu_of_another_driver_gets_its_place_from_the_imex_device_of_its_node():
    bare = device("gpu-0", text(type="gpu", uuid="GPU-1"))
    channel = device(
        "channel-0",
        text(type="channel", chassisSerial="C1", module2UUID="GPU-1", module2FabricGUID="0xff")
        | {"slot": {"int": 3}},
    )
    slices = [
        slice_of("gpu.nvidia.com", "n1", [bare]),
        slice_of("gpu.nvidia.com", "n2", [bare]),
        slice_of("compute-domain.nvidia.com", "n1", [channel]),
    ]
    here, elsewhere = (device for device in DeviceCache().of(slices).devices if device.kind == "gpu")
    assert (here.node, here.key.place.value, here.key.fabric_guid.value) == ("n1", SlotKey("C1", 3, 2), 0xFF)
    assert (elsewhere.node, elsewhere.key.place) == ("n2", None)


def test_a_nic_says_its_link_and_the_gpu_it_serves():
    nic = device(
        "pci-0002-03-00-0",
        text(rdmaState="down", state="up", gpuPartnerPCIBusID="0008:01:00.0", pciAddress="0002:03:00.0")
        | {"rdma": {"bool": True}, "linkSpeedGbps": {"int": 400}},
    )
    (found,) = DeviceCache().of([slice_of("dra.net", "n1", [nic])]).devices
    assert (found.kind, found.link, found.gbps, found.partner) == ("nic", "down", 400, "0008:01:00.0")
    assert found.key.pci_address.value == "0002:03:00.0"


def test_only_the_newest_generation_of_a_pool_counts():
    old = slice_of("gpu.nvidia.com", "n1", [GPU, device("gpu-9", text(type="gpu"))])
    new = slice_of("gpu.nvidia.com", "n1", [GPU], generation=2)
    assert [device.name for device in DeviceCache().of([old, new]).devices] == ["gpu-0"]


def test_a_reading_beside_another_one_tells_what_it_was_given():
    class Interrupted(DeviceCache):
        """A cache in which another thread reads other slices at the worst moment."""

        armed = False

        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "_newest" and self.armed:
                self.armed = False
                self.of([slice_of("gpu.nvidia.com", "n2", [GPU])])

    known = Interrupted()
    known.armed = True
    found = known.of([slice_of("gpu.nvidia.com", "n1", [GPU])])
    assert [device.node for device in found.devices] == ["n1"]


def test_an_empty_pool_is_a_pool():
    (found,) = DeviceCache().of([slice_of("gpu.nvidia.com", "n1", [])]).pools
    assert (found.driver, found.node) == ("gpu.nvidia.com", "n1")


def test_attributes_that_make_no_sense_are_left_out():
    odd = text(uuid="GPU-1", fabricGUID="zz", chassisSerial="C1") | {
        "slot": {"string": "three"},
        "moduleID": {"int": 2},
        "module²UUID": {"string": "GPU-2"},
        "module01UUID": {"string": "GPU-3"},
        "module4UUID": {"string": "GPU-4"},
        "module4FabricGUID": {"string": "-1"},
    }
    (found,) = DeviceCache().of([slice_of("other.example", "n1", [device("d", odd)])]).devices
    assert found.key.gpu_uuid.value == "GPU-1"
    assert found.key.fabric_guid is None
    assert found.key.place is None
