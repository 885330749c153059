"""A release: reproducible, complete and signed, with the checks that a downloader can do."""

import gzip
import io
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from deploy.release import build, copyrights, licences, pins, verify
from referencing import Registry, Resource

from deploy.image import debian

ROOT = build.ROOT
SECONDS = 1_700_000_000
VERSION = "0.1.0"


def export() -> bytes:
    done = subprocess.run(["git", "-C", ROOT, "archive", "HEAD"], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"NO GIT CHECKOUT, a release cannot be built: {done.stderr.decode().strip()}")
    return done.stdout


def built(folder: Path, files: bytes) -> Path:
    """A release of the checked-out commit, without images, from a separate folder."""
    source, out = folder / "source", folder / "out"
    source.mkdir(parents=True)
    out.mkdir()
    subprocess.run(["tar", "-x", "-m", "-C", source], input=files, check=True)
    build.build(source, VERSION, "0" * 40, SECONDS, out)
    build.finish(source, VERSION, "HEAD", "0" * 40, SECONDS, build.LOCAL_BUILDER, out)
    return out


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("release"), export())


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


@pytest.mark.slow
def test_two_builds_in_other_folders_at_other_times_are_the_same(release: Path, tmp_path: Path) -> None:
    again = built(tmp_path / "quite" / "another", export())
    assert (again / build.SUMS).read_text() == (release / build.SUMS).read_text()


@pytest.mark.slow
def test_the_index_would_take_the_wheel_and_the_sdist(release: Path) -> None:
    files = [only(release, "*.whl"), release / f"rackloom-{VERSION}.tar.gz"]
    command = [sys.executable, "-m", "twine", "check", "--strict", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_sdist_makes_the_same_wheel(release: Path, tmp_path: Path) -> None:
    with tarfile.open(release / f"rackloom-{VERSION}.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "out"]
    where = tmp_path / f"rackloom-{VERSION}"
    subprocess.run(command, cwd=where, check=True, capture_output=True, timeout=120)
    ours, theirs = (
        {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}
        for archive in map(zipfile.ZipFile, (only(release, "*.whl"), only(tmp_path / "out", "*.whl")))
    )
    assert ours == theirs


@pytest.mark.slow
def test_archives_are_of_one_time_and_nobody(release: Path) -> None:
    for name, prefix, count in (
        (f"rackloom-chart-{VERSION}.tgz", "rackloom/", 20),
        (f"rackloom-kustomize-{VERSION}.tar.gz", f"rackloom-kustomize-{VERSION}/", 30),
    ):
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress((release / name).read_bytes()))) as tar:
            members = tar.getmembers()
        assert len(members) > count
        assert all(member.name.startswith(prefix) for member in members)
        assert {(member.mtime, member.uid, member.gid, member.mode) for member in members} == {
            (SECONDS, 0, 0, 0o644)
        }


def schema_store() -> Registry[Any]:
    folder = resources.files("cyclonedx.schema") / "_res"
    named = (path for path in folder.iterdir() if path.name.endswith(".schema.json"))
    loaded = [json.loads(path.read_text()) for path in named]
    found = {schema["$id"]: Resource.from_contents(schema) for schema in loaded if "$id" in schema}
    return Registry().with_resources(found.items())


@pytest.mark.slow
def test_the_bill_of_materials_is_cyclonedx_and_has_every_pin(release: Path) -> None:
    document = json.loads((release / f"rackloom-{VERSION}.cdx.json").read_text())
    registry = schema_store()
    schema = registry.contents("http://cyclonedx.org/schema/bom-1.6.schema.json")
    jsonschema.Draft7Validator(schema, registry=registry).validate(document)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(schema, registry=registry).validate(document | {"components": [{}]})
    listed = {component["purl"].split("?")[0] for component in document["components"]}
    wheels = pins.read_pins(ROOT / "requirements/runtime.txt")
    assert {f"pkg:pypi/{name}@{version}" for name, version, _ in wheels} <= listed
    assert {each["name"] for each in document["components"]} >= {"libc6", "python3.11", "nixl", "htmx.org"}
    assert all(each["hashes"] for each in document["components"] if each["name"] != "htmx.org")


