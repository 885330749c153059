"""`rackloom node nic`: the kubelet plugin of this node's NICs."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rackloom.cli.node_options import Common, env

if TYPE_CHECKING:
    from rackloom.topology.discovery.nics import LeftOut


def nic(
    *,
    common: Common,
    nri_socket: Annotated[Path, env("NRI_SOCKET")] = Path("/var/run/nri/nri.sock"),
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
    from rackloom.app.node_nic import NicOptions, run_nic

    options = NicOptions(
        nri_socket=nri_socket,
        left_out=_left_out(leave_out, filter),
        filter=filter,
        moves_ipoib=move_ib_interfaces,
        profiles=profiles,
        attributes=attributes,
        nccl_topology=nccl_topology,
        declared=declared,
    )
    run_nic(common.options(), options, partial(print, flush=True))


def _left_out(kinds: tuple[str, ...] | None, expression: str | None) -> "LeftOut":
    """DRANET's filter takes the place of its default, which leaves out veth."""
    from rackloom.topology.discovery.nics import LEFT_OUT, POD_ENDS, LeftOut

    if kinds is not None:
        return LeftOut(kinds=frozenset(kinds), names=())
    return LEFT_OUT if expression is None else LeftOut(kinds=LEFT_OUT.kinds - POD_ENDS)
