"""`make test-node`: the tests of this folder on real nodes, and nothing of them left behind.

python tests/node/run.py [--all] [words for pytest]
python tests/node/run.py --chart[=VALUES] [words for pytest]
                                                    the core, with the chart by Helm (installation.py)
python tests/node/run.py --vm [words for run.py]    on cgroup v2, in a virtual machine (vm.py)
python tests/node/run.py --kernel [words for pytest]
                                                    tests of links and RDMA, in a machine that has all kinds
python tests/node/run.py --hold                     two nodes to look at by hand, until Ctrl-C
python tests/node/run.py --download                 only the downloads that the builds need
python tests/node/run.py --benchmark [--rounds N]   how long they take (benchmarks/nodes.py)

It reports what this machine lacks, builds what is not built yet (Kubernetes, CoreDNS, the images, all of it
cached), and runs pytest as a child of process 1 of new namespaces. When those end, however they end, the
kernel ends every process of the nodes and undoes their mounts and networks. The cgroups are removed here,
also those of an earlier run that was killed.

Exit status: that of pytest, or 3 if this machine cannot run real nodes.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from deploy.image.build import NAMES  # noqa: E402
from tests.cluster.build import CONTROL_PLANE, HELM, MPI_OPERATOR, NODE, NotBuilt, cache, download, made  # noqa: E402
from tests.node import vm  # noqa: E402
from tests.node.images import write_test_images  # noqa: E402
from tests.node.installation import CHART  # noqa: E402
from tests.node.nodes import COREDNS  # noqa: E402

CONTAINERD = "RACKLOOM_CONTAINERD_ROOT"
IMAGES = "RACKLOOM_NODE_IMAGES"
"""A folder that `images` has filled."""
CANNOT = 3
KERNEL_TESTS = (
    "tests/claim/node/gpu/test_binding_in_the_kernel.py",
    "tests/claim/node/nic/test_between_pods.py",
    "tests/claim/node/nic/test_children.py",
    "tests/claim/node/nic/test_kinds_of_links.py",
    "tests/claim/node/nic/test_moving.py",
    "tests/claim/node/nic/test_programs.py",
    "tests/claim/node/nic/test_rdma_in_the_kernel.py",
)
"""Tests that need kinds of links and drivers that the host's kernel may lack."""
_PREFIX = "rackloom-node-"
_PROGRAMS = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "ip": "iproute2",
    "nft": "nftables",
    "busybox": "busybox-static",
    "cc": "gcc libc6-dev",
    "pkill": "procps",
}
_BRIDGE = Path("/usr/lib/cni/bridge")


def missing() -> list[str]:
    """The requirements that this machine lacks, each with its remedy."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return ["real nodes need root on Linux"]
    lacking = [
        f"no {program}: apt-get install {package}"
        for program, package in _PROGRAMS.items()
        if shutil.which(program) is None
    ]
    if not _BRIDGE.exists():
        lacking.append(f"no {_BRIDGE}: apt-get install containernetworking-plugins")
    if not (containerd_root() / "usr/bin/containerd").exists():
        lacking.append(f"no containerd: tests/claim/node/nic/fetch_containerd.sh {containerd_root().parent}")
    return lacking


def containerd_root() -> Path:
    """The folder of the unpacked containerd and runc."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get(CONTAINERD) or base / "rackloom-containerd" / "root")


def built(target: str) -> Path:
    """The archive of an image of Rackloom, built if its inputs have changed."""
    make = ["make", "--no-print-directory", "-C", str(ROOT), "image", f"TARGET={target}"]
    subprocess.run(make, check=True, stdout=sys.stderr)
    return ROOT / f"build/image/{NAMES[target]}-0.1.0-amd64.tar"


def images() -> Path:
    """The folder of the archives that nodes import."""
    folder = cache().parent / "node-images"
    write_test_images(folder)
    _put(built("site"), folder / "rackloom.tar")
    return folder


def _put(archive: Path, place: Path) -> None:
    """Link or copy a file."""
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    on_one_disk = archive.stat().st_dev == place.parent.stat().st_dev
    (os.link if on_one_disk else shutil.copy)(archive, place)


def sweep() -> None:
    """Remove the cgroups of runs that are over."""
    for tree in {*Path("/sys/fs/cgroup").glob(f"*/{_PREFIX}*"), *Path("/sys/fs/cgroup").glob(f"{_PREFIX}*")}:
        runner = tree.name.removeprefix(_PREFIX).partition("-")[0]
        if runner != str(os.getpid()) and Path(f"/proc/{runner}").exists():
            continue
        for folder in sorted((path for path in tree.rglob("*") if path.is_dir()), reverse=True):
            _remove(folder)
        _remove(tree)


