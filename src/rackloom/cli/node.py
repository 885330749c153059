"""`rackloom node gpu|imex|nic|all|mps`: the kubelet plugins of this node, and the host of their MPS daemons.

`PluginParameters` and `DriverParameters` are the options that all plugins share. Most of them may be set
by environment variables. Each command builds the options of its process, and imports the process when it
runs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from rackloom.cli.common import (
    Kubeconfig,
    KubeContext,
    announce,
    env_parameter,
    split_names,
    with_common_flags,
)

if TYPE_CHECKING:
    from rackloom.app.node.gpu import GpuOptions
    from rackloom.app.node.imex import ImexOptions
    from rackloom.app.node.nic import NicOptions
    from rackloom.app.node.process import NodeOptions
    from rackloom.topology.nics import ExclusionPolicy


# Shared options.


DRIVER_ROOT = Path("/driver-root")
PLUGINS_DIRECTORY = Path("/var/lib/kubelet/plugins")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DriverParameters:
    """The location of NVIDIA's driver."""

    driver_root: Annotated[Path, env_parameter("DRIVER_ROOT_CTR_PATH")] = DRIVER_ROOT
    "Path of NVIDIA's driver as this process sees it."
    host_driver_root: Annotated[Path, env_parameter("NVIDIA_DRIVER_ROOT")] = Path("/")
    "Path of NVIDIA's driver on the host."
    proc_devices: Annotated[Path | None, env_parameter("ALT_PROC_DEVICES_PATH")] = None
    "A file to read instead of /proc/devices."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PluginParameters:
    """One plugin on one node, between kubelet and the API server."""

    node: Annotated[str, env_parameter("NODE_NAME")]
    "Name of this node."
    sysroot: Path = Path("/")
    "Directory with the host's /proc and /sys."
    registry: Annotated[Path, env_parameter("KUBELET_REGISTRAR_DIRECTORY_PATH")] = Path(
        "/var/lib/kubelet/plugins_registry"
    )
    "kubelet's plugins_registry directory."
    plugins: Annotated[Path, env_parameter("KUBELET_PLUGINS_DIRECTORY_PATH")] = PLUGINS_DIRECTORY
    "kubelet's plugins directory."
    cdi_root: Annotated[Path, env_parameter("CDI_ROOT")] = Path("/var/run/cdi")
    "Directory from which the container runtime reads CDI specs."
    listen: Annotated[str | None, env_parameter("HTTP_ENDPOINT")] = None
    "HOST:PORT of /metrics, /healthz and /readyz."
    healthcheck_port: Annotated[int, env_parameter("HEALTHCHECK_PORT")] = -1
    "TCP port of the gRPC health service that kubelet probes, -1 for none."
    kubeconfig: Kubeconfig = None
    context: KubeContext = None

    def options(self) -> "NodeOptions":
        """The options for the process."""
        from rackloom.app.node.process import NodeOptions
        from rackloom.claim.node.run import PluginDirectories

        return NodeOptions(
            node=self.node,
            directories=PluginDirectories(registry=self.registry, plugins=self.plugins, cdi=self.cdi_root),
            sysroot=self.sysroot,
            listen=self.listen,
            health_listen=None if self.healthcheck_port < 0 else f"[::]:{self.healthcheck_port}",
            kubeconfig=self.kubeconfig,
            context=self.context,
        )


@dataclass(frozen=True, kw_only=True)
class ImexParameters:
    """IMEX channels and daemons."""

    daemon_namespace: Annotated[str, env_parameter("IMEX_NAMESPACE")] = "rackloom-imex"
    "Namespace of the IMEX daemons. Claims of daemons are prepared only there."
    additional_namespaces: Annotated[str, env_parameter("ADDITIONAL_NAMESPACES")] = ""
    "Namespaces with daemons of earlier installations, separated by commas, as set for the controller."
    mode: Annotated[Literal["driverManaged", "hostManaged"], env_parameter("IMEX_MODE")] = "driverManaged"
    "The driver runs one nvidia-imex per ComputeDomain (driverManaged), or the host runs one (hostManaged)."
    isolation: Annotated[Literal["domain", "channel"], env_parameter("IMEX_ISOLATION")] = "domain"
    """Each job gets its own IMEX domain (domain), or a channel of a shared one (channel). The node's label
    rackloom.dev/imex-isolation overrides this."""
    clique_label: Annotated[bool, env_parameter("GPU_CLIQUE_LABEL_ENABLED")] = False
    "Write the node label nvidia.com/gpu.clique unless another program writes it."
    fabric_file: Path | None = None
    "Take the fabric from this file instead of NVML: for nodes without GPUs."
    host_socket: Annotated[str, env_parameter("IMEX_HOST_SOCKET_PATH")] = "/etc/nvidia-imex/imex_ctrl.sock"
    "Command socket of the host's nvidia-imex, in mode hostManaged."

    def options(self, driver: DriverParameters) -> "ImexOptions":
        """The options for the process."""
        from rackloom.app.node.imex import ImexOptions
        from rackloom.core.cluster.names import ImexIsolation, ImexMode

        return ImexOptions(
            namespaces=(self.daemon_namespace, *split_names(self.additional_namespaces)),
            mode=ImexMode(self.mode),
            isolation=ImexIsolation(self.isolation),
            clique_label=self.clique_label,
            fabric_file=self.fabric_file,
            driver_root=driver.driver_root,
            host_driver_root=driver.host_driver_root,
            proc_devices=driver.proc_devices,
            host_socket=self.host_socket,
        )


