"""Runs a program as in a container that got only the edits of a CDI spec, and once without them.

The root is an overlay of the machine's own, without any file of NVIDIA's driver and without its devices in
/dev. The machine's files are never touched. First the program runs there as it is, and should fail, or the
second run would prove nothing. Then the edits are applied according to the specification of the Container
Device Interface: device nodes are made from type, major and minor of the spec alone, files are mounted from
the host's paths, hooks of `createContainer` get the container's state on their standard input.

`in_container` calls this program in a separate mount namespace. It prints the output of both runs as JSON.
"""

import ctypes
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

HARMLESS = ("null", "zero", "full", "random", "urandom", "tty")
DRIVER_FILES = (
    "libcuda.so*",
    "libcudadebugger.so*",
    "libnvidia-*.so*",
    "libnvcuvid.so*",
    "libnvoptix.so*",
    "nvidia-smi",
    "nvidia-cuda-mps-*",
)
DRIVER_PLACES = (
    *("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib", "usr/bin"),
    *("usr/local/nvidia/lib64", "usr/local/nvidia/lib", "usr/local/nvidia/bin"),
)
CUDA = """
import ctypes, json
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    print(json.dumps({"error": str(error)}))
    raise SystemExit(0)
code, number = cuda.cuInit(0), ctypes.c_int()
if not code:
    code = cuda.cuDeviceGetCount(ctypes.byref(number))
uuid_of = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
uuids = []
for ordinal in range(number.value):
    device, text = ctypes.c_int(), ctypes.create_string_buffer(16)
    code = code or cuda.cuDeviceGet(ctypes.byref(device), ordinal) or uuid_of(text, device)
    uuids.append(text.raw.hex())
print(json.dumps({"error": f"the CUDA driver says {code}" if code else "", "uuids": uuids}))
"""
"""Calls CUDA without any package: how many GPUs there are, and their UUIDs."""


def in_container(edits: dict[str, Any], scratch: Path, hidden: tuple[str, ...] = ()) -> dict[str, Any]:
    """CUDA's answers `before` and `after` the edits, each with an `error` or `uuids`.

    `hidden` are further directories (absolute) that a container does not have. Raises `OSError` with the
    reason if no such root can be made here.
    """
    order = {"edits": edits, "scratch": str(scratch), "hidden": hidden, "environment": _python_of_ours()}
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, __file__, json.dumps(order)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise OSError(
            done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}"
        )
    return dict(json.loads(done.stdout))


def _python_of_ours() -> list[str]:
    """Directories that Python needs, even if they are on separate file systems."""
    return sorted({sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent.parent)})


def main(order: dict[str, Any]) -> None:
    """Make the root, run without the edits, apply them, run again."""
    root = _root(Path(order["scratch"]))
    _hide(root, order["hidden"])
    _bind(root, order["environment"])
    _devices(root)
    before = _run(root, {})
    edits = order["edits"]
    for node in edits.get("deviceNodes", ()):
        _make(root, node)
    for mount in edits.get("mounts", ()):
        _mount_file(root, mount)
    for hook in edits.get("hooks", ()):
        _hook(root, hook)
    after = _run(root, dict(variable.split("=", 1) for variable in edits.get("env", ())))
    sys.stdout.write(json.dumps({"before": before, "after": after}))


def _root(scratch: Path) -> Path:
    _mount("tmpfs", "none", scratch)
    root, upper, work = (scratch / name for name in ("root", "upper", "work"))
    for directory in (root, upper, work):
        directory.mkdir()
    _mount("overlay", "overlay", root, "-o", f"lowerdir=/,upperdir={upper},workdir={work}")
    for place in ("/proc", "/sys"):
        subprocess.run(["mount", "--rbind", place, f"{root}{place}"], check=True)
    return root


def _bind(root: Path, places: list[str]) -> None:
    """Mount Python's directories outside the machine's root, read-only. Call it after the deletions."""
    device = Path("/").stat().st_dev
    for place in places:
        if Path(place).stat().st_dev != device:
            at = f"{root}{place}"
            Path(at).mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", "--bind", place, at], check=True)
            subprocess.run(["mount", "-o", "remount,ro,bind", at], check=True)


def _hide(root: Path, hidden: list[str]) -> None:
    for place in hidden:
        shutil.rmtree(root / place.lstrip("/"), ignore_errors=True)
    for place in DRIVER_PLACES:
        for pattern in DRIVER_FILES:
            for file in (root / place).glob(pattern):
                file.unlink()
    # The loader's cache of the machine's libraries.
    (root / "etc/ld.so.cache").unlink(missing_ok=True)
    subprocess.run(["chroot", str(root), "ldconfig"], check=False, capture_output=True)


def _devices(root: Path) -> None:
    _mount("tmpfs", "none", root / "dev")
    for name in HARMLESS:
        known = Path("/dev", name).stat()
        os.mknod(root / "dev" / name, stat.S_IFCHR | 0o666, known.st_rdev)
        (root / "dev" / name).chmod(0o666)
    (root / "dev/shm").mkdir()
    _mount("tmpfs", "none", root / "dev/shm")


def _make(root: Path, node: dict[str, Any]) -> None:
    """A missing type means the type of the host's node at that path. The host must then have that node."""
    kind, at = node.get("type"), root / node["path"].lstrip("/")
    number = os.makedev(node.get("major", 0), node.get("minor", 0))
    if kind not in ("c", "u"):
        number = Path(node.get("hostPath") or node["path"]).stat().st_rdev
    at.parent.mkdir(parents=True, exist_ok=True)
    mode = node.get("fileMode", 0o666)
    os.mknod(at, stat.S_IFCHR | mode, number)
    at.chmod(mode)


def _mount_file(root: Path, mount: dict[str, Any]) -> None:
    source, at = Path(mount["hostPath"]), root / mount["containerPath"].lstrip("/")
    at.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        at.mkdir(exist_ok=True)
    elif not at.exists():
        at.touch()
    subprocess.run(["mount", "--rbind", str(source), str(at)], check=True)


def _hook(root: Path, hook: dict[str, Any]) -> None:
    if hook["hookName"] != "createContainer":
        return
    bundle = root.parent / "bundle"
    bundle.mkdir(exist_ok=True)
    (bundle / "config.json").write_text(json.dumps({"ociVersion": "1.1.0", "root": {"path": str(root)}}))
    state = {
        "ociVersion": "1.1.0",
        "id": "shown",
        "status": "creating",
        "pid": os.getpid(),
        "bundle": str(bundle),
    }
    subprocess.run(
        hook.get("args") or [hook["path"]],
        executable=hook["path"],
        input=json.dumps(state),
        text=True,
        check=True,
        capture_output=True,
        env=dict(variable.split("=", 1) for variable in hook.get("env", ())),
    )


def _run(root: Path, environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        ["chroot", str(root), sys.executable, "-c", CUDA],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **environment},
        timeout=60,
        check=False,
    )
    if done.returncode:
        return {"error": f"Python did not run: {done.stderr.strip()[-300:]}", "uuids": []}
    return {"uuids": [], **json.loads(done.stdout)}


def _mount(kind: str, source: str, target: Path, *more: str) -> None:
    """Mount by system call, since the `mount` program needs to know every file system beforehand."""
    options = more[1].encode() if more else None
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), str(target).encode(), kind.encode(), 0, options):
        raise OSError(
            ctypes.get_errno(), f"cannot mount {kind} at {target}: {os.strerror(ctypes.get_errno())}"
        )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
