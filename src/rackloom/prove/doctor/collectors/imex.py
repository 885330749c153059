"""What a host's files tell of IMEX: who runs it, what the driver offers, who is connected. Nothing is asked.

Whether a daemon reaches its peers is known to itself alone (`nvidia-imex-ctl -N`), and is in none of these.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from rackloom.claim.domain.names import IMEX_SERVER_PORT
from rackloom.prove.doctor.collectors.namespaces import shows_all_processes
from rackloom.prove.doctor.collectors.processes import called, processes
from rackloom.prove.doctor.collectors.sockets import ESTABLISHED, Socket, sockets_of
from rackloom.prove.doctor.evidence import IMEX_CONFIG, ImexSeen
from rackloom.topology.discovery.proc_devices import IMEX_CHANNELS, character_devices
from rackloom.topology.discovery.sysroot import Sysroot

_UNIT = "nvidia-imex.service"
_SET_UP = ("etc/systemd/system", "run/systemd/system")
_INSTALLED = ("usr/local/lib/systemd/system", "usr/lib/systemd/system", "lib/systemd/system")
_UNIT_FOLDERS = (*_SET_UP, *_INSTALLED)
"""Where systemd looks for a unit, the first over the later (systemd.unit(5))."""
_DEPENDENTS = (".wants", ".requires")
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
    in_pods = {one: _is_in_pod(host, one) for one in running or ()}
    return ImexSeen(
        running=running,
        in_pods=tuple(one for one, inside in in_pods.items() if inside),
        outside=None if running is None else _outside(in_pods),
        enabled=_enabled(host),
        offered=_offered(host),
        channels=tuple(sorted(_channels(host))),
        named=_named(host),
        connected=_connected(host, running or ()),
    )


def _processes(host: Sysroot) -> tuple[int, ...] | None:
    if 1 not in processes(host) or not shows_all_processes(host):
        return None
    return called(host, "nvidia-imex")


def _outside(in_pods: Mapping[int, bool | None]) -> tuple[int, ...] | None:
    own = tuple(one for one, inside in in_pods.items() if inside is False)
    return None if not own and None in in_pods.values() else own


def _is_in_pod(host: Sysroot, process: int) -> bool | None:
    """None where its control group's name is not seen, or only a part of it.

    From within a cgroup namespace the names of others are relative to it, `/../..`, and what they have in
    common with its own is left out (cgroup_namespaces(7)).
    """
    group = host.text(f"proc/{process}/cgroup")
    if not group:
        return None
    if _POD.search(group):
        return True
    return None if ":/.." in group and not group.endswith(f"/{_UNIT}") else False


def _enabled(host: Sysroot) -> bool | None:
    if all(host.real(folder) is None for folder in _SET_UP):
        return None
    if _is_masked(host):
        return False
    entries = (f"{at}/{name}" for at in _UNIT_FOLDERS for name in host.names(at))
    return any(_UNIT in host.names(one) for one in entries if one.endswith(_DEPENDENTS))


def _is_masked(host: Sysroot) -> bool:
    """Whether the unit that counts leads to /dev/null, which nothing starts, whoever wants it."""
    folder = next((one for one in _UNIT_FOLDERS if _UNIT in host.names(one)), None)
    found = None if folder is None else host.real(folder)
    if found is None:
        return False
    try:
        return str(host.root.joinpath(*found.parts[1:], _UNIT).readlink()) == "/dev/null"
    except OSError:
        return False


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
    nodes = host.text(_NODES if file is None else file[1])
    if nodes is None:
        return None
    return tuple(name for line in nodes.splitlines() if (name := line.partition("#")[0].strip()))


def _connected(host: Sysroot, running: Sequence[int]) -> int | None:
    tables = [sockets for one in running if (sockets := sockets_of(host, one)) is not None]
    if not tables:
        return None
    return len(set[str]().union(*(_peers(sockets) for sockets in tables)))


def _peers(sockets: Sequence[Socket]) -> set[str]:
    """Addresses of others with a connection at their server's port: a daemon is its own peer too."""
    at = {one.peer for one in sockets if one.state == ESTABLISHED and one.peer_port == IMEX_SERVER_PORT}
    return at - {one.own for one in sockets}
