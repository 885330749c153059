"""`rackloom node gpu|imex|nic`: the kubelet plugins of this node.

`PluginParameters` and `DriverParameters` are the options that all plugins share. Most of them may be set
by environment variables. Each command builds the options of its process and imports the process when it
runs.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from rackloom.cli.common import env_parameter, split_names

if TYPE_CHECKING:
    from rackloom.app.node.process import NodeOptions
    from rackloom.topology.nics import ExclusionPolicy


# Shared options.


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DriverParameters:
    """Where NVIDIA's driver is."""

    driver_root: Annotated[Path, env_parameter("DRIVER_ROOT_CTR_PATH")] = Path("/driver-root")
    "Where NVIDIA's driver is seen from here."
    host_driver_root: Annotated[Path, env_parameter("NVIDIA_DRIVER_ROOT")] = Path("/")
    "Where the host has NVIDIA's driver."
    proc_devices: Annotated[Path | None, env_parameter("ALT_PROC_DEVICES_PATH")] = None
    "A file to read instead of /proc/devices."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PluginParameters:
    """One plugin on one node, between kubelet and the API server."""

    node: Annotated[str, env_parameter("NODE_NAME")]
    "Name of this node."
    sysroot: Path = Path("/")
    "Where the host's /proc and /sys are found."
    registry: Annotated[Path, env_parameter("KUBELET_REGISTRAR_DIRECTORY_PATH")] = Path(
        "/var/lib/kubelet/plugins_registry"
    )
    "kubelet's plugins_registry directory."
    plugins: Annotated[Path, env_parameter("KUBELET_PLUGINS_DIRECTORY_PATH")] = Path(
        "/var/lib/kubelet/plugins"
    )
    "kubelet's plugins directory."
    cdi_root: Annotated[Path, env_parameter("CDI_ROOT")] = Path("/var/run/cdi")
    "Where the container runtime reads CDI specs."
    listen: Annotated[str | None, env_parameter("HTTP_ENDPOINT")] = None
    "HOST:PORT of /metrics, /healthz and /readyz."
    healthcheck_port: Annotated[int, env_parameter("HEALTHCHECK_PORT")] = -1
    "TCP port of the gRPC health service that kubelet probes; -1 for none."
    kubeconfig: Path | None = None
    "How to reach the API server; default: as the service account of this pod."

    def options(self) -> "NodeOptions":
        """The same, for the process."""
        from rackloom.app.node.process import NodeOptions
        from rackloom.claim.node.run import PluginDirectories

        return NodeOptions(
            node=self.node,
            directories=PluginDirectories(registry=self.registry, plugins=self.plugins, cdi=self.cdi_root),
            sysroot=self.sysroot,
            listen=self.listen,
            health_listen=None if self.healthcheck_port < 0 else f"[::]:{self.healthcheck_port}",
            kubeconfig=self.kubeconfig,
        )


# `rackloom node imex`.


app = App(name="node", help="Kubelet plugins: serve the devices of this node to pods.")
app.command("rackloom.cli.node:nic", name="nic", help="Serve NICs and RDMA devices (driver dra.net).")
app.command("rackloom.cli.node:gpu", name="gpu", help="Serve GPUs and MIG devices (driver gpu.nvidia.com).")


@app.command
def imex(
    *,
    common: PluginParameters,
    driver: DriverParameters = DriverParameters(),
    daemon_namespace: Annotated[str, env_parameter("IMEX_NAMESPACE")] = "rackloom-imex",
    additional_namespaces: Annotated[str, env_parameter("ADDITIONAL_NAMESPACES")] = "",
    mode: Annotated[Literal["driverManaged", "hostManaged"], env_parameter("IMEX_MODE")] = "driverManaged",
    isolation: Annotated[Literal["domain", "channel"], env_parameter("IMEX_ISOLATION")] = "domain",
    clique_label: Annotated[bool, env_parameter("GPU_CLIQUE_LABEL_ENABLED")] = False,
    fabric_file: Path | None = None,
    host_socket: Annotated[str, env_parameter("IMEX_HOST_SOCKET_PATH")] = "/etc/nvidia-imex/imex_ctrl.sock",
) -> None:
    """Serve IMEX channels and daemons (driver compute-domain.nvidia.com) to the pods of this node.

    Parameters
    ----------
    common
        What every plugin is told.
    driver
        Where NVIDIA's driver is.
    daemon_namespace
        Where IMEX daemons run: the claims of daemons are prepared there and nowhere else.
    additional_namespaces
        Where daemons of earlier installations still run, separated by commas; as the controller has it.
    mode
        Who runs nvidia-imex: the driver, one per ComputeDomain, or the host.
    isolation
        What a job gets: the IMEX domain of its own (domain), or a channel of a shared one (channel). The
        node's label rackloom.dev/imex-isolation is stronger.
    clique_label
        Write the node label nvidia.com/gpu.clique while nobody else does.
    fabric_file
        Take the fabric from this file instead of NVML: for nodes without GPUs.
    host_socket
        Command socket of the host's nvidia-imex, in mode hostManaged.
    """
    from rackloom.app.node.imex import ImexOptions, run_imex
    from rackloom.core.domains.names import ImexIsolation, ImexMode

    options = ImexOptions(
        namespaces=(daemon_namespace, *split_names(additional_namespaces)),
        mode=ImexMode(mode),
        isolation=ImexIsolation(isolation),
        clique_label=clique_label,
        fabric_file=fabric_file,
        driver_root=driver.driver_root,
        host_driver_root=driver.host_driver_root,
        proc_devices=driver.proc_devices,
        host_socket=host_socket,
    )
    run_imex(common.options(), options, partial(print, flush=True))


