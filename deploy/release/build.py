"""`make release VERSION=x.y.z`: everything that a release publishes, into one folder.

It is built from the files that git has at a ref (the tag `vVERSION` unless another is named), which must be
checked out without changes: then the programs that build are those of the release, too.
Times are that of the commit, so that a build of the same commit gives the same digests. `SHA256SUMS` has the
digest of every file, the provenance's among them; who holds a key signs that one file. Images take minutes
and downloads; `--no-images` leaves them out and says so.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from deploy.release.archives import files_below, write_tar_gz
from deploy.release.pins import parts
from deploy.release.provenance import digest, statement
from deploy.release.sbom import sbom

from deploy.image import debian

ROOT = Path(__file__).parents[2]
SUMS = "SHA256SUMS"
SIGNATURE_NAMESPACE = "rackloom-release"
"""The purpose of a signature. One made for another purpose is refused."""
LOCAL_BUILDER = "urn:rackloom:a-machine-of-the-releaser"
TARGETS = ("site", "transfer")
_MANIFESTS = (".yaml", ".toml", ".md", ".json", ".service")


class ReleaseError(Exception):
    """Nothing is built; the text says what to change."""


def git(*words: str, tree: Path = ROOT) -> str:
    """The output of git. Raises `ReleaseError` if it fails."""
    done = subprocess.run(["git", "-C", str(tree), *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ReleaseError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def commit_of(ref: str, tree: Path = ROOT) -> str:
    """The commit that a ref names; it must be checked out, without changes."""
    changed = git("status", "--porcelain", tree=tree)
    if changed:
        raise ReleaseError(f"the working tree has changes: commit or stash them\n{changed}")
    try:
        commit = git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}", tree=tree)
    except ReleaseError as error:
        raise ReleaseError(f"there is no {ref}: tag the commit, or name another by REF=") from error
    if git("rev-parse", "HEAD", tree=tree) != commit:
        raise ReleaseError(f"{ref} is not checked out: git switch --detach {ref}")
    return commit


def export(commit: str, folder: Path, tree: Path = ROOT) -> None:
    """The files of a commit in a folder, as git has them."""
    packed = subprocess.run(["git", "-C", str(tree), "archive", commit], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)


def check_version(source: Path, version: str, ref: str) -> None:
    """Check that each file with the version names this one, and for a tag CHANGELOG.md, too.

    Raises:
        ReleaseError: something names another.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ReleaseError(f"{version} is no version: MAJOR.MINOR.PATCH")
    found = {
        "pyproject.toml": tomllib.loads((source / "pyproject.toml").read_text())["project"]["version"],
        **{
            str(path.relative_to(source)): named[1]
            for path in sorted(source.glob("deploy/*/*/kustomization.yaml"))
            if (named := re.search(r'newTag: "(.*)"', path.read_text()))
        },
    }
    chart = (source / "deploy/helm/rackloom/Chart.yaml").read_text()
    found["deploy/helm/rackloom/Chart.yaml"] = re.findall(r"^version: (.*)$", chart, re.MULTILINE)[0]
    if ref == f"v{version}":
        changes = re.findall(r"^## (\S+)", (source / "CHANGELOG.md").read_text(), re.MULTILINE)
        found["CHANGELOG.md"] = changes[0]
    wrong = [f"{path} says {named}" for path, named in found.items() if named != version]
    if wrong:
        raise ReleaseError(f"this is not {version}: {', '.join(wrong)}")


def build(source: Path, version: str, commit: str, seconds: int, out: Path) -> None:
    """Build everything but images from an exported source tree into an empty folder."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(seconds)}
    for kind in ("sdist", "wheel"):
        command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)]
        done = subprocess.run(
            command, cwd=source, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise ReleaseError(f"the {kind} cannot be built:\n{done.stderr}")
    chart = list(files_below(source / "deploy/helm/rackloom", "rackloom"))
    write_tar_gz(out / f"rackloom-chart-{version}.tgz", chart, seconds)
    bundle = f"rackloom-kustomize-{version}"
    manifests = [
        each
        for folder in ("kubernetes", "monitoring", "site")
        for each in files_below(source / "deploy" / folder, f"{bundle}/{folder}", _MANIFESTS)
    ]
    write_tar_gz(out / f"{bundle}.tar.gz", manifests, seconds)
    (out / f"rackloom-{version}.cdx.json").write_bytes(sbom(version, commit, seconds, parts()))


def build_images(source: Path, out: Path) -> None:
    """Build both images for both architectures, by the exported tree's own program."""
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        for target in TARGETS:
            for arch in debian.ARCHITECTURES:
                words = ("--arch", arch, "--target", target, "--out", scratch)
                done = subprocess.run(
                    [sys.executable, "-m", "deploy.image.build", *words], cwd=source, check=False
                )
                if done.returncode != 0:
                    raise ReleaseError(f"the image {target} for {arch} cannot be built, see above")
        for archive in Path(scratch).glob("*.tar"):
            archive.rename(out / archive.name)


def finish(source: Path, version: str, ref: str, commit: str, seconds: int, builder: str, out: Path) -> None:
    """Write the provenance of all that is in the folder, and the digests of all."""
    text = statement(
        source=source,
        version=version,
        ref=ref,
        commit=commit,
        seconds=seconds,
        builder=builder,
        artefacts=list(out.iterdir()),
    )
    (out / f"rackloom-{version}.intoto.json").write_bytes(text)
    lines = [f"{digest(path)}  {path.name}\n" for path in sorted(out.iterdir())]
    (out / SUMS).write_text("".join(lines))


def sign(out: Path, key: Path) -> None:
    """Sign the digests with an SSH key, or with the key of an agent whose public half is named."""
    command = ["ssh-keygen", "-Y", "sign", "-q", "-f", str(key), "-n", SIGNATURE_NAMESPACE, str(out / SUMS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ReleaseError(f"cannot sign with {key}: {done.stderr.strip()}")


def release(version: str, ref: str, out: Path, *, key: Path | None, images: bool, builder: str) -> None:
    """Everything, into a folder that is made, or emptied of an earlier release.

    Raises:
        ReleaseError: the tree has changes, the ref is not there, or it is not of this version.
    """
    commit = commit_of(ref)
    seconds = int(git("log", "-1", "--format=%ct", commit))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        export(commit, source)
        check_version(source, version, ref)
        if out.exists():
            shutil.rmtree(out)
        out.mkdir(parents=True)
        build(source, version, commit, seconds, out)
        if images:
            build_images(source, out)
        else:
            print("release: NO IMAGES, as asked", file=sys.stderr)
        finish(source, version, ref, commit, seconds, builder, out)
    if key is None:
        print("release: UNSIGNED: name a key by KEY=", file=sys.stderr)
    else:
        sign(out, key)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m deploy.release.build")
    parser.add_argument("--version", required=True)
    parser.add_argument("--ref", help="what to build: the tag vVERSION unless said otherwise")
    parser.add_argument("--key", type=Path, help="SSH key that signs SHA256SUMS")
    parser.add_argument(
        "--out", type=Path, help="the folder that is written: dist/VERSION unless said otherwise"
    )
    parser.add_argument("--builder", default=LOCAL_BUILDER, help="URI of who builds, for the provenance")
    parser.add_argument("--no-images", action="store_true")
    asked = parser.parse_args()
    out = asked.out or ROOT / "dist" / asked.version
    ref = asked.ref or f"v{asked.version}"
    try:
        release(asked.version, ref, out, key=asked.key, images=not asked.no_images, builder=asked.builder)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    print((out / SUMS).read_text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
