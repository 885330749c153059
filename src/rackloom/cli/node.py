"""`rackloom node`: the kubelet plugins of one node."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App

from rackloom.cli.node_options import Common, Driver, env, listed

app = App(name="node", help="Kubelet plugins: serve the devices of this node to pods.")
app.command("rackloom.cli.node_nic:nic", name="nic", help="Serve NICs and RDMA devices (driver dra.net).")
app.command(
    "rackloom.cli.node_gpu:gpu", name="gpu", help="Serve GPUs and MIG devices (driver gpu.nvidia.com)."
)


@app.command
def imex(
    *,
    common: Common,
    driver: Driver = Driver(),  # noqa: B008 (frozen)
    daemon_namespace: Annotated[str, env("IMEX_NAMESPACE")] = "rackloom-imex",
    additional_namespaces: Annotated[str, env("ADDITIONAL_NAMESPACES")] = "",
    mode: Annotated[Literal["driverManaged", "hostManaged"], env("IMEX_MODE")] = "driverManaged",
    isolation: Annotated[Literal["domain", "channel"], env("IMEX_ISOLATION")] = "domain",
    clique_label: Annotated[bool, env("GPU_CLIQUE_LABEL_ENABLED")] = False,
    fabric_file: Path | None = None,
    host_socket: Annotated[str, env("IMEX_HOST_SOCKET_PATH")] = "/etc/nvidia-imex/imex_ctrl.sock",
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
    from rackloom.app.node_imex import ImexOptions, run_imex
    from rackloom.claim.domain.isolation import ImexMode, Isolation

    options = ImexOptions(
        namespaces=(daemon_namespace, *listed(additional_namespaces)),
        mode=ImexMode(mode),
        isolation=Isolation(isolation),
        clique_label=clique_label,
        fabric_file=fabric_file,
        driver_root=driver.driver_root,
        host_driver_root=driver.host_driver_root,
        proc_devices=driver.proc_devices,
        host_socket=host_socket,
    )
    run_imex(common.options(), options, partial(print, flush=True))
