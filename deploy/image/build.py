"""The container image, without a builder, a daemon or a base image: `python -m deploy.image.build`, or `make image`.

Three layers, the one that changes most on top:

1. debian: the locked packages, unpacked (see `debian`), and what their maintainer scripts would have made of them.
2. python: the wheels of requirements/runtime.txt for the architecture, and for the target `transfer` those of
   requirements/nixl.txt besides, in a layer of their own.
3. rackloom: the wheel of this source tree, and the program `rackloom` on PATH.

uv chooses and unpacks wheels of the other architecture as well as of our own; nothing that goes into the image is run.
Bytecode is compiled here when this Python has the image's minor version, for an image without starts slowly. The
result is an OCI layout in a tar, and the layers for deploy/site/Containerfile beside it. What was downloaded, and the
layers of locked inputs, stay in ${XDG_CACHE_HOME:-~/.cache}/rackloom/image.
"""

import argparse
import contextlib
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
from pathlib import Path

from deploy.image import debian
from deploy.image.trees import (
    FILE,
    MERGED,
    BuildError,
    Entry,
    Tree,
    check_machine,
    folder,
    link,
    python_version,
    read_folder,
    sha256,
    text,
    with_bytecode,
    without_host,
    write_tar,
)

ROOT = Path(__file__).parents[2]
OUT = ROOT / "build" / "image"
USER = 10001
_UNAMES = {"x86_64": "amd64", "aarch64": "arm64"}
_PLATFORMS = {"amd64": "x86_64-manylinux_2_36", "arm64": "aarch64-manylinux_2_36"}
"""What uv calls an architecture with the C library of Debian 12."""
_NAMES = {"site": "rackloom", "transfer": "rackloom-transfer"}
_KEPT_LAYERS = 4
_CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
_PROGRAM = """\
#!/usr/bin/python{python}
import sys

from rackloom.cli.main import main

sys.exit(main())
"""
_CONFIG = {
    # A number and no name: Kubernetes checks runAsNonRoot against the number.
    "User": f"{USER}:{USER}",
    "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
    "Entrypoint": ["rackloom"],
    "Cmd": ["serve", "--config", "/etc/rackloom/site.toml"],
    "Volumes": {"/var/lib/rackloom": {}},
    "ExposedPorts": {"8443/tcp": {}, "1079/tcp": {}, "9108/tcp": {}},
    "WorkingDir": "/",
}


def build(arch: str, target: str, out: Path) -> Path:
    """Write the layers of an image, and the image as an OCI archive; its path.

    Raises:
        BuildError: an input is lacking, or does not have its hash.
    """
    layers = [_debian_layer(arch), _wheels_layer(arch, "runtime.txt")]
    if target == "transfer":
        layers.append(_wheels_layer(arch, "nixl.txt"))
    folder_of_layers = out / f"{target}-{arch}"
    folder_of_layers.mkdir(parents=True, exist_ok=True)
    own = folder_of_layers / "rackloom.tar"
    write_tar(_own_tree(), own)
    placed = []
    for name, path in zip(("debian", "python", "nixl"), layers, strict=False):
        # A link where it can be: layers are large, and nobody writes into them.
        there = folder_of_layers / f"{name}.tar"
        there.unlink(missing_ok=True)
        try:
            there.hardlink_to(path)
        except OSError:
            shutil.copyfile(path, there)
        placed.append(there)
    version = _project()["version"]
    archive = out / f"{_NAMES[target]}-{version}-{arch}.tar"
    _write_archive(archive, f"docker.io/library/{_NAMES[target]}:{version}", arch, [*placed, own])
    return archive


