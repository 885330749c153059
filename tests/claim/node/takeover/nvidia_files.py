"""Checkpoints as NVIDIA's driver writes them, made from the facts of their format, and nodes with them."""

import json
import subprocess
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.claim.node.go_programs import go_program
from tests.cluster.build import Tools

from rackloom.claim.node.takeover.node_files import CHECKPOINT, NodePlaces
from rackloom.claim.node.takeover.nvidia_checkpoint import go_checksum
from rackloom.core.cluster.names import API_VERSION, GPU_DRIVER, IMEX_DRIVER

READER = Tools(Path(__file__).parent / "checkpoint_reader", {"checkpoint-reader": "."})
NODE = "node-a"
V1_PARTS = ("status", "preparedDevices")
COMPLETED, STARTED, ABORTED = "PrepareCompleted", "PrepareStarted", "PrepareAborted"


def go(value: object) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026").encode()


# Claims.


def status(driver: str, devices: Sequence[str], *configs: Any, **result: Any) -> dict[str, Any]:
    """The status of a ResourceClaim."""
    results = [
        {"request": "r", "driver": driver, "pool": NODE, "device": device, **result} for device in devices
    ]
    found: dict[str, Any] = {"results": results}
    if configs:
        found["config"] = [
            {"source": "FromClaim", "opaque": {"driver": driver, "parameters": config}} for config in configs
        ]
    reserved = [{"resource": "pods", "name": "p", "uid": "p-uid"}]
    return {"allocation": {"devices": found}, "reservedFor": reserved}


def domain_config(kind: str, domain: str) -> dict[str, str]:
    return {
        "apiVersion": API_VERSION,
        "kind": f"ComputeDomain{kind.capitalize()}Config",
        "domainID": domain,
        "comment": "a<b>&c é",
    }


def imex_claim(uid: str, kind: str, domain: str = "cd-1", state: str = COMPLETED, **more: Any) -> Any:
    """A claim of the compute-domain plugin. `kind` is channel or daemon."""
    device, vendor = f"{kind}-0", f"k8s.{IMEX_DRIVER}"
    ids = [*([f"{vendor}/device=all"] if kind == "daemon" else []), f"{vendor}/claim={uid}-{device}"]
    listed = {"Requests": ["r"], "PoolName": NODE, "DeviceName": device, "CDIDeviceIDs": ids}
    part = {"info": {"id": 0}, "device": listed}
    group = {
        "devices": [
            {"channel": part if kind == "channel" else None, "daemon": part if kind == "daemon" else None}
        ],
        "configState": {"Type": kind, "ComputeDomain": domain},
    }
    return {
        "checkpointState": state,
        "status": status(IMEX_DRIVER, [device], domain_config(kind, domain)),
        **({"preparedDevices": [group]} if state == COMPLETED else {}),
        "name": f"claim-{uid}",
        "namespace": "default",
        **more,
    }


def gpu_claim(
    uid: str,
    *devices: str,
    config: Any = None,
    state: Mapping[str, Any] = {},
    kind: str = "gpu",
    pci_address: str = "",
) -> Any:
    """A claim of the GPU plugin, which records no name of a prepared claim."""
    parts = []
    for device in devices:
        ids = [f"k8s.{GPU_DRIVER}/claim={uid}-{device}"]
        listed = {"Requests": ["r"], "PoolName": NODE, "DeviceName": device, "CDIDeviceIDs": ids}
        uuid = f"GPU-{device}"
        concrete = {"parentMinor": 0, "giId": 1, "ciId": 0, "migUUID": uuid, "parentUUID": "GPU-p"}
        gpu = {"info": {"uuid": uuid}, "device": listed} if kind == "gpu" else None
        mig = {"concrete": concrete, "device": listed} if kind == "mig" else None
        info = {"uuid": uuid, **({"pciBusID": pci_address} if pci_address else {})}
        vfio = {"vfio": {"info": info, "device": listed}} if kind == "vfio" else {}
        parts.append({"gpu": gpu, "mig": mig, **vfio})
    return {
        "checkpointState": COMPLETED,
        "status": status(GPU_DRIVER, devices, *([] if config is None else [config])),
        "preparedDevices": [{"devices": parts, "configState": dict(state)}],
    }


def gpu_config(strategy: str, **more: Any) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": "GpuConfig", "sharing": {"strategy": strategy, **more}}


