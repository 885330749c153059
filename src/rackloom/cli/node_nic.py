"""`rackloom node nic`: the kubelet plugin of this node's NICs."""

from functools import partial
from pathlib import Path
from typing import Annotated

from rackloom.cli.node import env


def nic(
    *,
    node: Annotated[str, env("NODE_NAME")],
    nri_socket: Annotated[Path, env("NRI_SOCKET")] = Path("/var/run/nri/nri.sock"),
    leave_out: tuple[str, ...] | None = None,
    filter: str | None = None,  # noqa: A002 - what DRANET calls it
    move_ib_interfaces: bool = True,
    profiles: Path | None = None,
    attributes: Path | None = None,
    nccl_topology: Path | None = None,
    declared: Path | None = None,
    sysroot: Path = Path("/"),
    registry: Annotated[Path, env("KUBELET_REGISTRAR_DIRECTORY_PATH")] = Path(
        "/var/lib/kubelet/plugins_registry"
    ),
    plugins: Annotated[Path, env("KUBELET_PLUGINS_DIRECTORY_PATH")] = Path("/var/lib/kubelet/plugins"),
    cdi_root: Annotated[Path, env("CDI_ROOT")] = Path("/var/run/cdi"),
    listen: Annotated[str | None, env("HTTP_ENDPOINT")] = None,
    healthcheck_port: Annotated[int, env("HEALTHCHECK_PORT")] = -1,
    kubeconfig: Path | None = None,
) -> None:
    """Serve network interfaces and RDMA devices (driver dra.net) to the pods of this node.

    Parameters
    ----------
    node
        Name of this node.
    nri_socket
        Where the container runtime listens for NRI plugins.
    leave_out
        Kinds of interface (`ip -d link`) that are never offered. Default: veth; none with a filter.
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
    sysroot
        Where the host's /sys and /proc are found.
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
    from rackloom.app.node import NodeOptions
    from rackloom.app.node_nic import NicOptions, run_nic
    from rackloom.claim.node.run import Places

    common = NodeOptions(
        node=node,
        places=Places(registry=registry, plugins=plugins, cdi=cdi_root),
        sysroot=sysroot,
        listen=listen,
        health_listen=None if healthcheck_port < 0 else f"[::]:{healthcheck_port}",
        kubeconfig=kubeconfig,
    )
    options = NicOptions(
        nri_socket=nri_socket,
        left_out_kinds=frozenset(_left_out(leave_out, filter)),
        filter=filter,
        moves_ipoib=move_ib_interfaces,
        profiles=profiles,
        attributes=attributes,
        nccl_topology=nccl_topology,
        declared=declared,
    )
    run_nic(common, options, partial(print, flush=True))


def _left_out(said: tuple[str, ...] | None, expression: str | None) -> tuple[str, ...]:
    """DRANET's filter takes the place of its default, which leaves out veth."""
    if said is not None:
        return said
    return ("veth",) if expression is None else ()
