"""Network namespaces of the tests' own: one that stands for the host, others that stand for pods."""

import ctypes
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyroute2 import IPRoute, NetlinkError  # type: ignore[import-untyped]

from rackloom.claim.node.nic.links import read_links, read_settings
from rackloom.claim.node.nic.netlink import Rtnetlink, in_namespace
from rackloom.core.domains.network_config import decode_network_config
from rackloom.core.nics.attachment import find_link, pod_settings

NEWNET = 0x40000000
libc = ctypes.CDLL(None, use_errno=True)


def may_make_namespaces() -> bool:
    """Whether this process may have network namespaces (it is root, or nearly)."""
    found: list[bool] = []

    def attempt() -> None:
        found.append(libc.unshare(NEWNET) == 0)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return found[0]


needs_root = pytest.mark.skipif(
    not may_make_namespaces(), reason="NEEDS ROOT: network namespaces and links cannot be made here"
)

needs_ipv6 = pytest.mark.skipif(
    not Path("/proc/sys/net/ipv6").is_dir(), reason="NEEDS IPv6: the kernel of this machine has none"
)


class Netns:
    """A network namespace that a thread holds open until `destroy`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        made, self._end = threading.Event(), threading.Event()
        self._failed = 0

        def hold() -> None:
            self._failed = libc.unshare(NEWNET)
            self._task = Path(f"/proc/self/task/{threading.get_native_id()}/ns/net")
            made.set()
            self._end.wait()

        self._thread = threading.Thread(target=hold, daemon=True)
        self._thread.start()
        made.wait()
        assert self._failed == 0
        path.symlink_to(self._task)

    def destroy(self) -> None:
        """End it, with every virtual link that is in it. The kernel does so a moment later."""
        self.path.unlink(missing_ok=True)
        self._end.set()
        self._thread.join()

    def call(self, work):
        return in_namespace(self.path, work)

    def ip(self, work):
        """`work` with another library than that of the code under test."""

        def ask():
            with IPRoute() as ipr:
                return work(ipr)

        return self.call(ask)

    def links(self):
        return {link.get_attr("IFLA_IFNAME"): link for link in self.ip(lambda ipr: list(ipr.get_links()))}

    def addresses(self, name):
        def ask(ipr):
            (index,) = ipr.link_lookup(ifname=name)
            return {f"{a.get_attr('IFA_ADDRESS')}/{a['prefixlen']}" for a in ipr.get_addr(index=index)}

        return {address for address in self.ip(ask) if not address.startswith("fe80")}


class Host(Netns):
    """The namespace that the tests' process is in: to the code under test it is the host's."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = Path("/proc/self/ns/net")
        self._pods: list[Netns] = []

    def pod(self, name: str = "pod") -> Netns:
        made = Netns(self.root / name)
        self._pods.append(made)
        return made

    def veth(self, name: str, peer: str, **settings) -> None:
        """A pair: `name` is the NIC, `peer` the network that it is plugged into."""

        def make(ipr):
            ipr.link("add", ifname=name, kind="veth", peer={"ifname": peer})
            for interface in (name, peer):
                (index,) = ipr.link_lookup(ifname=interface)
                ipr.link("set", index=index, state="up")
            if settings:
                (index,) = ipr.link_lookup(ifname=name)
                ipr.link("set", index=index, **settings)

        self.ip(make)

    def address(self, name: str, cidr: str, peer: str | None = None) -> None:
        def add(ipr):
            (index,) = ipr.link_lookup(ifname=name)
            address, _, length = cidr.partition("/")
            ends = {"address": address} if peer is None else {"local": address, "address": peer}
            ipr.addr("add", index=index, prefixlen=int(length), **ends)

        self.ip(add)

    def close(self) -> None:
        for pod in self._pods:
            pod.destroy()


def require_kind(host: Host, kind: str, **settings) -> None:
    """Skip the test if this kernel has no such links."""
    make_link(host, "probe", kind, **settings)
    host.ip(lambda ipr: ipr.link("del", ifname="probe"))


def make_link(host: Host, name: str, kind: str, below: str | None = None, **settings) -> None:
    """A link of a kind, on top of the link `below`. Skips the test if this kernel cannot have it."""

    def ask(ipr):
        if below is not None:
            settings["link"] = ipr.link_lookup(ifname=below)[0]
        ipr.link("add", ifname=name, kind=kind, **settings)

    try:
        host.ip(ask)
    except NetlinkError as error:
        pytest.skip(f"KERNEL LACKS {kind}: {error}")


@contextmanager
def own_host() -> Iterator[Host]:
    """The whole process moves to a new namespace, and back. Links made in it die with it."""
    before = os.open("/proc/self/ns/net", os.O_RDONLY)
    root = Path(tempfile.mkdtemp(prefix="rlns"))
    assert libc.unshare(NEWNET) == 0
    host = Host(root)
    host.ip(lambda ipr: ipr.link("set", index=1, state="up"))
    try:
        yield host
    finally:
        host.close()
        assert libc.setns(before, NEWNET) == 0
        os.close(before)
        shutil.rmtree(root)


def held(host, name, **config):
    """Identity, settings on the host and in the pod, as a prepare would find them."""

    def look():
        with Rtnetlink() as rtnetlink:
            link = next(read_link for read_link in read_links(rtnetlink) if read_link.name == name)
            settings = read_settings(rtnetlink, link, features=True)
            wanted = pod_settings(decode_network_config(config), settings)
            return link.identity(settings, wanted), settings, wanted

    return host.call(look)


def now(netns, identity):
    def look():
        with Rtnetlink() as rtnetlink:
            link = find_link(read_links(rtnetlink), identity)
            return None if link is None else read_settings(rtnetlink, link, features=True)

    return netns.call(look)
