"""Checks of the switch fabric: readable layers, controllers, GPU and partition health, trays.

`check_layers` reports layers that could not be read. Those with one cause are one finding. It also reports
token issuers with keys that could not be read. `check_controllers` reports domains with controllers that do
not answer or contradict one another, paused domains, domains that run out of multicast groups, controllers
that stay away for an hour (a switch tray that restarts is back within minutes), and domains with machines for
which no controller is registered.

`check_fabric` reports the problems that a controller lists for its own domain, and only for domains with a
fresh reading: sick GPUs, sick partitions, GPUs without reported health, trays and GPUs that it no longer
lists or never reported, GPUs without a recorded fabric GUID, which can join no partition. GPUs of three or
more trays, and of more than half of a domain, that have the same problem at once are one finding: look at the
switches that join them, not at each GPU.
"""

from collections import Counter
from collections.abc import Iterator
from shlex import quote

import msgspec

from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.findings import Finding, Severity, fails, first_few, unknown
from rackloom.core.diagnosis.index import (
    SnapshotIndex,
    at_device,
    at_domain,
    at_gpu,
    at_machine,
    at_node,
    at_partition,
    slot_part,
    tray_part,
)
from rackloom.core.diagnosis.snapshot import (
    GpuChain,
    Layer,
    MachineRecord,
    NvlinkDomainRecord,
    PartitionRecord,
    SilentController,
    grouped,
)
from rackloom.topology.part_names import gpu_numbers

# Switch controllers of each domain.


AWAY_SECONDS = 3600.0
"""A switch tray that starts again is back within minutes. After an hour it is not expected back."""
FREE_MULTICAST_SHARE = 0.1
"""A new partition gets 16 of usually 1,024 multicast groups, so a tenth is enough for six of them."""
_SHOW_DOMAIN = "rackloom admin domain show"
_NEW_ENDPOINT = "--endpoint https://SWITCH-CONTROLLER:9370"


def check_controllers(index: SnapshotIndex) -> Iterator[Finding]:
    """All findings about switch controllers."""
    held = Counter(machine.domain for machine in index.snapshot.machines if machine.instance is not None)
    partitions = grouped((partition.domain, partition) for partition in index.snapshot.partitions)
    for domain in index.snapshot.domains:
        yield from _silent_domain(domain, held[domain.uuid])
        if domain.paused:
            yield fails(
                Check.DOMAIN_PAUSED,
                f"domain {domain.uuid}",
                "it is paused: nothing that tenants ask for is done",
                f"rackloom admin domain resume --domain {quote(domain.uuid)}",
                severity=Severity.WARNING,
                evidence=("records: paused by an operator",),
                where=(at_domain(domain.uuid),),
            )
        if index.is_fresh(domain.uuid):
            yield from _few_multicast_groups(domain, partitions[domain.uuid])
    yield from _contradicted_gpus(index)
    if index.can_see(Layer.FABRIC):
        for domain in index.snapshot.domains:
            yield from _away_controllers(domain, index.snapshot.at)
        # The chassis of a controller that never answered is known, but its domain is not.
        controlled = {serial for domain in index.snapshot.domains for serial in domain.chassis}
        without = grouped(
            (tray.domain, tray)
            for tray in index.snapshot.machines
            if tray.domain and tray.domain not in index.domains and tray.chassis_serial not in controlled
        )
        for uuid, machines in without.items():
            yield _no_controller_registered(uuid, machines)


def _contradicted_gpus(index: SnapshotIndex) -> Iterator[Finding]:
    """One finding for each domain with a controller that contradicts itself about GPUs: these are unknown."""
    doubtful = grouped(
        (gpu.domain, gpu)
        for gpu in index.snapshot.fabric_gpus
        if gpu.uncertain and index.is_fresh(gpu.domain)
    )
    for uuid, gpus in doubtful.items():
        every = [f"{slot_part(gpu.place, index.racks)} (0x{gpu.guid:016x})" for gpu in gpus]
        named = first_few(every, _MOST_NAMED)
        yield unknown(
            Check.CONTROLLER,
            f"{len(gpus)} GPUs of domain {uuid}",
            f"the lists of the switch controller contradict each other about them: {named}",
            f"{_SHOW_DOMAIN} {quote(uuid)}  # then find out who changes partitions on its switch controller",
            where=tuple(at_gpu(uuid, gpu.guid) for gpu in gpus),
        )


