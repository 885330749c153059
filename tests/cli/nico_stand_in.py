"""A stand-in for NICo: a second whole service with its own store, and partitions named as NICo names them.

Our REST keeps NICo's contract 1.6.0, so the stand-in is as strict with tokens, organisations in paths and
pages. It is not NICo: no upstream binary runs here. It never writes to the fabric, because it runs in
read-only mode. The lab makes the partitions, as NICo's monitor would.
"""

import ssl

import httpx2
from tests.waiting import until_seen

from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin import operator_pb2 as ours
from rackloom.cli.admin import Connection, connect
from rackloom.lab.switches.fabric import DEFAULT_PARTITION_ID

NAME_LENGTH = 240
"""NICo cuts the names of its partitions here."""


def nico_name(logical_partition, guids):
    """NICo's name for the physical partition of a logical partition: its id, then the GUIDs."""
    return (logical_partition + ",".join(map(str, guids)))[:NAME_LENGTH]


async def empty_fabric(fabric):
    """Delete the factory default partition, as NICo does on a fabric that it uses completely."""
    if DEFAULT_PARTITION_ID in fabric.partitions:
        fabric.delete(DEFAULT_PARTITION_ID)


def read_only(config):
    """The configuration of a site that never writes to the fabric."""
    text = config.read_text()
    config.write_text(text.replace("enabled = true", "enabled = false\ndomain_discovery_enabled = true"))
    return config


class ServedSite:
    """A running service as its operator and its tenants reach it."""

    def __init__(self, ground, site):
        self.ground, self.site = ground, site
        crt, key = ground.files["admin"]
        self.connection = Connection(f"localhost:{site.admin_port}", ground.ca, crt, key)
        self.url = f"https://localhost:{site.rest_port}"

    def rpc(self, name, request):
        with connect(self.connection) as call:
            return call(name, request)

    def rest(self, method, path, body=None, *, org="acme", role="TENANT_ADMIN", is_json=True):
        headers = {"Authorization": f"Bearer {self.ground.token(org, role)}"}
        answer = httpx2.request(
            method,
            f"{self.url}/v2/org/{org}/nico/{path}",
            json=body,
            headers=headers,
            verify=ssl.create_default_context(cafile=str(self.ground.ca)),
            timeout=60,
        )
        assert answer.is_success, answer.text
        return answer.json() if is_json else answer.text

    def register(self, switch):
        for serial in sorted({gpu.chassis_serial for gpu in switch.fabric.gpus.values()}):
            self.rpc(
                "CreateNvlinkNmxcEndpoint", pb.NvlinkNmxcEndpoint(chassis_serial=serial, endpoint=switch.url)
            )
        until_seen(self.machines, "the machines of the rack")

    def machines(self):
        ids = self.rpc("FindMachineIds", pb.MachineSearchConfig()).machine_ids
        if not ids:
            return []
        return list(self.rpc("FindMachinesByIds", pb.MachinesByIdsRequest(machine_ids=ids)).machines)

    def domains(self):
        return {machine.nvlink_info.domain_uuid.value for machine in self.machines()}

    def partition_names(self):
        ids = self.rpc("FindNVLinkPartitionIds", pb.NVLinkPartitionSearchFilter()).partition_ids
        if not ids:
            return set()
        request = pb.NVLinkPartitionsByIdsRequest(partition_ids=ids)
        return {found.name for found in self.rpc("FindNVLinkPartitionsByIds", request).partitions}

    def until_listed(self, *names):
        until_seen(lambda: set(names) <= self.partition_names(), f"partitions {names}")

    def statuses(self, org):
        return {found["name"]: found["status"] for found in self.rest("GET", "instance", org=org)}

    def until_ready(self, org, *names):
        until_seen(
            lambda: {self.statuses(org).get(name) for name in names} == {"Ready"}, f"{org}/{names} is Ready"
        )


class NicoStandIn(ServedSite):
    """The stand-in: a site with an instance type, over racks that it observes and never changes."""

    def furnish(self, switches):
        for switch in switches:
            self.register(switch)
            domain = switch.fabric.domain
            until_seen(lambda domain=domain: domain in self.domains(), "the domain of the machines")
        self.site_id = self.rest("GET", "site", role="PROVIDER_ADMIN")[0]["id"]
        gpus = {"type": "GPU", "name": "NVIDIA GB200", "count": 4, "deviceType": "NVLink"}
        body = {"name": "gb200", "siteId": self.site_id, "machineCapabilities": [gpus]}
        self.type_id = self.rest("POST", "instance/type", body, role="PROVIDER_ADMIN")["id"]
        ids = {"machineIds": [machine.id.id for machine in self.machines()]}
        self.rest("POST", f"instance/type/{self.type_id}/machine", ids, role="PROVIDER_ADMIN")

    def tenant(self, org, name, instances, *, on=None):
        """Make a logical partition, a VPC that defaults to it, and instances. Returns the partition's id.

        `on` is a domain in which the provider's own instances are to be.
        """
        partition = self.rest(
            "POST", "nvlink-logical-partition", {"name": name, "siteId": self.site_id}, org=org
        )["id"]
        body = {"name": f"{name}-net", "siteId": self.site_id, "nvLinkLogicalPartitionId": partition}
        vpc = self.rest("POST", "vpc", body, org=org)["id"]
        for number in range(instances):
            body = {"name": f"{name}-{number}", "vpcId": vpc}
            body |= {"instanceTypeId": self.type_id} if on is None else {"machineId": self.free_machine(on)}
            body["labels"] = {"job": name}
            self.rest("POST", "instance", body, org=org)
        return partition

    def free_machine(self, domain):
        free = self.rest("GET", "machine?status=Ready&pageSize=100", role="PROVIDER_ADMIN")
        here = {found.id.id for found in self.machines() if found.nvlink_info.domain_uuid.value == domain}
        return next(found["id"] for found in free if found["id"] in here)

    def guids(self, org, partition):
        """The GPUs of a logical partition, as NICo's REST shows them."""
        shown = self.rest(
            "GET", f"nvlink-interface?nvLinkLogicalPartitionId={partition}&pageSize=100", org=org
        )
        return sorted(int(entry["gpuGuid"]) for entry in shown)

    def make_partition(self, fabric, org, partition, *, without=0):
        """Do the part of NICo's monitor for a logical partition. `without` leaves out that number of GPUs."""
        guids = self.guids(org, partition)
        name = nico_name(partition, guids)
        fabric.create(name, guids[: len(guids) - without])
        self.until_listed(name)
        if not without:
            request = ours.AdoptRequest(
                domain=fabric.domain, partition_name=name, logical_partition_id=partition, reason="of the lab"
            )
            self.rpc("AdoptPartition", request)
        return name
