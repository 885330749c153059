"""The container image, without a builder, a daemon or a base image: `make image`.

Its layers, from the one that changes least to the one that changes most:

- debian: the locked packages (see `debian`), and what their maintainer scripts would have written
- python: the wheels of requirements/runtime.txt, by hash, for the architecture of the image
- nixl: those of requirements/nixl.txt, in the target `transfer` only
- rackloom: the wheel of this source tree, and the program `rackloom`

uv chooses wheels for any architecture and unpacks them; the build runs nothing of what it puts into the
image. A Python of the image's minor version on this machine compiles the bytecode, since a program without
it takes many times longer to start. The result is an OCI image layout in a tar (OCI image specification
1.1). Its layers are not compressed: digests then depend on no compressor, and a registry's client
compresses on the way. They also lie beside it, for deploy/site/Containerfile. The same inputs and the same
compiler give the same digests.

Downloads and layers of pinned inputs are kept in ${XDG_CACHE_HOME:-~/.cache}/rackloom/image.
"""

import argparse
import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from deploy.image.trees import (
    FILE,
    BuildError,
    Entry,
    Tree,
    check_machine,
    compiler,
    directory,
    link,
    read_folder,
    sha256,
    text,
    with_bytecode,
    without,
    write_tar,
)

from deploy.image import debian

ROOT = Path(__file__).parents[2]
NAMES = {"site": "rackloom", "transfer": "rackloom-transfer"}
"""The image name of each target."""
USER = 10001
CONFIG = {
    # A number and no name: Kubernetes checks runAsNonRoot against the number.
    "User": f"{USER}:{USER}",
    # Manifests, probes and IMEX daemon pods say `rackloom`.
    "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
    "Entrypoint": ["rackloom"],
    "Cmd": ["serve", "--config", "/etc/rackloom/site.toml"],
    "Volumes": {"/var/lib/rackloom": {}},
    "ExposedPorts": {"8443/tcp": {}, "1079/tcp": {}, "9108/tcp": {}},
    "WorkingDir": "/",
}
"""How a container starts; deploy/site/Containerfile says the same."""
_PROGRAM = """\
#!/usr/bin/python{python}
import sys

from rackloom.cli.main import main

sys.exit(main())
"""
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
"""The architectures by their names in uname and in wheels."""
_CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
_KEPT = 4
"""Layers of one name and architecture that stay in the cache: other checkouts of this project share it."""


@dataclass(frozen=True)
class Layer:
    """A layer of pinned inputs: a file of the cache, made when it is first needed."""

    name: str
    arch: str
    inputs: tuple[str, ...]
    make: Callable[[], Tree]

    @property
    def path(self) -> Path:
        """Where it is: a file named by all that it is made of."""
        programs = [path.read_text() for path in sorted(Path(__file__).parent.iterdir()) if path.is_file()]
        key = hashlib.sha256("\0".join([*self.inputs, *programs, _compiler()]).encode()).hexdigest()
        return cache_folder() / "layers" / f"{self.name}-{self.arch}-{key[:32]}.tar"

    def file(self) -> Path:
        """Its file. Raises `BuildError` where an input cannot be had."""
        path = self.path
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            tree = _finished(self.make())
            check_machine(tree, self.arch)
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                written = Path(scratch) / path.name
                write_tar(tree, written)
                written.rename(path)
        path.touch()
        kept = sorted(
            path.parent.glob(f"{self.name}-{self.arch}-*.tar"), key=lambda file: -file.stat().st_mtime
        )
        for old in kept[_KEPT:]:
            old.unlink(missing_ok=True)
        return path


def layers(arch: str, target: str) -> list[Layer]:
    """The layers of pinned inputs, from the bottom."""
    packages = debian.locked(arch)
    wheels = {"python": "runtime.txt"} | ({"nixl": "nixl.txt"} if target == "transfer" else {})
    pins = {name: ROOT / "requirements" / file for name, file in wheels.items()}
    return [
        Layer("debian", arch, tuple(map(str, packages)), lambda: _debian(packages)),
        *(
            Layer(name, arch, (path.read_text(),), partial(_wheels, arch, path))
            for name, path in pins.items()
        ),
    ]


