"""The images of the real nodes: Rackloom's own, which `make image` builds, and two that tests need beside it.

containerd starts every pod with `localhost/pause:1`, and pods of tests run `busybox:1`. Both are made here of
one file system layer each, in the format of `docker save`, which containerd imports.
"""

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
_APPLETS = (
    "cat chmod cp date echo env false getent grep head hostname id ip kill ls mkdir mount nc nslookup ping "
    "ps rm sed sh sleep sort stat tail test touch true wc wget"
)


def write_test_images(folder: Path) -> None:
    """Write `pause.tar` and `busybox.tar` unless they exist."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (pause := folder / "pause.tar").exists():
        with tempfile.TemporaryDirectory() as scratch:
            program = Path(scratch) / "pause"
            subprocess.run(["cc", "-O2", "-static", "-o", program, HERE / "driver/pause.c"], check=True)
            _pack(pause, ["localhost/pause:1"], {"pause": program.read_bytes()}, ["/pause"])
    if not (busybox := folder / "busybox.tar").exists():
        static = shutil.which("busybox")
        assert static is not None, "there is no busybox"
        files: dict[str, bytes | str] = {"bin/busybox": Path(static).read_bytes(), "tmp/.keep": b""}
        files |= {f"bin/{applet}": "busybox" for applet in _APPLETS.split()}
        _pack(busybox, [f"docker.io/library/busybox:{tag}" for tag in ("1", "1.37")], files, ["/bin/sh"])


def _pack(archive: Path, names: list[str], files: dict[str, bytes | str], command: list[str]) -> None:
    """An image of `files` by path: their content, or the target of a symbolic link."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            if isinstance(content, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, content
                tar.addfile(entry)
            else:
                entry.size, entry.mode = len(content), 0o755
                tar.addfile(entry, io.BytesIO(content))
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": command, "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": names, "Layers": ["layer.tar"]}]
    whole = {
        "config.json": json.dumps(config).encode(),
        "manifest.json": json.dumps(manifest).encode(),
        "layer.tar": layer.getvalue(),
    }
    partial = archive.with_suffix(".part")
    with tarfile.open(partial, "w") as tar:
        for path, content in whole.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    partial.rename(archive)
