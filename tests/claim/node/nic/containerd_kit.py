"""containerd for real, with a separate root, sockets and network, and as much of CRI as a pod needs.

It is taken from PATH, or from the directories in RACKLOOM_CONTAINERD (with colons between them).
"""

import asyncio
import hashlib
import io
import json
import os
import platform
import shutil
import signal
import struct
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest
from tests.claim.node.nic.nic_kit import may_make_namespaces

NEEDED = ("containerd", "containerd-shim-runc-v2", "ctr", "runc")
IMAGE = "rackloom.example/pause:1"
PAUSE = bytes.fromhex("b8220000000f05ebf7")
"""mov eax, 34 (pause); syscall; jmp to the start: x86-64."""


def search_path() -> str:
    """The directories that are searched for programs."""
    return f"{os.environ.get('RACKLOOM_CONTAINERD', '')}:{os.environ['PATH']}"


def _why_not() -> str:
    if platform.machine() != "x86_64":
        return "the pause image of these tests is for x86-64"
    lacking = [program for program in NEEDED if shutil.which(program, path=search_path()) is None]
    if lacking:
        return f"NO CONTAINERD: {', '.join(lacking)} neither in PATH nor in RACKLOOM_CONTAINERD"
    return "" if may_make_namespaces() else "NEEDS ROOT: containers cannot be made here"


needs_containerd = pytest.mark.skipif(bool(_why_not()), reason=_why_not())


class Containerd:
    """A running containerd."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.socket = root / "c.sock"
        self.nri = root / "nri.sock"
        self.log = root / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, or start again with the earlier state."""
        (self.root / "config.toml").write_text(_config(self.root))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ["containerd", "--config", str(self.root / "config.toml")],
                executable=shutil.which("containerd", path=search_path()),
                env={**os.environ, "PATH": search_path()},
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        """As if it crashed. Its containers go on."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Stop it and everything that it started."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if str(self.root).encode() in (process / "cmdline").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
        for top in _cgroups(self.root):
            for processes in top.rglob("cgroup.procs"):
                for number in processes.read_text().split():
                    with suppress(OSError):
                        os.kill(int(number), signal.SIGKILL)

    def ctr(self, *arguments: str) -> None:
        """Run its command line."""
        program = shutil.which("ctr", path=search_path())
        subprocess.run(
            [str(program), "--address", str(self.socket), "-n", "k8s.io", *arguments],
            check=True,
            capture_output=True,
            timeout=60,
        )

    async def ready(self) -> None:
        """Wait until CRI answers, and have the image there."""
        while True:
            if self._process is not None and self._process.poll() is not None:
                raise AssertionError(self.log.read_text()[-4000:])
            try:
                await self.call("Version", {})
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)
        image = self.root / "pause.tar"
        image.write_bytes(pause_image())
        await asyncio.to_thread(self.ctr, "images", "import", str(image))

    async def call(self, method: str, request: dict) -> dict[int, bytes]:
        """A call of the RuntimeService. Fields by number, as in CRI v1."""
        async with grpc.aio.insecure_channel(f"unix:{self.socket}") as channel:
            ask = channel.unary_unary(f"/runtime.v1.RuntimeService/{method}")
            return decoded(await ask(encoded(request), timeout=60))

    async def run_pod(self, uid: str, name: str) -> str:
        """Start a sandbox: its ID."""
        return (await self.call("RunPodSandbox", {1: self.pod(uid, name)}))[1].decode()

    def pod(self, uid: str, name: str) -> dict:
        """PodSandboxConfig."""
        metadata = {1: name, 2: uid, 3: "default"}
        return {1: metadata, 2: name, 3: str(self.root / "pods"), 8: {1: f"/{self.root.name}"}}

    async def run_container(self, sandbox: str, uid: str, name: str, attempt: int) -> str:
        """Start a container in a sandbox: its ID."""
        config = {1: {1: "main", 2: attempt + 1}, 2: {1: IMAGE}, 3: "/pause", 15: {}}
        made = await self.call("CreateContainer", {1: sandbox, 2: config, 3: self.pod(uid, name)})
        container = made[1].decode()
        await self.call("StartContainer", {1: container})
        return container

    def interfaces(self, container: str) -> set[str]:
        """Names of the interfaces that the processes of a container see."""
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if container.encode() in (process / "cgroup").read_bytes():
                    lines = (process / "net/dev").read_text().splitlines()[2:]
                    return {line.partition(":")[0].strip() for line in lines}
        raise AssertionError(f"no process of {container}")


@contextmanager
def containerd(root: Path) -> Iterator[Containerd]:
    """containerd below `root`, until the context is left."""
    for directory in ("cni", "net.d", "pods", "nri.d"):
        (root / directory).mkdir()
    runtime = Containerd(root)
    _network(root)
    runtime.start()
    try:
        yield runtime
    finally:
        runtime.end()
        _unmount(root)
        _remove_cgroups(root)


def _cgroups(root: Path) -> list[Path]:
    """The cgroups of containers below `root`: by controller, or all in one tree."""
    return [
        path for pattern in (f"*/{root.name}", root.name) for path in Path("/sys/fs/cgroup").glob(pattern)
    ]


def _remove_cgroups(root: Path) -> None:
    """Kernel directories are empty once their processes are gone. The innermost go first."""
    for top in _cgroups(root):
        for inner in sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True):
            with suppress(OSError):
                inner.rmdir()
        with suppress(OSError):
            top.rmdir()


def _unmount(root: Path) -> None:
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for at in reversed([mount for mount in mounts if mount.startswith(f"{root}/")]):
        subprocess.run(["umount", "-l", at], check=False)


def _network(root: Path) -> None:
    """A CNI plugin that makes nothing and reports eth0: the NIC is to be the pod's only one."""
    answer = {
        "cniVersion": "1.0.0",
        "interfaces": [{"name": "eth0", "sandbox": "/proc/self/ns/net"}],
        "ips": [{"address": "192.0.2.2/24", "interface": 0}],
    }
    for name in ("nothing", "loopback"):
        plugin = root / "cni" / name
        plugin.write_text(f"#!/bin/sh\ncat >/dev/null\ncat <<'END'\n{json.dumps(answer)}\nEND\n")
        plugin.chmod(0o755)
    network = {"cniVersion": "1.0.0", "name": "nothing", "plugins": [{"type": "nothing"}]}
    (root / "net.d" / "10-nothing.conflist").write_text(json.dumps(network))