@pytest.mark.slow
def test_the_provenance_is_about_every_other_file(release: Path) -> None:
    document = json.loads((release / f"rackloom-{VERSION}.intoto.json").read_text())
    assert document["_type"] == "https://in-toto.io/Statement/v1"
    assert document["predicateType"] == "https://slsa.dev/provenance/v1"
    own = {f"rackloom-{VERSION}.intoto.json", build.SUMS}
    assert {each["name"] for each in document["subject"]} == {path.name for path in release.iterdir()} - own
    materials = document["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert materials[0]["digest"] == {"gitCommit": "0" * 40}
    assert len(materials) == 6


def verified(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.release.verify", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def downloaded(tmp_path: Path) -> Path:
    """A small release, as a user has downloaded it."""
    folder = tmp_path / "download"
    folder.mkdir()
    (folder / "rackloom-0.1.0.tar.gz").write_bytes(b"source")
    build.finish(ROOT, VERSION, "v0.1.0", "a" * 40, SECONDS, build.LOCAL_BUILDER, folder)
    return folder


@pytest.fixture
def key(tmp_path: Path) -> Path:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"]
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        pytest.skip("NO SSH-KEYGEN, nothing can be signed: install openssh-client")
    (tmp_path / "signers").write_text(f"releases {(tmp_path / 'key.pub').read_text()}")
    return tmp_path / "key"


def test_a_signed_release_is_verified_and_a_changed_one_is_not(
    downloaded: Path, key: Path, tmp_path: Path
) -> None:
    signers = tmp_path / "signers"
    unsigned = verified(downloaded, "--signers", signers)
    assert (unsigned.returncode, "unsigned" in unsigned.stderr) == (1, True)
    build.sign(downloaded, key)
    good = verified(downloaded, "--signers", signers)
    assert good.returncode == 0, good.stderr
    assert f"of commit {'a' * 40}: signed" in good.stdout
    (downloaded / "rackloom-0.1.0.tar.gz").write_bytes(b"sauce!")
    assert "rackloom-0.1.0.tar.gz is not the file" in verified(downloaded, "--signers", signers).stderr
    # With digests that fit, the signature does not.
    (downloaded / build.SUMS).write_text((downloaded / build.SUMS).read_text().replace("0", "1"))
    assert "the signature is not of releases" in verified(downloaded, "--signers", signers).stderr


def test_a_signature_of_another_key_or_for_another_purpose_does_not_count(
    downloaded: Path, key: Path, tmp_path: Path
) -> None:
    build.sign(downloaded, key)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
    (tmp_path / "others").write_text(f"releases {(tmp_path / 'other.pub').read_text()}")
    assert verified(downloaded, "--signers", tmp_path / "others").returncode == 1
    (downloaded / "SHA256SUMS.sig").unlink()
    command = ["ssh-keygen", "-Y", "sign", "-q", "-f", key, "-n", "mail", downloaded / build.SUMS]
    subprocess.run(command, check=True, capture_output=True)
    assert verified(downloaded, "--signers", tmp_path / "signers").returncode == 1


def test_a_file_more_or_less_is_noticed(downloaded: Path) -> None:
    assert verified(downloaded, "--unsigned").returncode == 0
    (downloaded / "more.whl").write_bytes(b"")
    assert "not in SHA256SUMS: ['more.whl']" in verified(downloaded, "--unsigned").stderr
    (downloaded / "more.whl").unlink()
    (downloaded / "rackloom-0.1.0.tar.gz").unlink()
    assert "missing: ['rackloom-0.1.0.tar.gz']" in verified(downloaded, "--unsigned").stderr


def test_a_provenance_of_other_files_is_noticed(downloaded: Path) -> None:
    statement = downloaded / "rackloom-0.1.0.intoto.json"
    document = json.loads(statement.read_text())
    document["subject"][0]["name"] = "another.whl"
    statement.write_text(json.dumps(document))
    (downloaded / build.SUMS).write_text(
        "".join(
            f"{build.digest(path)}  {path.name}\n"
            for path in sorted(downloaded.iterdir())
            if path.name != build.SUMS
        )
    )
    with pytest.raises(verify.NotVerified, match="other files"):
        verify.check_provenance(downloaded, verify.check_digests(downloaded))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A checkout with one tagged commit."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file").write_text("1")
    run_git(tree, "init", "-q")
    run_git(tree, "add", ".")
    run_git(tree, "-c", "user.name=n", "-c", "user.email=e@x.example", "commit", "-qm", "first")
    run_git(tree, "tag", "v0.1.0")
    return tree


def run_git(tree: Path, *words: str) -> None:
    subprocess.run(["git", "-C", tree, *words], check=True, capture_output=True)


def test_a_tree_with_changes_or_without_the_tag_is_refused(repository: Path) -> None:
    assert len(build.commit_of("v0.1.0", repository)) == 40
    with pytest.raises(build.ReleaseError, match=r"there is no v0\.2\.0"):
        build.commit_of("v0.2.0", repository)
    (repository / "new").write_text("2")
    with pytest.raises(build.ReleaseError, match="has changes"):
        build.commit_of("v0.1.0", repository)
    run_git(repository, "add", ".")
    run_git(repository, "-c", "user.name=n", "-c", "user.email=e@x.example", "commit", "-qm", "second")
    with pytest.raises(build.ReleaseError, match="not checked out"):
        build.commit_of("v0.1.0", repository)


def test_every_file_that_names_the_version_names_the_same() -> None:
    build.check_version(ROOT, VERSION, "HEAD")
    with pytest.raises(build.ReleaseError, match=r"pyproject.toml says 0\.1\.0.*Chart.yaml says"):
        build.check_version(ROOT, "9.9.9", "HEAD")
    with pytest.raises(build.ReleaseError, match="no version"):
        build.check_version(ROOT, "1.0", "HEAD")


def test_the_page_of_licences_has_each_part_with_its_version_and_licence() -> None:
    found = pins.parts()
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|(?: (yes|\*\*no\*\*) \|)?", licences.page(), re.MULTILINE
    )
    listed = {row[:3]: row[3] for row in rows if row[0] not in ("package", "---")}
    assert listed == {
        (part.name, part.version, part.licence): (
            ("yes" if licences.is_permissive(part.licence) else "**no**")
            if part.purl.startswith("pkg:deb/")
            else ""
        )
        for part in found
    }
    assert all(f"**{name}** is under" in licences.page() for name in licences.EXCEPTIONS)