def _remove(cgroup: Path) -> None:
    """The kernel takes a moment to let go of a cgroup whose last process has ended."""
    for _ in range(50):
        try:
            cgroup.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.05)
        else:
            return


def _download() -> int:
    """Fetch the downloads of a build, so that a caller can try that step again alone."""
    try:
        for tools in (CONTROL_PLANE, NODE, COREDNS, MPI_OPERATOR):
            download(tools)
    except NotBuilt as error:
        print(f"test-node: {error}", file=sys.stderr)
        return 1
    return subprocess.run(["make", "--no-print-directory", "-C", str(ROOT), "image"]).returncode


def on_kernel(words: list[str]) -> int:
    """Run tests that need a kernel and no nodes."""
    if lacking := vm.missing():
        print("test-kernel: NO VIRTUAL MACHINE RUNS HERE:", *lacking, sep="\n  ", file=sys.stderr)
        return CANNOT
    where = [] if any(word.startswith("tests/") for word in words) else list(KERNEL_TESTS)
    try:
        return vm.run_on_kernel([*words, *where], os.environ)
    except NotBuilt as error:
        print(f"test-kernel: {error}", file=sys.stderr)
        return CANNOT


def _program(words: list[str]) -> list[str]:
    """The program that runs in the namespaces."""
    if words[:1] == ["--hold"]:
        return ["tests/node/hold.py"]
    if words[:1] == ["--benchmark"]:
        return ["benchmarks/nodes.py", *words[1:]]
    where = [] if any(word.startswith("tests/") for word in words) else ["tests/node"]
    return ["-m", "pytest", "-p", "no:cacheprovider", *words, *where]


def _chart(words: list[str]) -> tuple[str | None, list[str]]:
    """The values of the chart (empty: its defaults, None: kustomize instead), and the other words."""
    if not words[:1] or words[0].partition("=")[0] != "--chart":
        return None, words
    if "--all" in words:
        sys.exit("test-node: --chart runs the core; without --all")
    return words[0].partition("=")[2], words[1:]


def main(words: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if words == ["--download"]:
        return _download()
    in_machine = words[:1] == ["--vm"]
    chart, words = _chart(words)
    if lacking := missing() + (vm.missing_for_cgroups() if in_machine else []):
        where = "on cgroup v2 in a virtual machine here" if in_machine else "here"
        print(f"test-node: NO REAL NODES RUN {where}:", *lacking, sep="\n  ", file=sys.stderr)
        return CANNOT
    try:
        for tools in (CONTROL_PLANE, NODE, COREDNS, MPI_OPERATOR, *([] if chart is None else [HELM])):
            made(tools)
        if in_machine:
            vm.kernel()
    except NotBuilt as error:
        print(f"test-node: {error}", file=sys.stderr)
        return CANNOT
    sweep()
    environment = {
        **os.environ,
        "RACKLOOM_TEST_NODE": "all" if "--all" in words else "core",
        "RACKLOOM_NODE_CGROUP": f"{_PREFIX}{os.getpid()}",
        IMAGES: os.environ.get(IMAGES) or str(images()),
        CONTAINERD: str(containerd_root()),
        **({} if chart is None else {CHART: chart}),
    }
    if in_machine:
        try:
            status = vm.run(words[1:], environment)
        except KeyboardInterrupt:
            return 130
        return 1 if status == CANNOT else status
    if "--all" in words:
        # In a separate folder, so that no node imports it at its start.
        _put(built("transfer"), Path(environment[IMAGES]) / "transfer/rackloom.tar")
    inside = [sys.executable, *_program([word for word in words if word != "--all"])]
    namespaces = ["--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    # Process 1 is a shell, which reaps the processes that are left to it.
    # The kernel ends it, and with it all below, also when this process is killed.
    command = [
        "setpriv",
        "--pdeathsig",
        "KILL",
        "--",
        "unshare",
        *namespaces,
        "--",
        "bash",
        "-c",
        '"$@"; exit $?',
        "test-node",
        *inside,
    ]
    try:
        return subprocess.run(command, cwd=ROOT, env=environment).returncode
    except KeyboardInterrupt:
        return 130
    finally:
        sweep()


if __name__ == "__main__":
    sys.exit(on_kernel(sys.argv[2:]) if sys.argv[1:2] == ["--kernel"] else main(sys.argv[1:]))
