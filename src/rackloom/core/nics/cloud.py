"""A cloud's data about a node and its NICs: the place of the node, and the network of each NIC.

Each cloud has a metadata service, a small HTTP server at a link-local address of the node. A reader per
cloud (`READERS`) is a generator that yields requests, is sent the answers, and returns `CloudAttributes`.
It does no I/O (that is in `rackloom.claim.node.nic.metadata`), so recorded answers serve as well.

| cloud | path | requirement |
|---|---|---|
| GKE | `/computeMetadata/v1/instance/...` | header `Metadata-Flavor: Google`, which the answer has too |
| Azure | `/metadata/instance/compute` | header `Metadata: true`, and a version of the API |
| AWS | `/latest/meta-data/...` | a session token (IMDSv2), by a PUT with the token's life in seconds |
| OKE | `/opc/v2/host/` | header `Authorization: Bearer Oracle` |

Attributes have DRANET's names, except for AWS, for which DRANET has none but for Neuron. Values that the
service does not know (404) are absent. Any other unexpected answer is `Retry`, and nothing of the reading
counts, since half an answer might look like another place. NICs are found by their MAC.

`cloud_of_host` detects the cloud by the firmware's data about the machine (DMI), without a request.
"""

import re
from collections.abc import Callable, Generator, Iterable, Mapping
from enum import StrEnum
from typing import TypeVar

import msgspec

from rackloom.core.allocate.attributes import AttributeValues, device_attributes
from rackloom.core.allocate.objects import Device, DeviceAttribute
from rackloom.core.nics.devices import join_within_limit
from rackloom.errors import Retry, Undecodable
from rackloom.runtime.foreign_text import decode_json

# Which cloud.


class Cloud(StrEnum):
    """A cloud whose metadata service can be read."""

    GKE = "gke"
    AZURE = "azure"
    AWS = "aws"
    OKE = "oke"


AZURE_ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"
"""Of every machine of Azure: "MSFT AZURE VM" in decimal ASCII. Other machines of Hyper-V have another one."""


class FirmwareIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Files below /sys/class/dmi/id. None if firmware has none."""

    sys_vendor: str | None = None
    product_name: str | None = None
    chassis_asset_tag: str | None = None


def cloud_of_host(host: FirmwareIdentity) -> Cloud | None:
    """The cloud that the machine belongs to, or None for all others."""
    if host.product_name == "Google Compute Engine":
        return Cloud.GKE
    if host.chassis_asset_tag == AZURE_ASSET_TAG:
        return Cloud.AZURE
    if host.sys_vendor == "Amazon EC2":
        return Cloud.AWS
    return Cloud.OKE if host.chassis_asset_tag == "OracleCloud.com" else None


# Requests, answers, and results.


class MetadataRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a reader."""

    path: str
    headers: Mapping[str, str]
    method: str = "GET"


class MetadataAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer. Names of headers are in lower case."""

    status: int
    text: str
    headers: Mapping[str, str] = {}


class CloudAttributes(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes by full name."""

    node: Mapping[str, DeviceAttribute] = {}
    """Of every NIC of the node."""
    by_mac: Mapping[str, Mapping[str, DeviceAttribute]] = {}
    """Of one NIC, by its MAC in lower case."""

    def names(self) -> frozenset[str]:
        """The names of all attributes that were found."""
        return frozenset(self.node).union(*self.by_mac.values())


NO_CLOUD_ATTRIBUTES = CloudAttributes()
Reading = Generator[MetadataRequest, MetadataAnswer, CloudAttributes]
RETRY_SECONDS = 5.0
_OK, _BAD_REQUEST, _NOT_FOUND = 200, 400, 404
_T = TypeVar("_T")


def with_cloud_attributes(device: Device, macs: Iterable[str | None], found: CloudAttributes) -> Device:
    """The device with the cloud's attributes of the node, and of its first MAC that the cloud knows."""
    own = next((found.by_mac[mac.lower()] for mac in macs if mac and mac.lower() in found.by_mac), {})
    more = {**found.node, **own}
    return msgspec.structs.replace(device, attributes={**device.attributes, **more}) if more else device


def _text(request: MetadataRequest, answer: MetadataAnswer) -> str | None:
    """The answer's text, or None if the service has nothing at that path."""
    if answer.status == _NOT_FOUND:
        return None
    if answer.status != _OK:
        raise Retry(f"{request.path} is answered with status {answer.status}", after=RETRY_SECONDS)
    return answer.text.strip()


