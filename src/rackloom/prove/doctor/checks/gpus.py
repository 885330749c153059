"""What switch controllers say of the health of GPUs."""

from collections import defaultdict
from collections.abc import Iterator
from shlex import quote

from rackloom.prove.doctor import names
from rackloom.prove.doctor.checks.view import View, at_device, at_domain, at_gpu, at_machine, at_partition
from rackloom.prove.doctor.findings import Finding, fails
from rackloom.prove.picture.values import GpuChain

_SHOW = "rackloom admin domain show"
_MANY = 3
"""Trays that fail alike by chance are fewer."""


def check_gpus(view: View) -> Iterator[Finding]:
    """All findings about the health of GPUs. What most trays of a domain have at once is one."""
    found: defaultdict[tuple[str, str], list[GpuChain]] = defaultdict(list)
    trays: defaultdict[str, set[int]] = defaultdict(set)
    for chain in view.chains:
        gpu = chain.fabric
        if gpu is None or not view.is_fresh(gpu.domain):
            continue
        trays[gpu.domain].add(gpu.tray_index)
        if gpu.healthy is False:
            found[gpu.domain, gpu.problem].append(chain)
    for (domain, problem), gpus in found.items():
        ill = {chain.fabric.tray_index for chain in gpus if chain.fabric is not None}
        if len(ill) >= _MANY and 2 * len(ill) > len(trays[domain]):
            yield _all_over(domain, problem, gpus, len(ill))
        else:
            yield from (finding for chain in gpus for finding in _gpu(chain))


def _all_over(domain: str, problem: str, gpus: list[GpuChain], trays: int) -> Finding:
    machines = dict.fromkeys(at_machine(chain.machine.id) for chain in gpus if chain.machine is not None)
    return fails(
        names.GPU_HEALTH,
        f"{len(gpus)} GPUs of domain {domain}",
        f"GPUs of {trays} trays are {problem or 'not healthy'} at once: look at what joins them, not at each",
        f"{_SHOW} {quote(domain)}  # then see to its switch trays: power, seating, cables",
        evidence=tuple(line for chain in gpus for line in _told_of(chain)),
        where=(at_domain(domain), *machines, *dict.fromkeys(one for chain in gpus for one in _around(chain))),
    )


def _gpu(chain: GpuChain) -> Iterator[Finding]:
    gpu = chain.fabric
    if gpu is None:
        return
    tray = "" if chain.machine is None else chain.machine.id
    why = f"GPU {gpu.place.module_id} {gpu.problem}"
    cordon = f"rackloom admin tray cordon {quote(tray)} --reason {quote(why)}  # then see to the GPU"
    yield fails(
        names.GPU_HEALTH,
        f"GPU {gpu.place.module_id} of {tray or f'slot {gpu.place.slot}'}",
        f"the switch controller says {gpu.problem or 'it is not healthy'}",
        cordon if tray else f"{_SHOW} {quote(gpu.domain)}",
        evidence=tuple(_told_of(chain)),
        where=tuple(_around(chain)),
    )


def _told_of(chain: GpuChain) -> Iterator[str]:
    gpu = chain.fabric
    if gpu is not None:
        yield f"switch controller: GPU 0x{gpu.guid:016x} is {gpu.problem or 'not healthy'}"
    yield from _of_node(chain)


def _of_node(chain: GpuChain) -> tuple[str, ...]:
    if chain.device is None:
        return ()
    taints = ", ".join(chain.device.taints) or "no taint"
    return (f"node {chain.device.node}: device {chain.device.name} has {taints}",)


def _around(chain: GpuChain) -> Iterator[str]:
    """What one sick GPU concerns: not its whole tray."""
    if chain.device is not None:
        yield at_device(chain.device)
    if chain.fabric is not None:
        yield at_gpu(chain.fabric.domain, chain.fabric.guid)
    if chain.partition is not None:
        yield at_partition(chain.partition.domain, chain.partition.name)