def test_the_copyright_files_are_those_of_the_locked_packages() -> None:
    found = {name: each.version for name, each in copyrights.locked().items()}
    for arch in debian.ARCHITECTURES:
        wanted = {package.name: package.version for package in debian.locked(arch)}
        assert found == wanted, "run python -m deploy.release.copyrights"


def test_a_package_is_under_no_licence_of_which_its_copyright_file_does_not_speak() -> None:
    named = copyrights.locked()
    unsupported = {
        name: terms
        for name, licence in pins.TABLE["debian"].items()
        if (terms := copyrights.unsupported(licence, named[name].names))
    }
    assert unsupported == {}
    assert copyrights.unsupported("MIT", named["libc6"].names) == ["MIT"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("Format: x\n\nFiles: *\nLicense: GPL-2+ or MIT\n\nLicense: GPL-2+\n A text.\n", {"GPL-2+", "MIT"}),
        ("See /usr/share/common-licenses/GPL-2.\nlibx is\npublic domain", {"GPL-2", "public-domain"}),
        ("No licence is named.", set()),
    ],
)
def test_which_licences_a_copyright_file_names(text: str, names: set[str]) -> None:
    assert set(copyrights.named_licences(text)) == names


def test_what_is_shipped_is_permissive_or_named() -> None:
    found = pins.parts()
    assert licences.refused(found) == []
    assert licences.EXCEPTIONS.keys() <= {part.name for part in found}


@pytest.mark.parametrize(
    ("expression", "permissive"),
    [("MIT", True), ("GPL-2.0-only", False), ("GPL-3.0-only OR MIT", True), ("MIT AND GPL-2.0-only", False)],
)
def test_which_expressions_are_permissive(expression: str, permissive: bool) -> None:
    assert licences.is_permissive(expression) is permissive
