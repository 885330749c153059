"""`rackloom node gpu`: the kubelet plugin of this node's GPUs."""

from functools import partial
from pathlib import Path
from typing import Annotated

from rackloom.cli.node import env


def gpu(
    *,
    node: Annotated[str, env("NODE_NAME")],
    inventory_file: Path | None = None,
    nccl_topology: Annotated[Path | None, env("NCCL_TOPO_FILE")] = None,
    topology_file: Path | None = None,
    vfio: Annotated[bool, env("VFIO_ENABLED")] = False,
    ignore_xid: tuple[int, ...] = (),
    consumable_shares: Annotated[str, env("CONSUMABLE_SHARES")] = "disabled",
    sysroot: Path = Path("/"),
    driver_root: Annotated[Path, env("DRIVER_ROOT_CTR_PATH")] = Path("/driver-root"),
    host_driver_root: Annotated[Path, env("NVIDIA_DRIVER_ROOT")] = Path("/"),
    proc_devices: Annotated[Path | None, env("ALT_PROC_DEVICES_PATH")] = None,
    registry: Annotated[Path, env("KUBELET_REGISTRAR_DIRECTORY_PATH")] = Path(
        "/var/lib/kubelet/plugins_registry"
    ),
    plugins: Annotated[Path, env("KUBELET_PLUGINS_DIRECTORY_PATH")] = Path("/var/lib/kubelet/plugins"),
    cdi_root: Annotated[Path, env("CDI_ROOT")] = Path("/var/run/cdi"),
    listen: Annotated[str | None, env("HTTP_ENDPOINT")] = None,
    healthcheck_port: Annotated[int, env("HEALTHCHECK_PORT")] = -1,
    kubeconfig: Path | None = None,
) -> None:
    """Serve GPUs and MIG devices (driver gpu.nvidia.com) to the pods of this node.

    Parameters
    ----------
    node
        Name of this node.
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
    sysroot
        Where the host's /proc and /sys are found.
    driver_root
        Where NVIDIA's driver is seen from here.
    host_driver_root
        Where the host has NVIDIA's driver.
    proc_devices
        A file to read instead of /proc/devices.
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
    from rackloom.app.node_gpu import GpuOptions, run_gpu
    from rackloom.claim.node.gpu.shares import shares_of
    from rackloom.claim.node.run import Places

    common = NodeOptions(
        node=node,
        places=Places(registry=registry, plugins=plugins, cdi=cdi_root),
        sysroot=sysroot,
        listen=listen,
        health_listen=None if healthcheck_port < 0 else f"[::]:{healthcheck_port}",
        kubeconfig=kubeconfig,
    )
    options = GpuOptions(
        inventory_file=inventory_file,
        nccl_topology=nccl_topology,
        topology_file=topology_file,
        vfio=vfio,
        ignored_xids=ignore_xid,
        driver_root=driver_root,
        host_driver_root=host_driver_root,
        proc_devices=proc_devices,
        shares=shares_of(consumable_shares),
    )
    run_gpu(common, options, partial(print, flush=True))