@dataclass(frozen=True, kw_only=True)
class GpuParameters:
    """GPUs and MIG devices."""

    inventory_file: Path | None = None
    "Take the GPUs from this file instead of NVML: for nodes without GPUs."
    nccl_topology: Annotated[Path | None, env_parameter("NCCL_TOPO_FILE")] = None
    "The vendor's NCCL topology file, for clouds that hide the PCIe tree."
    topology_file: Path | None = None
    "Known facts about the machine that cannot be read, as for `rackloom topology discover`."
    vfio: Annotated[bool, env_parameter("VFIO_ENABLED")] = False
    "Publish GPUs that are bound to vfio-pci, for virtual machines."
    ignore_xid: tuple[int, ...] = ()
    "XID after which a GPU stays in use, contrary to NVIDIA's catalogue. May be repeated."
    consumable_shares: Annotated[str, env_parameter("CONSUMABLE_SHARES")] = "disabled"
    "How many claims may share a GPU: disabled, memory (by the requested amount), unlimited, or a number."
    vfio_binding: Annotated[bool, env_parameter("VFIO_BINDING")] = False
    "Also offer GPUs of NVIDIA's driver to virtual machines: a claim binds one to vfio-pci until it ends."
    dynamic_mig: Annotated[bool, env_parameter("DYNAMIC_MIG")] = False
    "Create MIG devices when a claim needs them, and destroy them after it."
    mps_daemons: Annotated[Literal["here", "pod"], env_parameter("MPS_DAEMONS")] = "here"
    """MPS daemons run in this container and end with it (here), or run in the pod of `rackloom node mps` and
    outlive this container (pod)."""

    def options(self, driver: DriverParameters) -> "GpuOptions":
        """The options for the process. Raises `Refused`."""
        from rackloom.app.node.gpu import GpuOptions, check_options
        from rackloom.claim.node.gpu.inventory import parse_shares

        options = GpuOptions(
            inventory_file=self.inventory_file,
            nccl_topology=self.nccl_topology,
            topology_file=self.topology_file,
            vfio=self.vfio,
            vfio_binding=self.vfio_binding,
            ignored_xids=self.ignore_xid,
            driver_root=driver.driver_root,
            host_driver_root=driver.host_driver_root,
            proc_devices=driver.proc_devices,
            shares=parse_shares(self.consumable_shares),
            dynamic_mig=self.dynamic_mig,
            mps_in_pod=self.mps_daemons == "pod",
        )
        check_options(options)
        return options


@dataclass(frozen=True, kw_only=True)
class NicParameters:
    """Network interfaces and RDMA devices."""

    nri_socket: Annotated[Path, env_parameter("NRI_SOCKET")] = Path("/var/run/nri/nri.sock")
    "Socket on which the container runtime listens for NRI plugins."
    leave_out: tuple[str, ...] | None = None
    """Kinds of interface (`ip -d link`) that are not offered, in place of the default: ends of pods'
    interfaces, bridges, tunnels, and names of container networks (with a filter, all but the first). An
    interface that carries the node's or the pods' network is never offered."""
    filter: str | None = None
    "A CEL expression over `attributes`, as for DRANET, that is true for the devices to offer."
    move_ib_interfaces: bool = True
    "Move IPoIB interfaces into the pod. Without it, only their RDMA devices are lent."
    profiles: Path | None = None
    "A file with the NetworkConfigs that claims may refer to by `profile`."
    attributes: Path | None = None
    "A file with attributes to publish in addition to those that are found."
    cloud: Literal["auto", "none", "gke", "azure", "aws", "oke"] = "auto"
    "The cloud whose metadata service is read. auto: the cloud that the machine's firmware names, if any."
    nccl_topology: Path | None = None
    "The vendor's NCCL topology file, for kernels that hide which GPU a NIC is near."
    declared: Path | None = None
    "A file with corrections to the discovered topology."

    def options(self) -> "NicOptions":
        """The options for the process."""
        from rackloom.app.node.nic import NicOptions

        return NicOptions(
            nri_socket=self.nri_socket,
            left_out=_excluded_interfaces(self.leave_out, self.filter),
            filter=self.filter,
            moves_ipoib=self.move_ib_interfaces,
            profiles=self.profiles,
            attributes=self.attributes,
            cloud=self.cloud,
            nccl_topology=self.nccl_topology,
            declared=self.declared,
        )


