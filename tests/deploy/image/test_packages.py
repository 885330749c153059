"""The lock of Debian packages, and downloads of its packages: with the real apt, from a local archive."""

import functools
import hashlib
import re
import shutil
import subprocess
import threading
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from deploy.image.trees import DIRECTORY, BuildError, link

from deploy.image import debian

NEEDS = debian.Needs("bookworm", "3.11", "2.36", ("alpha",), ("scripts",), (), ())
POOL = "pool/main"


def test_the_lock_has_the_same_packages_for_both_architectures():
    amd64, arm64 = (debian.locked(arch) for arch in debian.ARCHITECTURES)
    assert [(package.name, package.version) for package in amd64] == [
        (package.name, package.version) for package in arm64
    ]
    assert set(debian.needs().packages) <= {package.name for package in amd64}
    assert not set(debian.needs().without) & {package.name for package in amd64}


def test_the_lock_names_no_host():
    for package in (package for arch in debian.ARCHITECTURES for package in debian.locked(arch)):
        assert re.fullmatch(r"pool/(updates/)?main/[\w./+%~-]+\.deb", package.path), package
        assert re.fullmatch(r"[0-9a-f]{64}", package.sha256), package
        assert package.size > 0


class Archive:
    """A Debian archive: packages that are made here, their index, and a server."""

    def __init__(self, home, name):
        self.folder, self.answered = home / name, []
        (self.folder / POOL).mkdir(parents=True)
        self.index = {"amd64": "", "arm64": ""}
        handler = functools.partial(_Quiet, directory=str(self.folder))
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.source = f"deb [trusted=yes] http://127.0.0.1:{self.server.server_port} bookworm main\n"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def put(self, name, version="1.0", arch="arm64", depends="", files=()):
        """Make a package with files and links (path to text, or to a `Path` as a link's target)."""
        root = self.folder / f"{name}-root"
        (root / "DEBIAN").mkdir(parents=True)
        fields = (
            f"Package: {name}\nVersion: {version}\nArchitecture: {arch}\nMaintainer: nobody <n@example>\n"
        )
        fields += f"Depends: {depends}\n" if depends else ""
        (root / "DEBIAN/control").write_text(f"{fields}Description: of a test\n")
        (root / "DEBIAN/postinst").write_text("#!/bin/sh\nexit 1\n")
        (root / "DEBIAN/postinst").chmod(0o755)
        for path, content in dict(files).items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(content)
            (root / path).chmod(0o4755)
        (root / "DEBIAN").chmod(0o755)  # dpkg-deb refuses the mode that another umask than 022 gives
        file = self.folder / POOL / f"{name}_{version}_{arch}.deb"
        subprocess.run(["dpkg-deb", "--root-owner-group", "-b", root, file], check=True, capture_output=True)
        shutil.rmtree(root)
        content = file.read_bytes()
        package = debian.Package(
            arch, name, version, f"{POOL}/{file.name}", len(content), hashlib.sha256(content).hexdigest()
        )
        self.index[arch] += f"{fields}Filename: {package.path}\nSize: {package.size}\n"
        self.index[arch] += f"SHA256: {package.sha256}\nDescription: of a test\n\n"
        return package

    def publish(self, codename="bookworm"):
        """Write the index as apt reads it."""
        top = self.folder / "dists/bookworm"
        hashes = []
        for arch, text in self.index.items():
            path = f"main/binary-{arch}/Packages"
            (top / path).parent.mkdir(parents=True, exist_ok=True)
            (top / path).write_text(text)
            hashes.append(f" {hashlib.sha256(text.encode()).hexdigest()} {len(text)} {path}")
        release = [f"Codename: {codename}", "Architectures: amd64 arm64", "Components: main", "SHA256:"]
        (top / "Release").write_text("".join(f"{line}\n" for line in [*release, *hashes]))


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def archives(tmp_path, monkeypatch):
    """Two archives, the only ones that apt knows."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        pytest.skip("NO APT: packages cannot be fetched here")
    tmp_path.chmod(0o755)
    pair = [Archive(tmp_path, "one"), Archive(tmp_path, "two")]
    (tmp_path / "sources.list").write_text("".join(archive.source for archive in pair))
    (tmp_path / "apt.conf").write_text(
        f'Dir::Etc::sourcelist "{tmp_path}/sources.list"; Dir::Etc::sourceparts "/dev/null";'
        'Acquire::http::Proxy "DIRECT"; Acquire::Retries::Delay "false";'
    )
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    yield pair
    for archive in pair:
        archive.server.shutdown()
        archive.server.server_close()


def test_packages_come_from_whichever_archive_has_them_and_only_once(archives, tmp_path):
    first, second = archives[0].put("alpha"), archives[1].put("beta")
    files = debian.fetch([first, second], tmp_path / "kept")
    assert [hashlib.sha256(files[file].read_bytes()).hexdigest() for file in (first, second)] == [
        first.sha256,
        second.sha256,
    ]
    for archive in archives:
        archive.server.shutdown()
        shutil.rmtree(archive.folder)
    assert debian.fetch([first, second], tmp_path / "kept") == files


def test_what_no_archive_has_is_named_with_what_to_do_and_not_asked_again(archives, tmp_path):
    there = archives[0].put("alpha")
    gone = replace(there, name="beta", path=f"{POOL}/beta_1.0_arm64.deb")
    with pytest.raises(BuildError, match=r"beta 1\.0 \(arm64\)[\s\S]*make image-lock") as raised:
        debian.fetch([there, gone], tmp_path / "kept")
    assert not raised.value.again
    assert "alpha 1.0" not in str(raised.value)


def test_an_archive_that_does_not_answer_is_asked_again(archives, tmp_path):
    package = archives[0].put("alpha")
    for archive in archives:
        archive.server.shutdown()
        archive.server.server_close()
    with pytest.raises(BuildError, match="alpha") as raised:
        debian.fetch([package], tmp_path / "kept")
    assert raised.value.again


@pytest.mark.parametrize(
    ("complaint", "absent"),
    [
        ("http://127.0.0.1:80/a_1.deb  404  File not found [IP: 127.0.0.1 80]", True),
        ("http://127.0.0.1:40463/a_1.deb  Could not connect to 127.0.0.1:40463 (127.0.0.1).", False),
    ],
)
def test_an_answer_of_404_is_told_from_a_port(complaint, absent):
    assert debian.is_absent(f"E: Failed to fetch {complaint}\n") is absent


def test_a_package_with_another_hash_is_refused(archives, tmp_path):
    package = replace(archives[0].put("alpha"), sha256="0" * 64)
    with pytest.raises(BuildError, match="alpha"):
        debian.fetch([package], tmp_path / "kept")
    assert list((tmp_path / "kept").iterdir()) == []


@pytest.mark.slow
def test_locking_takes_dependencies_of_that_architecture_and_leaves_out_those_of_scripts(archives, tmp_path):
    expected = [archives[0].put("alpha", "2.0", depends="beta, scripts"), archives[1].put("beta")]
    archives[0].put("alpha", "3.0", arch="amd64", depends="beta, scripts")
    archives[0].put("scripts", depends="gamma")
    archives[0].put("gamma")
    for archive in archives:
        archive.publish()
    assert debian.resolved(NEEDS, "arm64") == expected
    assert [
        package.version for package in debian.resolved(replace(NEEDS, without=("scripts", "beta")), "amd64")
    ] == ["3.0"]


def test_locking_takes_nothing_from_another_suite(archives):
    archives[0].put("alpha", "1.0")
    archives[1].put("alpha", "9.0")
    archives[0].publish()
    archives[1].publish(codename="sid")
    assert [package.version for package in debian.resolved(NEEDS, "arm64")] == ["1.0"]


@pytest.mark.slow
def test_packages_are_read_and_their_scripts_are_not_run(archives, tmp_path):
    package = archives[0].put("alpha", files={"lib/x/a.so": "a", "usr/bin/alpha": "b"})
    tree = debian.unpack(debian.fetch([package], tmp_path / "kept"))
    assert tree["lib"] == link("usr/lib")
    assert tree["usr/lib/x/a.so"].data == b"a"
    assert tree["usr/lib/x"].kind == DIRECTORY
    # No program of an image takes over its owner's rights.
    assert oct(tree["usr/bin/alpha"].mode) == "0o755"
    assert "Package: alpha\n" in tree["var/lib/dpkg/status.d/alpha"].data.decode()


@pytest.mark.slow
def test_two_packages_with_two_contents_of_a_file_are_refused(archives, tmp_path):
    packages = [archives[0].put(name, files={"usr/bin/x": name}) for name in ("alpha", "beta")]
    with pytest.raises(BuildError, match="/usr/bin/x"):
        debian.unpack(debian.fetch(packages, tmp_path / "kept"))
