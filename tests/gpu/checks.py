"""Checks of Rackloom on one machine with an NVIDIA GPU.

Every check compares Rackloom's output with a source that it does not use itself: `nvidia-smi -q -x`, the
CUDA driver called by ctypes, files of /dev, the loader. No check changes a setting of a GPU, and the last one
verifies that. A check returns its figures, or raises `Differs` with the differences, or `Skipped` with the
missing requirements.
"""

import asyncio
import ctypes
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.gpu.container import in_container

Figures = dict[str, Any]
LIBRARY, PROGRAM = "libcuda.so.1", "nvidia-smi"
NEEDED = (LIBRARY, "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1")
SETTINGS = (
    *("persistence_mode", "compute_mode", "addressing_mode", "mig_mode", "ecc_mode", "accounting_mode"),
    *("applications_clocks", "gpu_power_readings/requested_power_limit", "power_readings/power_limit"),
)
"""Elements of a GPU in `nvidia-smi -q -x` that hold settings."""
TRANSFER_BYTES, TRANSFER_ITERATIONS = 256 << 20, 20
SECONDS = 60.0
MACHINES = {"x86_64": 62, "aarch64": 183}
"""e_machine of the ELF header."""


class Skipped(Exception):
    """The machine lacks a requirement of the check."""


class Differs(Exception):
    """Two sources that should agree do not."""


def no_gpu_reason(load: Callable[[str], Any] = ctypes.CDLL) -> str | None:
    """Why there is no GPU to use here, or None. It calls the driver, and makes no context."""
    from rackloom.errors import Refused
    from rackloom.prove.transfer.buffers import CudaDriver

    try:
        driver = CudaDriver(load)
    except Refused as refused:
        return refused.reason
    return None if driver.count() else "the CUDA driver finds no GPU"