def _excluded_interfaces(kinds: tuple[str, ...] | None, expression: str | None) -> "ExclusionPolicy":
    """The excluded interfaces. DRANET's filter replaces its default, which leaves out veth."""
    from rackloom.topology.nics import DEFAULT_EXCLUSION_POLICY, POD_INTERFACE_KINDS, ExclusionPolicy

    if kinds is not None:
        return ExclusionPolicy(kinds=frozenset(kinds), names=())
    return (
        DEFAULT_EXCLUSION_POLICY
        if expression is None
        else ExclusionPolicy(kinds=DEFAULT_EXCLUSION_POLICY.kinds - POD_INTERFACE_KINDS)
    )


# The commands.


app = App(name="node", help="Kubelet plugins: serve the devices of this node to pods.")
app.command("rackloom.cli.node:nic", name="nic", help="Serve NICs and RDMA devices (driver dra.net).")
app.command("rackloom.cli.node:gpu", name="gpu", help="Serve GPUs and MIG devices (driver gpu.nvidia.com).")
app.command("rackloom.cli.node:together", name="all", help="Serve all three in one process, for less memory.")
app.command("rackloom.cli.node:mps", name="mps", help="Run MPS daemons, which outlive the GPU plugin then.")


@app.command
@with_common_flags
def imex(
    *,
    common: PluginParameters,
    driver: DriverParameters = DriverParameters(),
    imex: Annotated[ImexParameters, Parameter(name="*")] = ImexParameters(),
) -> None:
    """Serve IMEX channels and daemons (driver compute-domain.nvidia.com) to the pods of this node.

    Parameters
    ----------
    common
        Options of every plugin.
    driver
        The location of NVIDIA's driver.
    imex
        Options of this plugin only.
    """
    from rackloom.app.node.imex import run_imex

    run_imex(common.options(), imex.options(driver), announce)


@with_common_flags
def gpu(
    *,
    common: PluginParameters,
    driver: DriverParameters = DriverParameters(),
    gpu: Annotated[GpuParameters, Parameter(name="*")] = GpuParameters(),
) -> None:
    """Serve GPUs and MIG devices (driver gpu.nvidia.com) to the pods of this node.

    Parameters
    ----------
    common
        Options of every plugin.
    driver
        The location of NVIDIA's driver.
    gpu
        Options of this plugin only.
    """
    from rackloom.app.node.gpu import run_gpu

    run_gpu(common.options(), gpu.options(driver), announce)


@with_common_flags
def nic(
    *, common: PluginParameters, nic: Annotated[NicParameters, Parameter(name="*")] = NicParameters()
) -> None:
    """Serve network interfaces and RDMA devices (driver dra.net) to the pods of this node.

    Parameters
    ----------
    common
        Options of every plugin.
    nic
        Options of this plugin only.
    """
    from rackloom.app.node.nic import run_nic

    run_nic(common.options(), nic.options(), announce)


@with_common_flags
def together(
    *,
    common: PluginParameters,
    driver: DriverParameters = DriverParameters(),
    imex: Annotated[ImexParameters, Parameter(name="imex")] = ImexParameters(),
    gpu: Annotated[GpuParameters, Parameter(name="gpu")] = GpuParameters(),
    nic: Annotated[NicParameters, Parameter(name="nic")] = NicParameters(),
) -> None:
    """Serve IMEX channels, GPUs and NICs in one process, which takes less memory than three.

    Options of a single plugin have its name in front (--imex.clique-label, --gpu.vfio, --nic.filter). If one
    plugin fails, the process ends with all of them.

    Parameters
    ----------
    common
        Options of every plugin.
    driver
        The location of NVIDIA's driver.
    imex
        Options of the IMEX plugin only.
    gpu
        Options of the GPU plugin only.
    nic
        Options of the NIC plugin only.
    """
    from rackloom.app.node.together import run_together

    run_together(common.options(), imex.options(driver), gpu.options(driver), nic.options(), announce)


@with_common_flags
def mps(
    *,
    plugins: Annotated[Path, env_parameter("KUBELET_PLUGINS_DIRECTORY_PATH")] = PLUGINS_DIRECTORY,
    driver_root: Annotated[Path, env_parameter("DRIVER_ROOT_CTR_PATH")] = DRIVER_ROOT,
) -> None:
    """Start MPS daemons for the GPU plugin of this node, in a container that outlives the plugin's.

    The plugin (`--mps-daemons pod`) requests the start and the end of each daemon. All daemons end with this
    process.

    Parameters
    ----------
    plugins
        kubelet's plugins directory.
    driver_root
        Path of NVIDIA's driver as this process sees it.
    """
    from rackloom.app.node.mps import MpsOptions, run_mps

    run_mps(MpsOptions(plugins=plugins, driver_root=driver_root), announce)
