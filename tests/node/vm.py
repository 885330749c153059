"""Tests in a virtual machine with Debian's kernel, for features that the host's kernel lacks.

`run` runs the tests of this folder, on hosts that have cgroups of version 1, since the machine has version 2.
`run_on_kernel` runs any tests: those of kinds of links and of RDMA need modules that a host may lack.

The machine runs Debian's kernel and has the host's files: QEMU shows it the host's root over 9p, read only,
and its writes go to a scratch disk without a name (only QEMU has it open). So the same checkout, virtual
environment, caches and programs run in it, and nothing of it is left when QEMU ends. The kernel ends QEMU
with this process. It has no network.

KVM makes it fast, on a processor that virtualizes. A /dev/kvm without such a processor opens as well, but
interprets a stock kernel step by step, slower than QEMU without KVM, up to the first instruction that it does
not know. Without KVM QEMU translates every instruction. Its clock then runs slower (driver/slow_clock.c), so
that the machine sees itself compute at a few times less than the usual speed, and the timeouts of Kubernetes
and of the tests keep their usual meaning.

The status comes back by QEMU's debug-exit device. QEMU's own status, when it cannot start, or when the
machine crashes or stops, is not mistaken for it.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from tests.cluster.build import NotBuilt, cache

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CGROUP_V2 = Path("/sys/fs/cgroup/cgroup.controllers")
"""Exists if the machine itself has cgroups of version 2."""
LIMIT = 1200.0
"""Seconds that the machine may take with KVM. Without KVM they are seconds of its slower clock."""
SLOWER = 20
"""How much slower the clock of a machine without KVM runs: such a machine computes about 20 times slower."""
WITHOUT_KVM = ["tests/node/test_nodes.py"]
"""The tests of a machine without KVM if none are named: all of them would take hours."""
OWN_KERNEL = "RACKLOOM_OWN_KERNEL"
"""Set if tests may change settings of the whole kernel."""
_QEMU = "qemu-system-x86_64"
_WITHOUT_KVM = "max,-avx,-avx2,-la57,-smap,-smep"
"""All features except those that cost more to translate than they save: with these Python starts in thrice
the time."""
_PROGRAMS = {_QEMU: "qemu-system-x86", "busybox": "busybox-static", "mkfs.ext4": "e2fsprogs", "dpkg": "dpkg"}
_MODULES = ("virtio_pci", "virtio_blk", "9pnet_virtio", "9p", "crc32c_generic", "ext4", "overlay")
"""The modules that reach the root. The kernel loads the rest from there."""
_EXIT_PORT = 0xF4
_STATUSES = 64
"""QEMU ends with 2 n + 1 when n is written to the port: n is this and a status, for QEMU's own is 0 or 1."""
_DISK = 24 << 30
_PASSED_ON = (
    "PATH",
    "PYTHONPATH",
    "HOME",
    "LANG",
    "CI",
    "XDG_CACHE_HOME",
    "PYTEST_ADDOPTS",
    "KUBEBUILDER_ASSETS",
)
say = partial(print, file=sys.stderr, flush=True)


def missing_for_cgroups() -> list[str]:
    """The reasons that no machine of another cgroup version can run here, each with its remedy."""
    if CGROUP_V2.exists():
        return [
            "this machine has cgroups of version 2 itself: the tests on it, without --vm, show that version"
        ]
    return missing()


def missing() -> list[str]:
    """The requirements of a machine that this host lacks, each with its remedy."""
    return [
        f"no {program}: apt-get install {package}"
        for program, package in _PROGRAMS.items()
        if shutil.which(program) is None
    ]


def kernel() -> Path:
    """The folder of Debian's kernel and its modules (fetch_kernel.sh), downloaded if it is not cached.

    Raises:
        NotBuilt: it cannot be downloaded.
    """
    fetch = HERE / "fetch_kernel.sh"
    folder = cache().parent / "vm" / hashlib.sha256(fetch.read_bytes()).hexdigest()[:16]
    if not (folder / "vmlinuz").exists():
        say(f"test-node: downloading Debian's kernel into {folder}")
        if subprocess.run([fetch, folder]).returncode != 0:
            raise NotBuilt(
                "Debian's kernel cannot be downloaded (see above): is the package archive reachable?"
            )
    return folder