# Files.


def checkpoint_file(claims: Mapping[str, Any], boot_id: str = "boot-1", parts: str = "v1 v2") -> bytes:
    """The driver's file. Releases before 0.4 lack `boot_id`, and those up to 25.3 have only the part v1."""
    claims = dict(sorted(claims.items()))
    prepared = {
        uid: claim if isinstance(claim, list) else {part: claim[part] for part in V1_PARTS if part in claim}
        for uid, claim in claims.items()
        if isinstance(claim, list) or claim["checkpointState"] == COMPLETED
    }
    file: dict[str, Any] = {"checksum": 0}
    if "v1" in parts:
        file["v1"] = {"preparedClaims": prepared} if prepared else {}
    file["checksum"] = go_checksum(go(file))
    if "v2" in parts:
        v2 = {"checksum": 0, **({"preparedClaims": claims} if claims else {})}
        v2 |= {"nodeBootID": boot_id} if boot_id else {}
        file["v2"] = {**v2, "checksum": go_checksum(go(v2))}
    return go(file)


def kubelet_state(
    *claims: str,
    changed: str = "",
    devices: Mapping[str, Sequence[str]] = {},
    named: Mapping[str, str] = {},
) -> bytes:
    """kubelet's dra_manager_state with claims of these UIDs. `devices` has those of each, by driver.

    `named` has names by UID, for claims that are not named after it.
    """
    state = {
        driver: {
            "Devices": [
                {"PoolName": NODE, "DeviceName": name, "RequestNames": ["r"], "CDIDeviceIDs": None}
                for name in names
            ]
        }
        for driver, names in devices.items()
    }
    held = [
        {
            "ClaimUID": uid,
            "ClaimName": named.get(uid, f"claim-{uid}"),
            "Namespace": "default",
            "PodUIDs": {"p-uid": {}},
            "DriverState": state,
        }
        for uid in claims
    ]
    data = go(
        {
            "kind": "DRACheckpoint",
            "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1",
            "ClaimInfoStateList": held,
        }
    ).decode()
    return go({"Data": data + changed, "Checksum": zlib.crc32(data.encode())})


class Node:
    """The files of a node, below a short path (sockets)."""

    def __init__(self, root: Path, boot_id: str = "boot-1") -> None:
        self.root, self.boot_id = root, boot_id
        self.set_state()

    @property
    def places(self) -> NodePlaces:
        return NodePlaces(
            plugins=self.root / "plug",
            registry=self.root / "reg",
            cdi=self.root / "cdi",
            kubelet_state=self.root / "dra_manager_state",
            boot_id=self.boot_id,
            dranet=self.root / "run/dranet/dranet.db",
        )

    def set_state(self, *uids: str, devices: Mapping[str, Sequence[str]] = {}) -> None:
        (self.root / "dra_manager_state").write_bytes(kubelet_state(*uids, devices=devices))

    def home(self, driver: str = IMEX_DRIVER) -> Path:
        return self.places.plugins / driver

    def install(self, found: bytes, driver: str = IMEX_DRIVER) -> Path:
        """NVIDIA's plugin has been here."""
        home = self.home(driver)
        home.mkdir(parents=True, exist_ok=True)
        (home / "pu.lock").touch()
        (home / CHECKPOINT).write_bytes(found)
        return home / CHECKPOINT

    def add_cdi(self, driver: str, uid: str) -> Path:
        self.places.cdi.mkdir(exist_ok=True)
        file = self.places.cdi / f"k8s.{driver}-claim_{uid}.yaml"
        file.write_text("of NVIDIA's driver")
        return file

    def files(self) -> dict[str, bytes]:
        """All files below the plugins directory, except locks."""
        found = (path for path in self.root.rglob("*") if path.is_file() and path.suffix != ".lock")
        return {str(path.relative_to(self.root)): path.read_bytes() for path in found}


# NVIDIA's driver, as far as it reads the file.


def reader() -> Path:
    """The program, built if it is missing."""
    return go_program(READER, "checkpoint-reader", "kubelet's checksum package")


def states_read_by_driver(binary: Path, driver: str, file: Path, release: str = "") -> dict[str, str]:
    """The state of each claim by UID. Raises AssertionError with the reason if the file is refused."""
    structs = driver.removesuffix(".nvidia.com") + release
    done = subprocess.run([binary, structs, file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))