def _silent_domain(domain: NvlinkDomainRecord, held: int) -> Iterator[Finding]:
    if domain.unknown_since is not None:
        reason = domain.problem or "it cannot be read"
        if domain.silent and not domain.disputed:
            reason = f"no switch controller of it can be read: {domain.problem}"
        yield unknown(
            Check.CONTROLLER,
            f"domain {domain.uuid}",
            reason,
            f"{_SHOW_DOMAIN} {quote(domain.uuid)}"
            f"  # then see to the switch tray of {', '.join(domain.endpoints)}",
            evidence=(
                *(f"asked through {url}" for url in domain.endpoints),
                *((f"records: instances in it: {held}",) if held else ()),
            ),
            where=(at_domain(domain.uuid),),
            since=domain.unknown_since,
            instances=held,
        )


def _few_multicast_groups(domain: NvlinkDomainRecord, partitions: list[PartitionRecord]) -> Iterator[Finding]:
    """Too few free multicast groups for new partitions. A controller without a limit has none to run out of.

    The factory partition has all groups at first. Alone in its domain it keeps none from others.
    """
    limit, used = domain.multicast_limit, domain.multicast_used
    if limit is None or all(partition.default for partition in partitions):
        return
    subject = f"domain {domain.uuid}"
    factory = [at_partition(domain.uuid, partition.name) for partition in partitions if partition.default]
    if used is None:
        message = f"its switch controller does not report how many of {limit} multicast groups are in use"
        fix = f"{_SHOW_DOMAIN} {quote(domain.uuid)}"
        yield unknown(Check.MULTICAST, subject, message, fix, where=(at_domain(domain.uuid), *factory))
    elif limit - used < FREE_MULTICAST_SHARE * limit:
        yield fails(
            Check.MULTICAST,
            subject,
            f"{limit - used} of {limit} multicast groups are free: new partitions get none once they run out",
            f"rackloom admin partition show  # delete partitions of {subject} that no instance needs",
            severity=Severity.WARNING,
            evidence=(f"switch controller: {used} of {limit} multicast groups belong to partitions",),
            where=(at_domain(domain.uuid), *factory),
        )


def _away_controllers(domain: NvlinkDomainRecord, now: float) -> Iterator[Finding]:
    """Controllers that stay away: one finding if all of a domain do, else one for each."""
    away = [silent for silent in domain.silent if now - silent.since >= AWAY_SECONDS]
    if away and len(away) == len(domain.endpoints):
        message = "none of its switch controllers can be read any more: nothing that tenants ask for is done"
        yield _controller_gone(domain, away, message, Severity.ERROR)
        return
    answering = len(domain.endpoints) - len(domain.silent)
    for controller in away:
        message = (
            f"it can be read no more; of its domain's {len(domain.endpoints)} controllers {answering} can"
        )
        yield _controller_gone(domain, [controller], message, Severity.WARNING)


def _controller_gone(
    domain: NvlinkDomainRecord, away: list[SilentController], message: str, severity: Severity
) -> Finding:
    alone = severity is Severity.WARNING
    return fails(
        Check.CONTROLLER_AWAY,
        f"controller {away[0].url} of domain {domain.uuid}" if alone else f"domain {domain.uuid}",
        message,
        f"rackloom admin endpoint update --chassis-serial {quote(away[0].chassis[0])} {_NEW_ENDPOINT}"
        f"  # if it was replaced; else see to the switch tray behind {away[0].url}",
        severity=severity,
        evidence=tuple(
            f"records: {controller.url} speaks for chassis {', '.join(controller.chassis)}"
            for controller in away
        ),
        where=() if alone else (at_domain(domain.uuid),),
        since=max(controller.since for controller in away),
    )


def _no_controller_registered(uuid: str, machines: list[MachineRecord]) -> Finding:
    serials = sorted({machine.chassis_serial for machine in machines})
    held = sum(machine.instance is not None for machine in machines)
    return fails(
        Check.CONTROLLER_AWAY,
        f"domain {uuid}",
        "no switch controller is registered for it: nobody knows how it is, and nothing can be changed in it",
        f"rackloom admin endpoint create --chassis-serial {quote(serials[0])} {_NEW_ENDPOINT}",
        severity=Severity.ERROR if held else Severity.WARNING,
        evidence=(
            f"records: machines of chassis {', '.join(serials)}: {len(machines)}, with an instance: {held}",
        ),
        where=(at_domain(uuid), *(at_machine(machine.id) for machine in machines)),
    )


# Health of GPUs.


_MOST_NAMED = 8
"""GPUs that a sentence names."""
_MANY_TRAYS = 3
"""The least number of trays with a common problem that is not taken for chance."""


