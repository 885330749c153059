"""Whole images: built, read back, started, and compared with a builder's image of the Containerfile.

They download packages and wheels, and write some gigabytes: `make test-image` sets RACKLOOM_TEST_IMAGE.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path, PurePosixPath

import pytest
from deploy.image.trees import DIRECTORY, FILE, LINK, MACHINES, sha256, write_tar
from deploy.release import copyrights
from tests.deploy.image import elf

from deploy.image import build, debian

ROOT = Path(__file__).parents[3]
ASKED_BY = "RACKLOOM_TEST_IMAGE"
pytestmark = pytest.mark.skipif(
    ASKED_BY not in os.environ, reason=f"NO IMAGE: `make test-image` builds and tests it ({ASKED_BY})"
)
OF_THE_DRIVER = {"libcuda.so.1", "libnvidia-ml.so.1"}
"""Libraries that a container gets from the driver of its host."""

OPEN = ("run/lock", "tmp", "var/tmp")
"""Folders in which every user may write."""


class Image:
    """The layers of an image, from the bottom, and the resulting tree."""

    def __init__(self, layers: list[Path]) -> None:
        self.layers = layers

    def members(self):
        """Each entry of each layer with its content."""
        for layer in self.layers:
            with tarfile.open(layer) as tar:
                for info in tar:
                    yield info, tar.extractfile(info).read() if info.isreg() else b""

    def layout(self):
        """The entry at each path in a container: kind, mode, user, group, and content or target."""
        return {info.name.rstrip("/"): described(info, data) for info, data in self.members()}

    def unpack(self, place: Path) -> Path:
        """The files in a folder that every user may enter, owned as in the image if root runs this."""
        place.chmod(0o755)
        for layer in self.layers:
            subprocess.run(["tar", "-x", "-p", "-f", layer, "-C", place], check=True)
        return place


def described(info, data):
    content = info.linkname if info.issym() else hash(data) if info.isreg() else None
    return info.type, oct(info.mode & 0o7777), info.uid, info.gid, content


@pytest.fixture(scope="session")
def image(tmp_path_factory):
    """An image by architecture and target."""
    own = tmp_path_factory.mktemp("own") / "rackloom.tar"
    write_tar(build.own_tree(), own)
    return lambda arch, target="site": Image([*(layer.file() for layer in build.layers(arch, target)), own])


@pytest.mark.parametrize("arch", ["amd64", "arm64"])
def test_every_program_is_of_the_architecture_and_finds_its_libraries(image, arch):
    programs, names = {}, set()
    for info, data in image(arch).members():
        names.add(PurePosixPath(info.name).name)
        if elf.machine(data) is not None:
            programs[info.name] = (elf.machine(data), elf.needed(data))
    assert len(programs) > 200
    assert {found for found, _ in programs.values()} == {MACHINES[arch]}
    lacking = {path: set(needed) - names for path, (_, needed) in programs.items() if set(needed) - names}
    assert lacking == {}


@pytest.mark.parametrize("arch", ["amd64", "arm64"])
def test_nixl_is_of_the_architecture_and_what_ucx_needs_is_there(image, arch):
    programs, names = {}, set()
    for info, data in image(arch, "transfer").members():
        names.add(PurePosixPath(info.name).name)
        if elf.machine(data) is not None:
            programs[info.name] = (elf.machine(data), elf.needed(data))
    assert {found for found, _ in programs.values()} == {MACHINES[arch]}
    used = {
        path: set(needed) - names - OF_THE_DRIVER
        for path, (_, needed) in programs.items()
        if PurePosixPath(path).name.startswith(
            ("libplugin_UCX.", "libuct_ib.", "libuct_ib_mlx5.", "libuct_cuda.")
        )
    }
    assert len(used) >= 4
    assert {path: lacking for path, lacking in used.items() if lacking} == {}


@pytest.mark.parametrize("arch", ["amd64", "arm64"])
def test_the_root_is_whole_and_nothing_in_it_is_of_this_machine(image, arch):
    kinds, links, strange = {}, {}, (str(ROOT).encode(), str(Path(sys.executable).parent).encode())
    for info, data in image(arch).members():
        kinds[info.name] = info.type
        if info.issym():
            links[info.name] = info.linkname
        assert info.type in (DIRECTORY, FILE, LINK), info.name
        assert info.mtime == 0, info.name
        assert not info.mode & 0o6000, info.name
        assert info.mode & 0o022 == 0 or info.issym() or info.name in OPEN, info.name
        assert (info.uid, info.gid) == ((10001,) * 2 if info.name == "var/lib/rackloom" else (0, 0)), (
            info.name
        )
        assert not any(text in data for text in strange), info.name
    dangling = [path for path in links if reached(path, kinds, links) is None]
    assert dangling == []


@pytest.mark.parametrize("arch", debian.ARCHITECTURES)
def test_the_list_of_licences_is_what_the_packages_say(arch):
    assert copyrights.read(arch) == list(copyrights.locked().values())


def reached(path, kinds, links, depth=0):
    """The target of a path in the image, or None if it leads nowhere."""
    at = PurePosixPath("/")
    for part in PurePosixPath("/", path).parts[1:]:
        if part == "..":
            at = at.parent
            continue
        at /= part
        name = str(at)[1:]
        if name in links:
            if depth > 20:
                return None
            target = reached(str(at.parent / links[name]), kinds, links, depth + 1)
            if target is None:
                return None
            at = PurePosixPath("/", target)
        elif name not in kinds and name not in ("proc", "sys", "dev"):
            return None
    return str(at)[1:]


def test_the_same_inputs_give_the_same_digest(tmp_path):
    """Twice from the same downloads, without the layers that are kept, in two places."""
    digests = []
    for name in ("one", "another place"):
        kept = tmp_path / name / "cache/rackloom/image"
        kept.mkdir(parents=True)
        for downloads in ("packages", "wheels"):
            kept.joinpath(downloads).symlink_to(build.cache_folder() / downloads)
        source = tmp_path / name / "source"
        tracked = subprocess.check_output(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT)
        for file in tracked.decode().rstrip("\0").split("\0"):
            source.joinpath(file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, source / file)
        command = [
            sys.executable,
            "-m",
            "deploy.image.build",
            "--arch",
            "arm64",
            "--out",
            str(tmp_path / name),
        ]
        env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / name / "cache"), "PYTHONPATH": ""}
        subprocess.run(command, cwd=source, env=env, check=True)
        (archive,) = (tmp_path / name).glob("*.tar")
        digests.append(sha256(archive))
        shutil.rmtree(tmp_path / name)
    assert digests[0] == digests[1]


def in_root(root, *command):
    """Run a program in the image's root as its user, found by its PATH, with /dev, /proc and /sys."""
    if os.geteuid():
        pytest.skip("NEEDS ROOT: a program is started in another root")
    script = (
        'root=$1; shift; for each in dev sys; do mount --rbind "/$each" "$root/$each"; done; '
        'mount -t proc proc "$root/proc"; exec chroot --userspec=10001:10001 "$root" "$@"'
    )
    outside = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]
    inside = ["/usr/bin/env", "-i", *build.CONFIG["Env"], *command]
    return subprocess.run(
        [*outside, "sh", "-c", script, "sh", str(root), *inside], capture_output=True, text=True, timeout=600
    )


