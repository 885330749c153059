"""Checks of physical partitions against the logical partitions that tenants request.

Only domains with a fresh reading are judged. The checks report:

- Two tenants in one partition, which is critical: they share memory.
- A partition that the site did not make, with the trays that get no instance because of it, and the factory
  partition if the site's policy removes it.
- A partition of the site that the controller no longer lists although no one deleted it.
- A GPU that the controller lists in several partitions.
- Instances with GPUs outside the requested partition, one finding for each instance. A request younger than
  `SETTLES_IN` (two intervals of the reconciler) is unknown and not a failure: it may still be in progress.
- A logical partition with instances in several NVLink domains. The site makes one physical partition
  in each domain, and no memory is shared between them.
"""

from collections.abc import Iterable, Iterator, Mapping
from shlex import quote

import msgspec

from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.findings import Finding, Severity, fails, first_few, unique, unknown
from rackloom.core.diagnosis.index import (
    SnapshotIndex,
    at_domain,
    at_gpu,
    at_logical,
    at_machine,
    at_node,
    at_partition,
    places_around,
    tray_part,
)
from rackloom.core.diagnosis.snapshot import (
    GpuChain,
    InstanceGpuRecord,
    MachineRecord,
    PartitionRecord,
    grouped,
)
from rackloom.topology.part_names import PartName, gpu_numbers

# Physical partitions of one domain, and the requests of instances.


SETTLES_IN = 120.0
"""Seconds, two intervals of the reconciler: a younger request may still be in progress."""
_READY = "Ready"


def check_partitions(index: SnapshotIndex) -> Iterator[Finding]:
    """All findings about the partitions of readable domains."""
    # A GPU that several partitions list is a member of each of them.
    members = grouped(
        ((gpu.domain, number), chain)
        for chain in index.chains
        if (gpu := chain.fabric) is not None and gpu.partition is not None
        for number in (gpu.partition, *gpu.also)
    )
    for partition in index.snapshot.partitions:
        if index.is_fresh(partition.domain) and not partition.uncertain:
            yield from _check_partition(partition, members[partition.domain, partition.id], index)
    for chain in index.chains:
        if chain.fabric is not None and chain.fabric.also:
            yield from _several_partitions(chain, index)


def _check_partition(
    partition: PartitionRecord, gpus: list[GpuChain], index: SnapshotIndex
) -> Iterator[Finding]:
    yield from _shared_by_tenants(partition, gpus, index)
    domain = index.domains.get(partition.domain)
    policy = "" if domain is None else domain.default_policy
    if partition.owner == "foreign":
        yield _foreign_partition(partition, gpus)
    elif partition.default and policy not in ("", "keep"):
        yield fails(
            Check.DEFAULT_GONE,
            f"partition {partition.name} of domain {partition.domain}",
            f"the factory partition is still there, and joins {len(gpus)} GPUs",
            f"{_plan_command(partition.domain)}  # what keeps it: else it is removed by itself",
            severity=Severity.WARNING,
            evidence=(f"switch controller: partition {partition.id}", f"site: policy for it is {policy}"),
            where=_partition_places(partition, gpus),
        )


def _foreign_partition(partition: PartitionRecord, gpus: list[GpuChain]) -> Finding:
    busy = sorted({chain.machine.id for chain in gpus if chain.machine and chain.machine.instance})
    idle = sorted({chain.machine.id for chain in gpus if chain.machine and not chain.machine.instance})
    content = f"it holds GPUs of instances on {first_few(busy)}" if busy else "nobody asked for it"
    if idle:
        trays = "tray" if len(idle) == 1 else "trays"
        content += f"; it keeps instances off {len(idle)} empty {trays}: {first_few(idle)}"
    title, reason = f"partition {partition.name}", "it was made by somebody else"
    if not partition.name:
        title = f"partition {partition.id} without a name"
        reason = "a switch that forgot names cannot say whose it is"
    domain, name = quote(partition.domain), quote(partition.name)
    return fails(
        Check.PARTITION_OWNED,
        title,
        f"{reason}: {content}",
        f"rackloom admin partition release --domain {domain} --name {name} --reason unknown  # or adopt it",
        severity=Severity.ERROR if busy else Severity.WARNING,
        evidence=(
            f"switch controller: partition {partition.id} of domain {partition.domain}, with"
            f" {len(gpus)} GPUs",
            "records: nobody here made it",
        ),
        where=_partition_places(partition, gpus),
    )


def _plan_command(domain: str) -> str:
    return f"rackloom admin plan {quote(domain)}"


def _partition_places(partition: PartitionRecord, gpus: list[GpuChain]) -> tuple[str, ...]:
    return unique(at_partition(partition.domain, partition.name), *places_around(gpus))


