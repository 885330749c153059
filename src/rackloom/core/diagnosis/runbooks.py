"""A runbook for each check: what its finding means, how to see it, how to mend it, what it causes.

A finding says what is wrong in one place and carries the commands for that place. Its runbook says what holds
in every place. Every interface shows the same texts: `rackloom doctor --runbook NAME`, the rack map, and the
pages of the documentation. The title is that of the finding (`titles`); causes and consequences are those of
the catalogue, by which findings are folded.
"""

from collections.abc import Mapping
from functools import cache
from textwrap import fill

import msgspec

from rackloom.core.diagnosis.catalogue import EXPLAINS, Check, runbook_name
from rackloom.core.diagnosis.titles import TITLES


class Runbook(msgspec.Struct, frozen=True, kw_only=True):
    """What to know of the findings of one check."""

    name: str
    """As findings name it: `device-untainted`."""
    check: Check
    title: str
    """The title of such a finding, with words in place of names."""
    means: str
    """What is wrong, and for whom."""
    look: str
    """How to see it without the doctor."""
    mend: str
    """What mends it, and when it is over."""
    causes: tuple[Check, ...]
    """Checks whose findings may explain it: mend these first."""
    consequences: tuple[Check, ...]
    """Checks whose findings follow from it: they end with it."""


