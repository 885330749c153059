"""`rackloom node`: the kubelet plugins of one node."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

app = App(name="node", help="Kubelet plugins: serve the devices of this node to pods.")
app.command("rackloom.cli.node_nic:nic", name="nic", help="Serve NICs and RDMA devices (driver dra.net).")
app.command(
    "rackloom.cli.node_gpu:gpu", name="gpu", help="Serve GPUs and MIG devices (driver gpu.nvidia.com)."
)


def env(name: str) -> Parameter:
    """A flag that an environment variable may set."""
    return Parameter(env_var=name)


@app.command
def imex(
    *,
    node: Annotated[str, env("NODE_NAME")],
    namespace: Annotated[str, env("NAMESPACE")] = "rackloom-system",
    mode: Annotated[Literal["driverManaged", "hostManaged"], env("IMEX_MODE")] = "driverManaged",
    isolation: Annotated[Literal["domain", "channel"], env("IMEX_ISOLATION")] = "domain",
    clique_label: Annotated[bool, env("GPU_CLIQUE_LABEL_ENABLED")] = False,
    fabric_file: Path | None = None,
    sysroot: Path = Path("/"),
    driver_root: Annotated[Path, env("DRIVER_ROOT_CTR_PATH")] = Path("/driver-root"),
    host_driver_root: Annotated[Path, env("NVIDIA_DRIVER_ROOT")] = Path("/"),
    proc_devices: Annotated[Path | None, env("ALT_PROC_DEVICES_PATH")] = None,
    host_socket: Annotated[str, env("IMEX_HOST_SOCKET_PATH")] = "/etc/nvidia-imex/imex_ctrl.sock",
    registry: Annotated[Path, env("KUBELET_REGISTRAR_DIRECTORY_PATH")] = Path(
        "/var/lib/kubelet/plugins_registry"
    ),
    plugins: Annotated[Path, env("KUBELET_PLUGINS_DIRECTORY_PATH")] = Path("/var/lib/kubelet/plugins"),
    cdi_root: Annotated[Path, env("CDI_ROOT")] = Path("/var/run/cdi"),
    listen: Annotated[str | None, env("HTTP_ENDPOINT")] = None,
    healthcheck_port: Annotated[int, env("HEALTHCHECK_PORT")] = -1,
    kubeconfig: Path | None = None,
) -> None:
    """Serve IMEX channels and daemons (driver compute-domain.nvidia.com) to the pods of this node.

    Parameters
    ----------
    node
        Name of this node.
    namespace
        The driver's namespace, where IMEX daemons run.
    mode
        Who runs nvidia-imex: the driver, one per ComputeDomain, or the host.
    isolation
        What a job gets: the IMEX domain of its own (domain), or a channel of a shared one (channel). The
        node's label rackloom.dev/imex-isolation is stronger.
    clique_label
        Write the node label nvidia.com/gpu.clique while nobody else does.
    fabric_file
        Take the fabric from this file instead of NVML: for nodes without GPUs.
    sysroot
        Where the host's /proc is found.
    driver_root
        Where NVIDIA's driver is seen from here.
    host_driver_root
        Where the host has NVIDIA's driver.
    proc_devices
        A file to read instead of /proc/devices.
    host_socket
        Command socket of the host's nvidia-imex, in mode hostManaged.
    registry
        kubelet's plugins_registry directory.
    plugins
        kubelet's plugins directory.
    cdi_root
        Where the container runtime reads CDI specs.
    listen
        HOST:PORT of /metrics and /healthz.
    healthcheck_port
        TCP port of the gRPC health service that kubelet probes; -1 for none.
    kubeconfig
        How to reach the API server; default: as the service account of this pod.
    """
    from rackloom.app.node import ImexOptions, NodeOptions, run_imex
    from rackloom.claim.domain.isolation import ImexMode, Isolation
    from rackloom.claim.node.run import Places

    common = NodeOptions(
        node=node,
        places=Places(registry=registry, plugins=plugins, cdi=cdi_root),
        sysroot=sysroot,
        listen=listen,
        health_listen=None if healthcheck_port < 0 else f"[::]:{healthcheck_port}",
        kubeconfig=kubeconfig,
    )
    options = ImexOptions(
        namespace=namespace,
        mode=ImexMode(mode),
        isolation=Isolation(isolation),
        clique_label=clique_label,
        fabric_file=fabric_file,
        driver_root=driver_root,
        host_driver_root=host_driver_root,
        proc_devices=proc_devices,
        host_socket=host_socket,
    )
    run_imex(common, options, partial(print, flush=True))