def _shared_by_tenants(
    partition: PartitionRecord, gpus: list[GpuChain], index: SnapshotIndex
) -> Iterator[Finding]:
    tenants = grouped(
        (chain.machine.tenant, chain)
        for chain in gpus
        if chain.machine is not None and chain.machine.tenant is not None
    )
    owner = next((chain.logical.tenant for chain in gpus if chain.logical is not None), None)
    # A partition made for one tenant and used by another is shared too, even if its owner has no GPU in it.
    if owner is not None and tenants:
        tenants.setdefault(owner, [])
    if len(tenants) < 2:
        return
    named: list[str] = []
    evidence: list[str] = []
    for tenant, members in sorted(tenants.items()):
        name = index.snapshot.tenants.get(tenant, tenant)
        named.append(name)
        if members:
            names = [str(index.gpu_part(chain)) for chain in members]
            evidence.append(f"switch controller: partition {partition.id} holds {first_few(names)}")
            evidence.append(f"records: these are tenant {name}'s")
        else:
            evidence.append(f"records: partition {partition.name} was made for tenant {name}")
    yield fails(
        Check.ISOLATION,
        f"partition {partition.name}",
        f"GPUs of tenants {' and '.join(named)} share memory in it",
        f"{_plan_command(partition.domain)} --to plan.json  # read it, then: rackloom admin apply plan.json",
        severity=Severity.CRITICAL,
        evidence=tuple(evidence),
        where=_partition_places(partition, gpus),
    )


def _module_of(chain: GpuChain) -> int:
    return 0 if chain.key.place is None else chain.key.place.value.module_id


def check_lost_partitions(index: SnapshotIndex) -> Iterator[Finding]:
    """Partitions that controllers no longer list although no one deleted them."""
    if not index.snapshot.lost_partitions:
        return
    domains = {machine.id: machine.domain for machine in index.snapshot.machines}
    # A logical partition may span domains, and each domain has a physical partition for it.
    requested = grouped(
        ((domains.get(gpu.machine, ""), gpu.logical), gpu.machine) for gpu in index.snapshot.instance_gpus
    )
    doubtful = {domain.uuid for domain in index.snapshot.domains if domain.uncertain}
    for partition in index.snapshot.lost_partitions:
        # A list that contradicts itself may omit a partition that stands.
        if not index.is_fresh(partition.domain) or partition.domain in doubtful:
            continue
        machines = requested[partition.domain, partition.logical]
        nodes = [index.node_of_machine[machine] for machine in machines if machine in index.node_of_machine]
        yield fails(
            Check.PARTITION_THERE,
            f"partition {partition.name}",
            "the switch controller no longer lists it, and nobody here deleted it",
            f"{_plan_command(partition.domain)}"
            "  # what keeps it from being made again: else it is, by itself",
            evidence=(
                f"records: made for logical partition {_logical_name(partition.logical, index)}",
                f"switch controller of domain {partition.domain}: no partition of that name",
            ),
            where=unique(
                at_partition(partition.domain, partition.name),
                *map(at_machine, machines),
                *map(at_node, nodes),
            ),
            since=partition.seen_at,
        )


def _several_partitions(chain: GpuChain, index: SnapshotIndex) -> Iterator[Finding]:
    gpu = chain.fabric
    if gpu is None or not gpu.also or not index.is_fresh(gpu.domain):
        return
    listed = ", ".join(map(str, (gpu.partition, *gpu.also)))
    yield fails(
        Check.ONE_PARTITION,
        str(index.gpu_part(chain)),
        f"the switch controller lists it in partitions {listed}",
        "rackloom admin partition show  # release the one that nobody here made",
        evidence=(
            f"switch controller of domain {gpu.domain}: GPU 0x{gpu.guid:016x} is in partitions {listed}",
            f"place: {gpu_numbers(chain.key)}",
        ),
        where=(at_gpu(gpu.domain, gpu.guid),),
    )


MisplacedGpu = tuple[InstanceGpuRecord, GpuChain | None]
"""A requested GPU that is not in its requested partition, and the GPU through all layers."""


def misplaced_gpus(index: SnapshotIndex) -> tuple[MisplacedGpu, ...]:
    """The requested GPUs that are not in their requested partition."""
    chains = {
        (chain.machine.id, _module_of(chain)): chain for chain in index.chains if chain.machine is not None
    }
    found = ((gpu, chains.get((gpu.machine, gpu.module_id))) for gpu in index.snapshot.instance_gpus)
    # A status may be older than the fabric, so both are looked at.
    return tuple(
        [(gpu, chain) for gpu, chain in found if gpu.status != _READY or _is_elsewhere(gpu, chain, index)]
    )