def _config(root: Path) -> str:
    cri = "io.containerd.cri.v1"
    return f"""
version = 3
root = "{root}/root"
state = "{root}/state"
[grpc]
  address = "{root}/c.sock"
[plugins."io.containerd.nri.v1.nri"]
  disable = false
  socket_path = "{root}/nri.sock"
  plugin_path = "{root}/nri.d"
  plugin_config_path = "{root}/nri.d"
[plugins."{cri}.images"]
  snapshotter = "native"
[plugins."{cri}.images".pinned_images]
  sandbox = "{IMAGE}"
[plugins."{cri}.runtime"]
  netns_mounts_under_state_dir = true
  disable_apparmor = true
  restrict_oom_score_adj = true
[plugins."{cri}.runtime".cni]
  bin_dirs = ["{root}/cni"]
  conf_dir = "{root}/net.d"
[plugins."{cri}.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
"""


def pause_image() -> bytes:
    """An OCI image with one static program, as a tar archive."""
    layer = _tar({"pause": (_elf(PAUSE), 0o755)})
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": ["/pause"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    ).encode()
    oci = "application/vnd.oci.image"
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": f"{oci}.manifest.v1+json",
            "config": _descriptor(f"{oci}.config.v1+json", config),
            "layers": [_descriptor(f"{oci}.layer.v1.tar", layer)],
        }
    ).encode()
    entry = _descriptor(f"{oci}.manifest.v1+json", manifest)
    entry["annotations"] = {"io.containerd.image.name": IMAGE}
    files = {"oci-layout": (b'{"imageLayoutVersion":"1.0.0"}', 0o644)}
    files["index.json"] = (json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode(), 0o644)
    for blob in (layer, config, manifest):
        files[f"blobs/sha256/{_digest(blob).partition(':')[2]}"] = (blob, 0o644)
    return _tar(files)


def _descriptor(media_type: str, blob: bytes) -> dict:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _tar(files: dict[str, tuple[bytes, int]]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, (content, mode) in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def _elf(code: bytes) -> bytes:
    """The smallest ELF file that runs `code`: a header, one segment, the code."""
    at, size = 0x400000, 64 + 56 + len(code)
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, at + 120, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    return header + struct.pack("<IIQQQQQQ", 1, 5, 0, at, at, size, size, 0x1000) + code


def encoded(fields: dict) -> bytes:
    """Protobuf: numbers to strings, integers or messages."""
    made = b""
    for number, value in fields.items():
        if isinstance(value, int):
            made += bytes([number << 3]) + _varint(value)
        else:
            data = encoded(value) if isinstance(value, dict) else value.encode()
            made += bytes([number << 3 | 2]) + _varint(len(data)) + data
    return made


def decoded(data: bytes) -> dict[int, bytes]:
    """The answer's fields that hold bytes. No others are needed here."""
    found, at = {}, 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        length, at = _read_varint(data, at)
        if tag & 7 == 2:
            found[tag >> 3] = data[at : at + length]
            at += length
    return found


def _varint(value: int) -> bytes:
    made = b""
    while value > 127:
        made, value = made + bytes([value & 127 | 128]), value >> 7
    return made + bytes([value])


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at