def check_gpus(index: SnapshotIndex) -> Iterator[Finding]:
    """All findings about the health of GPUs. A problem that most trays of a domain share is one finding."""
    listed = [(chain, gpu) for chain in index.chains if (gpu := chain.fabric) and index.is_fresh(gpu.domain)]
    found = grouped(((gpu.domain, gpu.problem), chain) for chain, gpu in listed if gpu.healthy is False)
    sick_domains = {domain for domain, _ in found}
    trays = grouped((gpu.domain, gpu.tray_index) for _, gpu in listed if gpu.domain in sick_domains)
    for (domain, problem), gpus in found.items():
        sick = {chain.fabric.tray_index for chain in gpus if chain.fabric is not None}
        # One cause for many trays is likelier than many causes: NVLink switches or power join them.
        if len(sick) >= _MANY_TRAYS and 2 * len(sick) > len(set(trays[domain])):
            yield _domain_wide(domain, problem, gpus, len(sick))
        else:
            yield from (finding for chain in gpus for finding in _sick_gpu(chain, index))
    untold = grouped((gpu.domain, chain) for chain, gpu in listed if gpu.healthy is None)
    for domain, gpus in untold.items():
        yield unknown(
            Check.GPU_HEALTH,
            f"{len(gpus)} GPUs of domain {domain}",
            "their switch controller does not report their health",
            f"{_SHOW_DOMAIN} {quote(domain)}",
            evidence=(f"switch controller: it lists {len(gpus)} GPUs of unknown health",),
            where=tuple(dict.fromkeys(place for chain in gpus for place in _gpu_places(chain))),
        )


def _domain_wide(domain: str, problem: str, gpus: list[GpuChain], trays: int) -> Finding:
    machines = dict.fromkeys(at_machine(chain.machine.id) for chain in gpus if chain.machine is not None)
    return fails(
        Check.GPU_HEALTH,
        f"{len(gpus)} GPUs of domain {domain}",
        f"GPUs of {trays} trays are {problem or 'not healthy'} at once: look at what joins them, not at each",
        f"{_SHOW_DOMAIN} {quote(domain)}  # then see to its switch trays: power, seating, cables",
        evidence=tuple(line for chain in gpus for line in _gpu_evidence(chain)),
        where=(
            at_domain(domain),
            *machines,
            *dict.fromkeys(place for chain in gpus for place in _gpu_places(chain)),
        ),
    )


def _sick_gpu(chain: GpuChain, index: SnapshotIndex) -> Iterator[Finding]:
    gpu = chain.fabric
    if gpu is None:
        return
    tray = "" if chain.machine is None else chain.machine.id
    name = str(index.gpu_part(chain))
    why = f"{name} {gpu.problem}"
    cordon = f"rackloom admin tray cordon {quote(tray)} --reason {quote(why)}  # then see to the GPU"
    yield fails(
        Check.GPU_HEALTH,
        name,
        f"the switch controller says {gpu.problem or 'it is not healthy'}",
        cordon if tray else f"{_SHOW_DOMAIN} {quote(gpu.domain)}",
        evidence=(*_gpu_evidence(chain), *_reservation_evidence(chain.machine)),
        where=tuple(_gpu_places(chain)),
    )


def _reservation_evidence(machine: MachineRecord | None) -> Iterator[str]:
    """The reservation that waits for an empty tray. Omitted if a tenant, who may read it, uses the tray."""
    if machine is not None and machine.reservation and machine.instance is None:
        yield f"records: machine {machine.id} is {machine.reservation}"


def _gpu_evidence(chain: GpuChain) -> Iterator[str]:
    if (gpu := chain.fabric) is not None:
        yield f"switch controller: GPU 0x{gpu.guid:016x} is {gpu.problem or 'not healthy'}"
        yield f"place: {gpu_numbers(chain.key)}"
    if (device := chain.device) is not None:
        yield f"node {device.node}: device {device.name} has {', '.join(device.taints) or 'no taint'}"


def _gpu_places(chain: GpuChain) -> Iterator[str]:
    """The places that one sick GPU concerns, which do not include its whole tray."""
    if chain.device is not None:
        yield at_device(chain.device)
    if chain.fabric is not None:
        yield at_gpu(chain.fabric.domain, chain.fabric.guid)
    if chain.partition is not None:
        yield at_partition(chain.partition.domain, chain.partition.name)


# Layers, partitions and trays.