def _decoded(request: MetadataRequest, text: str, shape: type[_T]) -> _T:
    try:
        return decode_json(text, request.path, shape)
    except Undecodable as error:
        raise Retry(
            f"{request.path} is not answered as documented: {error.reason}", after=RETRY_SECONDS
        ) from error


# GKE.


class _GoogleInterface(msgspec.Struct, frozen=True, rename="camel"):
    mac: str
    network: str = ""
    ip_aliases: tuple[str, ...] = ()


_GOOGLE_NETWORK = re.compile(r"projects/([0-9]{1,18})/networks/([^/]+)")
_PLACE_PARTS = 3


def read_gke() -> Reading:
    """The machine's type and place, and the network of each NIC."""
    machine_type = yield from _from_google("machine-type")
    # Not all kinds of machines have it.
    place = ((yield from _from_google("attributes/physical_host")) or "").strip("/").split("/")
    block, sub_block, host = place if len(place) == _PLACE_PARTS else (None, None, None)
    node: AttributeValues = {
        "gce.dra.net/block": block,
        "gce.dra.net/subBlock": sub_block,
        "gce.dra.net/host": host,
        "gce.dra.net/machineType": (machine_type or "").rpartition("/")[2],
    }
    path = "network-interfaces/?recursive=true&alt=json"
    interfaces = _decoded(
        _google_request(path), (yield from _from_google(path)) or "[]", tuple[_GoogleInterface, ...]
    )
    return CloudAttributes(
        node=device_attributes(node),
        by_mac={interface.mac.lower(): _google_network(interface) for interface in interfaces},
    )


def _google_network(interface: _GoogleInterface) -> Mapping[str, DeviceAttribute]:
    network = _GOOGLE_NETWORK.fullmatch(interface.network)
    return device_attributes(
        {
            "gce.dra.net/networkName": network and network[2],
            "gce.dra.net/networkProjectNumber": None if network is None else int(network[1]),
            "gce.dra.net/ipAliases": join_within_limit(interface.ip_aliases),
        }
    )


def _google_request(path: str) -> MetadataRequest:
    return MetadataRequest(path=f"/computeMetadata/v1/instance/{path}", headers={"Metadata-Flavor": "Google"})


def _from_google(path: str) -> Generator[MetadataRequest, MetadataAnswer, str | None]:
    request = _google_request(path)
    answer = yield request
    if answer.headers.get("metadata-flavor") != "Google":
        raise Retry(f"{request.path} is not answered by Google's service", after=RETRY_SECONDS)
    return _text(request, answer)


# Azure.


AZURE_VERSIONS = ("2025-11-11", "2021-02-01")
"""The first knows interconnect groups. A region that does not have it yet refuses it (400)."""


class _AzureCompute(msgspec.Struct, frozen=True, rename="camel"):
    vm_size: str = ""
    placement_group_id: str = ""
    interconnect_group_id: str = ""
    interconnect_subgroup_id: str = ""


def read_azure() -> Reading:
    """The machine's size, and the groups of machines that it was placed with."""
    for version in AZURE_VERSIONS:
        request = MetadataRequest(
            path=f"/metadata/instance/compute?api-version={version}&format=json",
            headers={"Metadata": "true"},
        )
        answer = yield request
        if answer.status != _BAD_REQUEST:
            break
    compute = _decoded(request, _text(request, answer) or "{}", _AzureCompute)
    node: AttributeValues = {
        "azure.dra.net/vmSize": compute.vm_size,
        "azure.dra.net/placementGroupId": compute.placement_group_id,
        "azure.dra.net/interconnectGroupId": compute.interconnect_group_id,
        "azure.dra.net/interconnectSubgroupId": compute.interconnect_subgroup_id,
    }
    return CloudAttributes(node=device_attributes(node))


# AWS.


_TOKEN_SECONDS = 60
_MOST_INTERFACES = 128
"""More than any machine has: a list without an end must not be walked."""
_AWS_MAC = re.compile(r"(?:[0-9a-f]{2}:){5}[0-9a-f]{2}")