def check_requests(misplaced: Iterable[MisplacedGpu], index: SnapshotIndex) -> Iterator[Finding]:
    """One finding for each instance with a misplaced GPU."""
    for instance, gpus in sorted(grouped((gpu.instance, (gpu, chain)) for gpu, chain in misplaced).items()):
        gpus.sort(key=lambda found: (found[0].machine, found[0].module_id))
        chains = [chain for _, chain in gpus if chain is not None]
        yield _request_finding(instance, [gpu for gpu, _ in gpus], chains, index)


def _is_elsewhere(gpu: InstanceGpuRecord, chain: GpuChain | None, index: SnapshotIndex) -> bool:
    if chain is None or chain.fabric is None or chain.fabric.uncertain:
        return False
    if not index.is_fresh(chain.fabric.domain):
        return False
    return gpu.logical is not None and (chain.partition is None or chain.partition.logical != gpu.logical)


def _request_finding(
    instance: str, gpus: list[InstanceGpuRecord], chains: list[GpuChain], index: SnapshotIndex
) -> Finding:
    first = gpus[0]
    domain = next((chain.machine.domain for chain in chains if chain.machine is not None), "")
    known = (tray_part(chain.machine) for chain in chains if chain.machine is not None)
    tray = next(known, PartName(first.machine))
    named = ", ".join(str(msgspec.structs.replace(tray, gpu=gpu.module_id - 1)) for gpu in gpus)
    since = min((gpu.since for gpu in gpus if gpu.since is not None), default=None)
    wanted = "no partition" if first.logical is None else _logical_name(first.logical, index)
    young = since is not None and index.snapshot.at - since < SETTLES_IN
    doubtful = any(chain.fabric is not None and chain.fabric.uncertain for chain in chains)
    report = unknown if young or doubtful or not index.is_fresh(domain) else fails
    return report(
        Check.INTERFACE,
        f"instance {instance}",
        f"{named}: {first.problem or f'it is {first.status}'}",
        first.fix or f"rackloom admin domain show {quote(domain)}",
        evidence=(
            f"records: instance {instance} on machine {first.machine} wants {named} in {wanted}",
            *(_fabric_evidence(chain, index) for chain in chains[:4]),
        ),
        where=(at_machine(first.machine), at_domain(domain), *places_around(chains)),
        since=since,
    )


def _logical_name(logical: str, index: SnapshotIndex) -> str:
    found = index.logicals.get(logical)
    return logical if found is None else found.name


def _fabric_evidence(chain: GpuChain, index: SnapshotIndex) -> str:
    name = index.gpu_part(chain)
    if chain.fabric is None:
        return f"switch controller: no GPU at {name}"
    held = "no partition" if chain.partition is None else f"partition {chain.partition.name}"
    return f"switch controller: {name} (0x{chain.fabric.guid:016x}) is in {held}"


# Logical partitions that reach over several NVLink domains.


def check_spread(index: SnapshotIndex) -> Iterator[Finding]:
    """One finding for each logical partition with instances in several NVLink domains."""
    machines = {machine.id: machine for machine in index.snapshot.machines}
    requested = dict.fromkeys((gpu.logical, gpu.machine) for gpu in index.snapshot.instance_gpus)
    located = grouped(
        (logical, machines[id_])
        for logical, id_ in requested
        if logical is not None and id_ in machines and machines[id_].domain
    )
    for logical, members in sorted(located.items()):
        domains = grouped((machine.domain, machine) for machine in members)
        if len(domains) > 1:
            yield _spread_finding(logical, domains, index)


def _spread_finding(
    logical: str, domains: Mapping[str, list[MachineRecord]], index: SnapshotIndex
) -> Finding:
    record = index.logicals.get(logical)
    name, tenant = (logical, "") if record is None else (record.name, record.tenant)
    org = index.snapshot.tenants.get(tenant, tenant) or "ORGANISATION"
    fewest = min(domains, key=lambda domain: (len(domains[domain]), domain))
    # It is spread since the second domain got its first machine. That is unknown if any first one is.
    since = [[machine.held_since for machine in machines] for machines in domains.values()]
    known = [[at for at in found if at is not None] for found in since]
    firsts = sorted(min(found) for found in known if found)
    evidence = []
    for domain, machines in sorted(domains.items()):
        count = f"{len(machines)} instance{'' if len(machines) == 1 else 's'}"
        named = first_few([machine.id for machine in machines])
        evidence.append(f"records: {count} in domain {domain}, on {named}")
    return fails(
        Check.LOGICAL_SPREAD,
        f"logical partition {name}",
        f"its instances are in {len(domains)} NVLink domains, and share no memory from one to another",
        f"rackloom admin logical-partition create --name {quote(f'{name}-{fewest}')} --tenant {quote(org)}"
        "  # one for each domain: rackloom admin instance update-nvlink-config moves its instances",
        severity=Severity.WARNING,
        evidence=tuple(evidence),
        where=(at_logical(logical),),
        since=firsts[1] if len(firsts) == len(domains) else None,
    )
