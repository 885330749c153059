"""The configuration that the stand-in reads: NVIDIA's option names, and the refusals that theirs makes."""

import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

HOSTS_VARIABLE = "RACKLOOM_TWIN_IMEX_HOSTS"
"""A hosts file to use instead of /etc/hosts, where daemons that share a machine need one each."""
NETWORK_VARIABLE = "RACKLOOM_TWIN_IMEX_NETWORK"
"""Two octets, such as `127.7`, that take the place of the first two of every address: simulated pods have
addresses at which nothing can listen."""


class Refusal(Exception):
    """The configuration prevents initialisation."""


@dataclass(frozen=True)
class Surroundings:
    """The machine as a daemon sees it, where several daemons share one."""

    hosts: Path | None = None
    network: str = ""
    beat: float = 0.2
    """Seconds between heart-beats to a peer."""

    def address(self, named: str) -> str:
        """Where to listen or connect for an address of the configuration or the hosts file."""
        return f"{self.network}.{named.split('.', 2)[2]}" if self.network else named

    def resolve(self, host: str) -> str | None:
        """A node's address now; None for a name that nobody has (a place that is not taken)."""
        if host[:1].isdigit():
            return self.address(host)
        if self.hosts is not None:
            lines = (line.split() for line in self.hosts.read_text().splitlines())
            return next((self.address(fields[0]) for fields in lines if host in fields[1:]), None)
        try:
            return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except socket.gaierror:
            return None


def surroundings() -> Surroundings:
    """As the environment describes them."""
    hosts = os.environ.get(HOSTS_VARIABLE)
    return Surroundings(Path(hosts) if hosts else None, os.environ.get(NETWORK_VARIABLE, ""))


@dataclass(frozen=True)
class Settings:
    """The options that the stand-in acts on."""

    bind_ip: str
    port: int
    command_port: int
    nodes: tuple[str, ...]
    options: dict[str, str]
    around: Surroundings

    @property
    def authenticated(self) -> bool:
        """Whether peers must show a certificate of the domain's authority."""
        return self.options.get("IMEX_ENABLE_AUTH_ENCRYPTION") == "1"

    def own_index(self) -> int:
        """The line of the node file that is this node."""
        for index, host in enumerate(self.nodes):
            if self.around.resolve(host) == self.bind_ip:
                return index
        raise Refusal(f"no line of the node file is {self.bind_ip}")

    def server_tls(self) -> ssl.SSLContext | None:
        """The context for peers that connect; None without authentication."""
        return self._tls("SERVER", ssl.PROTOCOL_TLS_SERVER) if self.authenticated else None

    def client_tls(self) -> ssl.SSLContext | None:
        """The context for connecting to peers; None without authentication."""
        return self._tls("CLIENT", ssl.PROTOCOL_TLS_CLIENT) if self.authenticated else None

    def _tls(self, side: str, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        try:
            context.load_cert_chain(self.options[f"IMEX_{side}_CERT"], self.options[f"IMEX_{side}_KEY"])
            context.load_verify_locations(self.options[f"IMEX_{side}_CERT_AUTH"])
        except (KeyError, OSError) as error:
            raise Refusal(f"{side.lower()} credentials: {error!r}") from error
        context.verify_mode = ssl.CERT_REQUIRED
        return context


def read_settings(path: Path, around: Surroundings) -> Settings:
    """Read the configuration and the node file it names."""
    lines = (line.strip() for line in path.read_text().splitlines())
    options = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    if options.get("IMEX_ENABLE_AUTH_ENCRYPTION") == "1":
        _check_authentication(options)
    nodes = Path(options.get("IMEX_NODE_CONFIG_FILE", "/etc/nvidia-imex/nodes_config.cfg")).read_text()
    return Settings(
        bind_ip=around.address(options.get("BIND_INTERFACE_IP", "")),
        port=int(options.get("SERVER_PORT", "50000")),
        command_port=int(options.get("IMEX_CMD_PORT", "50005")),
        nodes=tuple(line.strip() for line in nodes.splitlines() if line.strip() and line[0] != "#"),
        options=options,
        around=around,
    )


def _check_authentication(options: dict[str, str]) -> None:
    if options.get("IMEX_AUTH_ENCRYPTION_MODE") != "SSL_TLS":
        raise Refusal("the stand-in knows IMEX_AUTH_ENCRYPTION_MODE=SSL_TLS only")
    if options.get("IMEX_AUTH_SOURCE") != "FILE":
        raise Refusal("the stand-in knows IMEX_AUTH_SOURCE=FILE only")