def check_layers(index: SnapshotIndex) -> Iterator[Finding]:
    """Layers and issuers that could not be read. Layers with one cause are one finding."""
    lost = grouped(
        (status.problem, status) for status in index.snapshot.layers if status.unknown_since is not None
    )
    for problem, layers in lost.items():
        names = [status.layer for status in layers]
        fabric = Layer.FABRIC in names
        domains = index.snapshot.domains if fabric else ()
        nodes = index.snapshot.nodes if Layer.CLUSTER in names else ()
        held = sum(machine.instance is not None for machine in index.snapshot.machines)
        yield unknown(
            Check.LAYER,
            f"layer {' and '.join(names)}",
            problem,
            layers[0].fix,
            where=(*(at_domain(domain.uuid) for domain in domains), *(at_node(node.name) for node in nodes)),
            since=layers[0].unknown_since,
            instances=held if fabric else 0,
        )
    for issuer, problem in index.snapshot.issuers.items():
        fix = f"curl {quote(issuer)}/.well-known/openid-configuration  # from the host of the site service"
        yield unknown(Check.LAYER, f"issuer {issuer}", problem, fix)


def check_fabric(index: SnapshotIndex) -> Iterator[Finding]:
    """All findings about GPUs, partitions and trays as their switch controllers show them."""
    yield from check_gpus(index)
    for partition in index.snapshot.partitions:
        if partition.healthy is False and index.is_fresh(partition.domain):
            yield fails(
                Check.PARTITION_HEALTH,
                f"partition {partition.name}",
                f"the switch controller says {partition.problem or 'it is not healthy'}",
                f"{_SHOW_DOMAIN} {quote(partition.domain)}",
                evidence=(
                    f"switch controller: partition {partition.id} of domain {partition.domain}"
                    f" is {partition.problem}",
                ),
                where=(at_partition(partition.domain, partition.name),),
            )
    unlisted = grouped(
        (chain.machine.id, chain) for chain in index.chains if chain.machine and chain.fabric is None
    )
    for machine in index.snapshot.machines:
        yield from _tray(machine, unlisted.get(machine.id, []), index)


def _tray(machine: MachineRecord, unlisted: list[GpuChain], index: SnapshotIndex) -> Iterator[Finding]:
    name = index.node_of_machine.get(machine.id)
    subject, where = f"machine {machine.id}", (at_machine(machine.id), *([at_node(name)] if name else []))
    node = index.nodes.get(name or "")
    if not machine.domain:
        serial = quote(machine.chassis_serial)
        fix = f"rackloom admin endpoint create --chassis-serial {serial} {_NEW_ENDPOINT}"
        message = "no switch controller has reported this tray yet"
        yield unknown(Check.MACHINE_PRESENT, subject, message, fix, where=where)
    elif machine.missing_since is not None and index.is_fresh(machine.domain):
        cordon = f"rackloom admin tray cordon {quote(machine.id)} --reason missing"
        yield fails(
            Check.MACHINE_PRESENT,
            subject,
            "its switch controller lists none of its GPUs",
            f"{cordon}  # then see to its power and seating",
            severity=Severity.ERROR if machine.instance else Severity.WARNING,
            evidence=(
                f"records: chassis {machine.chassis_serial} slot {machine.slot}",
                *(() if node is None else (f"node {node.name}: {'ready' if node.ready else 'not ready'}",)),
                *_reservation_evidence(machine),
            ),
            where=where,
            since=machine.missing_since,
        )
    elif any(key.fabric_guid is None for key in machine.gpus) and index.is_fresh(machine.domain):
        yield _unmapped_gpus(machine, where)
    elif unlisted and index.is_fresh(machine.domain):
        yield _unlisted_gpus(machine, unlisted, where, index)


def _unlisted_gpus(
    machine: MachineRecord, gpus: list[GpuChain], tray: tuple[str, ...], index: SnapshotIndex
) -> Finding:
    # The cluster may name the GPUs themselves. If it does not, the whole tray is concerned.
    devices = tuple(at_device(chain.device) for chain in gpus if chain.device is not None)
    return fails(
        Check.MACHINE_PRESENT,
        ", ".join(str(index.gpu_part(chain)) for chain in gpus),
        "its switch controller lists only the other GPUs of the tray",
        f"{_SHOW_DOMAIN} {quote(machine.domain)}  # then see to the GPU and its tray",
        severity=Severity.ERROR if machine.instance else Severity.WARNING,
        evidence=tuple(f"place: {gpu_numbers(chain.key)}" for chain in gpus),
        where=(*devices, *tray),
    )


def _unmapped_gpus(machine: MachineRecord, where: tuple[str, ...]) -> Finding:
    lacking = (gpu for gpu, key in enumerate(machine.gpus) if key.fabric_guid is None)
    gpus = ", ".join(str(msgspec.structs.replace(tray_part(machine), gpu=gpu)) for gpu in lacking)
    return fails(
        Check.MAPPING,
        f"machine {machine.id}",
        f"no fabric GUID is recorded of {gpus}: they can join no partition",
        f"rackloom admin machine nvlink-info populate {quote(machine.id)} --update-db",
        evidence=(f"records: {gpus} have no GUID",),
        where=where,
    )
