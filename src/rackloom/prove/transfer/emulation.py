"""Two emulated pods on one machine without RDMA: network namespaces and shaped veth pairs.

Each namespace gets eth0 (the pod network, for the control channel) and rdma0 and rdma1 (the NICs). Both
ends of each NIC are held to a declared rate by a token bucket filter (tc tbf). Everything that a claimed
NIC goes through is real: a device in the pod's namespace, UCX pinned to it, counters. The rates are declared,
not measured, so every result is labelled as emulated. The default rates have the ratio of the
nixl-kv-transfer example's measured arms.

`emulate` needs root and iproute2. It removes the namespaces on every way out, SIGTERM included, and
`sweep` removes those of processes that were killed before they could. The kernel announces a carrier up
to a second late, and UCX finds no device before that, so `emulate` waits for it.
"""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import msgspec

from rackloom.errors import Refused, Retry
from rackloom.runtime.foreign_text import decode_json

ALIGNED_GIGABITS = 8.0
UNALIGNED_GIGABITS = 5.64
"""Defaults in the ratio of the nixl-kv-transfer example's measured arms, 39.07 : 27.54, and low enough that
two processors have something left: at twice the rate it is they that are measured."""
MTU = 9000
_READY_SECONDS = 5.0
"""The kernel announces a carrier up to a second late (linkwatch). UCX finds no device before that."""
_NAMESPACE_NAME = re.compile(r"rackloom-(?P<pid>\d+)-\d+-[ab]")
_namespace_numbers = itertools.count()


class EmulatedPods(msgspec.Struct, frozen=True):
    """Two emulated pods. `prefix_*` run a command inside one. The NICs are rdma0 and rdma1 in both."""

    prefix_a: tuple[str, ...]
    prefix_b: tuple[str, ...]
    address_b: str
    """The address of pod b on the pod network, for pod a."""
    gigabits: tuple[float, float]
    """Declared rates of rdma0 and rdma1, Gb/s each way."""


def can_emulate() -> str | None:
    """The obstacle to emulated pods here, or None. Builds two and removes them (a quarter of a second)."""
    try:
        with emulate():
            return None
    except (Refused, Retry) as trouble:
        return trouble.reason


@contextmanager
def emulate(
    aligned_gigabits: float = ALIGNED_GIGABITS, unaligned_gigabits: float = UNALIGNED_GIGABITS
) -> Iterator[EmulatedPods]:
    """Two pods, removed again on every way out, SIGTERM included (when entered in the main thread).

    Raises:
        Refused: not allowed or not possible here.
        Retry: the links did not come up in time.
    """
    if sys.platform != "linux":
        raise Refused("network namespaces exist on Linux only")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise Refused(f"{tool} is not installed", nearest_fix="install iproute2")
    if os.geteuid() != 0:
        raise Refused("network namespaces need root", nearest_fix="run as root")
    remove_stale_namespaces()
    name = f"rackloom-{os.getpid()}-{next(_namespace_numbers)}"
    pods = (f"{name}-a", f"{name}-b")
    with ExitStack() as stack:
        stack.enter_context(_sigterm_raises())
        for pod in pods:
            stack.callback(_remove_namespace, pod)
            _run_command("ip", "netns", "add", pod)
            _run_command("ip", "-n", pod, "link", "set", "lo", "up")  # UCX connects each end to itself first
        links = (("eth0", None), ("rdma0", aligned_gigabits), ("rdma1", unaligned_gigabits))
        for subnet, (device, gigabits) in enumerate(links):
            _connect_pods(pods, device, subnet, gigabits)
        _wait_for_carrier(pods, [device for device, _ in links])
        inside = [("ip", "netns", "exec", pod) for pod in pods]
        yield EmulatedPods(inside[0], inside[1], _pod_address(0, 1), (aligned_gigabits, unaligned_gigabits))


def remove_stale_namespaces() -> None:
    """Remove the namespaces of our processes that were killed before they could remove them."""
    for line in _run_command("ip", "netns", "list").splitlines():
        pod = line.split(" ", 1)[0]
        if (ours := _NAMESPACE_NAME.fullmatch(pod)) and not Path("/proc", ours["pid"]).exists():
            _remove_namespace(pod)


def _connect_pods(pods: tuple[str, str], device: str, subnet: int, gigabits: float | None) -> None:
    a, b = pods
    mtu = ("mtu", str(MTU))
    _run_command(
        "ip", "-n", a, "link", "add", device, *mtu, "type", "veth", "peer", "name", device, *mtu, "netns", b
    )
    for side, pod in enumerate(pods):
        _run_command("ip", "-n", pod, "addr", "add", f"{_pod_address(subnet, side)}/30", "dev", device)
        if gigabits is not None:
            rate = ("rate", f"{gigabits * 1000:.0f}mbit", "burst", "1mb", "limit", "8mb")
            _run_command("tc", "-n", pod, "qdisc", "add", "dev", device, "root", "tbf", *rate)
    for pod in pods:
        _run_command("ip", "-n", pod, "link", "set", device, "up")


def _pod_address(subnet: int, side: int) -> str:
    return f"192.168.{subnet}.{side + 1}"


def _wait_for_carrier(pods: tuple[str, str], devices: list[str]) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while not all(_is_link_up(pod, device) for pod in pods for device in devices):
        if time.monotonic() > deadline:
            raise Retry("the emulated links did not come up", after=1.0)
        time.sleep(0.05)


def _is_link_up(pod: str, device: str) -> bool:
    (link,) = decode_json(_run_command("ip", "-n", pod, "-json", "-4", "addr", "show", "dev", device), "ip")
    return link["operstate"] == "UP" and bool(link["addr_info"])


def _remove_namespace(pod: str) -> None:
    subprocess.run(["ip", "netns", "delete", pod], capture_output=True, check=False, timeout=10)


def _run_command(*command: str) -> str:
    """Run a command and return its output. Raises Refused with the output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    if done.returncode != 0:
        output = (done.stderr or done.stdout).strip().replace("\n", " ")
        raise Refused(f"`{' '.join(command[:5])} ...` is not possible here: {output}")
    return done.stdout


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Within it, SIGTERM unwinds the stack instead of ending the process on the spot."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: Callable[[int, FrameType | None], object] | int | None = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