def own_tree() -> Tree:
    """The layer of this source tree: its wheel, which is pure Python, and the program."""
    tree = {"usr/local/bin/rackloom": text(_PROGRAM.format(python=debian.needs().python), 0o755)}
    with tempfile.TemporaryDirectory() as scratch:
        _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", scratch)
        (wheel,) = Path(scratch).glob("*-none-any.whl")
        with zipfile.ZipFile(wheel) as content:
            for name in content.namelist():
                tree[f"{_packages()}/{name}"] = Entry(FILE, 0o644, content.read(name))
    return _finished(tree)


def build(arch: str, target: str, out: Path) -> Path:
    """Write the layers and the archive of an image, and return the path of the archive.

    Raises:
        BuildError: an input cannot be had.
    """
    place = out / arch
    place.mkdir(parents=True, exist_ok=True)
    files = [_copy(layer.file(), place / f"{layer.name}.tar") for layer in layers(arch, target)]
    own = place / "rackloom.tar"
    write_tar(own_tree(), own)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    archive = out / f"{NAMES[target]}-{version}-{arch}.tar"
    write_archive(archive, f"docker.io/library/{NAMES[target]}:{version}", arch, [*files, own])
    return archive


def architecture() -> str | None:
    """The architecture of this machine, or None if there is no image for it."""
    return _MACHINES.get(platform.machine())


def _debian(packages: list[debian.Package]) -> Tree:
    """The packages, and what their scripts, and those of base-passwd, would have written."""
    tree = debian.unpack(debian.fetch(packages, cache_folder() / "packages"))
    certificates = [tree[path].data for path in sorted(tree) if path.startswith("usr/share/ca-certificates/")]
    return tree | {
        _CERTIFICATES: Entry(FILE, 0o644, b"".join(data.rstrip() + b"\n" for data in certificates if data)),
        # Debian's libssl looks here.
        "usr/lib/ssl/cert.pem": link(f"/{_CERTIFICATES}"),
        "etc/passwd": text(
            "root:x:0:0:root:/root:/usr/sbin/nologin\n"
            f"rackloom:x:{USER}:{USER}::/nonexistent:/usr/sbin/nologin\n"
            "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
        ),
        "etc/group": text(f"root:x:0:\nrackloom:x:{USER}:\nnogroup:x:65534:\n"),
        "etc/nsswitch.conf": text("passwd: files\ngroup: files\nhosts: files dns\n"),
        "etc/localtime": link("/usr/share/zoneinfo/Etc/UTC"),
        "run/lock": directory(0o1777),
        "var/lock": link("/run/lock"),
        "var/run": link("/run"),
        "tmp": directory(0o1777),
        "var/tmp": directory(0o1777),
        "var/lib/rackloom": directory(0o750, USER),
    }


def _wheels(arch: str, pins: Path) -> Tree:
    """The files that the wheels of a requirements file install."""
    machine = next(machine for machine, name in _MACHINES.items() if name == arch)
    need = debian.needs()
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            *(sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-config"),
            *("--cache-dir", str(cache_folder() / "wheels"), "--link-mode", "copy", "--target", scratch),
            *("--python-platform", f"{machine}-manylinux_{need.glibc.replace('.', '_')}"),
            *("--python-version", need.python, "--no-deps", "--only-binary", ":all:"),
            *("--require-hashes", "-r", str(pins)),
        ]
        try:
            _run(*command, "--offline")
        except BuildError:
            _run(*command)
        tree = read_folder(Path(scratch), _packages())
    # Scripts name the interpreter of this machine, and the image compiles nothing against headers.
    tree = without(tree, [f"{_packages()}/{name}" for name in (".lock", "bin/*", "include/*", "share/*")])
    for path, entry in tree.items():
        if path.endswith(".dist-info/RECORD"):
            lines = entry.data.decode().splitlines(keepends=True)
            there = [line for line in lines if f"{_packages()}/{line.partition(',')[0]}" in tree]
            tree[path] = text("".join(there))
    return tree


