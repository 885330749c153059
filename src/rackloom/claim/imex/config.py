"""The configuration files of nvidia-imex, as text.

Source: the option names and defaults of NVIDIA's IMEX service guide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from rackloom.claim.domain.names import IMEX_COMMAND_PORT, IMEX_SERVER_PORT

Mode = Literal["dns", "ip"]
"""What the node file holds: names, which never change, or the addresses of the members."""

DAEMON_PREFIX = "compute-domain-daemon-"


@dataclass(frozen=True, slots=True)
class Tls:
    """Where a daemon's key, certificate and authority lie, and the name that every peer's certificate bears.

    All daemons of a domain share one identity: being of the domain is what a peer has to prove. The name
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
    """What one daemon is told. `address` is its pod's.

    Without `tls` anybody who reaches its port may join the domain.
    """

    address: str
    nodes_file: PurePath
    tls: Tls | None
    mode: Mode = "dns"
    server_port: int = IMEX_SERVER_PORT
    command_port: int = IMEX_COMMAND_PORT


def config_text(config: ImexConfig) -> str:
    """The service's configuration file."""
    options = {
        "LOG_LEVEL": "4",
        "LOG_FILE_NAME": "",  # empty: to stderr, where the container's log is
        "DAEMONIZE": "0",
        # nvidia-imex compares this as text with the node file's entry for this node, so an address beside
        # names keeps it from starting. Empty, it takes the first entry that is an address of this machine.
        "BIND_INTERFACE_IP": config.address if config.mode == "ip" else "",
        "SERVER_PORT": str(config.server_port),
        "IMEX_NODE_CONFIG_FILE": str(config.nodes_file),
        # After an unsafe stop, wait for the nodes that had imported memory, so that no stale reference stays.
        "IMEX_WAIT_FOR_QUORUM": "RECOVERY",
        "IMEX_CMD_ENABLED": "1",
        # nvidia-imex-ctl asks at this address, and `-N` reaches no peer from a loopback address.
        "IMEX_CMD_BIND_INTERFACE_IP": config.address,
        "IMEX_CMD_PORT": str(config.command_port),
        "IMEX_NODE_DISCONNECTED_GRACE_TIME": "-1",
        **_authentication(config.tls),
    }
    return "".join(f"{name}={value}\n" for name, value in options.items())


def _authentication(tls: Tls | None) -> dict[str, str]:
    if tls is None:
        return {"IMEX_ENABLE_AUTH_ENCRYPTION": "0"}
    key, certificate, authority = (str(path) for path in tls.files)
    return {
        "IMEX_ENABLE_AUTH_ENCRYPTION": "1",
        "IMEX_AUTH_ENCRYPTION_MODE": "SSL_TLS",
        "IMEX_AUTH_SOURCE": "FILE",  # the only source whose credentials SIGUSR1 reloads
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