# `rackloom node gpu`.


def gpu(
    *,
    common: PluginParameters,
    driver: DriverParameters = DriverParameters(),
    inventory_file: Path | None = None,
    nccl_topology: Annotated[Path | None, env_parameter("NCCL_TOPO_FILE")] = None,
    topology_file: Path | None = None,
    vfio: Annotated[bool, env_parameter("VFIO_ENABLED")] = False,
    ignore_xid: tuple[int, ...] = (),
    consumable_shares: Annotated[str, env_parameter("CONSUMABLE_SHARES")] = "disabled",
) -> None:
    """Serve GPUs and MIG devices (driver gpu.nvidia.com) to the pods of this node.

    Parameters
    ----------
    common
        What every plugin is told.
    driver
        Where NVIDIA's driver is.
    inventory_file
        Take the GPUs from this file instead of NVML: for nodes without GPUs.
    nccl_topology
        The vendor's NCCL topology file, where a cloud hides the PCIe tree.
    topology_file
        What is known of the machine and cannot be read, as for `rackloom topology discover`.
    vfio
        Publish GPUs that are bound to vfio-pci, for virtual machines.
    ignore_xid
        XID that keeps nothing off a GPU, besides 13, 31, 43, 45, 68 and 109; may be repeated.
    consumable_shares
        How many claims may share a GPU: disabled, memory (as it is asked for), unlimited, or a number.
    """
    from rackloom.app.node.gpu import GpuOptions, run_gpu
    from rackloom.claim.node.gpu.inventory import parse_shares

    options = GpuOptions(
        inventory_file=inventory_file,
        nccl_topology=nccl_topology,
        topology_file=topology_file,
        vfio=vfio,
        ignored_xids=ignore_xid,
        driver_root=driver.driver_root,
        host_driver_root=driver.host_driver_root,
        proc_devices=driver.proc_devices,
        shares=parse_shares(consumable_shares),
    )
    run_gpu(common.options(), options, partial(print, flush=True))


# `rackloom node nic`.


def nic(
    *,
    common: PluginParameters,
    nri_socket: Annotated[Path, env_parameter("NRI_SOCKET")] = Path("/var/run/nri/nri.sock"),
    leave_out: tuple[str, ...] | None = None,
    filter: str | None = None,  # noqa: A002 - what DRANET calls it
    move_ib_interfaces: bool = True,
    profiles: Path | None = None,
    attributes: Path | None = None,
    nccl_topology: Path | None = None,
    declared: Path | None = None,
) -> None:
    """Serve network interfaces and RDMA devices (driver dra.net) to the pods of this node.

    Parameters
    ----------
    common
        What every plugin is told.
    nri_socket
        Where the container runtime listens for NRI plugins.
    leave_out
        Kinds of interface (`ip -d link`) that are not offered, in place of the default: ends of pods'
        interfaces, bridges, tunnels, and names of container networks (with a filter, all but the first). What
        carries the node's or the pods' network is never offered.
    filter
        A CEL expression over `attributes`, as for DRANET: only devices for which it holds are offered.
    move_ib_interfaces
        Whether IPoIB interfaces go into the pod. Without it their RDMA devices alone are lent.
    profiles
        A file with the NetworkConfigs that claims may refer to by `profile`.
    attributes
        A file with attributes to publish beside those that are found.
    nccl_topology
        The vendor's NCCL topology file, where the kernel hides which GPU a NIC is near to.
    declared
        A file with corrections to what is discovered.
    """
    from rackloom.app.node.nic import NicOptions, run_nic

    options = NicOptions(
        nri_socket=nri_socket,
        left_out=_excluded_interfaces(leave_out, filter),
        filter=filter,
        moves_ipoib=move_ib_interfaces,
        profiles=profiles,
        attributes=attributes,
        nccl_topology=nccl_topology,
        declared=declared,
    )
    run_nic(common.options(), options, partial(print, flush=True))


def _excluded_interfaces(kinds: tuple[str, ...] | None, expression: str | None) -> "ExclusionPolicy":
    """DRANET's filter takes the place of its default, which leaves out veth."""
    from rackloom.topology.nics import DEFAULT_EXCLUSION_POLICY, POD_INTERFACE_KINDS, ExclusionPolicy

    if kinds is not None:
        return ExclusionPolicy(kinds=frozenset(kinds), names=())
    return (
        DEFAULT_EXCLUSION_POLICY
        if expression is None
        else ExclusionPolicy(kinds=DEFAULT_EXCLUSION_POLICY.kinds - POD_INTERFACE_KINDS)
    )