def test_it_starts_as_its_user_by_its_path(image, tmp_path):
    root = image(build.architecture()).unpack(tmp_path)
    done = in_root(root, *build.CONFIG["Entrypoint"], "--version")
    assert (done.returncode, done.stdout.strip()) == (0, "0.1.0"), done.stderr
    done = in_root(root, *build.CONFIG["Entrypoint"], *build.CONFIG["Cmd"])
    assert "cannot read /etc/rackloom/site.toml" in done.stderr
    # Certificate verification has the system's authorities, and CEL has time zones.
    use = (
        "import ssl, zoneinfo; zoneinfo.ZoneInfo('Europe/Oslo')\n"
        "print(len(ssl.create_default_context().get_ca_certs()))"
    )
    done = in_root(root, "python3.11", "-c", use)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


def test_a_transfer_runs_in_the_image_that_has_nixl(image, tmp_path):
    root = image(build.architecture(), "transfer").unpack(tmp_path)
    asked = ("--block-size", "1MiB", "--iters", "5", "--runs", "1", "--warmup", "1")
    done = in_root(root, "rackloom", "transfer", "run", *asked)
    results = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert [result["verified"] for result in results] == [True], done.stderr


def test_the_image_for_arm64_starts(image, tmp_path):
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None:
        pytest.skip("NO QEMU: qemu-user-static starts the programs of arm64")
    root = image("arm64").unpack(tmp_path)
    command = [emulator, "-L", root, root / "usr/bin/python3.11", root / "usr/local/bin/rackloom"]
    for arguments, expected in ((["--version"], "0.1.0"), (["controller", "--help"], "API server")):
        done = subprocess.run(
            [*command, *arguments], env={"HOME": "/"}, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
    # Each library of another language, loaded and used.
    use = (
        "import platform, asyncio, asyncpg, uvloop, httptools, grpc, msgspec, pydantic, sqlalchemy, yaml\n"
        "import cel_expr_python, cryptography.fernet, re2\n"
        "assert msgspec.json.decode(b'[1]') == [1]; cryptography.fernet.Fernet.generate_key()\n"
        "print(platform.machine())"
    )
    done = subprocess.run([*command[:-1], "-c", use], env={}, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "aarch64", done.stderr


def test_a_builder_makes_the_same_of_the_containerfile(image, tmp_path):
    builder = next((program for program in ("buildah", "podman") if shutil.which(program)), None)
    if builder is None:
        pytest.skip("NO BUILDER: neither buildah nor podman is here")
    if os.geteuid():
        pytest.skip("NEEDS ROOT: the builder's storage keeps owners")
    arch = build.architecture()
    ours = image(arch)
    context = tmp_path / "context"
    for path in ("deploy/site/Containerfile", ".dockerignore"):
        (context / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, context / path)
    # All layers are given: the target `site` leaves that of NIXL.
    (context / f"build/image/{arch}").mkdir(parents=True)
    names = [*(layer.name for layer in build.layers(arch, "transfer")), "rackloom"]
    for name, layer in zip(names, image(arch, "transfer").layers, strict=True):
        (context / f"build/image/{arch}/{name}.tar").hardlink_to(layer)
    storage = [builder, "--root", tmp_path / "root", "--runroot", tmp_path / "run", "--storage-driver", "vfs"]
    made = ["build", "--isolation", "chroot", "--target", "site", "--tag", "rackloom:test"]
    saved = f"oci:{tmp_path}/saved:test"

    def run(*arguments):
        done = subprocess.run([*storage, *arguments], capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stderr

    run(*made, "--file", context / "deploy/site/Containerfile", context)
    run("push", *(["--disable-compression"] if builder == "buildah" else []), "rackloom:test", saved)
    theirs = Saved(tmp_path / "saved")
    keys = ("User", "Env", "Entrypoint", "Cmd", "Volumes", "ExposedPorts", "WorkingDir")
    assert {key: theirs.config["config"].get(key) for key in keys} == {key: build.CONFIG[key] for key in keys}
    assert theirs.layout() == ours.layout()


class Saved(Image):
    """An OCI layout in a folder."""

    def __init__(self, folder: Path) -> None:
        def blob(digest):
            return folder / "blobs/sha256" / digest.removeprefix("sha256:")

        (entry,) = json.loads((folder / "index.json").read_text())["manifests"]
        manifest = json.loads(blob(entry["digest"]).read_text())
        self.config = json.loads(blob(manifest["config"]["digest"]).read_text())
        super().__init__([blob(layer["digest"]) for layer in manifest["layers"]])