_TEXTS: Mapping[Check, tuple[str, str, str]] = {
    Check.LAYER: (
        "A whole source cannot be read: the site service, the API server of the cluster, a transfer "
        "record, or the keys of an issuer of tokens. What it would report is unknown, and no fault in it can "
        "be found. Nothing is known to be broken. New tokens of such an issuer are refused.",
        "Read the problem in the evidence. Ask the source itself: systemctl status of the service, "
        "kubectl get --raw /readyz for a cluster, the file for a transfer record.",
        "Start the service, or correct the address and credentials with which it is read. It is over "
        "with the next reading that succeeds.",
    ),
    Check.CONTROLLER: (
        "The switch controller of an NVLink domain does not answer, contradicts another, or lists what "
        "cannot be. The present partitions of its racks are unknown. Running jobs go on, since switches "
        "keep their state; instances of the domain wait.",
        "rackloom admin domain show names each controller, when it answered last and its error. Reach it "
        "from the host of the service: the port may be closed, or its certificate expired.",
        "Restart the controller, or register its present address. Two controllers that contradict one "
        "another need a person: take the wrong one out of the site. It is over with the next reading.",
    ),
    Check.CONTROLLER_AWAY: (
        "A switch controller could not be read for an hour, or none is registered for the domain of "
        "recorded machines. No partition there can be changed. With another controller of the domain "
        "answering, only the reserve is missing.",
        "rackloom admin domain show lists the controllers of the domain and since when each is silent.",
        "Replace the controller or register the one that took its place. Take a controller that will not "
        "come back out of the site, so that nobody waits for it.",
    ),
    Check.DOMAIN_PAUSED: (
        "An operator has paused the domain. Nothing is carved there: what tenants ask for waits until it "
        "is resumed.",
        "rackloom admin domain show says who paused it, and what waits.",
        "Resume it when the work is done for which it was paused. What waited is done then, so look at "
        "the plan first.",
    ),
    Check.TRAY_PLACE: (
        "The switch lists GPUs of an instance in another slot than the recorded one: somebody moved the "
        "tray. The tenant's host is where the tray is, and the record points elsewhere.",
        "Compare the fabric GUIDs in the evidence with the labels on the tray, and the slot with the rack.",
        "Put the tray back, or record its new place. Do not give its old slot to anybody before: the "
        "next tenant would get the machine of this one.",
    ),
    Check.MACHINE_PRESENT: (
        "The switch controller lists no GPU of a recorded tray: it is off, unplugged, or its switch link "
        "is down. An instance on it has no NVLink, perhaps no machine.",
        "Ask the BMC for the power state, and the controller for the tray (rackloom admin domain show). "
        "Look at the seat of the tray if it has power.",
        "Cordon the tray, so that nobody gets it. Power it on or reseat it. It is over when the "
        "controller lists all of its GPUs.",
    ),
    Check.GPU_HEALTH: (
        "The switch controller calls a GPU unhealthy, mostly because an NVLink of it is down. "
        "Collectives over it fail or hang. If most GPUs of a rack have it at once, a switch tray or its "
        "power is the cause.",
        "nvidia-smi nvlink --status on the node, and dmesg for Xid and SXid messages, name the link.",
        "Keep new work off, move the job to a spare tray if there is one, then reset the GPU or restart "
        "the machine. If it comes back sick, replace the tray. It is over when the controller calls it "
        "healthy.",
    ),
    Check.PARTITION_HEALTH: (
        "The switch controller calls a partition unhealthy though the finding names no sick GPU for it. "
        "Jobs in it may lose NVLink.",
        "rackloom admin partition show lists its GPUs and the reason that the controller gives.",
        "Mend the GPUs or switches that the controller names. A partition does not heal by being made "
        "again while its hardware is sick.",
    ),
    Check.ISOLATION: (
        "One partition holds GPUs of two tenants: each can reach the memory of the other. Nothing is "
        "more urgent.",
        "rackloom admin partition show lists the GPUs of the partition, and the evidence whose they are.",
        "Read the plan that takes them apart, then apply it. Tell both tenants, and keep the audit of "
        "who made the partition. It is over when each partition holds GPUs of one tenant.",
    ),
    Check.ONE_PARTITION: (
        "The controller lists a GPU in several partitions, which hardware does not allow: its lists are "
        "wrong or were read half-way through a change.",
        "rackloom admin domain show reads the partitions again. Two readings that agree rule out a "
        "change under way.",
        "Release the partition that nobody asked for. If the lists stay wrong, restart the controller; "
        "switches keep their partitions meanwhile.",
    ),
    Check.PARTITION_THERE: (
        "A partition that the site made is no longer listed, and the site did not delete it: a switch "
        "was reset or somebody deleted it by hand. Jobs in it have lost NVLink.",
        "rackloom admin plan for the domain prints what the site would make again; the audit names who "
        "deleted what.",
        "Let the site make it again: resume the domain if it is paused. Restart the jobs that used it, "
        "because they do not find their peers again.",
    ),
    Check.PARTITION_OWNED: (
        "A partition is there that the site did not make. It keeps its GPUs from instances, and may hold "
        "GPUs of one.",
        "rackloom admin partition show says which GPUs it holds. Ask who works at the switch by hand, or "
        "with another manager.",
        "Adopt it if its GPUs are those of a tenant, else release it. Releasing ends NVLink for whatever "
        "runs in it.",
    ),
    Check.DEFAULT_GONE: (
        "The partition of the factory is still there, against the policy of the site. All GPUs in it "
        "share memory, so no tenant gets one of them.",
        "rackloom admin plan for the domain says what keeps it.",
        "It is removed by itself when nothing keeps it. Mend what the plan names, or change the policy "
        "of the site.",
    ),
    Check.MULTICAST: (
        "Fewer than a tenth of the multicast groups of an NVLink domain are free. Partitions get theirs when "
        "they are made. Without groups NCCL has no NVLink SHARP, and some versions of it end with an error.",
        "The metric nvlink_multicast_groups shows its growth, and REST the groups of each partition.",
        "Delete partitions that no instance needs. The factory partition may have all groups: it gives them "
        "back when it is removed. A partition without groups gets some only when it is made again.",
    ),
    Check.INTERFACE: (
        "A GPU of an instance is not in the partition that its tenant asked for. The instance runs "
        "without NVLink to its peers. Two minutes after the request it counts as wrong.",
        "The status of the instance's NVLink interface names the reason, and rackloom admin plan the "
        "step that is missing.",
        "Mend the cause that the plan names: a foreign partition, a silent controller, a limit. The site "
        "repeats the rest by itself.",
    ),
    Check.LOGICAL_SPREAD: (
        "Instances of one logical partition are in several NVLink domains. Memory is shared within a "
        "domain only, so the tenant gets islands where one partition was meant.",
        "The evidence lists the domains with the instances in each.",
        "Ask for instances in one domain. If the islands are intended, use one logical partition per "
        "domain: that says so.",
    ),
    Check.MAPPING: (
        "The record of a machine lacks the fabric GUID of a GPU. The site cannot tell which GPU of the "
        "switch is which of the machine, and carves none of them.",
        "rackloom admin machine nvlink-info show prints what is recorded.",
        "Populate the record from the switch controller, once the tray is listed there.",
    ),
    Check.IDENTITY: (
        "Layers name different GPUs in one place: a tray was swapped, and one layer still knows the old "
        "one. Partitions would be made of the wrong GPUs.",
        "Compare the GUIDs and UUIDs in the evidence with nvidia-smi --query-gpu=uuid,serial on the node.",
        "Record the new tray (populate its nvlink-info). Restart the plugin on the node if the cluster "
        "is the layer that is behind.",
    ),
    Check.SPLIT: (
        "GPUs of one node are in different partitions. Such a node has no clique, and jobs that need "
        "NVLink across nodes cannot use it.",
        "rackloom admin partition show lists which GPU is where.",
        "Join the GPUs in one partition, or take the instance off. The clique label comes back by itself "
        "within a minute.",
    ),
    Check.CLIQUE_LABEL: (
        "The label nvidia.com/gpu.clique of a node does not match its partition. The scheduler places "
        "jobs by it, so pods may land where they share no memory. After a change of partitions it is "
        "behind for up to a minute.",
        "kubectl get node NODE --show-labels, beside the partition in the evidence.",
        "Wait a minute. If it stays, remove the label, so that its writer sets it again; if two write "
        "it, see one-writer-of-gpu-clique.",
    ),
    Check.CLIQUE_WRITER: (
        "Two programs own the clique label of a node. They overwrite one another, and jobs are placed by "
        "whichever wrote last.",
        "kubectl get node NODE -o yaml --show-managed-fields names both field managers.",
        "Switch the label off in one of them. In a cluster with NVIDIA's GPU operator, either it or "
        "Rackloom writes the label.",
    ),
    Check.NODE_READY: (
        "The node is not ready, or its kubelet is silent. Its pods are lost or soon evicted; what its "
        "devices do is unknown.",
        "kubectl describe node NODE for its conditions, and journalctl -u kubelet on it if it can be "
        "reached.",
        "Restart kubelet or the machine. Pods of jobs that cannot wait are deleted, so that they start "
        "on spare trays. It is over when the node is ready.",
    ),
    Check.NODE_PUBLISHES: (
        "A driver that publishes devices of most nodes publishes none of this one: its plugin is not "
        "running, or found no device. Pods that need the device stay pending.",
        "kubectl get resourceslices for the node, and the log of the driver's pod on it.",
        "Restart the plugin. If it finds no device, the driver of the host or the device itself is the "
        "cause.",
    ),
    Check.SLICE_OF_NODE: (
        "Devices of a node are still published although the node is gone. The scheduler may place pods "
        "on them, which never start.",
        "kubectl get node NODE says not found; kubectl get resourceslices still lists it.",
        "Delete the slices. If the node comes back, its plugins publish them again.",
    ),
    Check.DEVICE_TAINT: (
        "A plugin keeps new work off a device: it is lost from the bus, must be reset, or is being "
        "repaired. Or an administrator does so by a DeviceTaintRule, which the finding names. A pod that "
        "has the device goes on or is evicted, as the taint says. NoExecute evicts no pod that counts its "
        "GPUs as nvidia.com/gpu (kubernetes#141290): evict it through the Eviction API.",
        "The taint in the evidence names the reason; nvidia-smi on the node shows the same GPU. "
        "kubectl describe devicetaintrule RULE shows what else a rule selects.",
        "Move the job to a spare tray if there is one, else cordon the node and delete the pod. Then "
        "reset the GPU, or restart the machine if the GPU is lost. It is over when the plugin takes the "
        "taint away, or the rule is deleted.",
    ),
    Check.DEVICE_THERE: (
        "A claim holds a device that is no longer published. A pod that starts again with this claim "
        "does not come up.",
        "kubectl get resourceclaim CLAIM -o yaml names the device, kubectl get resourceslices lacks it.",
        "Bring the device back (its node, its plugin), or delete the pod, so that a new claim is "
        "allocated elsewhere.",
    ),
    Check.TEMPLATES: (
        "Pods name a claim template that does not exist. They stay pending for ever, without an event "
        "that says so plainly.",
        "kubectl get resourceclaimtemplates in the namespace, beside the name in the pod.",
        "Correct the name in the workload, or make the ComputeDomain that brings the template.",
    ),
    Check.CLAIMS: (
        "Claims of a workload are not allocated or not reserved: no node has what they ask for, or not "
        "beside one another, or DeviceTaintRules keep it from them. The pods wait.",
        "rackloom claim explain says which request fits nowhere, and why each candidate is refused.",
        "Free what is asked for, or ask for less. Pods start by themselves once the claim is allocated.",
    ),
    Check.ACTIVE: (
        "A ComputeDomain is not ready: its daemons are not up, or its nodes are in several cliques. Its "
        "pods wait in ContainerCreating.",
        "kubectl describe computedomain NAME lists its nodes with the state of each.",
        "Mend the node that is not ready. The domain becomes ready by itself.",
    ),
    Check.ONE_CLIQUE: (
        "Pods of one ComputeDomain are on racks that share no memory. They run, and everything between "
        "them goes over the network: slower, or failing where the code expects NVLink.",
        "kubectl get pods -o wide, with the clique label of each node.",
        "Delete the pods that are apart and let them be placed together; a gang or an affinity for the "
        "clique label keeps it so.",
    ),
    Check.MESH: (
        "IMEX daemons of a ComputeDomain do not all reach each other. Memory cannot be exported between "
        "these nodes, and jobs fail when they try.",
        "nvidia-imex-ctl -N in a daemon's pod prints the connections that are missing.",
        "Open the port between the nodes, restart the daemon that lacks peers, or mend the node under it.",
    ),
    Check.NIC_LINK: (
        "The network link of a NIC is down, or slower than its siblings in the tray. Traffic of its GPU "
        "takes a detour or the whole job runs at the speed of this link.",
        "rdma link and ip -br link on the node; the port of the switch at the other end.",
        "Reseat or replace the cable or the transceiver. Keep jobs that need the rate off meanwhile.",
    ),
    Check.NIC_ALIGNED: (
        "A GPU has no NIC at its own processor, or a pod got the NIC of another GPU. Its traffic crosses "
        "the link between processors and is slower.",
        "nvidia-smi topo -m on the node shows the distance of each pair.",
        "Use a claim that ties each GPU to its NIC. If the hardware has no near NIC, expect the lower rate.",
    ),
    Check.TRANSFER: (
        "The newest measured transfer carried wrong data, went over another device, or was slower than "
        "the topology promises. The path is not what it is taken for.",
        "The record says what was measured, over which device, and what was promised.",
        "Mend the link or the alignment that other findings name, then measure again with rackloom "
        "transfer run --save. It is over with a transfer that keeps its promise.",
    ),
    Check.DRIVER: (
        "The NVIDIA driver of a host is older than what ComputeDomains need. IMEX channels or health "
        "reports are missing.",
        "cat /proc/driver/nvidia/version on the host.",
        "Install a driver of the branch that the finding names, and restart the machine while it is drained.",
    ),
    Check.CDI: (
        "The container runtime of a host does not give devices to containers by CDI. Pods with claims do "
        "not start there.",
        "containerd config dump on the host: enable_cdi in the section of the CRI plugin.",
        "Switch it on and restart the runtime; running containers go on.",
    ),
    Check.PORTS: (
        "TCP ports that IMEX daemons need are taken on the host. A daemon there cannot start or is not "
        "reached.",
        "ss -ltnp on the host names the program that has the port.",
        "Stop that program, or move it to another port. Mostly it is an nvidia-imex of the host itself.",
    ),
    Check.HOST_IMEX: (
        "The host runs an nvidia-imex of its own, beside the daemons in pods. It takes their ports, and "
        "joins nodes outside of any ComputeDomain.",
        "systemctl status nvidia-imex on the host.",
        "Disable the service. Jobs that use the host's session, outside of ComputeDomains, end with it.",
    ),
    Check.CHANNELS: (
        "The driver of the host offers no IMEX channels, so that no pod can share memory with other nodes.",
        "grep nvidia-caps-imex-channels /proc/devices on the host.",
        "Load a driver with IMEX support; on machines without NVLink between nodes there is nothing to mend.",
    ),
}
_WIDTH = 100
_WORDS = {"place": "PLACE", "subject": "SUBJECT", "message": "REASON"}


