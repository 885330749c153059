"""Reads one host's files for the checks of a node, below any root. Runs no program.

`collect_host` returns `HostEvidence`. Anything that cannot be read is None or `UNREADABLE`, never a guess.

- Processes and sockets come from /proc. They count as the host's own only if process 1 is in the initial
  PID namespace. A copied tree has no namespace links and is taken for the host.
- CDI comes from containerd's configuration: the file that the running containerd was given (k3s has its
  own), then the files that it imports. The last table of the CRI plugin wins and replaces earlier ones,
  as in containerd's mergeConfig. The table's name depends on the version of the configuration. Version 3
  has CDI on by default. Number and size of files, and dots in a line, are limited, because the tree may
  be hostile.
- IMEX: which nvidia-imex processes run, which of them are in pods (by the name of their control group,
  which a cgroup namespace may hide), whether systemd starts the unit and it is not masked, whether the
  driver offers channel devices, which nodes the host's own configuration names, and with how many peers
  the processes are connected. Whether a daemon reaches its peers is known to the daemon alone and is in
  none of these files.
"""

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import msgspec

from rackloom.core.cluster.names import IMEX_SERVER_PORT
from rackloom.core.diagnosis.evidence import IMEX_CONFIG_FILE, CdiSetting, HostEvidence, ImexEvidence
from rackloom.runtime.foreign_text import decode_toml
from rackloom.topology.discovery.sysfs import IMEX_CHANNEL_DEVICES, Sysroot, character_devices

# PID namespace: whose processes /proc shows.


