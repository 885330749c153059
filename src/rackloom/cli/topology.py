"""`rackloom topology`: the wiring of this host, a saved machine, or a published profile.

`classes` prints one row per GPU and one column per run of NICs that every GPU sees alike, because a
machine has up to 32 NICs. Each value is printed with its source. An unknown value prints as a dash.

`slurm` keeps Slurm's topology.yaml up to date (`app.slurm_topology`, which is imported when it runs).
"""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter
from cyclopts.validators import Number

from rackloom.cli.common import (
    Flag,
    Kubeconfig,
    KubeContext,
    Output,
    columns,
    emit,
    with_common_flags,
)
from rackloom.errors import Misuse, Refused, Undecodable
from rackloom.runtime.foreign_text import decode_json
from rackloom.topology import profiles
from rackloom.topology.affinity import Cell, classes, guest_view
from rackloom.topology.join_key import Fact
from rackloom.topology.machine import Gpu, Machine, Nic, PciePath
from rackloom.topology.rack import RackProfile

app = App(name="topology", help="The wiring of machines and racks, with the source of each fact.")

_MAX_NAMES = 3
"""The number of interface names in one row."""
ClassMatrix = tuple[tuple[Cell, ...], ...]


@app.command(name="list")
@with_common_flags
def list_profiles(*, output: Output = "table") -> None:
    """List the machine and rack profiles that ship with Rackloom."""
    loaded = [profiles.load_profile(name) for name in profiles.profile_names()]
    rows = [_summary(profile) for profile in loaded]
    keys = ("profile", "kind", "gpus", "nics")
    value = [dict(zip(keys, row, strict=True)) for row in rows]
    emit(value, output, lambda: columns([key.upper() for key in keys], [_cells(row) for row in rows]))


@app.command
@with_common_flags
def show(profile: str, *, output: Output = "table") -> None:
    """Show a profile: devices, NUMA nodes and PCIe paths of a machine, or racks, trays and links of a rack.

    Parameters
    ----------
    profile
        Name as `rackloom topology list` prints it, or a machine saved as a .json file.
    """
    found = _load_profile(profile)
    emit(
        found,
        output,
        lambda: _rack_table(found) if isinstance(found, RackProfile) else _machine_table(found),
    )


@app.command
@with_common_flags
def discover(
    *,
    sysroot: Path = Path("/"),
    nccl_topology: Path | None = None,
    declared: Path | None = None,
    output: Output = "table",
) -> None:
    """Discover the GPUs and NICs of this host and the distances between them. `show` reads saved JSON again.

    Parameters
    ----------
    sysroot
        A directory with `sys` and `proc` of another machine, instead of this one's.
    nccl_topology
        The vendor's topology file (NCCL_TOPO_FILE), for values that a hypervisor hides.
    declared
        A JSON file with corrections and missing values of this machine. docs/topology.md shows one.
    """
    from rackloom.topology.discovery.discover import discover_machine as find

    machine = find(sysroot, nccl_topology=nccl_topology, declared=declared)
    emit(machine, output, lambda: _discovered_page(machine))


@app.command(name="classes")
@with_common_flags
def show_classes(
    profile: str,
    *,
    guest: Flag = False,
    output: Output = "table",
) -> None:
    """Show how near each NIC is to each GPU (PIX, PXB, PHB, NODE, SYS, UNKNOWN), with the source.

    Parameters
    ----------
    profile
        Name as `rackloom topology list` prints it, or a machine saved as a .json file. For a rack, the
        machine of its trays is shown.
    guest
        Use only values that the machine's kernel and driver show, without vendor files and declarations.
    """
    found, machine = _load_profile(profile), load_machine(profile)
    matrix = classes(guest_view(machine) if guest else machine)
    excluded = [{"nic": nic.index, "reason": nic.excluded} for nic in machine.nics if nic.excluded]
    value = {"machine": machine.name, "guest": guest, "rows": matrix, "excluded": excluded}
    emit(value, output, lambda: _matrix_page(_matrix_title(found, machine, guest), machine, matrix))


