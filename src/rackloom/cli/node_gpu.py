"""`rackloom node gpu`: the kubelet plugin of this node's GPUs."""

from functools import partial
from pathlib import Path
from typing import Annotated

from rackloom.cli.node_options import Common, Driver, env


def gpu(
    *,
    common: Common,
    driver: Driver = Driver(),  # noqa: B008 (frozen)
    inventory_file: Path | None = None,
    nccl_topology: Annotated[Path | None, env("NCCL_TOPO_FILE")] = None,
    topology_file: Path | None = None,
    vfio: Annotated[bool, env("VFIO_ENABLED")] = False,
    ignore_xid: tuple[int, ...] = (),
    consumable_shares: Annotated[str, env("CONSUMABLE_SHARES")] = "disabled",
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
    from rackloom.app.node_gpu import GpuOptions, run_gpu
    from rackloom.claim.node.gpu.shares import shares_of

    options = GpuOptions(
        inventory_file=inventory_file,
        nccl_topology=nccl_topology,
        topology_file=topology_file,
        vfio=vfio,
        ignored_xids=ignore_xid,
        driver_root=driver.driver_root,
        host_driver_root=driver.host_driver_root,
        proc_devices=driver.proc_devices,
        shares=shares_of(consumable_shares),
    )
    run_gpu(common.options(), options, partial(print, flush=True))