_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""The initial PID namespace (Linux' PROC_PID_INIT_INO)."""
_PROCESS_LINKS = ("proc/1", "proc/self")
"""Processes to try: only a privileged reader may see the namespace of process 1."""


def shows_all_processes(host: Sysroot) -> bool:
    """Whether process 1 of `host` is the host's own. A copied tree has no such links, and is taken for it."""
    found = next(filter(None, (_pid_namespace(host, link) for link in _PROCESS_LINKS)), None)
    return found is None or found == _INITIAL_PID_NAMESPACE


def _pid_namespace(host: Sysroot, process: str) -> str | None:
    """The target of the namespace link, which is a name and no path."""
    found = host.real(process)
    try:
        return None if found is None else str(host.root.joinpath(*found.parts[1:], "ns/pid").readlink())
    except OSError:
        return None


# Processes by name.


def process_ids(host: Sysroot) -> tuple[int, ...]:
    """The ids of all processes."""
    names = (name for name in host.names("proc") if name.isascii() and name.isdigit())
    return tuple(sorted(int(name) for name in names))


def processes_named(host: Sysroot, name: str) -> tuple[int, ...]:
    """The ids of the processes with this name."""
    return tuple(pid for pid in process_ids(host) if host.text(f"proc/{pid}/comm") == name)


# TCP sockets of a network namespace.


LISTENING, ESTABLISHED = "0A", "01"
"""In the column `st` of /proc/net/tcp (include/net/tcp_states.h)."""
_IPV4_MAPPED = "0000000000000000FFFF0000"
"""::ffff:0:0/96, IPv4 within IPv6 (RFC 4291), in words of a little-endian machine."""


class TcpSocket(msgspec.Struct, frozen=True):
    """One socket. `own` and `peer` are the addresses of both sides as the kernel prints them, in hex.

    An IPv4 address is in its short form in sockets of both families.
    """

    own: str
    port: int
    peer: str
    peer_port: int
    state: str


def sockets_of(host: Sysroot, process: int) -> tuple[TcpSocket, ...] | None:
    """TCP sockets in the network namespace of `process`, both families, or None if not all can be read."""
    ipv4, ipv6 = (host.whole(f"proc/{process}/net/{name}") for name in ("tcp", "tcp6"))
    if ipv4 is None:
        return None
    try:
        return tuple(row for table in (ipv4, ipv6 or "") for row in _socket_rows(table))
    except ValueError:
        return None


def _socket_rows(table: str) -> Iterator[TcpSocket]:
    """Columns: number, own address, peer address, state, ... Raises ValueError for another format."""
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 3:
            yield TcpSocket(*_socket_address(fields[1]), *_socket_address(fields[2]), fields[3])


def _socket_address(text: str) -> tuple[str, int]:
    address, _, port = text.rpartition(":")
    return address.removeprefix(_IPV4_MAPPED), int(port, 16)


# containerd's configuration of CDI.


_CONTAINERD_CONFIG = PurePosixPath("/etc/containerd/config.toml")
_CONFIG_OPTIONS = ("-c", "--config")
_CRI_PLUGIN = {1: "cri", 2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime"}
"""The table that has enable_cdi, by the version of containerd's configuration."""
_VERSION_WITH_CDI_ON = 3
"""Version of the configuration that only containerd 2 reads, and that has CDI on (containerd 2.0's notes)."""
_MOST_FILES = 64
_MOST_CHARACTERS = 1024 * 1024
"""The limit for all files together."""
_MOST_DOTS_IN_LINE = 100
"""The most dots in one line: tomllib's time grows with the square of a key's parts."""
_WILDCARDS = re.compile(r"[*?\[]")

TomlTable = dict[str, Any]
T = TypeVar("T", dict[str, Any], list[Any])


def cdi_setting(host: Sysroot, runtime: str | None) -> CdiSetting:
    """Whether containerd is configured with CDI on. `UNREADABLE` if any of its files is not understood.

    Without `runtime`, the name in the node's status, the file counts only if containerd is seen running
    and CRI-O is not: Docker has one too, which no kubelet uses.
    """
    if runtime is None and (processes_named(host, "crio") or not processes_named(host, "containerd")):
        return CdiSetting.UNSAID
    try:
        return _cdi_of(list(_containerd_configs(host)))
    except ValueError:
        return CdiSetting.UNREADABLE


def _cdi_of(configs: list[TomlTable]) -> CdiSetting:
    """By the last table of the CRI plugin, else by the version. Raises ValueError as `_version`."""
    first = _config_version(configs[0], 1) if configs else 1
    setting: object = None
    for config in configs:
        plugins, name = _toml_part(config, "plugins", dict), _CRI_PLUGIN[_config_version(config, first)]
        if name in plugins:
            setting = _toml_part(plugins, name, dict).get("enable_cdi")
    if isinstance(setting, bool):
        return CdiSetting.ON if setting else CdiSetting.OFF
    if setting is not None:
        raise ValueError("enable_cdi is neither true nor false")
    return CdiSetting.ON if first >= _VERSION_WITH_CDI_ON else CdiSetting.UNSAID


def _config_version(config: TomlTable, otherwise: int) -> int:
    """Raises ValueError for one that is not known here."""
    version = config.get("version", otherwise)
    if not isinstance(version, int) or version not in _CRI_PLUGIN:
        raise ValueError(f"no version of containerd's configuration: {version}")
    return version


def _containerd_configs(host: Sysroot) -> Iterator[TomlTable]:
    """The file, then all files that it imports. Raises ValueError for invalid TOML."""
    # The file of the running containerd: distributions such as k3s use their own. If several containerd were
    # given different files, kubelet's one is unknown.
    commands = (host.text(f"proc/{pid}/cmdline") or "" for pid in processes_named(host, "containerd"))
    given = {_config_option(command.split("\0")) for command in commands} or {_CONTAINERD_CONFIG}
    if len(given) > 1:
        raise ValueError("several containerd run with different configurations")
    todo, done, left = [given.pop()], set[PurePosixPath](), _MOST_CHARACTERS
    while todo:
        path = todo.pop(0)
        text = None if path in done else _config_text(host, path)
        done.add(path)
        if text is not None:
            left -= len(text)
            if left < 0 or len(done) > _MOST_FILES:
                raise ValueError("containerd's configuration is too long to be read")
            if any(line.count(".") > _MOST_DOTS_IN_LINE for line in text.split("\n")):
                raise ValueError("a line has too many dots to be read")
            config = decode_toml(text, "containerd")
            yield config
            todo.extend(_imported_files(host, path.parent, _toml_part(config, "imports", list)))


def _config_option(words: list[str]) -> PurePosixPath:
    for word, following in pairwise([*words, ""]):
        option, _, value = word.partition("=")
        if option in _CONFIG_OPTIONS:
            return PurePosixPath(value or following)
    return _CONTAINERD_CONFIG


def _config_text(host: Sysroot, path: PurePosixPath) -> str | None:
    """A file's content, or None if there is no such file. Raises ValueError for one that cannot be read."""
    text = host.whole(str(path))
    if text is None and host.real(str(path)) is not None:
        raise ValueError(f"{path} cannot be read")
    return text


def _imported_files(host: Sysroot, beside: PurePosixPath, imports: list[Any]) -> Iterator[PurePosixPath]:
    """The files that patterns name, each relative to the file that imports them.

    Raises ValueError for a pattern of directories, and for more patterns than files are read.
    """
    if len(imports) > _MOST_FILES:
        raise ValueError("containerd's configuration imports too much to be read")
    for pattern in imports:
        at = beside / str(pattern)
        if _WILDCARDS.search(str(at.parent)):
            raise ValueError(f"{at} may be in many directories")
        yield from (at.parent / name for name in host.names(str(at.parent)) if fnmatchcase(name, at.name))


def _toml_part(table: TomlTable, key: str, kind: type[T]) -> T:
    """A part of a table, or an empty one if it is missing. Raises ValueError for one of another kind."""
    value = table.get(key, kind())
    if not isinstance(value, kind):
        raise ValueError(f"{key} is no {kind.__name__}")
    return value


# IMEX.


_IMEX_UNIT = "nvidia-imex.service"
_ADMIN_UNIT_FOLDERS = ("etc/systemd/system", "run/systemd/system")
_PACKAGE_UNIT_FOLDERS = ("usr/local/lib/systemd/system", "usr/lib/systemd/system", "lib/systemd/system")
_UNIT_FOLDERS = (*_ADMIN_UNIT_FOLDERS, *_PACKAGE_UNIT_FOLDERS)
"""The search path of systemd for units, the first entry first (systemd.unit(5))."""
_DEPENDENTS = (".wants", ".requires")
_NODES_CONFIG = "/etc/nvidia-imex/nodes_config.cfg"
_NODES_OPTION = re.compile(r"^[ \t]*IMEX_NODE_CONFIG_FILE[ \t]*=[ \t]*(\S+)", re.MULTILINE)
_POD_CGROUP = re.compile(
    r"kubepods|/(?:[\w.-]*-)?pod[0-9a-f][0-9a-f_-]*(?:\.slice)?(?:/|$)|/(?:cri-containerd|crio)-",
    re.MULTILINE,
)
"""The names that kubelet and the runtimes give the control groups of pods, with both cgroup drivers."""
_CHANNEL_DEVICE = re.compile(r"channel([0-9]{1,4})")


def collect_imex(host: Sysroot) -> ImexEvidence:
    """The evidence of IMEX in the host's files."""
    readable = 1 in process_ids(host) and shows_all_processes(host)
    running = processes_named(host, "nvidia-imex") if readable else None
    in_pods = {pid: _is_in_pod(host, pid) for pid in running or ()}
    outside: tuple[int, ...] | None = tuple(pid for pid, inside in in_pods.items() if inside is False)
    if running is None or (not outside and None in in_pods.values()):
        outside = None
    tables = [sockets for pid in running or () if (sockets := sockets_of(host, pid)) is not None]
    return ImexEvidence(
        running=running,
        in_pods=tuple(pid for pid, inside in in_pods.items() if inside),
        outside=outside,
        enabled=_starts_at_boot(host),
        offered=_offers_channels(host),
        channels=tuple(sorted(_channel_devices(host))),
        named=_configured_nodes(host),
        connected=len(set[str]().union(*map(_peer_addresses, tables))) if tables else None,
    )


def _is_in_pod(host: Sysroot, process: int) -> bool | None:
    """Whether a process is in a pod, or None if the name of its control group is not visible in full.

    Within a cgroup namespace, the names of control groups outside of it are relative to it (`/../..`), and
    the common part is left out (cgroup_namespaces(7)).
    """
    group = host.text(f"proc/{process}/cgroup")
    if not group:
        return None
    if _POD_CGROUP.search(group):
        return True
    return None if ":/.." in group and not group.endswith(f"/{_IMEX_UNIT}") else False


def _starts_at_boot(host: Sysroot) -> bool | None:
    if all(host.real(folder) is None for folder in _ADMIN_UNIT_FOLDERS):
        return None
    if _is_unit_masked(host):
        return False
    entries = (f"{at}/{name}" for at in _UNIT_FOLDERS for name in host.names(at))
    return any(_IMEX_UNIT in host.names(entry) for entry in entries if entry.endswith(_DEPENDENTS))


def _is_unit_masked(host: Sysroot) -> bool:
    """Whether the effective unit file is a link to /dev/null: then systemd does not start it at all."""
    folder = next((folder for folder in _UNIT_FOLDERS if _IMEX_UNIT in host.names(folder)), None)
    found = None if folder is None else host.real(folder)
    if found is None:
        return False
    try:
        return str(host.root.joinpath(*found.parts[1:], _IMEX_UNIT).readlink()) == "/dev/null"
    except OSError:
        return False


def _offers_channels(host: Sysroot) -> bool | None:
    text = host.whole("proc/devices")
    return None if text is None else IMEX_CHANNEL_DEVICES in {name for _, name in character_devices(text)}


def _channel_devices(host: Sysroot) -> Iterator[int]:
    for name in host.names(f"dev/{IMEX_CHANNEL_DEVICES}"):
        if found := _CHANNEL_DEVICE.fullmatch(name):
            yield int(found[1])


def _configured_nodes(host: Sysroot) -> tuple[str, ...] | None:
    config = host.text(IMEX_CONFIG_FILE)
    if config is None:
        return None
    file = _NODES_OPTION.search(config)
    nodes = host.text(_NODES_CONFIG if file is None else file[1])
    if nodes is None:
        return None
    return tuple(name for line in nodes.splitlines() if (name := line.partition("#")[0].strip()))


def _peer_addresses(sockets: Sequence[TcpSocket]) -> set[str]:
    """Peers connected at their server's port, without the host itself, which is its own peer too."""
    connected = (sock for sock in sockets if sock.state == ESTABLISHED and sock.peer_port == IMEX_SERVER_PORT)
    return {sock.peer for sock in connected} - {sock.own for sock in sockets}


# The whole host.


_INIT = 1
"""The process that has the host's network namespace."""


def collect_host(here: str, root: Path, runtime: str | None) -> HostEvidence:
    """Read the host below `root`, which findings call `here`.

    `runtime` is the node status' containerRuntimeVersion, if known.
    """
    host = Sysroot(root)
    return HostEvidence(
        here=here,
        driver_version=_driver_version(host),
        runtime=runtime,
        cdi_setting=cdi_setting(host, runtime),
        imex=collect_imex(host),
        busy_ports=_busy_ports(host),
    )


def _driver_version(host: Sysroot) -> str | None:
    """The version of the loaded module, which may differ from the installed packages."""
    found = host.text("sys/module/nvidia/version")
    if found:
        return found
    text = host.text("proc/driver/nvidia/version") or ""
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return match[1] if match else None


def _busy_ports(host: Sysroot) -> frozenset[int] | None:
    sockets = sockets_of(host, _INIT) if shows_all_processes(host) else None
    if sockets is None:
        return None
    return frozenset(sock.port for sock in sockets if sock.state == LISTENING)