@app.command
@with_common_flags
def slurm(
    *,
    to: Path | None = None,
    config_map: str | None = None,
    site: Annotated[list[Path] | None, Parameter(negative="", consume_multiple=True)] = None,
    kubeconfig: Kubeconfig = None,
    context: KubeContext = None,
    taint: str = "slinky.slurm.net/slurm",
    all_nodes: Flag = False,
    clique_label: str = "nvidia.com/gpu.clique",
    block_size: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    hook: str | None = None,
    busy: str | None = None,
    every: Annotated[float, Parameter(validator=Number(gte=1))] = 30.0,
    once: Flag = False,
) -> None:
    """Keep Slurm's topology.yaml up to date, with a block for each clique of Slurm's nodes.

    If a source cannot be read or shows no block, nothing is changed. docs/slurm.md has the whole picture.

    Parameters
    ----------
    to
        The topology.yaml to replace when the site has changed.
    config_map
        NAMESPACE/NAME of the ConfigMap that Slinky's Controller names in configFileRefs, in place of a file.
    site
        Files with nodes (`kubectl get nodes -o json`) in place of a cluster. Changes are read again.
    taint
        Key of the taint of Slurm's nodes.
    all_nodes
        Treat every node with a clique as Slurm's, tainted or not.
    clique_label
        Label of nodes that names their clique.
    block_size
        Nodes of Slurm's base block. Default: the size of the largest block.
    hook
        Command that makes Slurm read the file, such as `scontrol reconfigure`. It is run after a change, and
        repeated until it succeeds.
    busy
        Command that prints the nodes with jobs, such as `sinfo -h -N -t alloc,mix,comp -o %N`. A node enters
        a block only while it is not among them.
    every
        Seconds between two checks of the files of --site.
    once
        Write the topology of --site once, run the hook, and end.
    """
    from rackloom.app.slurm_topology import SlurmOptions, run_slurm_topology
    from rackloom.claim.cluster.slurm_controller import SlurmRule
    from rackloom.core.cluster.names import SchedulerLabels

    if (to is None) == (config_map is None):
        raise Misuse(
            "the topology goes into a file or into a ConfigMap",
            nearest_fix="say --to /etc/slurm/topology.yaml, or --config-map NAMESPACE/NAME",
        )
    if config_map is not None and (site or hook or busy or len(config_map.split("/")) != 2):
        raise Misuse(
            f"a ConfigMap ({config_map}) is kept for its own cluster, and Slinky reconfigures Slurm",
            nearest_fix="say --config-map NAMESPACE/NAME, and leave --site, --hook and --busy out",
        )
    if once and not site:
        raise Misuse("--once reads files", nearest_fix="name them with --site, or leave --once out")
    rule = SlurmRule(
        labels=SchedulerLabels(clique=clique_label),
        taint=None if all_nodes else taint,
        block_size=block_size,
    )
    run_slurm_topology(
        SlurmOptions(
            rule=rule,
            sites=tuple(site or ()),
            every=every,
            kubeconfig=kubeconfig,
            context=context,
            file=to,
            hook=hook,
            busy=busy,
            config_map=config_map,
            once=once,
        )
    )


def _discovered_page(machine: Machine) -> str:
    if not machine.gpus:
        return f"{_machine_table(machine)}\n\nno GPU found: none is on the PCI bus, and no driver lists one"
    return f"{_machine_table(machine)}\n\n{_matrix_table(machine, classes(machine))}"


def _interfaces_table(machine: Machine) -> str:
    """Interfaces with the same answer share a row, because a node has one for each of its pods."""
    alike: dict[tuple[str, str | None], list[str]] = {}
    for interface in machine.interfaces:
        alike.setdefault((interface.kind, interface.excluded), []).append(interface.name)
    rows = [
        _cells([_some_names(names), kind or None, _tenant_use(excluded)])
        for (kind, excluded), names in alike.items()
    ]
    return columns(("INTERFACE", "KIND", "TENANT USE"), rows)


def _some_names(names: Sequence[str]) -> str:
    """The first of many names, and the number of the others."""
    shown = ", ".join(names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown} and {len(names) - _MAX_NAMES} more"


def _tenant_use(excluded: str | None) -> str:
    return "yes" if excluded is None else f"no: {excluded}"


def load_machine(profile: str) -> Machine:
    """A published machine, the tray of a published rack, or a saved machine.

    Raises:
        Refused: no machine or rack has that name.
    """
    return machine_or_tray(_load_profile(profile), "classes")


def _load_profile(profile: str) -> Machine | RackProfile:
    return _saved_machine(Path(profile)) if profile.endswith(".json") else profiles.load_profile(profile)


def _saved_machine(path: Path) -> Machine:
    try:
        return decode_json(path.read_bytes(), path.name, Machine)
    except (OSError, Undecodable) as trouble:
        fix = "name a file that `rackloom topology show -o json` wrote for a machine"
        raise Refused(f"{path} is not a saved machine: {trouble}", nearest_fix=fix) from trouble


