"""Physical partitions against the logical ones that tenants ask for, and against one another."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from shlex import quote

import msgspec

from rackloom.prove.doctor import names
from rackloom.prove.doctor.checks.view import (
    View,
    around,
    at_domain,
    at_gpu,
    at_machine,
    at_node,
    at_partition,
)
from rackloom.prove.doctor.findings import Finding, Severity, fails, unknown
from rackloom.prove.doctor.words import some, unique
from rackloom.prove.picture.values import GpuChain, InstanceGpu, PartitionSeen

SETTLES_IN = 120.0
"""Seconds: two intervals of the reconciler. What was asked for later than that may still be on its way."""
_READY = "Ready"


def check_partitions(view: View) -> Iterator[Finding]:
    """All findings about partitions of domains that can be read, and about what instances asked for."""
    held = _held(view)
    for partition in view.picture.partitions:
        if view.is_fresh(partition.domain):
            yield from _partition(partition, held.get((partition.domain, partition.id), []), view)
    yield from _lost(view)
    for chain in view.chains:
        yield from _in_one(chain, view)
    yield from _wishes(view)


def _held(view: View) -> Mapping[tuple[str, int], list[GpuChain]]:
    """The GPUs in each partition, those that several list in all of them."""
    found: defaultdict[tuple[str, int], list[GpuChain]] = defaultdict(list)
    for chain in view.chains:
        gpu = chain.fabric
        if gpu is not None and gpu.partition is not None:
            for number in (gpu.partition, *gpu.also):
                found[gpu.domain, number].append(chain)
    return found


def _partition(one: PartitionSeen, gpus: list[GpuChain], view: View) -> Iterator[Finding]:
    yield from _tenants(one, gpus, view)
    where = _where(one, gpus)
    if one.owner == "foreign":
        busy = sorted({chain.machine.id for chain in gpus if chain.machine and chain.machine.instance})
        said = f"it holds GPUs of instances on {some(busy)}" if busy else "nobody asked for it"
        yield fails(
            names.PARTITION_OWNED,
            _called(one),
            f"{_whose(one)}: {said}",
            _let_go(one),
            severity=Severity.ERROR if busy else Severity.WARNING,
            evidence=(
                f"switch controller: partition {one.id} of domain {one.domain}, with {len(gpus)} GPUs",
                "records: nobody here made it",
            ),
            where=where,
        )
    elif one.default and _policy(one.domain, view) not in ("", "keep"):
        yield fails(
            names.DEFAULT_GONE,
            f"partition {one.name} of domain {one.domain}",
            f"the factory partition is still there, and joins {len(gpus)} GPUs",
            f"{_plan(one.domain)}  # what keeps it: else it is removed by itself",
            severity=Severity.WARNING,
            evidence=(
                f"switch controller: partition {one.id}",
                f"site: policy for it is {_policy(one.domain, view)}",
            ),
            where=where,
        )


def _called(one: PartitionSeen) -> str:
    return f"partition {one.name}" if one.name else f"partition {one.id} without a name"


def _whose(one: PartitionSeen) -> str:
    return "it was made by somebody else" if one.name else "a switch that forgot names cannot say whose it is"


def _let_go(one: PartitionSeen) -> str:
    domain, name = quote(one.domain), quote(one.name)
    return f"rackloom admin partition release --domain {domain} --name {name} --reason unknown  # or adopt it"


def _plan(domain: str) -> str:
    return f"rackloom admin plan {quote(domain)}"


def _policy(domain: str, view: View) -> str:
    found = view.domains.get(domain)
    return "" if found is None else found.default_policy


def _where(one: PartitionSeen, gpus: list[GpuChain]) -> tuple[str, ...]:
    return unique(at_partition(one.domain, one.name), *around(gpus))


def _tenants(one: PartitionSeen, gpus: list[GpuChain], view: View) -> Iterator[Finding]:
    tenants: defaultdict[str, list[str]] = defaultdict(list)
    for chain in gpus:
        if chain.machine is not None and chain.machine.tenant is not None:
            tenants[chain.machine.tenant].append(f"GPU {_module(chain)} of {chain.machine.id}")
    owner = next((chain.logical.tenant for chain in gpus if chain.logical is not None), None)
    if owner is not None and tenants:
        tenants.setdefault(owner, [])
    if len(tenants) < 2:
        return
    named = [view.picture.tenants.get(tenant, tenant) for tenant in sorted(tenants)]
    yield fails(
        names.ISOLATION,
        f"partition {one.name}",
        f"GPUs of tenants {' and '.join(named)} share memory in it",
        f"{_plan(one.domain)} --to plan.json  # read it, then: rackloom admin apply plan.json",
        severity=Severity.CRITICAL,
        evidence=tuple(_members(one, tenants, view)),
        where=_where(one, gpus),
    )


def _members(one: PartitionSeen, tenants: Mapping[str, list[str]], view: View) -> Iterator[str]:
    for tenant, members in sorted(tenants.items()):
        name = view.picture.tenants.get(tenant, tenant)
        if members:
            yield f"switch controller: partition {one.id} holds {some(members)}"
            yield f"records: these are tenant {name}'s"
        else:
            yield f"records: partition {one.name} was made for tenant {name}"


def _module(chain: GpuChain) -> int:
    return 0 if chain.key.place is None else chain.key.place.value.module_id


def _lost(view: View) -> Iterator[Finding]:
    wishing = _wishing(view)
    for one in view.picture.lost_partitions:
        if not view.is_fresh(one.domain):
            continue
        machines = wishing.get((one.domain, one.logical), [])
        nodes = [view.node_of_machine[one] for one in machines if one in view.node_of_machine]
        yield fails(
            names.PARTITION_THERE,
            f"partition {one.name}",
            "the switch controller no longer lists it, and nobody here deleted it",
            f"{_plan(one.domain)}  # what keeps it from being made again: else it is, by itself",
            evidence=(
                f"records: made for logical partition {_named(one.logical, view)}",
                f"switch controller of domain {one.domain}: no partition of that name",
            ),
            where=unique(
                at_partition(one.domain, one.name), *map(at_machine, machines), *map(at_node, nodes)
            ),
            since=one.seen_at,
        )


def _wishing(view: View) -> Mapping[tuple[str, str | None], list[str]]:
    """Machines by domain and by the logical partition that their instances asked for: it may span domains."""
    domains = {one.id: one.domain for one in view.picture.machines}
    found: defaultdict[tuple[str, str | None], list[str]] = defaultdict(list)
    for gpu in view.picture.instance_gpus:
        found[domains.get(gpu.machine, ""), gpu.logical].append(gpu.machine)
    return found


def _in_one(chain: GpuChain, view: View) -> Iterator[Finding]:
    gpu = chain.fabric
    if gpu is None or not gpu.also or not view.is_fresh(gpu.domain):
        return
    told = ", ".join(str(one) for one in (gpu.partition, *gpu.also))
    yield fails(
        names.ONE_PARTITION,
        f"GPU 0x{gpu.guid:016x}",
        f"the switch controller lists it in partitions {told}",
        "rackloom admin partition show  # release the one that nobody here made",
        evidence=(f"switch controller of domain {gpu.domain}: member of partitions {told}",),
        where=(at_gpu(gpu.domain, gpu.guid),),
    )


def _wishes(view: View) -> Iterator[Finding]:
    """What instances asked for, machine by machine: their GPUs mostly share their fate."""
    chains = {(chain.machine.id, _module(chain)): chain for chain in view.chains if chain.machine is not None}
    troubled: defaultdict[str, list[InstanceGpu]] = defaultdict(list)
    for one in view.picture.instance_gpus:
        chain = chains.get((one.machine, one.module_id))
        if one.status != _READY or _is_elsewhere(one, chain, view):
            troubled[one.instance].append(one)
    for instance, gpus in sorted(troubled.items()):
        beside = [chains[at] for one in gpus if (at := (one.machine, one.module_id)) in chains]
        yield _wish(instance, gpus, beside, view)


def _is_elsewhere(one: InstanceGpu, chain: GpuChain | None, view: View) -> bool:
    if chain is None or chain.fabric is None or not view.is_fresh(chain.fabric.domain):
        return False
    return one.logical is not None and (chain.partition is None or chain.partition.logical != one.logical)


def _wish(instance: str, gpus: list[InstanceGpu], chains: list[GpuChain], view: View) -> Finding:
    first = gpus[0]
    machine = next((one for one in chains if one.machine is not None), None)
    domain = "" if machine is None or machine.machine is None else machine.machine.domain
    modules = ", ".join(str(one.module_id) for one in gpus)
    said = first.problem or f"it is {first.status}"
    since = min((one.since for one in gpus if one.since is not None), default=None)
    subject = f"instance {instance}"
    fix = first.fix or f"rackloom admin domain show {quote(domain)}"
    message = f"GPU {modules} of {first.machine}: {said}"
    young = since is not None and view.picture.at - since < SETTLES_IN
    tell = unknown if young or not view.is_fresh(domain) else fails
    wanted = "no partition" if first.logical is None else _named(first.logical, view)
    return msgspec.structs.replace(
        tell(names.INTERFACE, subject, message, fix),
        evidence=(
            f"records: instance {instance} wants GPU {modules} of {first.machine} in {wanted}",
            *(_fabric_says(chain) for chain in chains[:4]),
        ),
        where=(at_machine(first.machine), at_domain(domain), *around(chains)),
        since=since,
    )


def _named(logical: str, view: View) -> str:
    found = view.logicals.get(logical)
    return logical if found is None else found.name


def _fabric_says(chain: GpuChain) -> str:
    if chain.fabric is None:
        return f"switch controller: no GPU in place {_module(chain)}"
    held = "no partition" if chain.partition is None else f"partition {chain.partition.name}"
    return f"switch controller: GPU 0x{chain.fabric.guid:016x} is in {held}"
