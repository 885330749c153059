"""The files of nvidia-imex: service configuration, node list, hosts entries, certificates.

In mode `dns` the node file holds one fixed DNS name for each possible index of the clique, and the pod's
hosts file maps the names of members to their addresses, so the node file never changes. In mode `ip` it
holds addresses. A line number in the node file is a node's index, so the file must be the same on all
nodes. The hosts file is written in place, since it is a bind mount that cannot be renamed over. Values that
are no IP address are left out: peers write their own addresses, and a line break in one would add lines of
the writer's choice.

`write_boot` leaves the node's boot id on the host, for the device plugin (`claim.node.imex.domains`).

With TLS all daemons of a domain share one identity: a peer has to prove that it is of the domain. The
peer name overrides the address, which changes with the pod. Only source FILE reloads credentials on
SIGUSR1. `tls_fingerprint` changes when kubelet swaps the Secret's files.

Source: the option names and defaults of NVIDIA's IMEX service guide.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Literal

import structlog

from rackloom.core.cluster.names import BOOT_FILE, IMEX_COMMAND_PORT, IMEX_SERVER_PORT
from rackloom.core.domains.clique import is_ip_address
from rackloom.core.domains.imex_settings import IMEX_SETTING_DEFAULTS, ImexSettings

# Texts.


NodeFileMode = Literal["dns", "ip"]
"""The content of the node file: names, which never change, or the addresses of the members."""

DAEMON_PREFIX = "compute-domain-daemon-"


@dataclass(frozen=True, slots=True)
class ImexTls:
    """The files of a daemon's key, certificate and authority, and the name in the certificate of every peer.

    All daemons of a domain share one identity: a peer has to prove that it is of the domain. The name
    overrides the peer's address, which changes with its pod.
    """

    directory: PurePath
    peer_name: str

    @property
    def files(self) -> tuple[PurePath, PurePath, PurePath]:
        """Key, certificate and authority, under the names of a kubernetes.io/tls Secret."""
        return self.directory / "tls.key", self.directory / "tls.crt", self.directory / "ca.crt"


@dataclass(frozen=True, slots=True)
class ImexConfig:
    """The settings of one daemon. `address` is its pod's.

    Without `tls` any host that reaches its port may join the domain.
    """

    address: str
    nodes_file: PurePath
    tls: ImexTls | None
    mode: NodeFileMode = "dns"
    server_port: int = IMEX_SERVER_PORT
    command_port: int = IMEX_COMMAND_PORT
    settings: ImexSettings = field(default_factory=dict)
    """The operator's settings. See `core.domains.imex_settings`."""


def config_text(config: ImexConfig) -> str:
    """The service's configuration file."""
    options = {
        **IMEX_SETTING_DEFAULTS,
        **config.settings,
        "LOG_FILE_NAME": "",  # empty: to stderr, and so to the container's log
        "DAEMONIZE": "0",
        # nvidia-imex compares this as text with the node file's entry for this node, so an address beside
        # names keeps it from starting. Empty, it takes the first entry that is an address of this machine.
        "BIND_INTERFACE_IP": config.address if config.mode == "ip" else "",
        "SERVER_PORT": str(config.server_port),
        "IMEX_NODE_CONFIG_FILE": str(config.nodes_file),
        "IMEX_CMD_ENABLED": "1",
        # nvidia-imex-ctl connects to this address, and `-N` reaches no peer from a loopback address.
        "IMEX_CMD_BIND_INTERFACE_IP": config.address,
        "IMEX_CMD_PORT": str(config.command_port),
        **_authentication(config.tls),
    }
    return "".join(f"{name}={value}\n" for name, value in options.items())


def _authentication(tls: ImexTls | None) -> dict[str, str]:
    if tls is None:
        return {"IMEX_ENABLE_AUTH_ENCRYPTION": "0"}
    key, certificate, authority = (str(path) for path in tls.files)
    return {
        "IMEX_ENABLE_AUTH_ENCRYPTION": "1",
        "IMEX_AUTH_ENCRYPTION_MODE": "SSL_TLS",
        "IMEX_AUTH_SOURCE": "FILE",  # the only source for which SIGUSR1 reloads credentials
        "IMEX_SERVER_KEY": key,
        "IMEX_SERVER_CERT": certificate,
        "IMEX_SERVER_CERT_AUTH": authority,
        "IMEX_CLIENT_KEY": key,
        "IMEX_CLIENT_CERT": certificate,
        "IMEX_CLIENT_CERT_AUTH": authority,
        "IMEX_SECURITY_TARGET_OVERRIDE": tls.peer_name,
    }


def daemon_host(index: int) -> str:
    """The DNS name under which the daemon at this index of its clique is known to its peers."""
    return f"{DAEMON_PREFIX}{index:04d}"


def nodes_text(hosts: Sequence[str]) -> str:
    """The node configuration file: a peer's line number is its index, so it must be alike on all nodes."""
    return "".join(f"{host}\n" for host in hosts)


# Files.


_log = structlog.get_logger(__name__)

MARKER = "# Compute Domain Daemon mappings"


def config_file(directory: Path) -> Path:
    """The service's configuration file. The control tool reads it too."""
    return directory / "imexd.cfg"


class ImexFiles:
    """`imexd.cfg` and `nodes.cfg` in `directory`, and the pod's hosts file."""

    def __init__(self, directory: Path, hosts: Path) -> None:
        self.config = config_file(directory)
        self.nodes = directory / "nodes.cfg"
        self._hosts = hosts

    def write_config(self, config: ImexConfig) -> None:
        """The service's options, which it reads once at its start."""
        self.config.write_text(config_text(config))

    def write_boot(self, boot_id: str) -> None:
        """Write the boot of the node in which the daemon has reported itself, for the device plugin.

        Nothing is written if the plugin named no boot: one of an earlier release reads no such file. A
        full disk must not end a running daemon. The plugin then admits no new job after a reboot.
        """
        if not boot_id:
            return
        try:
            (self.config.parent / BOOT_FILE).write_text(boot_id)
        except OSError as error:
            _log.warning("imex.boot-not-written", reason=str(error))

    def write_nodes(self, text: str) -> None:
        """The node file, which the service reads once at its start."""
        self.nodes.write_text(text)

    def write_hosts(self, addresses: Mapping[int, str]) -> None:
        """The peers' names. In place: a pod's hosts file is a bind mount, which cannot be renamed over."""
        before = self._hosts.read_text()
        after = with_peers(before, addresses)
        if after != before:
            self._hosts.write_text(after)


def with_peers(hosts: str, addresses: Mapping[int, str]) -> str:
    """The hosts file with exactly these peers (index in the clique to address). All other lines stay.

    Values that are no IP address are left out: peers write their addresses themselves, and a line break in
    one would make lines of its writer's choice.
    """
    kept = [line for line in hosts.splitlines() if not _is_ours(line)]
    peers = [
        f"{address}\t{daemon_host(index)}"
        for index, address in sorted(addresses.items())
        if is_ip_address(address)
    ]
    return "".join(f"{line}\n" for line in [*kept, MARKER, *peers])


def _is_ours(line: str) -> bool:
    return line == MARKER or DAEMON_PREFIX in line


# TLS material.


def tls_fingerprint(tls: ImexTls | None) -> str | None:
    """A digest of the domain's Secret as kubelet projects it, or None while a file is missing.

    kubelet swaps all files of a Secret at once, behind a symlink. An empty file counts as missing.
    """
    digest = hashlib.sha256()
    for path in () if tls is None else tls.files:
        try:
            content = Path(path).read_bytes()
        except OSError:
            return None
        if not content:
            return None
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()