def _debian_layer(arch: str) -> Path:
    want = debian.wanted()
    packages = debian.locked(arch)

    def make() -> Tree:
        tree = debian.unpack(debian.fetch(packages, _cache() / "packages"), want.leave)
        bundle = b"".join(
            tree[path].data.rstrip() + b"\n"
            for path in sorted(tree)
            if path.startswith("usr/share/ca-certificates/") and path.endswith(".crt")
        )
        tree |= {name: link(f"usr/{name}") for name in MERGED}
        tree |= {
            _CERTIFICATES: Entry(FILE, 0o644, bundle),
            # Where Debian's libssl looks; its package openssl would link it.
            "usr/lib/ssl/cert.pem": link(f"/{_CERTIFICATES}"),
            "etc/passwd": text(
                "root:x:0:0:root:/root:/usr/sbin/nologin\n"
                "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
                f"rackloom:x:{USER}:{USER}:rackloom:/nonexistent:/usr/sbin/nologin\n"
            ),
            "etc/group": text(f"root:x:0:\nnogroup:x:65534:\nrackloom:x:{USER}:\n"),
            "etc/nsswitch.conf": text("passwd: files\ngroup: files\nhosts: files dns\n"),
            "tmp": folder(0o1777),
            "var/tmp": folder(0o1777),
            "var/lib/rackloom": folder(0o750, USER),
        }
        return _compiled(tree)

    return _layer(f"debian-{arch}", [repr(want), *map(repr, packages)], make, arch)


def _wheels_layer(arch: str, requirements: str) -> Path:
    pins = ROOT / "requirements" / requirements
    python = debian.wanted().python

    def make() -> Tree:
        with tempfile.TemporaryDirectory() as scratch:
            place = Path(scratch)
            command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--target", scratch]
            command += [
                "--python-platform",
                _PLATFORMS[arch],
                "--python-version",
                python,
                "--link-mode",
                "copy",
            ]
            command += ["--only-binary", ":all:", "--no-deps", "--require-hashes", "-r", str(pins)]
            command += ["--cache-dir", str(_cache() / "wheels"), "--no-config"]
            if subprocess.run([*command, "--offline"], capture_output=True, check=False).returncode:
                try:
                    subprocess.run(command, check=True)
                except subprocess.CalledProcessError as error:
                    raise BuildError(f"cannot install the wheels of {requirements} for {arch}") from error
            # Scripts name the interpreter of this machine; ours is written below. Nobody compiles against headers.
            for name in ("bin", "include", "share"):
                shutil.rmtree(place / name, ignore_errors=True)
            place.joinpath(".lock").unlink(missing_ok=True)
            for record in place.glob("*.dist-info/RECORD"):
                lines = record.read_text().splitlines(keepends=True)
                record.write_text(
                    "".join(x for x in lines if not x.startswith(("bin/", "include/", "share/")))
                )
            return _compiled(read_folder(place, _packages_folder()))

    return _layer(f"{pins.stem}-{arch}", [pins.read_text(), python], make, arch)


def _own_tree() -> Tree:
    """The wheel of this source tree: it is pure Python, and so the same for each architecture."""
    tree: Tree = {}
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", scratch]
        env = {**os.environ, "SOURCE_DATE_EPOCH": "315532800"}
        subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = Path(scratch).glob("*-none-any.whl")
        with zipfile.ZipFile(wheel) as content:
            for name in content.namelist():
                if not name.endswith("/"):
                    tree[f"{_packages_folder()}/{name}"] = Entry(FILE, 0o644, content.read(name))
    tree["usr/local/bin/rackloom"] = text(_PROGRAM.format(python=debian.wanted().python), 0o755)
    return _compiled(tree)


def _layer(name: str, inputs: list[str], make: Callable[[], Tree], arch: str) -> Path:
    """The tar of a layer, made unless it was made of the same inputs by the same program before."""
    programs = [(Path(__file__).parent / part).read_text() for part in ("build.py", "debian.py", "trees.py")]
    key = hashlib.sha256("\0".join([*inputs, *programs, sys.version]).encode()).hexdigest()[:32]
    place = _cache() / "layers"
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"{name}-{key}.tar"
    if not path.exists():
        tree = make()
        check_machine(tree, arch)
        without_host(tree, [ROOT])
        with tempfile.TemporaryDirectory(dir=place) as scratch:
            written = Path(scratch) / "layer.tar"
            write_tar(tree, written)
            written.rename(path)
    path.touch()
    for old in sorted(place.glob(f"{name}-*.tar"), key=lambda file: -file.stat().st_mtime)[_KEPT_LAYERS:]:
        old.unlink(missing_ok=True)
    return path


