"""A host and its cluster see one fault: one finding, tied by GPU UUID and PCI address and by no name."""

import msgspec
import pytest
from tests.app.doctor.hosts import examine_host, laid_out

from rackloom.core.cluster.domain_objects import ComputeDomain, ComputeDomainStatus
from rackloom.core.cluster.names import GPU_DRIVER
from rackloom.core.cluster.objects import Condition
from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.findings import CheckState, Severity
from rackloom.core.diagnosis.snapshot import (
    DeviceRecord,
    DeviceUse,
    ImexMeshRecord,
    Layer,
    LayerStatus,
    NodeRecord,
    SiteSnapshot,
)
from rackloom.topology.affinity import own_nics
from rackloom.topology.join_key import Fact, GpuKey, Source
from rackloom.topology.machine import numa_of
from rackloom.topology.profiles import load_machine

SEEN = "azure-nd96isr-h100-v5"
NODE, NIC_DRIVER = "gpu-node-7", "dra.net"
NOW = 1_800_000_000.0


def machine(numbered=True):
    """With GPUs that report UUIDs, or (without a number) none."""
    plain = load_machine(SEEN)
    gpus = (msgspec.structs.replace(gpu, uuid=f"GPU-{gpu.index}" if numbered else None) for gpu in plain.gpus)
    return msgspec.structs.replace(plain, gpus=tuple(gpus))


def gpu_of(gpu, partner, node):
    key = GpuKey(
        gpu_uuid=None if gpu.uuid is None else Fact(gpu.uuid, Source.NVML),
        pci_address=Fact(gpu.pci_address, Source.SYSFS),
    )
    return DeviceRecord(
        driver=GPU_DRIVER,
        pool=node,
        name=f"gpu-{gpu.index}",
        node=node,
        kind="gpu",
        key=key,
        numa=numa_of(gpu),
        partner=partner.rdma_device,
        partner_address=partner.pci_address,
    )


def nic_of(nic, gpu, node):
    return DeviceRecord(
        driver=NIC_DRIVER,
        pool=node,
        name=f"nic-{nic.index}",
        node=node,
        kind="nic",
        key=GpuKey(pci_address=Fact(nic.pci_address, Source.SYSFS)),
        numa=numa_of(nic),
        partner=gpu.pci_address,
        link="active",
        gbps=nic.line_rate_gbps or 400,
    )


def cluster(host, node=NODE, **more):
    """The cluster in which a machine is `node`, all well."""
    pairs = [(host.gpus[index], host.nics[cell.nic]) for index, cell in own_nics(host).items()]
    devices = [device for gpu, nic in pairs for device in (gpu_of(gpu, nic, node), nic_of(nic, gpu, node))]
    return SiteSnapshot(
        at=NOW,
        layers=(LayerStatus(layer=Layer.CLUSTER, at=NOW),),
        nodes=(NodeRecord(name=node, ready=True, runtime="containerd://2.1.4"),),
        devices=tuple(devices),
        **more,
    )


def with_nics(snapshot, which, **changes):
    devices = tuple(
        msgspec.structs.replace(device, **changes) if device.kind == "nic" and which(device) else device
        for device in snapshot.devices
    )
    return msgspec.structs.replace(snapshot, devices=devices)


def is_first(nic):
    return nic.name == "nic-0"


def down(root):
    (root / "sys/class/infiniband" / machine().nics[0].rdma_device / "ports/1/state").write_text("1: DOWN\n")
    return root


def test_a_host_in_its_cluster_is_well(tmp_path):
    host = machine()
    assert examine_host(laid_out(tmp_path, host), cluster(host)) == ()


def test_a_link_that_both_see_down_is_one_finding_with_both_sides(tmp_path):
    host = machine()
    broken = with_nics(cluster(host), is_first, link="down", gbps=None)
    (found,) = examine_host(down(laid_out(tmp_path, host)), broken)
    assert (found.check, found.subject) == (Check.NIC_LINK, f"{NODE}/nic-0")
    assert {line.partition(":")[0] for line in found.evidence} == {"slice", "host"}
    assert f"device {NODE}/{NIC_DRIVER}/nic-0" in found.where


