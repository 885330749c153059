"""Templates of nodes that do not exist: claims get the same devices on them as on the real node."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.lab.nodes.test_trays import rack

from rackloom.claim.manifests.documents import parse_documents
from rackloom.claim.manifests.read import Manifests, manifests_of
from rackloom.claim.node.node_template import profile_template
from rackloom.cli.main import app
from rackloom.core.allocate.driver_slices import GPU_DRIVER, device_classes
from rackloom.core.allocate.node_template import (
    CAPACITY,
    capacity_annotations,
    cluster_api_slices,
    scale_up_answers,
    template_of_slices,
    whole_gpus,
)
from rackloom.core.allocate.objects import (
    DeviceAttribute,
    DeviceClass,
    Node,
    ObjectMeta,
    ResourceClaim,
    ResourceSlice,
)
from rackloom.core.allocate.planning import PlacedClaim, RefusedClaim, allocate_each
from rackloom.core.cluster.objects import RESOURCE_SLICE
from rackloom.errors import Refused
from rackloom.lab.nodes.host_files import tray_machine
from rackloom.topology.profiles import load_machine, load_rack, machine_names

GPU, NIC, IMEX = "gpu.nvidia.com", "dra.net", "compute-domain.nvidia.com"
GROUP = "racks"


def claim_file(requests: str, constraints: str = "[]") -> ResourceClaim:
    text = (
        "apiVersion: resource.k8s.io/v1\nkind: ResourceClaimTemplate\nmetadata: {name: c}\n"
        f"spec: {{spec: {{devices: {{requests: [{requests}], constraints: {constraints}}}}}}}\n"
    )
    (claim,) = manifests_of(parse_documents(text, "claim")).claims
    return claim


def request(name: str, of: str, count: int = 1, cel: str | None = None) -> str:
    selectors = "" if cel is None else f", selectors: [{{cel: {{expression: {json.dumps(cel)}}}}}]"
    return f"{{name: {name}, exactly: {{deviceClassName: {of}, count: {count}{selectors}}}}}"


NUMA, ROOT = (
    "[{matchAttribute: resource.kubernetes.io/numaNode}]",
    "[{matchAttribute: gpu.nvidia.com/clique}]",
)
CLAIMS = {
    "all GPUs": claim_file(request("g", GPU, 4)),
    "too many": claim_file(request("g", GPU, 5)),
    "one clique": claim_file(request("g", GPU, 4), ROOT),
    "distinct": claim_file(request("g", GPU, 2), "[{distinctAttribute: gpu.nvidia.com/uuid}]"),
    "a pair": claim_file(f"{request('g', GPU)}, {request('n', 'dranet.net')}", NUMA),
    "by root": claim_file(
        request("g", GPU, 1, "device.attributes['resource.kubernetes.io'].pcieRoot == 'pci0009:00'")
    ),
    "of one GPU": claim_file(request("g", GPU, 1, "device.attributes['gpu.nvidia.com'].uuid == 'GPU-1'")),
    "rail": claim_file(request("n", "dranet.net", 1, "device.attributes['dra.net'].rail == 2")),
    "channel": claim_file(
        request("c", IMEX, 1, "device.attributes['compute-domain.nvidia.com'].type == 'channel'")
    ),
}


def classes() -> tuple[DeviceClass, ...]:
    text = f"""
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {{name: {IMEX}}}
spec: {{selectors: [{{cel: {{expression: "device.driver == '{IMEX}'"}}}}]}}
"""
    return (*device_classes(), *manifests_of(parse_documents(text, "classes")).classes)


def devices_given(slices: tuple[ResourceSlice, ...], node: str, claim: ResourceClaim) -> list[str] | None:
    (answer,) = allocate_each((Node(metadata=ObjectMeta(name=node)),), classes(), slices, (claim,))
    if isinstance(answer, RefusedClaim):
        return None
    return [f"{each.request} {each.driver} {each.device}" for each in answer.allocation.devices.results]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A node of a rack with our three plugins at work, and their published objects as kubectl prints them."""

    async def look() -> tuple[str, str]:
        async with rack(tmp_path_factory.mktemp("rack")) as found:
            items = (await found.api.list(RESOURCE_SLICE)).items
            return found.first, json.dumps({"apiVersion": "v1", "kind": "List", "items": list(items)})

    return asyncio.run(look())


def manifests(real: tuple[str, str]) -> Manifests:
    return manifests_of(parse_documents(real[1], "the cluster"))


@pytest.mark.parametrize("name", CLAIMS)
def test_a_template_of_a_node_gives_what_the_node_gives(real: tuple[str, str], name: str) -> None:
    slices = manifests(real).slices
    template = template_of_slices(slices, real[0], GROUP)
    assert {slice_.spec.driver for slice_ in template} == {GPU, NIC, IMEX}
    assert devices_given(template, GROUP, CLAIMS[name]) == devices_given(slices, real[0], CLAIMS[name])


def test_nothing_in_a_template_names_the_node_or_its_hardware(real: tuple[str, str]) -> None:
    slices = manifests(real).slices
    template = template_of_slices(slices, real[0], GROUP)
    identities = {
        value.string
        for slice_ in slices
        for device in slice_.spec.devices
        for name, value in device.attributes.items()
        if value.string and ("uuid" in name.lower() or "guid" in name.lower() or "clique" in name)
    }
    assert len(identities) > 8
    shown = str(template)
    assert real[0] not in shown
    assert not [identity for identity in identities if identity in shown]
    assert len({slice_.metadata.name for slice_ in template}) == len(template)


def facts(slices: tuple[ResourceSlice, ...]) -> Iterator[tuple[str, str, str, DeviceAttribute]]:
    for slice_ in slices:
        for device in slice_.spec.devices:
            for name, value in device.attributes.items():
                yield slice_.spec.driver, device.name, name, value


