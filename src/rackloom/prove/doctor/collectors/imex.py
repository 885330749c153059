"""What a host's files tell of IMEX: who runs it, what the driver offers, who is connected. Nothing is asked.

Whether a daemon reaches its peers is known to itself alone (`nvidia-imex-ctl -N`), and is in none of these.
"""

import re
from collections.abc import Iterator, Sequence

from rackloom.prove.doctor.collectors.sockets import ESTABLISHED, sockets_of
from rackloom.prove.doctor.evidence import IMEX_CONFIG, SERVER_PORT, ImexSeen
from rackloom.topology.discovery.proc_devices import IMEX_CHANNELS, character_devices
from rackloom.topology.discovery.sysroot import Sysroot

_UNIT = "nvidia-imex.service"
_UNIT_FOLDERS = ("etc/systemd/system", "run/systemd/system")
_NODES = "/etc/nvidia-imex/nodes_config.cfg"
_NODES_OPTION = re.compile(r"^[ \t]*IMEX_NODE_CONFIG_FILE[ \t]*=[ \t]*(\S+)", re.MULTILINE)
_POD = re.compile(
    r"kubepods|/(?:[\w.-]*-)?pod[0-9a-f][0-9a-f_-]*(?:\.slice)?(?:/|$)|/(?:cri-containerd|crio)-",
    re.MULTILINE,
)
"""How kubelet and the runtimes name the control groups of pods, with both cgroup drivers."""
_CHANNEL = re.compile(r"channel([0-9]{1,4})")


def collect_imex(host: Sysroot) -> ImexSeen:
    """All of it."""
    running = _processes(host)
    return ImexSeen(
        running=running,
        outside=None if running is None else _outside(host, running),
        enabled=_enabled(host),
        offered=_offered(host),
        channels=tuple(sorted(_channels(host))),
        named=_named(host),
        connected=_connected(host, running or ()),
    )


def _processes(host: Sysroot) -> tuple[int, ...] | None:
    numbers = [name for name in host.names("proc") if name.isascii() and name.isdigit()]
    if "1" not in numbers:
        return None
    return tuple(sorted(int(one) for one in numbers if host.text(f"proc/{one}/comm") == "nvidia-imex"))


def _outside(host: Sysroot, running: Sequence[int]) -> tuple[int, ...] | None:
    in_pods = {one: _is_in_pod(host, one) for one in running}
    own = tuple(one for one in running if in_pods[one] is False)
    return None if not own and None in in_pods.values() else own


def _is_in_pod(host: Sysroot, process: int) -> bool | None:
    """None where only a part of its control group's name is seen.

    From within a cgroup namespace the names of others are relative to it, `/../..`, and what they have in
    common with its own is left out (cgroup_namespaces(7)).
    """
    group = host.text(f"proc/{process}/cgroup") or ""
    if _POD.search(group):
        return True
    return None if ":/.." in group and not group.endswith(f"/{_UNIT}") else False


def _enabled(host: Sysroot) -> bool | None:
    folders = [folder for folder in _UNIT_FOLDERS if host.real(folder) is not None]
    if not folders:
        return None
    wanting = [f"{at}/{name}" for at in folders for name in host.names(at) if name.endswith(".wants")]
    return any(_UNIT in host.names(one) for one in wanting)


def _offered(host: Sysroot) -> bool | None:
    text = host.whole("proc/devices")
    return None if text is None else IMEX_CHANNELS in {name for _, name in character_devices(text)}


def _channels(host: Sysroot) -> Iterator[int]:
    for name in host.names(f"dev/{IMEX_CHANNELS}"):
        if found := _CHANNEL.fullmatch(name):
            yield int(found[1])


def _named(host: Sysroot) -> tuple[str, ...] | None:
    config = host.text(IMEX_CONFIG)
    if config is None:
        return None
    file = _NODES_OPTION.search(config)
    lines = (host.text(_NODES if file is None else file[1]) or "").splitlines()
    return tuple(name for line in lines if (name := line.partition("#")[0].strip()))


def _connected(host: Sysroot, running: Sequence[int]) -> int | None:
    tables = [sockets for one in running if (sockets := sockets_of(host, one)) is not None]
    if not tables:
        return None
    peers = {
        one.peer
        for sockets in tables
        for one in sockets
        if one.state == ESTABLISHED and one.peer_port == SERVER_PORT
    }
    return len(peers)