@dataclass
class Machine:
    """The machine under test. Tests of the checks themselves replace its fields."""

    driver_root: Path | None = None
    """The directory of the driver. None derives it from the place where the loader finds the CUDA driver."""
    node_options: Mapping[str, Any] = field(default_factory=dict)
    """For the GPU plugin, besides the driver's root."""
    sysroot: Path = Path("/")

    @cached_property
    def lacks_gpu(self) -> str | None:
        """The reason that nothing can be checked here, or None if a GPU answers."""
        why = no_gpu_reason()
        on_the_bus = nvidia_functions(self.sysroot)
        if why is not None and on_the_bus:
            return f"the GPU at {', '.join(on_the_bus)} cannot be used: {why}"
        return None if why is None else f"no NVIDIA GPU is on the PCI bus, and {why}"

    @cached_property
    def root(self) -> Path:
        """The root of the driver's libraries in `lib64`, `usr/lib/x86_64-linux-gnu` and the like."""
        return self.driver_root or root_of(loaded_from(LIBRARY))

    @cached_property
    def program(self) -> str:
        """nvidia-smi."""
        places = [*os.environ.get("PATH", "").split(":"), str(self.root / "bin"), str(self.root / "usr/bin")]
        found = shutil.which(PROGRAM, path=":".join(places))
        if found is None:
            raise Skipped(f"there is no {PROGRAM} to compare with")
        return found

    def printed(self) -> ET.Element:
        """`nvidia-smi -q -x`."""
        return ET.fromstring(self.asked("-q", "-x"))  # noqa: S314 - of the driver's own program

    def asked(self, *words: str) -> str:
        """The output of nvidia-smi."""
        done = subprocess.run(
            [self.program, *words], capture_output=True, text=True, timeout=SECONDS, check=False
        )
        if done.returncode:
            raise Differs(f"{PROGRAM} {' '.join(words)} fails: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    @cached_property
    def settings(self) -> dict[str, str]:
        """The GPUs' settings when this property was first read."""
        return settings_of(self.printed())

    def prepared(self, kind: str) -> "Given":
        """A claim for the first device of a type, prepared by the plugin, and the edits of its specs."""
        return asyncio.run(_prepared(self, kind))


@dataclass(frozen=True)
class Given:
    """The edits that a container would get for one device."""

    device: str
    attributes: Mapping[str, Any]
    capacity: Mapping[str, Any]
    edits: dict[str, Any]
    published: tuple[str, ...]


def inventory(machine: Machine) -> Figures:
    """The plugin's inventory (through NVML) against nvidia-smi's: same GPUs, same facts of each."""
    from rackloom.claim.node.gpu.nvml import read_gpus

    read, log = read_gpus(machine.root), machine.printed()
    ours = {
        gpu.pci_address: {
            "uuid": gpu.uuid,
            "product": gpu.product,
            "minor": str(gpu.minor),
            "memory MiB": str(gpu.memory_bytes >> 20),
            "MIG": "Enabled" if gpu.mig_mode else "Disabled",
            "driver": read.driver_version,
            "CUDA": read.cuda_version,
        }
        for gpu in read.gpus
    }
    differences = differing(ours, gpus_in(log), "the plugin", PROGRAM)
    if differences:
        raise Differs("; ".join(differences))
    return {"gpus": ours, "architecture": sorted({gpu.architecture or "?" for gpu in read.gpus})}


def topology(machine: Machine) -> Figures:
    """`topology discover` against nvidia-smi and sysfs: GPUs, UUIDs, and each one's NUMA node."""
    from rackloom.topology.discovery.discover import discover_machine

    found = discover_machine(machine.sysroot)
    theirs = {address: known["uuid"] for address, known in gpus_in(machine.printed()).items()}
    ours = {gpu.pci_address or "?": gpu.uuid or "?" for gpu in found.gpus}
    if ours != theirs:
        raise Differs(f"discovery has {ours}, {PROGRAM} has {theirs}")
    nodes = {}
    for gpu in found.gpus:
        file = machine.sysroot / f"sys/bus/pci/devices/{gpu.pci_address}/numa_node"
        read = int(file.read_text()) if file.exists() else -1
        nodes[gpu.pci_address] = None if gpu.numa_node is None else gpu.numa_node.value
        if nodes[gpu.pci_address] != (read if read >= 0 else None):
            raise Differs(
                f"{gpu.pci_address}: discovery has NUMA node {nodes[gpu.pci_address]}, sysfs {read}"
            )
    nics = {nic.if_name or nic.rdma_device or str(nic.index): nic.excluded or "offered" for nic in found.nics}
    return {"numa_nodes": nodes, "nics": nics}


def cuda_agrees(machine: Machine) -> Figures:
    """CUDA's devices, read through ctypes, against the inventory: same UUIDs, same PCI addresses."""
    from rackloom.claim.node.gpu.nvml import read_gpus
    from rackloom.prove.transfer.buffers import CudaDriver

    read = read_gpus(machine.root).gpus
    theirs = sorted(CudaDriver().addresses())
    ours = sorted(gpu.pci_address for gpu in read)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        raise Skipped(f"CUDA_VISIBLE_DEVICES is {hidden!r}: CUDA may not show all GPUs")
    if any(gpu.mig_mode for gpu in read):
        raise Skipped("CUDA shows at most one MIG device of a GPU in MIG mode")
    if [full_address(their) for their in theirs] != [full_address(our) for our in ours]:
        raise Differs(f"CUDA has {theirs}, the plugin has {ours}")
    return {"addresses": ours}


def published(machine: Machine) -> Figures:
    """The devices that the plugin publishes, over its own sockets, against nvidia-smi."""
    given = machine.prepared("gpu")
    known = {gpu["uuid"]: gpu for gpu in gpus_in(machine.printed()).values()}
    printed = known.get(given.attributes["uuid"]["string"])
    if printed is None:
        raise Differs(f"{given.device} is published with a UUID that {PROGRAM} does not have")
    published = given.attributes["productName"]["string"], int(given.capacity["memory"]["value"]) >> 20
    if published != (printed["product"], int(printed["memory MiB"])):
        raise Differs(f"{given.device} is published as {published}, {PROGRAM} has {printed}")
    return {"devices": given.published, "attributes": len(given.attributes)}


def device_nodes(machine: Machine) -> Figures:
    """Every device node of the claim's CDI spec against the device file of the host: type, major, minor."""
    return _nodes_of(machine.prepared("gpu"))


def _nodes_of(given: Given) -> Figures:
    nodes, wrong = given.edits.get("deviceNodes", ()), []
    for node in nodes:
        listed = (node.get("type"), node.get("major"), node.get("minor"))
        try:
            info = Path(node["path"]).stat()
        except OSError as error:
            wrong.append(f"{node['path']}: {error.strerror} on the host")
            continue
        there = ("c", os.major(info.st_rdev), os.minor(info.st_rdev))
        if listed != there:
            wrong.append(f"{node['path']}: the spec says {listed}, the host has {there}")
    if wrong or not nodes:
        raise Differs("; ".join(wrong) or "the spec has no device node at all")
    return {node["path"]: f"{node['major']}:{node['minor']}" for node in nodes}


def mounts(machine: Machine) -> Figures:
    """Every file that the specs mount exists. A library is for this processor and finds its dependencies."""
    edits = machine.prepared("gpu").edits
    # If no hook makes the link by which programs load it (libcuda.so), a file is mounted twice.
    sources = [Path(path) for path in dict.fromkeys(mount["hostPath"] for mount in edits.get("mounts", ()))]
    wrong = [f"{source} does not exist" for source in sources if not source.exists()]
    libraries = [source for source in sources if source.exists() and ".so" in source.name]
    named = {source.name for source in libraries}
    for library in libraries:
        problem = wrong_library(library, [source.parent for source in libraries])
        if problem:
            wrong.append(problem)
    wrong += [f"no mount brings {needed}" for needed in NEEDED if needed not in named]
    if wrong:
        raise Differs("; ".join(wrong))
    return {"mounts": len(sources), "libraries": len(libraries)}


def container(machine: Machine) -> Figures:
    """CUDA in a root without the driver, then with the CDI edits of one GPU: that GPU and no other."""
    return _contained(machine, machine.prepared("gpu"))


def _contained(machine: Machine, given: Given) -> Figures:
    hidden = () if machine.root == Path("/") else (str(machine.root),)
    with tempfile.TemporaryDirectory(prefix="gpu-root-") as scratch:
        try:
            outcome = in_container(given.edits, Path(scratch), hidden)
        except OSError as error:
            raise Skipped(f"no container's root can be made here: {error}") from error
    before, after = outcome["before"], outcome["after"]
    if not before["error"]:
        raise Differs(f"CUDA finds {before['uuids']} without the edits: the driver was not hidden")
    if after["error"]:
        raise Differs(f"CUDA fails with the edits: {after['error']}")
    expected = given.attributes["uuid"]["string"].split("-", 1)[1].replace("-", "")
    if after["uuids"] != [expected]:
        raise Differs(f"CUDA finds {after['uuids']} with the edits of {given.device} ({expected})")
    return {"without": before["error"], "with": after["uuids"]}


def transfer(machine: Machine) -> Figures:
    """GPU memory of two processes: verified, carried by cuda_ipc alone. Without cuda_ipc, by other lanes."""
    from rackloom.prove.transfer import installation

    problem = installation.nixl_missing_reason()
    if problem:
        raise Skipped(problem)
    shown = {}
    for name, transports in (
        ("cuda_ipc", ("cuda_ipc", "cuda_copy", "tcp")),
        ("control", ("cuda_copy", "tcp")),
    ):
        report = _measured(transports)
        if not report.verified:
            raise Differs(f"{name}: the data did not arrive")
        by_ipc = [lane for lane in report.path.protocols if lane.startswith("cuda_ipc/")]
        if bool(by_ipc) != (name == "cuda_ipc"):
            raise Differs(f"{name}: UCX carried it by {report.path.protocols}")
        if name == "cuda_ipc" and report.path.carried_by:
            raise Differs(f"beside cuda_ipc, {report.path.carried_by} counted the payload")
        shown[name] = {
            "GB/s": round(report.avg_GBps, 2),
            "copy within the GPU GB/s": report.copy_GBps and round(report.copy_GBps, 2),
            "lanes": report.path.protocols,
            "evidence": report.path.evidence,
        }
    return shown


def _measured(transports: tuple[str, ...]) -> Any:
    from rackloom.core.transfer.values import EndConfig, TransferSpec, UcxPins
    from rackloom.prove.transfer.run import EndLocation, Lane, run_lanes

    place = EndLocation(config=EndConfig(device="cuda:0", ucx=UcxPins(transports)))
    spec = TransferSpec(
        block_size=TRANSFER_BYTES, iters=TRANSFER_ITERATIONS, warmup_iters=5, timeout_seconds=120
    )
    return run_lanes(spec, [Lane(place, place)])[0]


def mig(machine: Machine) -> Figures:
    """Existing MIG devices match the list of nvidia-smi, their nodes are right, and CUDA finds just one."""
    listed = [line.strip() for line in machine.asked("-L").splitlines() if "MIG-" in line]
    if not listed:
        raise Skipped("no GPU has MIG devices, and these checks make none")
    given = machine.prepared("mig")
    theirs = {line.rpartition("UUID: ")[2].rstrip(")") for line in listed}
    if given.attributes["uuid"]["string"] not in theirs:
        raise Differs(f"{given.device} has a UUID that {PROGRAM} -L does not list")
    return {"listed": listed, "nodes": _nodes_of(given), "container": _contained(machine, given)}


def mps(machine: Machine) -> Figures:
    """A separate control daemon, with the GPU's settings as they are: its client gets a server."""
    places = f"{os.environ['PATH']}:{Path(machine.program).parent}"
    control = shutil.which("nvidia-cuda-mps-control", path=places)
    if control is None:
        raise Skipped("there is no nvidia-cuda-mps-control")
    modes = {gpu.findtext("compute_mode") for gpu in machine.printed().iter("gpu")}
    if "Prohibited" in modes:
        raise Skipped("the compute mode is Prohibited, and these checks change none")
    if mig_is_on(machine.printed()):
        raise Skipped("a GPU is in MIG mode: MPS would need a device of it to be chosen")
    with tempfile.TemporaryDirectory(prefix="gpu-mps-") as home:
        own = {
            **os.environ,
            "CUDA_MPS_PIPE_DIRECTORY": f"{home}/pipe",
            "CUDA_MPS_LOG_DIRECTORY": f"{home}/log",
        }
        for name in ("pipe", "log"):
            Path(home, name).mkdir()
        _mps_program([control, "-d"], own)
        try:
            client = subprocess.run(
                [sys.executable, "-c", _CLIENT],
                env=own,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
            if client.returncode:
                raise Differs(f"a client of MPS fails: {client.stderr.strip() or client.stdout.strip()}")
            servers = _mps_program([control], own, "get_server_list\n").split()
        finally:
            _mps_program([control], own, "quit\n")
    if not servers:
        raise Differs("the client got its context without a server of MPS")
    return {"servers": len(servers), "compute_modes": sorted(filter(None, modes))}


_CLIENT = """
import ctypes
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
code = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
code = code or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
raise SystemExit(f"the CUDA driver says {code}" if code else 0)
"""


def _mps_program(command: Sequence[str], environment: Mapping[str, str], stdin: str = "") -> str:
    done = subprocess.run(
        command, input=stdin, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if done.returncode:
        raise Differs(f"{' '.join(command)} fails: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def settings_stay(machine: Machine) -> Figures:
    """The settings of all GPUs, before the first check and after the last, as nvidia-smi prints them."""
    before, after = machine.settings, settings_of(machine.printed())
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    if changed:
        differences = ", ".join(
            f"{name}: {before.get(name)} -> {after.get(name)}" for name in sorted(changed)
        )
        raise Differs(f"settings have changed: {differences}")
    return dict(before)


CHECKS: tuple[Callable[[Machine], Figures], ...] = (
    *(inventory, topology, cuda_agrees, published, device_nodes, mounts, container, transfer, mig, mps),
    settings_stay,
)


def nvidia_functions(sysroot: Path) -> list[str]:
    """PCI addresses of NVIDIA's display and 3D controllers."""
    from rackloom.topology.discovery.discover import NVIDIA
    from rackloom.topology.discovery.sysfs import Sysroot, read_pci

    known = read_pci(Sysroot(sysroot))
    return [device.address for device in known if device.vendor == NVIDIA and device.class_code >> 16 == 0x03]


def loaded_from(library: str) -> Path:
    """The file from which the loader loaded the library."""
    ctypes.CDLL(library)
    stem = library.partition(".so")[0]
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(
        Path(line.split()[-1]) for line in lines if Path(line.split()[-1]).name.startswith(f"{stem}.so")
    )


def root_of(library: Path) -> Path:
    """The root of the driver that has this library: `/` for `/usr/lib64/...`."""
    for parent in library.parents:
        if parent.name in ("usr", "lib", "lib64"):
            above = parent.parent
            return above.parent if above.name == "usr" else above
    return Path("/")


def full_address(text: str) -> str:
    """`0000:0f:00.0` from any spelling: domains of eight digits, capitals."""
    from rackloom.topology.discovery.sysfs import normal_pci_address

    return normal_pci_address(text) or text.lower()


def gpus_in(log: ET.Element) -> dict[str, dict[str, str | None]]:
    """The facts of each GPU by PCI address, from `nvidia-smi -q -x`."""
    return {
        full_address(gpu.get("id") or ""): {
            "uuid": gpu.findtext("uuid"),
            "product": gpu.findtext("product_name"),
            "minor": gpu.findtext("minor_number"),
            "memory MiB": (gpu.findtext("fb_memory_usage/total") or "").partition(" ")[0],
            "MIG": _mig_of(gpu),
            "driver": log.findtext("driver_version"),
            "CUDA": log.findtext("cuda_version"),
        }
        for gpu in log.iter("gpu")
    }


def _mig_of(gpu: ET.Element) -> str:
    """A GPU without MIG reports `N/A`."""
    return "Enabled" if gpu.findtext("mig_mode/current_mig") == "Enabled" else "Disabled"


def mig_is_on(log: ET.Element) -> bool:
    """Whether any GPU is in MIG mode."""
    return any(_mig_of(gpu) == "Enabled" for gpu in log.iter("gpu"))


def settings_of(log: ET.Element) -> dict[str, str]:
    """The settings by GPU and name."""
    found = {}
    for gpu in log.iter("gpu"):
        for path in SETTINGS:
            for element in gpu.findall(path):
                words = [text.strip() for text in element.itertext() if text.strip()]
                found[f"{gpu.get('id')} {path}"] = " ".join(words)
    return found


def differing(
    ours: Mapping[str, Mapping[str, Any]], theirs: Mapping[str, Mapping[str, Any]], we: str, they: str
) -> list[str]:
    """All differences between two descriptions of the same things, in words."""
    found = [f"only {we} has {name}" for name in sorted(ours.keys() - theirs.keys())]
    found += [f"only {they} has {name}" for name in sorted(theirs.keys() - ours.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        for fact, value in ours[name].items():
            if value != theirs[name].get(fact):
                found.append(f"{fact} of {name}: {we} has {value}, {they} has {theirs[name].get(fact)}")
    return found


def wrong_library(file: Path, folders: Sequence[Path]) -> str | None:
    """The reason that a shared library can't be loaded here (processor, missing libraries), or None."""
    head = file.read_bytes()[:20] if file.is_file() else b""
    expected = MACHINES.get(platform.machine())
    if head[:4] != b"\x7fELF" or head[4] != 2:
        return f"{file} is no library of 64 bits"
    if expected is not None and struct.unpack_from("<H", head, 18)[0] != expected:
        return f"{file} is not for this processor"
    path = ":".join(dict.fromkeys(map(str, folders)))
    done = subprocess.run(
        ["ldd", str(file)],
        capture_output=True,
        text=True,
        env={**os.environ, "LD_LIBRARY_PATH": path},
        timeout=SECONDS,
        check=False,
    )
    lacking = [line.split()[0] for line in done.stdout.splitlines() if "not found" in line]
    # Display libraries are for images with their own display server.
    lacking = [
        library
        for library in lacking
        if not library.startswith(("libX", "libwayland", "libgbm", "libdrm", "libGL"))
    ]
    return f"{file} needs {', '.join(lacking)}" if lacking else None


async def _prepared(machine: Machine, kind: str) -> Given:
    """All steps of a claim on this machine (publish, allocate, prepare). kubelet and API are simulated."""
    from tests.claim.node.plugin_manager import plugin_manager_on

    from rackloom.app.node.gpu import GpuOptions, gpu_node
    from rackloom.app.node.process import NodeOptions
    from rackloom.claim.node.gpu.plugin import GPU_DRIVER
    from rackloom.claim.node.run import PluginDirectories
    from rackloom.core.cluster.objects import NODE, RESOURCE_SLICE
    from rackloom.lab.kube.direct import DirectApi
    from rackloom.lab.kube.server import FakeKube

    name = "this-machine"
    api = DirectApi(FakeKube(namespaces=("default",), seed=1), "checks")
    await api.create(NODE, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-")))
        places = PluginDirectories(registry=home / "reg", plugins=home / "plug", cdi=home / "cdi")
        common = NodeOptions(node=name, directories=places, sysroot=machine.sysroot)
        options = GpuOptions(
            driver_root=machine.root, host_driver_root=machine.root, **dict(machine.node_options)
        )
        plugin = await stack.enter_async_context(gpu_node(common, options, api))
        kubelet = await stack.enter_async_context(plugin_manager_on(places.registry, api, name))
        async with asyncio.timeout(SECONDS):
            await plugin.publisher.published.wait()
            await kubelet.registered(GPU_DRIVER)
        slices = (await api.list(RESOURCE_SLICE)).items
        devices = {device["name"]: device for slice_ in slices for device in slice_["spec"]["devices"]}
        of_kind = [device for device in devices.values() if device["attributes"]["type"]["string"] == kind]
        if not of_kind:
            raise Skipped(f"no device of type {kind} is published: {', '.join(devices) or 'none at all'}")
        chosen = of_kind[0]
        claim = await _claim(api, GPU_DRIVER, name, chosen["name"])
        given = (await kubelet.prepare(claim))[claim.uid]
        ids = [cdi_id for device in given for cdi_id in device.cdi_ids]
        edits = merged_edits(places.cdi, ids)
        await kubelet.unprepare(claim)
        return Given(
            device=chosen["name"],
            attributes=chosen["attributes"],
            capacity=chosen.get("capacity") or {},
            edits=edits,
            published=tuple(devices),
        )


async def _claim(api: Any, driver: str, node: str, device: str) -> Any:
    from rackloom.core.cluster.objects import RESOURCE_CLAIM
    from rackloom.lab.nodes.dra_manager import pod_claim

    request = {"name": "gpu", "exactly": {"deviceClassName": driver}}
    made = await api.create(
        RESOURCE_CLAIM,
        {
            "apiVersion": RESOURCE_CLAIM.api_version,
            "kind": "ResourceClaim",
            "metadata": {"name": "shown", "namespace": "default"},
            "spec": {"devices": {"requests": [request]}},
        },
    )
    result = {"request": "gpu", "driver": driver, "pool": node, "device": device}
    status = {
        "allocation": {"devices": {"results": [result]}},
        "reservedFor": [{"resource": "pods", "name": "p", "uid": str(uuid.uuid4())}],
    }
    return pod_claim(await api.replace(RESOURCE_CLAIM, {**made, "status": status}, subresource="status"))


def merged_edits(directory: Path, ids: Sequence[str]) -> dict[str, Any]:
    """The edits of CDI devices by full names, as a runtime puts them together: the spec's, the device's."""
    import json

    merged: dict[str, Any] = {}
    specs = [json.loads(file.read_text()) for file in sorted(directory.iterdir())]
    for full in ids:
        kind, _, device = full.partition("=")
        found = [
            (spec, cdi_device)
            for spec in specs
            for cdi_device in spec["devices"]
            if spec["kind"] == kind and cdi_device["name"] == device
        ]
        if len(found) != 1:
            raise Differs(f"{len(found)} CDI specs have a device {full}")
        spec, cdi_device = found[0]
        for edits in (spec.get("containerEdits") or {}, cdi_device["containerEdits"]):
            for name, values in edits.items():
                merged.setdefault(name, []).extend(values)
    return merged