def test_a_profile_says_nothing_that_the_plugins_on_such_a_machine_do_not(real: tuple[str, str]) -> None:
    """Placeholders aside, each attribute of the template is that of the real slices, by device and name."""
    published = tuple(slice_ for slice_ in manifests(real).slices if slice_.spec.node_name == real[0])
    template = profile_template(tray_machine(load_rack("gb200-nvl72")), GROUP, has_fabric=True)
    shown = {(driver, device, name): value for driver, device, name, value in facts(published)}
    names = {(driver, device) for driver, device, _ in shown}
    without_rdma = {(NIC, "pci-0010-03-00-1"), (NIC, "pci-0012-03-00-0")}
    assert {(driver, device) for driver, device, _, _ in facts(template)} == names | without_rdma
    wrong = [
        (driver, device, name, value, shown.get((driver, device, name)))
        for driver, device, name, value in facts(template)
        if (driver, device) in names
        and shown.get((driver, device, name)) != value
        # Simulated trays have no interfaces, and so neither these NICs nor their rails.
        and name not in {"ifName", "rail"}
        and not (name in {"cliqueID", "clusterUUID"} or (value.string or "").startswith("template"))
    ]
    assert not wrong


@pytest.mark.parametrize(
    "name", ["all GPUs", "too many", "one clique", "distinct", "by root", "rail", "channel"]
)
def test_a_profile_gives_what_the_node_gives(real: tuple[str, str], name: str) -> None:
    template = profile_template(tray_machine(load_rack("gb200-nvl72")), GROUP, has_fabric=True)
    slices = manifests(real).slices
    assert devices_given(template, GROUP, CLAIMS[name]) == devices_given(slices, real[0], CLAIMS[name])


@pytest.mark.parametrize("name", machine_names())
def test_every_profile_makes_slices_that_an_api_server_would_take(name: str) -> None:
    for slice_ in profile_template(load_machine(name), GROUP, has_fabric=False):
        assert 0 < len(slice_.spec.devices) <= 128
        names = [device.name for device in slice_.spec.devices]
        assert len(set(names)) == len(names)
        assert all(len(device.attributes) <= 32 for device in slice_.spec.devices)


def test_what_the_cluster_api_provider_knows_is_a_count(real: tuple[str, str]) -> None:
    template = template_of_slices(manifests(real).slices, real[0], GROUP)
    assert whole_gpus(template, GPU_DRIVER) == 4
    answers = dict(
        zip(CLAIMS, scale_up_answers(tuple(CLAIMS.values()), classes(), template, GROUP, GPU), strict=True)
    )
    starts = {name for name, answer in answers.items() if isinstance(answer.cluster_api, PlacedClaim)}
    assert starts == {"all GPUs"}
    assert isinstance(answers["one clique"].template, PlacedClaim)
    assert not cluster_api_slices(GPU, 0, GROUP)


def test_annotations_are_those_that_the_provider_reads() -> None:
    found = capacity_annotations(
        {"cpu": "144", "memory": "960Gi", "pods": "110"},
        driver=GPU,
        gpus=4,
        labels={"pool": "gb200"},
        taints=["slinky.slurm.net/slurm=:NoExecute"],
    )
    assert found == {
        f"{CAPACITY}/cpu": "144",
        f"{CAPACITY}/memory": "960Gi",
        f"{CAPACITY}/maxPods": "110",
        f"{CAPACITY}/gpu-count": "4",
        f"{CAPACITY}/dra-driver": GPU,
        f"{CAPACITY}/labels": "pool=gb200",
        f"{CAPACITY}/taints": "slinky.slurm.net/slurm=:NoExecute",
    }
    with pytest.raises(Refused, match="CPU and memory"):
        capacity_annotations({"cpu": "1"}, driver=GPU, gpus=1, labels={}, taints=[])


def test_the_command_prints_what_claim_allocate_reads(
    real: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slices, node = tmp_path / "slices.json", real[0]
    listed = json.loads(real[1])
    labels = {"pool": "gb200", "kubernetes.io/hostname": node, "nvidia.com/gpu.clique": "u.1"}
    status = {"allocatable": {"cpu": "144", "memory": "960Gi", "pods": "200", "nvidia.com/gpu": "4"}}
    listed["items"].append(
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "labels": labels}, "status": status}
    )
    slices.write_text(json.dumps(listed))
    claims = tmp_path / "claims.yaml"
    claims.write_text(
        "apiVersion: resource.k8s.io/v1\nkind: ResourceClaimTemplate\nmetadata: {name: all}\n"
        f"spec: {{spec: {{devices: {{requests: [{request('g', GPU, 4)}]}}}}}}\n"
    )
    where = ["--slices", str(slices), "--node", node]
    call = ["claim", "node-group", GROUP, *where, "--claims", str(claims)]
    assert app(call, result_action="return_value") == 0
    printed = capsys.readouterr()
    assert "the Cluster API provider would start one" in printed.err
    found = manifests_of(parse_documents(printed.out, "printed"))
    assert [each.metadata.name for each in found.nodes] == [GROUP]
    assert found.slices == template_of_slices(manifests(real).slices, node, GROUP)

    assert app([*call, "--form", "cluster-api"], result_action="return_value") == 0
    (group,) = yaml.safe_load_all(capsys.readouterr().out)
    annotations = group["metadata"]["annotations"]
    assert annotations[f"{CAPACITY}/labels"] == "pool=gb200"
    assert annotations[f"{CAPACITY}/maxPods"] == "200"
    assert annotations[f"{CAPACITY}/memory"] == "960Gi"