def machine_or_tray(found: Machine | RackProfile, wanted: str) -> Machine:
    """The machine, or that of a rack's trays. Raises Refused with `wanted` if none is published."""
    if isinstance(found, Machine):
        return found
    if found.tray_machine is None:
        raise Refused(f"no machine like a tray of {found.name} is published, so its {wanted} are not known")
    return profiles.load_machine(found.tray_machine)


def _matrix_title(found: Machine | RackProfile, machine: Machine, guest: bool) -> str:
    of_rack = f"tray of {found.name}, as " if isinstance(found, RackProfile) else ""
    view = "as its own kernel shows it" if guest else "from all sources"
    return f"{of_rack}{machine.name}: GPU x NIC, {view}"


def _summary(profile: Machine | RackProfile) -> tuple[str, str, int, int | None]:
    if isinstance(profile, RackProfile):
        return profile.name, "rack", profile.gpus_per_domain, None
    usable = sum(nic.excluded is None for nic in profile.nics)
    return profile.name, "machine", len(profile.gpus), usable


def _rack_table(rack: RackProfile) -> str:
    fields = msgspec.structs.asdict(rack) | {"origin": "; ".join(rack.origin)}
    rows = [(name.replace("_", " "), *_cells([value])) for name, value in fields.items()]
    return columns(("FACT", "VALUE"), [*rows, ("gpus per domain", rack.gpus_per_domain)])


def _machine_table(machine: Machine) -> str:
    gpus = columns(
        ("GPU", "PRODUCT", "ADDRESS", "NUMA", "PCIE", "SWITCH"), [_gpu_row(gpu) for gpu in machine.gpus]
    )
    nics = columns(
        ("NIC", "DEVICE", "MODEL", "ADDRESS", "GBIT/S", "NUMA", "PCIE", "SWITCH", "TENANT USE"),
        [_nic_row(nic) for nic in machine.nics],
    )
    origin = "\n".join(f"origin: {place}" for place in machine.origin)
    interfaces = [_interfaces_table(machine)] if machine.interfaces else []
    return "\n\n".join([f"{machine.name}\n{machine.note}\n{origin}", gpus, nics, *interfaces])


def _gpu_row(gpu: Gpu) -> list[str]:
    return _cells([gpu.index, gpu.product or gpu.pci_id, gpu.pci_address, *_location_cells(gpu)])


def _nic_row(nic: Nic) -> list[str]:
    device = "/".join(name for name in (nic.if_name, nic.rdma_device) if name) or None
    model, use = nic.model or nic.pci_id, _tenant_use(nic.excluded)
    return _cells([nic.index, device, model, nic.pci_address, nic.line_rate_gbps, *_location_cells(nic), use])


def _location_cells(device: Gpu | Nic) -> tuple[str | None, str | None, str | None]:
    return _fact_text(device.numa_node), _path_text(device.pcie), _fact_text(device.vendor_switch)


def _fact_text(fact: Fact[int] | Fact[str] | None) -> str | None:
    return None if fact is None else f"{fact.value}/{fact.source}"


def _path_text(path: PciePath | None) -> str | None:
    return None if path is None else f"{' > '.join([path.root, *(path.bridges or ())])}/{path.source}"


def _cells(values: Sequence[object]) -> list[str]:
    """The values as text, with a dash for an unknown one."""
    return ["-" if value is None else str(value) for value in values]


def _matrix_page(title: str, machine: Machine, matrix: ClassMatrix) -> str:
    excluded = [f"(NIC {nic.index}) not for tenants: {nic.excluded}" for nic in machine.nics if nic.excluded]
    return "\n\n".join([title, _matrix_table(machine, matrix), *(["\n".join(excluded)] if excluded else [])])


def _matrix_table(machine: Machine, matrix: ClassMatrix) -> str:
    """One column per run of NICs that every GPU sees alike: machines have up to 32."""
    texts = [[_cell_text(row[nic.index]) for row in matrix] for nic in machine.nics]
    alike = groupby(machine.nics, key=lambda nic: (texts[nic.index], nic.excluded is None))
    runs = [list(run) for _, run in alike]
    rows = [[gpu.index, *(texts[run[0].index][gpu.index] for run in runs)] for gpu in machine.gpus]
    return columns(["GPU", *(_run_name(run) for run in runs)], rows)


def _run_name(run: list[Nic]) -> str:
    first, last = run[0].index, run[-1].index
    name = f"NIC {first}" if first == last else f"NIC {first}-{last}"
    return name if run[0].excluded is None else f"({name})"


def _cell_text(cell: Cell) -> str:
    return cell.path_class if cell.source is None else f"{cell.path_class}/{cell.source}"