@cache
def runbooks() -> Mapping[str, Runbook]:
    """The runbook of every check, by its name and in the order of the catalogue."""
    found = {}
    for check in Check:
        means, look, mend = _TEXTS[check]
        name = runbook_name(check)
        found[name] = Runbook(
            name=name,
            check=check,
            title=TITLES[check].format(**_WORDS),
            means=means,
            look=look,
            mend=mend,
            causes=tuple(cause for cause in Check if check in EXPLAINS.get(cause, ())),
            consequences=tuple(effect for effect in Check if effect in EXPLAINS.get(check, ())),
        )
    return found


def runbook_text(runbook: Runbook) -> str:
    """The runbook for a terminal."""
    parts = [
        f"{runbook.check}\n{_indented(f'Its findings begin: {runbook.title}')}",
        f"What it means\n{_indented(runbook.means)}",
        f"See for yourself\n{_indented(runbook.look)}",
        f"Mend it\n{_indented(runbook.mend)}",
    ]
    for head, checks in (("May come from", runbook.causes), ("May bring with it", runbook.consequences)):
        if checks:
            parts.append(f"{head}\n" + "\n".join(f"  {check} ({runbook_name(check)})" for check in checks))
    return "\n\n".join(parts)


def _indented(text: str) -> str:
    return fill(text, _WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