def run(words: list[str], environment: Mapping[str, str]) -> int:
    """Run run.py with these words and variables in the machine: the run.py of the host.

    Returns its status, or 1 if the machine ended without one.

    Raises:
        NotBuilt: there is no kernel for it.
    """
    fast = has_kvm()
    limit = LIMIT if fast else LIMIT * SLOWER
    if not fast:
        say(f"test-node: NO KVM HERE: QEMU TRANSLATES EVERY INSTRUCTION, A SECOND IN IT IS {SLOWER} OUTSIDE")
        if not words:
            words = WITHOUT_KVM
            say(f"test-node: ONLY {' '.join(words)}: name others, or use a machine with KVM")
        # The machine would need minutes to write this bytecode. It reads the files that are written here.
        collect = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", HERE]
        subprocess.run(collect, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)
    program = [sys.executable, "tests/node/run.py", *words]
    return _boot(program, environment, limit, fast=fast, slow_clock=not fast)


def run_on_kernel(words: list[str], environment: Mapping[str, str]) -> int:
    """Run pytest with these words in the machine. The status is as that of `run`.

    These tests wait for nothing outside the machine, so its clock is the host's also without KVM.
    """
    fast = has_kvm()
    if not fast:
        say("test-kernel: NO KVM HERE: QEMU TRANSLATES EVERY INSTRUCTION")
    program = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", *words]
    return _boot(program, {**environment, OWN_KERNEL: "1"}, LIMIT, fast=fast, slow_clock=False)


def _boot(
    program: list[str], environment: Mapping[str, str], limit: float, *, fast: bool, slow_clock: bool
) -> int:
    installed = kernel()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as disk:
        initramfs = Path(folder) / "initramfs"
        initramfs.write_bytes(_initramfs(installed, _job(program, environment)))
        disk.truncate(_DISK)
        files = [disk.fileno()]
        format_ = ["mkfs.ext4", "-q", "-F", "-O", "^has_journal", f"/proc/self/fd/{disk.fileno()}"]
        subprocess.run(format_, check=True, pass_fds=files)
        command = _qemu(installed / "vmlinuz", initramfs, disk.fileno(), fast=fast)
        clock = {"LD_PRELOAD": _slow_clock(Path(folder))} if slow_clock else {}
        try:
            ended = subprocess.run(
                command, stdin=subprocess.DEVNULL, env={**os.environ, **clock}, timeout=limit, pass_fds=files
            ).returncode
        except subprocess.TimeoutExpired:
            say(f"test-node: the virtual machine has not ended within {limit:.0f} s")
            return 1
    say(f"test-node: the virtual machine ran for {time.monotonic() - began:.0f} s")
    status = (ended >> 1) - _STATUSES
    if status < 0:
        say(f"test-node: the virtual machine ended without a status (QEMU: {ended})")
        return 1
    return status


def has_kvm() -> bool:
    """/dev/kvm opens, on a processor that virtualizes."""
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    if flags is None or not {"vmx", "svm"} & set(flags[1].split()):
        return False
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR))
    except OSError:
        return False
    return True


def _slow_clock(folder: Path) -> str:
    library = folder / "slow_clock.so"
    source = HERE / "driver/slow_clock.c"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", f"-DSLOWER={SLOWER}", "-o", library, source], check=True)
    return str(library)


