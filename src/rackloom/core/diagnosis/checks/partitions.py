"""Checks of physical partitions against the logical partitions that tenants ask for.

Only domains with a fresh reading are judged. The checks report:

- two tenants in one partition, which is critical: they share memory;
- a partition that the site did not make, and the factory partition where the site's policy removes it;
- a partition of the site that the controller no longer lists though nobody deleted it;
- a GPU that the controller lists in several partitions;
- instances whose GPUs are not where they were asked into, one finding for each instance. A request
  younger than `SETTLES_IN` (two intervals of the reconciler) is unknown and not a failure: it may still
  be in progress;
- a logical partition whose instances are in several NVLink domains. The site makes one physical partition
  in each domain, and no memory is shared between them.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from shlex import quote

import msgspec

from rackloom.core.diagnosis import catalogue
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
)
from rackloom.core.diagnosis.snapshot import GpuChain, InstanceGpuRecord, MachineRecord, PartitionRecord

# Physical partitions of one domain, and what instances asked for.


SETTLES_IN = 120.0
"""Seconds: two intervals of the reconciler. What was asked for later than that may still be on its way."""
_READY = "Ready"


def check_partitions(view: SnapshotIndex) -> Iterator[Finding]:
    """All findings about partitions of domains that can be read, and about what instances asked for."""
    held = _gpus_by_partition(view)
    for partition in view.picture.partitions:
        if view.is_fresh(partition.domain):
            yield from _check_partition(partition, held.get((partition.domain, partition.id), []), view)
    yield from _lost_partitions(view)
    for chain in view.chains:
        yield from _several_partitions(chain, view)
    yield from _instance_requests(view)


def _gpus_by_partition(view: SnapshotIndex) -> Mapping[tuple[str, int], list[GpuChain]]:
    """The GPUs in each partition, those that several list in all of them."""
    found: defaultdict[tuple[str, int], list[GpuChain]] = defaultdict(list)
    for chain in view.chains:
        gpu = chain.fabric
        if gpu is not None and gpu.partition is not None:
            for number in (gpu.partition, *gpu.also):
                found[gpu.domain, number].append(chain)
    return found


def _check_partition(
    partition_record: PartitionRecord, gpus: list[GpuChain], view: SnapshotIndex
) -> Iterator[Finding]:
    yield from _shared_by_tenants(partition_record, gpus, view)
    where = _partition_places(partition_record, gpus)
    if partition_record.owner == "foreign":
        busy = sorted({chain.machine.id for chain in gpus if chain.machine and chain.machine.instance})
        said = f"it holds GPUs of instances on {first_few(busy)}" if busy else "nobody asked for it"
        yield fails(
            catalogue.PARTITION_OWNED,
            _partition_title(partition_record),
            f"{_foreign_reason(partition_record)}: {said}",
            _release_command(partition_record),
            severity=Severity.ERROR if busy else Severity.WARNING,
            evidence=(
                f"switch controller: partition {partition_record.id} of domain {partition_record.domain}, with {len(gpus)} GPUs",
                "records: nobody here made it",
            ),
            where=where,
        )
    elif partition_record.default and _default_policy(partition_record.domain, view) not in ("", "keep"):
        yield fails(
            catalogue.DEFAULT_GONE,
            f"partition {partition_record.name} of domain {partition_record.domain}",
            f"the factory partition is still there, and joins {len(gpus)} GPUs",
            f"{_plan_command(partition_record.domain)}  # what keeps it: else it is removed by itself",
            severity=Severity.WARNING,
            evidence=(
                f"switch controller: partition {partition_record.id}",
                f"site: policy for it is {_default_policy(partition_record.domain, view)}",
            ),
            where=where,
        )


def _partition_title(partition_record: PartitionRecord) -> str:
    return (
        f"partition {partition_record.name}"
        if partition_record.name
        else f"partition {partition_record.id} without a name"
    )


def _foreign_reason(partition_record: PartitionRecord) -> str:
    return (
        "it was made by somebody else"
        if partition_record.name
        else "a switch that forgot names cannot say whose it is"
    )


def _release_command(partition_record: PartitionRecord) -> str:
    domain, name = quote(partition_record.domain), quote(partition_record.name)
    return f"rackloom admin partition release --domain {domain} --name {name} --reason unknown  # or adopt it"


def _plan_command(domain: str) -> str:
    return f"rackloom admin plan {quote(domain)}"


def _default_policy(domain: str, view: SnapshotIndex) -> str:
    found = view.domains.get(domain)
    return "" if found is None else found.default_policy


def _partition_places(partition_record: PartitionRecord, gpus: list[GpuChain]) -> tuple[str, ...]:
    return unique(at_partition(partition_record.domain, partition_record.name), *places_around(gpus))


def _shared_by_tenants(
    partition_record: PartitionRecord, gpus: list[GpuChain], view: SnapshotIndex
) -> Iterator[Finding]:
    tenants: defaultdict[str, list[str]] = defaultdict(list)
    for chain in gpus:
        if chain.machine is not None and chain.machine.tenant is not None:
            tenants[chain.machine.tenant].append(f"GPU {_module_of(chain)} of {chain.machine.id}")
    owner = next((chain.logical.tenant for chain in gpus if chain.logical is not None), None)
    if owner is not None and tenants:
        tenants.setdefault(owner, [])
    if len(tenants) < 2:
        return
    named = [view.picture.tenants.get(tenant, tenant) for tenant in sorted(tenants)]
    yield fails(
        catalogue.ISOLATION,
        f"partition {partition_record.name}",
        f"GPUs of tenants {' and '.join(named)} share memory in it",
        f"{_plan_command(partition_record.domain)} --to plan.json  # read it, then: rackloom admin apply plan.json",
        severity=Severity.CRITICAL,
        evidence=tuple(_tenant_evidence(partition_record, tenants, view)),
        where=_partition_places(partition_record, gpus),
    )


def _tenant_evidence(
    partition_record: PartitionRecord, tenants: Mapping[str, list[str]], view: SnapshotIndex
) -> Iterator[str]:
    for tenant, members in sorted(tenants.items()):
        name = view.picture.tenants.get(tenant, tenant)
        if members:
            yield f"switch controller: partition {partition_record.id} holds {first_few(members)}"
            yield f"records: these are tenant {name}'s"
        else:
            yield f"records: partition {partition_record.name} was made for tenant {name}"


def _module_of(chain: GpuChain) -> int:
    return 0 if chain.key.place is None else chain.key.place.value.module_id


def _lost_partitions(view: SnapshotIndex) -> Iterator[Finding]:
    wishing = _machines_by_request(view)
    for partition in view.picture.lost_partitions:
        if not view.is_fresh(partition.domain):
            continue
        machines = wishing.get((partition.domain, partition.logical), [])
        nodes = [view.node_of_machine[machine] for machine in machines if machine in view.node_of_machine]
        yield fails(
            catalogue.PARTITION_THERE,
            f"partition {partition.name}",
            "the switch controller no longer lists it, and nobody here deleted it",
            f"{_plan_command(partition.domain)}  # what keeps it from being made again: else it is, by itself",
            evidence=(
                f"records: made for logical partition {_logical_name(partition.logical, view)}",
                f"switch controller of domain {partition.domain}: no partition of that name",
            ),
            where=unique(
                at_partition(partition.domain, partition.name),
                *map(at_machine, machines),
                *map(at_node, nodes),
            ),
            since=partition.seen_at,
        )


def _machines_by_request(view: SnapshotIndex) -> Mapping[tuple[str, str | None], list[str]]:
    """Machines by domain and by the logical partition that their instances asked for: it may span domains."""
    domains = {machine.id: machine.domain for machine in view.picture.machines}
    found: defaultdict[tuple[str, str | None], list[str]] = defaultdict(list)
    for gpu in view.picture.instance_gpus:
        found[domains.get(gpu.machine, ""), gpu.logical].append(gpu.machine)
    return found


def _several_partitions(chain: GpuChain, view: SnapshotIndex) -> Iterator[Finding]:
    gpu = chain.fabric
    if gpu is None or not gpu.also or not view.is_fresh(gpu.domain):
        return
    told = ", ".join(str(one) for one in (gpu.partition, *gpu.also))
    yield fails(
        catalogue.ONE_PARTITION,
        f"GPU 0x{gpu.guid:016x}",
        f"the switch controller lists it in partitions {told}",
        "rackloom admin partition show  # release the one that nobody here made",
        evidence=(f"switch controller of domain {gpu.domain}: member of partitions {told}",),
        where=(at_gpu(gpu.domain, gpu.guid),),
    )


def _instance_requests(view: SnapshotIndex) -> Iterator[Finding]:
    """What instances asked for, machine by machine: their GPUs mostly share their fate."""
    chains = {
        (chain.machine.id, _module_of(chain)): chain for chain in view.chains if chain.machine is not None
    }
    troubled: defaultdict[str, list[InstanceGpuRecord]] = defaultdict(list)
    for one in view.picture.instance_gpus:
        chain = chains.get((one.machine, one.module_id))
        if one.status != _READY or _is_elsewhere(one, chain, view):
            troubled[one.instance].append(one)
    for instance, gpus in sorted(troubled.items()):
        beside = [chains[at] for one in gpus if (at := (one.machine, one.module_id)) in chains]
        yield _request_finding(instance, gpus, beside, view)


def _is_elsewhere(gpu_record: InstanceGpuRecord, chain: GpuChain | None, view: SnapshotIndex) -> bool:
    if chain is None or chain.fabric is None or not view.is_fresh(chain.fabric.domain):
        return False
    return gpu_record.logical is not None and (
        chain.partition is None or chain.partition.logical != gpu_record.logical
    )


def _request_finding(
    instance: str, gpus: list[InstanceGpuRecord], chains: list[GpuChain], view: SnapshotIndex
) -> Finding:
    first = gpus[0]
    machine = next((chain for chain in chains if chain.machine is not None), None)
    domain = "" if machine is None or machine.machine is None else machine.machine.domain
    modules = ", ".join(str(one.module_id) for one in gpus)
    said = first.problem or f"it is {first.status}"
    since = min((one.since for one in gpus if one.since is not None), default=None)
    subject = f"instance {instance}"
    fix = first.fix or f"rackloom admin domain show {quote(domain)}"
    message = f"GPU {modules} of {first.machine}: {said}"
    young = since is not None and view.picture.at - since < SETTLES_IN
    tell = unknown if young or not view.is_fresh(domain) else fails
    wanted = "no partition" if first.logical is None else _logical_name(first.logical, view)
    return msgspec.structs.replace(
        tell(catalogue.INTERFACE, subject, message, fix),
        evidence=(
            f"records: instance {instance} wants GPU {modules} of {first.machine} in {wanted}",
            *(_fabric_evidence(chain) for chain in chains[:4]),
        ),
        where=(at_machine(first.machine), at_domain(domain), *places_around(chains)),
        since=since,
    )


def _logical_name(logical: str, view: SnapshotIndex) -> str:
    found = view.logicals.get(logical)
    return logical if found is None else found.name


def _fabric_evidence(chain: GpuChain) -> str:
    if chain.fabric is None:
        return f"switch controller: no GPU in place {_module_of(chain)}"
    held = "no partition" if chain.partition is None else f"partition {chain.partition.name}"
    return f"switch controller: GPU 0x{chain.fabric.guid:016x} is in {held}"


# Logical partitions that reach over several NVLink domains.


_MOST_NAMED = 3
"""Machines of one domain."""


def check_spread(view: SnapshotIndex) -> Iterator[Finding]:
    """One finding for each logical partition that is more than one island of shared memory."""
    for logical, domains in sorted(_machines_by_domain(view).items()):
        if len(domains) > 1:
            yield _spread_finding(logical, domains, view)


def _machines_by_domain(view: SnapshotIndex) -> Mapping[str, Mapping[str, list[MachineRecord]]]:
    """The machines of the instances of each logical partition, by domain."""
    asked = dict.fromkeys((one.logical, one.machine) for one in view.picture.instance_gpus)
    machines = {one.id: one for one in view.picture.machines}
    found: defaultdict[str, defaultdict[str, list[MachineRecord]]] = defaultdict(lambda: defaultdict(list))
    for logical, id_ in asked:
        machine = machines.get(id_)
        if logical is not None and machine is not None and machine.domain:
            found[logical][machine.domain].append(machine)
    return found


def _spread_finding(logical: str, domains: Mapping[str, list[MachineRecord]], view: SnapshotIndex) -> Finding:
    seen = view.logicals.get(logical)
    name, tenant = (logical, "") if seen is None else (seen.name, seen.tenant)
    org = view.picture.tenants.get(tenant, tenant) or "ORGANISATION"
    fewest = min(domains, key=lambda domain: (len(domains[domain]), domain))
    return fails(
        catalogue.LOGICAL_SPREAD,
        f"logical partition {name}",
        f"its instances are in {len(domains)} NVLink domains, and share no memory from one to another",
        f"rackloom admin logical-partition create --name {quote(f'{name}-{fewest}')} --tenant {quote(org)}"
        "  # one for each domain: rackloom admin instance update-nvlink-config moves its instances",
        severity=Severity.WARNING,
        evidence=tuple(_domain_evidence(domain, machines) for domain, machines in sorted(domains.items())),
        where=(at_logical(logical),),
        since=_second_domain_since(domains),
    )


def _domain_evidence(domain: str, machines: list[MachineRecord]) -> str:
    count = f"{len(machines)} instance{'' if len(machines) == 1 else 's'}"
    return f"records: {count} in domain {domain}, on {first_few([machine.id for machine in machines], _MOST_NAMED)}"


def _second_domain_since(domains: Mapping[str, list[MachineRecord]]) -> float | None:
    """When the second domain got its first; None where that of some is not known."""
    told = [
        [machine.held_since for machine in machines if machine.held_since is not None]
        for machines in domains.values()
    ]
    firsts = sorted(min(one) for one in told if one)
    return firsts[1] if len(firsts) == len(domains) else None
