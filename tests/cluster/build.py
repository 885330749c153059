"""The binaries of a real control plane: the machine's own, or built once from the pins beside this file.

`KUBEBUILDER_ASSETS` names a folder with all four of them. Without it they are Go tools of go.mod, built into
a folder of the cache that carries the digest of the pins, so that another pin is another folder. The pins of
another minor version are in a folder beside this file, which `RACKLOOM_KUBERNETES=1.34` chooses.

python tests/cluster/build.py                 builds the missing binaries and prints their folder
python tests/cluster/build.py --download      only downloads the sources for that build
python tests/cluster/build.py helm            builds Helm alone, which the tests of the chart run
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
ASSETS = "KUBEBUILDER_ASSETS"
CACHE = "RACKLOOM_CLUSTER_CACHE"
MINOR = "RACKLOOM_KUBERNETES"
_VERSION_PACKAGES = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
say = partial(print, file=sys.stderr, flush=True)


class NotBuilt(Exception):
    """The binaries are missing and cannot be built here. The message has the remedy."""


@dataclass(frozen=True, slots=True)
class Tools:
    """Go programs that one go.mod pins."""

    module: Path
    """The folder of go.mod and go.sum, and of our own program if there is one."""
    packages: Mapping[str, str]
    """The package of each binary."""

    @property
    def folder(self) -> Path:
        """The folder of the binaries, which is the same for the same pins."""
        pins = hashlib.sha256()
        for file in sorted((*self.module.glob("go.*"), *self.module.glob("*.go"))):
            pins.update(file.read_bytes())
        return cache() / pins.hexdigest()[:16]

    def missing(self, folder: Path) -> list[str]:
        return [name for name in self.packages if not os.access(folder / name, os.X_OK)]


PINS = HERE / f"kubernetes-{os.environ[MINOR]}" if os.environ.get(MINOR) else HERE
CONTROL_PLANE = Tools(
    PINS,
    {
        "etcd": "go.etcd.io/etcd/server/v3",
        "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
        "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
        "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
    },
)
NODE = Tools(
    PINS,
    {
        "kubelet": "k8s.io/kubernetes/cmd/kubelet",
        "kube-proxy": "k8s.io/kubernetes/cmd/kube-proxy",
        "kubectl": "k8s.io/kubernetes/cmd/kubectl",
    },
)
"""The programs of a real node and its user, from the release of the control plane."""
MPI_OPERATOR = Tools(HERE / "mpi", {"mpi-operator": "."})
HELM = Tools(HERE / "helm", {"helm": "helm.sh/helm/v4/cmd/helm"})


def cache() -> Path:
    """The folder of all builds."""
    named = os.environ.get(CACHE)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named) if named else Path(base) / "rackloom" / "cluster"


def at_hand(tools: Tools) -> Path | None:
    """The folder of binaries that need no build.

    Raises:
        NotBuilt: the folder that the environment names lacks some, or there are no pins of that version.
    """
    if not tools.module.exists():
        others = sorted(folder.name.partition("-")[2] for folder in HERE.glob("kubernetes-*"))
        raise NotBuilt(f"no pins for {MINOR}={os.environ[MINOR]}: there are {', '.join(others)}, or unset it")
    assets = os.environ.get(ASSETS)
    if assets and tools is CONTROL_PLANE:
        if lacking := tools.missing(Path(assets)):
            raise NotBuilt(
                f"{ASSETS}={assets} lacks {', '.join(lacking)}: add them, or unset it to build them"
            )
        return Path(assets)
    return None if tools.missing(tools.folder) else tools.folder


def made(tools: Tools) -> Path:
    """The folder of the binaries. Builds them if they are not at hand.

    Raises:
        NotBuilt: the build failed.
    """
    folder = at_hand(tools)
    if folder is not None:
        return folder
    target = tools.folder
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if tools.missing(target):
            _build(tools, target)
    return target


def _build(tools: Tools, target: Path) -> None:
    """Programs that Go names as we do come from one command: some are linked while others compile."""
    say(f"building {', '.join(tools.packages)} into {target}: minutes the first time, nothing after that")
    together = [package for name, package in tools.packages.items() if package.rpartition("/")[2] == name]
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        if together:
            _go_build(tools.module, Path(scratch), *together)
        for binary, package in tools.packages.items():
            if package not in together:
                _go_build(tools.module, Path(scratch) / binary, package)
        target.mkdir(exist_ok=True)
        for binary in tools.packages:
            (Path(scratch) / binary).replace(target / binary)


def _go_build(module: Path, output: Path, *packages: str) -> None:
    flags = f"-s -w {stamps((module / 'go.mod').read_text())}"
    # Nobody debugs these programs, so the compiler need not describe them (DWARF).
    words = ("-trimpath", "-gcflags=all=-dwarf=false", "-ldflags", flags, "-o", str(output))
    done = _go(module, "build", *words, *packages)
    if done.returncode != 0:
        names = ", ".join(packages)
        raise NotBuilt(f"{names} does not build (is the Go module proxy reachable?): {_gist(done.stderr)}")


def download(tools: Tools) -> None:
    """The sources that a build needs are here, or no build is needed.

    Raises:
        NotBuilt: some cannot be had.
    """
    if at_hand(tools) is None:
        done = _go(tools.module, "list", "-deps", *tools.packages.values())
        if done.returncode != 0:
            raise NotBuilt(f"no sources of {', '.join(tools.packages)}: {_gist(done.stderr)}")


def _go(module: Path, command: str, *words: str) -> subprocess.CompletedProcess[str]:
    go = shutil.which("go")
    if go is None:
        raise NotBuilt(f"there is no Go to build a cluster with: install Go, or name binaries by {ASSETS}")
    return subprocess.run(
        [go, command, "-mod=readonly", *words],
        cwd=module,
        # Each process of the compiler ends soon: it collects its garbage less often than by default.
        env={"GOGC": "400", **os.environ, "CGO_ENABLED": "0"},
        capture_output=True,
        text=True,
    )


def stamps(pins: str) -> str:
    """Linker flags that make binaries report the pinned Kubernetes version rather than v0.0.0-master."""
    pinned = re.search(r"k8s\.io/kubernetes (v(\d+)\.(\d+)\.\d+)", pins)
    if pinned is None:
        return ""
    version, major, minor = pinned.groups()
    values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    return " ".join(
        f"-X {where}.{name}={value}" for where in _VERSION_PACKAGES for name, value in values.items()
    )


def _gist(stderr: str) -> str:
    """The last line that is not progress, in which Go names the error."""
    lines = [line.strip() for line in stderr.splitlines() if not line.startswith("go: downloading")]
    return next((line for line in reversed(lines) if line), "go said nothing")


def main(words: list[str]) -> None:
    if words not in ([], ["--download"], ["helm"]):
        raise NotBuilt(f"{' '.join(words)}: say nothing, --download or helm")
    for wanted in (HELM,) if words == ["helm"] else (CONTROL_PLANE, MPI_OPERATOR, HELM):
        if words == ["--download"]:
            download(wanted)
        else:
            sys.stdout.write(f"{made(wanted)}\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except NotBuilt as error:
        sys.exit(f"build: {error}")