def _finished(tree: Tree) -> Tree:
    """The tree with bytecode, without files that no program reads."""
    need = debian.needs()
    python = compiler(need.python)
    return without(tree if python is None else with_bytecode(tree, python), need.leave, need.keep)


def write_archive(archive: Path, name: str, arch: str, files: list[Path]) -> None:
    """Write the image of these layers, from the bottom, with the name by which a runtime imports it."""
    media = "application/vnd.oci.image"
    digests = [sha256(file) for file in files]
    variant = {"variant": "v8"} if arch == "arm64" else {}
    config = _json(
        {
            "architecture": arch,
            **variant,
            "os": "linux",
            "created": "1970-01-01T00:00:00Z",
            "config": CONFIG,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
            "history": [{"created_by": f"{file.stem}; bytecode: {_compiler() or 'none'}"} for file in files],
        }
    )
    described = [
        {"mediaType": f"{media}.layer.v1.tar", "digest": f"sha256:{digest}", "size": file.stat().st_size}
        for digest, file in zip(digests, files, strict=True)
    ]
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": f"{media}.manifest.v1+json",
            "config": _described(f"{media}.config.v1+json", config),
            "layers": described,
        }
    )
    entry = {
        **_described(f"{media}.manifest.v1+json", manifest),
        "platform": {"architecture": arch, **variant, "os": "linux"},
        "annotations": {
            "io.containerd.image.name": name,
            "org.opencontainers.image.ref.name": name.rpartition(":")[2],
        },
    }
    index = _json({"schemaVersion": 2, "mediaType": f"{media}.index.v1+json", "manifests": [entry]})
    written = archive.with_suffix(".part")
    with tarfile.open(written, "w", format=tarfile.PAX_FORMAT) as tar:
        _put(tar, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        _put(tar, "index.json", index)
        for blob in (manifest, config):
            _put(tar, f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}", blob)
        for digest, file in zip(digests, files, strict=True):
            info = tarfile.TarInfo(f"blobs/sha256/{digest}")
            info.size = file.stat().st_size
            with file.open("rb") as content:
                tar.addfile(info, content)
    written.rename(archive)


def _put(tar: tarfile.TarFile, name: str, blob: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(blob)
    tar.addfile(info, io.BytesIO(blob))


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _described(media_type: str, blob: bytes) -> dict[str, object]:
    return {
        "mediaType": media_type,
        "digest": f"sha256:{hashlib.sha256(blob).hexdigest()}",
        "size": len(blob),
    }


def _copy(source: Path, target: Path) -> Path:
    """The file under another name: a link if possible, because it is large and never written to."""
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)
    return target


def _run(*command: str) -> None:
    try:
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise BuildError(f"`{' '.join(command[:5])} ...` failed:\n{error.stderr}", again=True) from error


@cache
def _compiler() -> str:
    """The version of the Python that compiles, or an empty text without one."""
    python = compiler(debian.needs().python)
    return subprocess.check_output([python, "-VV"], text=True).strip() if python else ""


def _packages() -> str:
    """Where the image's Python looks for packages that are not Debian's."""
    return f"usr/local/lib/python{debian.needs().python}/dist-packages"


def cache_folder() -> Path:
    """Where downloads (`packages`, `wheels`) and layers are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "rackloom" / "image"


def main() -> int:
    """The command line. It ends with 1 where the same once more may help, and with 3 where it will not."""
    parser = argparse.ArgumentParser(prog="python -m deploy.image.build")
    parser.add_argument("--arch", choices=debian.ARCHITECTURES, default=architecture())
    parser.add_argument("--target", choices=sorted(NAMES), default="site")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "image")
    parser.add_argument("--lock", action="store_true", help="write packages.lock and build nothing")
    asked = parser.parse_args()
    try:
        if asked.lock:
            debian.relock()
            return 0
        if not _compiler():
            python = debian.needs().python
            print(
                f"image: NO PYTHON {python}: built without bytecode, its programs start slowly",
                file=sys.stderr,
            )
        archive = build(asked.arch, asked.target, asked.out)
    except BuildError as error:
        print(f"image: {error}", file=sys.stderr)
        return 1 if error.again else 3
    print(f"{archive}: {archive.stat().st_size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