def test_a_link_that_is_down_and_published_as_up_has_both_sides_too(tmp_path):
    host = machine()
    (found,) = examine_host(down(laid_out(tmp_path, host)), cluster(host))
    assert found.message == "its link is down"
    assert found.severity is Severity.WARNING
    assert any(line.startswith("slice: the link of nic-0 is active") for line in found.evidence)


def test_a_slice_that_is_older_than_the_link_is_contradicted_by_the_host(tmp_path):
    host = machine()
    stale = with_nics(cluster(host), is_first, link="down", gbps=None)
    (found,) = examine_host(laid_out(tmp_path, host), stale)
    assert any(line.startswith("host: port 1 of ") and " is active" in line for line in found.evidence)


def test_a_nic_that_a_claim_holds_is_missed_by_somebody(tmp_path):
    host = machine()
    use = DeviceUse(driver=NIC_DRIVER, pool=NODE, device="nic-0", claim="team/c", pods=("team/p",))
    (found,) = examine_host(down(laid_out(tmp_path, host)), cluster(host, uses=(use,)))
    assert found.severity is Severity.ERROR


def test_a_link_that_no_driver_tells_of_and_the_host_sees_up_is_well(tmp_path):
    host = machine()
    untold = with_nics(cluster(host), is_first, link="unknown", gbps=None)
    assert examine_host(laid_out(tmp_path, host), untold) == ()


@pytest.mark.parametrize("holder", [NIC_DRIVER, "other.net"])
def test_a_nic_that_two_drivers_publish_is_held_by_a_claim_of_either(holder, tmp_path):
    host = machine()
    snapshot = cluster(host)
    first = next(device for device in snapshot.devices if is_first(device))
    other = msgspec.structs.replace(first, driver="other.net", name="other-0")
    use = DeviceUse(
        driver=holder,
        pool=NODE,
        device="nic-0" if holder == NIC_DRIVER else "other-0",
        claim="team/c",
        pods=("team/p",),
    )
    twice = msgspec.structs.replace(snapshot, devices=(*snapshot.devices, other), uses=(use,))
    (found,) = examine_host(down(laid_out(tmp_path, host)), twice)
    assert found.severity is Severity.ERROR
    assert {f"device {NODE}/{NIC_DRIVER}/nic-0", f"device {NODE}/other.net/other-0"} <= set(found.where)
    assert {"nic-0", "other-0"} <= {word for line in found.evidence for word in line.split()}


def test_two_nics_that_two_drivers_call_the_same_are_two(tmp_path):
    """A driver's names are its own: dra.net's nic-0 and another driver's need not be one NIC."""
    host = machine()
    snapshot = with_nics(cluster(host), is_first, link="down", gbps=None)
    second = next(device for device in snapshot.devices if device.name == "nic-1")
    namesake = msgspec.structs.replace(second, driver="other.net", name="nic-0")
    both = msgspec.structs.replace(snapshot, devices=(*snapshot.devices, namesake))
    (found,) = examine_host(down(laid_out(tmp_path, host)), both)
    assert f" of {host.nics[0].rdma_device} " in "".join(found.evidence)
    assert f" of {host.nics[1].rdma_device} " not in "".join(found.evidence)


def test_two_nics_are_two_findings(tmp_path):
    host = machine()
    second = with_nics(cluster(host), lambda device: device.name == "nic-1", link="down", gbps=None)
    found = examine_host(down(laid_out(tmp_path, host)), second)
    assert [finding.check for finding in found] == [Check.NIC_LINK] * 2


def test_a_node_of_the_hosts_name_with_other_gpus_is_another(tmp_path):
    """Names may be alike by luck: every cloud has a gpu-node-1."""
    host = machine()
    namesake = cluster(host, node=host.name)
    others = tuple(
        msgspec.structs.replace(device, key=GpuKey(gpu_uuid=Fact(f"GPU-other-{at}", Source.NVML)))
        if device.kind == "gpu"
        else device
        for at, device in enumerate(namesake.devices)
    )
    unrelated = with_nics(msgspec.structs.replace(namesake, devices=others), is_first, link="down", gbps=None)
    found = examine_host(down(laid_out(tmp_path, host)), unrelated)
    assert sorted(finding.subject for finding in found) == [
        f"NIC {host.nics[0].rdma_device} of host {host.name}",
        f"{host.name}/nic-0",
    ]