def _qemu(vmlinuz: Path, initramfs: Path, disk: int, *, fast: bool) -> list[str]:
    return [
        *("setpriv", "--pdeathsig", "KILL", "--", _QEMU),
        *(
            ("-accel", "kvm", "-cpu", "host")
            if fast
            else ("-accel", "tcg,thread=multi", "-cpu", _WITHOUT_KVM)
        ),
        *("-smp", "2", "-m", "6G", "-nodefaults", "-no-user-config", "-no-reboot"),
        *("-display", "none", "-serial", "stdio"),
        *("-kernel", str(vmlinuz), "-initrd", str(initramfs)),
        # A panic is a reboot at once, and a reboot the end.
        *(
            "-append",
            "console=ttyS0 loglevel=4 panic=-1 mitigations=off tsc=reliable no_timer_check intel_iommu=on",
        ),
        *("-virtfs", "local,path=/,mount_tag=host,security_model=passthrough,readonly=on,multidevs=remap"),
        *("-drive", f"file=/proc/self/fd/{disk},format=raw,if=virtio,cache=unsafe"),
        *("-device", f"isa-debug-exit,iobase={_EXIT_PORT},iosize=1"),
        # A function that tests may take from its driver. vfio-pci takes it only behind an IOMMU.
        *("-machine", "q35", "-device", "intel-iommu", "-device", "virtio-rng-pci"),
    ]


def _job(program: list[str], environment: Mapping[str, str]) -> str:
    """The command of the machine once it has a root. A status too large for the exit port becomes 1."""
    chosen = {
        name: value
        for name, value in environment.items()
        if name in _PASSED_ON or name.startswith("RACKLOOM_")
    }
    variables = [f"{name}={value}" for name, value in {**chosen, "TMPDIR": "/scratch"}.items()]
    return "\n".join(
        [
            f"cd {shlex.quote(str(ROOT))}",
            'echo "test-node: $(uname -sr), cgroups of version 2, up after $(cut -d. -f 1 /proc/uptime) s"',
            shlex.join(["env", "-i", *variables, *program]),
            "status=$?",
            f"[ $status -lt {_STATUSES - 1} ] || status=1",
            _leave("$status"),
            "",
        ]
    )


def _leave(status: str) -> str:
    """The shell command that ends the machine with a status."""
    octal = f'"\\\\$(printf %o $(({_STATUSES} + {status})))"'
    return f"printf {octal} | dd of=/dev/port bs=1 seek={_EXIT_PORT} conv=notrunc status=none"


def _initramfs(installed: Path, job: str) -> bytes:
    """The machine's first root: busybox, the modules that reach the other root, vm_init.sh and the job."""
    busybox = shutil.which("busybox")
    assert busybox is not None
    files = {
        "bin/busybox": Path(busybox).read_bytes(),
        "init": (HERE / "vm_init.sh").read_bytes(),
        "job": job.encode(),
        "modules.path": str(installed / "lib/modules").encode(),
    }
    for number, module in enumerate(_needed(installed)):
        files[f"modules/{number:02}-{module.name}"] = module.read_bytes()
    return b"".join(_archive(files))


def _needed(installed: Path) -> list[Path]:
    """The files of `_MODULES` and of their dependencies, in an order in which they can be loaded."""
    [release] = (installed / "lib/modules").iterdir()
    needs = {}
    for line in (release / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        needs[path] = others.split()
    by_name = {Path(path).name.partition(".")[0].replace("-", "_"): path for path in needs}
    ordered: dict[str, None] = {}

    def add(path: str) -> None:
        for other in needs[path]:
            add(other)
        ordered[path] = None

    for name in _MODULES:
        if name in by_name:  # elsewhere it is part of the kernel
            add(by_name[name])
    return [release / path for path in ordered]


def _archive(files: Mapping[str, bytes]) -> Iterator[bytes]:
    """A cpio archive of the format that the kernel reads (newc), with the folders of the files."""
    folders = {str(parent) for path in files for parent in Path(path).parents if parent != Path()}
    entries: Iterable[tuple[str, int, bytes]] = [
        *((folder, 0o040755, b"") for folder in sorted(folders | {"dev"})),
        *((path, 0o100755, content) for path, content in files.items()),
        ("TRAILER!!!", 0, b""),
    ]
    for number, (path, mode, content) in enumerate(entries, 1):
        name = path.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name), 0)
        header = b"070701" + b"".join(b"%08X" % field for field in fields) + name
        yield header + bytes(-len(header) % 4) + content + bytes(-len(content) % 4)