def _compiled(tree: Tree) -> Tree:
    if python_version() != debian.wanted().python:
        return tree
    return with_bytecode(tree)


def _write_archive(archive: Path, name: str, arch: str, layers: list[Path]) -> None:
    """An OCI image layout in a tar, with the name that a runtime imports it by (OCI image specification 1.1)."""
    digests = [sha256(layer) for layer in layers]
    config = _json(
        {
            "architecture": arch,
            "os": "linux",
            **({"variant": "v8"} if arch == "arm64" else {}),
            "created": "1970-01-01T00:00:00Z",
            "config": _CONFIG,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
            "history": [{"created_by": f"deploy/image: {layer.stem}"} for layer in layers],
        }
    )
    media = "application/vnd.oci.image."
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": f"{media}manifest.v1+json",
            "config": _described(f"{media}config.v1+json", config),
            "layers": [
                {
                    "mediaType": f"{media}layer.v1.tar",
                    "digest": f"sha256:{digest}",
                    "size": layer.stat().st_size,
                }
                for digest, layer in zip(digests, layers, strict=True)
            ],
        }
    )
    annotations = {
        "io.containerd.image.name": name,
        "org.opencontainers.image.ref.name": name.rpartition(":")[2],
    }
    entry = {
        **_described(f"{media}manifest.v1+json", manifest),
        "platform": {"architecture": arch, "os": "linux"},
        "annotations": annotations,
    }
    index = _json({"schemaVersion": 2, "mediaType": f"{media}index.v1+json", "manifests": [entry]})
    small = {"oci-layout": _json({"imageLayoutVersion": "1.0.0"}), "index.json": index}
    small |= {f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}": blob for blob in (config, manifest)}
    written = archive.with_suffix(".part")
    with tarfile.open(written, "w", format=tarfile.PAX_FORMAT) as tar:
        for path, blob in small.items():
            info = tarfile.TarInfo(path)
            info.size = len(blob)
            tar.addfile(info, io.BytesIO(blob))
        for digest, layer in zip(digests, layers, strict=True):
            info = tarfile.TarInfo(f"blobs/sha256/{digest}")
            info.size = layer.stat().st_size
            with layer.open("rb") as file:
                tar.addfile(info, file)
    written.rename(archive)


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _described(media_type: str, blob: bytes) -> dict[str, object]:
    return {
        "mediaType": media_type,
        "digest": f"sha256:{hashlib.sha256(blob).hexdigest()}",
        "size": len(blob),
    }


def _packages_folder() -> str:
    return f"usr/local/lib/python{debian.wanted().python}/dist-packages"


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "rackloom" / "image"


def _project() -> dict[str, str]:
    project: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def main() -> int:
    """The command line. Ends with 1 where the same again may help, with 3 where it will not."""
    parser = argparse.ArgumentParser(prog="python -m deploy.image.build", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", choices=debian.ARCHITECTURES, default=_UNAMES.get(platform.machine()))
    parser.add_argument("--target", choices=tuple(_NAMES), default="site")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--lock", action="store_true", help="write packages.lock, and build nothing")
    given = parser.parse_args()
    try:
        if given.lock:
            debian.relock()
            return 0
        if python_version() != debian.wanted().python:
            print(
                f"image: NO BYTECODE: this is Python {python_version()} and the image has {debian.wanted().python}: "
                "its programs start slowly",
                file=sys.stderr,
            )
        archive = build(given.arch, given.target, given.out)
    except BuildError as error:
        print(f"image: {error}", file=sys.stderr)
        return 1 if error.again else 3
    with contextlib.suppress(ValueError):
        archive = archive.relative_to(Path.cwd())
    print(f"{archive} {archive.stat().st_size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