def read_aws() -> Reading:
    """The machine's type and placement group, and the network card of each NIC.

    The machines' place in the network (`DescribeInstanceTopology`) is not in the metadata.
    """
    request = MetadataRequest(
        method="PUT",
        path="/latest/api/token",
        headers={"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)},
    )
    token = _text(request, (yield request))
    if not token or not token.isascii() or not token.isprintable():
        raise Retry("the metadata service gives no session token (IMDSv2)", after=RETRY_SECONDS)
    node: AttributeValues = {
        "aws.dra.net/instanceType": (yield from _from_aws(token, "instance-type")),
        "aws.dra.net/placementGroup": (yield from _from_aws(token, "placement/group-name")),
        "aws.dra.net/placementPartition": _number(
            (yield from _from_aws(token, "placement/partition-number"))
        ),
    }
    listed = (yield from _from_aws(token, "network/interfaces/macs/")) or ""
    macs = [
        mac for line in listed.splitlines() if _AWS_MAC.fullmatch(mac := line.strip().rstrip("/").lower())
    ]
    by_mac = {}
    for mac in macs[:_MOST_INTERFACES]:
        card = yield from _from_aws(token, f"network/interfaces/macs/{mac}/network-card")
        if card is None:
            # Its name in the first list of categories that had it.
            card = yield from _from_aws(token, f"network/interfaces/macs/{mac}/network-card-index")
        by_mac[mac] = device_attributes({"aws.dra.net/networkCard": _number(card)})
    return CloudAttributes(node=device_attributes(node), by_mac=by_mac)


def _from_aws(token: str, path: str) -> Generator[MetadataRequest, MetadataAnswer, str | None]:
    request = MetadataRequest(path=f"/latest/meta-data/{path}", headers={"X-aws-ec2-metadata-token": token})
    return _text(request, (yield request))


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch("[0-9]{1,9}", text) else None


# OKE.


_OCID_LENGTH = 60
"""The last part of an OCID, which alone distinguishes resources. A whole one has some 90 characters."""


class _OracleTopology(msgspec.Struct, frozen=True):
    hpc_island: str | None = msgspec.field(default=None, name="customerHPCIslandId")
    network_block: str | None = msgspec.field(default=None, name="customerNetworkBlock")
    local_block: str | None = msgspec.field(default=None, name="customerLocalBlock")
    memory_fabric: str | None = msgspec.field(default=None, name="customerGpuMemoryFabric")


class _OracleHost(msgspec.Struct, frozen=True, rename="camel"):
    network_block_id: str | None = None
    rack_id: str | None = None
    rdma_topology_data: _OracleTopology | None = None


def read_oke() -> Reading:
    """The machine's place in the RDMA network. Complete only if the tenancy has topology data enabled."""
    request = MetadataRequest(path="/opc/v2/host/", headers={"Authorization": "Bearer Oracle"})
    host = _decoded(request, _text(request, (yield request)) or "{}", _OracleHost)
    topology = host.rdma_topology_data or _OracleTopology(network_block=host.network_block_id)
    node: AttributeValues = {
        "oke.dra.net/hpcIslandId": _end_of_ocid(topology.hpc_island),
        "oke.dra.net/networkBlockId": _end_of_ocid(topology.network_block),
        "oke.dra.net/localBlockId": _end_of_ocid(topology.local_block),
        "oke.dra.net/rackId": _end_of_ocid(host.rack_id),
        "oke.dra.net/gpuMemoryFabricId": _end_of_ocid(topology.memory_fabric),
    }
    return CloudAttributes(node=device_attributes(node))


def _end_of_ocid(text: str | None) -> str | None:
    """The last part of `ocid1.TYPE.oc1.REGION.UNIQUE`. Any other text stays as it is."""
    return text.rpartition(".")[2][-_OCID_LENGTH:] if text and text.startswith("ocid") else text


READERS: Mapping[Cloud, Callable[[], Reading]] = {
    Cloud.GKE: read_gke,
    Cloud.AZURE: read_azure,
    Cloud.AWS: read_aws,
    Cloud.OKE: read_oke,
}
"""How each cloud is read."""
CLOUD_ATTRIBUTES: Mapping[Cloud, tuple[str, ...]] = {
    Cloud.GKE: tuple(
        f"gce.dra.net/{name}"
        for name in (
            *("block", "subBlock", "host", "machineType"),
            *("networkName", "networkProjectNumber", "ipAliases"),
        )
    ),
    Cloud.AZURE: tuple(
        f"azure.dra.net/{name}"
        for name in ("vmSize", "placementGroupId", "interconnectGroupId", "interconnectSubgroupId")
    ),
    Cloud.AWS: tuple(
        f"aws.dra.net/{name}"
        for name in ("instanceType", "placementGroup", "placementPartition", "networkCard")
    ),
    Cloud.OKE: tuple(
        f"oke.dra.net/{name}"
        for name in ("hpcIslandId", "networkBlockId", "localBlockId", "rackId", "gpuMemoryFabricId")
    ),
}
"""The attributes that a reading can have, to report those that it lacks."""