def test_slices_that_are_left_of_a_node_that_is_gone_name_no_host(tmp_path):
    """The machine was given another name: its GPUs are published under both."""
    host = machine()
    left = cluster(host, node="a-former-name").devices
    now = cluster(host)
    both = msgspec.structs.replace(now, devices=(*left, *now.devices))
    (found,) = examine_host(down(laid_out(tmp_path, host)), both)
    assert f"device {NODE}/{NIC_DRIVER}/nic-0" in found.where


@pytest.mark.parametrize("node", [NODE, load_machine(SEEN).name])
def test_without_a_uuid_the_node_is_the_one_of_its_name(node, tmp_path):
    host = machine(numbered=False)
    broken = with_nics(cluster(host, node=node), is_first, link="down", gbps=None)
    found = examine_host(down(laid_out(tmp_path, host)), broken)
    assert len(found) == (2 if node == NODE else 1)


def test_gpus_far_from_any_nic_are_one_finding_of_both_sides(tmp_path):
    host = machine()
    elsewhere = Fact(0, Source.SYSFS)
    nics = tuple(msgspec.structs.replace(nic, numa_node=elsewhere, pcie=None) for nic in host.nics)
    moved = msgspec.structs.replace(host, nics=nics)
    (found,) = examine_host(laid_out(tmp_path, moved), cluster(moved))
    far = [gpu for gpu in moved.gpus if numa_of(gpu) == 1]
    assert found.check == Check.NIC_ALIGNED
    assert {f"device {NODE}/{GPU_DRIVER}/gpu-{gpu.index}" for gpu in far} <= set(found.where)
    assert {line.partition(":")[0] for line in found.evidence} == {"slice", "host"}


DAEMON = {
    "proc/71/comm": "nvidia-imex\n",
    "proc/71/cgroup": "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-1.scope\n",
    "proc/71/net/tcp": "  sl  local_address rem_address   st\n   1: 0100000A:9C40 0200000A:C350 01\n",
}
READY = Condition(type="Ready", status="True", reason="AllNodesReady", message="all nodes are ready")
DOMAIN = ComputeDomain(
    namespace="team",
    name="job",
    uid="uid-1",
    template="channel",
    status=ComputeDomainStatus(conditions=(READY,)),
)


@pytest.mark.parametrize(("reported", "state"), [(None, CheckState.UNKNOWN), (False, CheckState.FAILS)])
def test_the_mesh_of_a_daemon_is_one_finding_with_what_its_host_shows(reported, state, tmp_path):
    host = machine()
    missing = ("0 -> 1: DISCONNECTED",) if reported is False else ()
    mesh = ImexMeshRecord(domain="uid-1", node=NODE, clique="c.1", complete=reported, missing=missing)
    snapshot = cluster(host, compute_domains=(DOMAIN,), meshes=(mesh,))
    (found,) = examine_host(laid_out(tmp_path, host, **DAEMON), snapshot)
    assert (found.check, found.subject, found.state) == (Check.MESH, "ComputeDomain team/job", state)
    assert "host: it is connected with 1 other addresses at their port of IMEX" in found.evidence


def test_an_imex_of_the_host_is_the_cause_of_what_its_pod_misses(tmp_path):
    host = machine()
    mesh = ImexMeshRecord(
        domain="uid-1", node=NODE, clique="c.1", complete=False, missing=("0 -> 1: INVALID",)
    )
    snapshot = cluster(host, compute_domains=(DOMAIN,), meshes=(mesh,))
    own = {
        "proc/72/comm": "nvidia-imex\n",
        "proc/72/cgroup": "0::/system.slice/nvidia-imex.service\n",
        "proc/1/net/tcp": ("  sl  local_address rem_address   st\n   0: 00000000:C350 00000000:0000 0A\n"),
    }
    (found,) = examine_host(laid_out(tmp_path, host, **own), snapshot)
    assert found.check == Check.HOST_IMEX
    assert {reported.partition(":")[0] for reported in found.consequences} == {Check.PORTS, Check.MESH}
