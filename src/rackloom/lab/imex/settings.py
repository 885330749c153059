"""The settings that the IMEX stand-in reads and checks at start: options, the node file, and its own node.

nvidia-imex gets the names or addresses of all nodes, but not which of them it is. It resolves each
entry of the node file and takes the first that is an address of its machine. An entry that does not
resolve is a warning. The daemon refuses to start only if none is local. BIND_INTERFACE_IP is compared
with that entry as text, so an address never matches a name: with a node file of names the option must
be empty.

`ImexHost` is the machine as one daemon sees it. Several daemons may share a machine, each with its own
hosts file or network prefix, and may run faster than NVIDIA's program (the RACKLOOM_TWIN_IMEX_* variables).
"""

import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rackloom.core.domains.clique import is_ip_address

HOSTS_VARIABLE = "RACKLOOM_TWIN_IMEX_HOSTS"
"""A hosts file to use instead of /etc/hosts, if daemons that share a machine need one each."""
NETWORK_VARIABLE = "RACKLOOM_TWIN_IMEX_NETWORK"
"""Two octets, such as `127.7`, that take the place of the first two of every address: simulated pods have
addresses at which nothing can listen."""
SPEED_VARIABLE = "RACKLOOM_TWIN_IMEX_SPEED"
"""How many times faster than NVIDIA's program it is, for tests of something else."""

DEFAULT_NODES = "/etc/nvidia-imex/nodes_config.cfg"
LogLine = Callable[[str, str], None]
"""Takes a level (INFO, WARNING, ERROR) and a text."""


class ImexRefusal(Exception):
    """The configuration prevents initialisation. The arguments are the lines of the log that say why."""


@dataclass(frozen=True)
class ImexHost:
    """The machine as a daemon sees it. Several daemons share one where `hosts` or `network` is given."""

    hosts: Path | None = None
    network: str = ""
    beat: float = 0.2
    """Seconds between heart-beats to a peer."""
    speed: float = 1.0

    @property
    def shared(self) -> bool:
        """Whether other daemons' addresses are addresses of this machine too."""
        return self.hosts is not None or bool(self.network)

    def seconds(self, observed: float) -> float:
        """The duration here of a step that took NVIDIA's program `observed` seconds."""
        return observed / self.speed

    def address(self, named: str) -> str:
        """The address to listen at or connect to for one of the configuration or the hosts file."""
        return f"{self.network}.{named.split('.', 2)[2]}" if named and self.network else named

    def resolve(self, host: str) -> str | None:
        """A node's address now, or None if its name does not resolve (an unused member slot)."""
        if is_ip_address(host):
            return self.address(host)
        if self.hosts is not None:
            lines = (line.split() for line in self.hosts.read_text().splitlines())
            return next((self.address(fields[0]) for fields in lines if host in fields[1:]), None)
        try:
            return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except socket.gaierror:
            return None


def imex_host_from_environment() -> ImexHost:
    """As the environment describes them."""
    hosts = os.environ.get(HOSTS_VARIABLE)
    return ImexHost(
        Path(hosts) if hosts else None,
        os.environ.get(NETWORK_VARIABLE, ""),
        speed=float(os.environ.get(SPEED_VARIABLE) or 1),
    )


@dataclass(frozen=True)
class ImexOptions:
    """The options that the stand-in acts on."""

    bind_ip: str
    port: int
    command_ip: str
    """The address of the command service. Empty: every address."""
    command_port: int
    command_socket: str
    """A Unix socket of the command service. Empty: no socket."""
    nodes_file: str
    nodes: tuple[str, ...]
    options: dict[str, str]
    host: ImexHost

    @property
    def log_level(self) -> int:
        """How much is logged: 0 for nothing to 4 for all, which is the default."""
        return int(self.options.get("LOG_LEVEL", "4"))

    @property
    def authenticated(self) -> bool:
        """Whether peers must show a certificate of the domain's authority."""
        return self.options.get("IMEX_ENABLE_AUTH_ENCRYPTION") == "1"

    def own(self, log: LogLine) -> tuple[int, str]:
        """The line of the node file that is this node, and its address. Raises `Refusal`."""
        found: list[tuple[int, str]] = []
        for index, node in enumerate(self.nodes):
            address = self.host.resolve(node)
            if address is None:
                log("WARNING", f"Unable to resolve '{node}' while looking for matching local IP addresses")
            elif self._is_local(address):
                found.append((index, address))
        if not found:
            raise ImexRefusal(
                f"No matching network interface found for any IP addresses in {self.nodes_file}"
            )
        entry = self.nodes[found[0][0]]
        if self.bind_ip and self.bind_ip != entry:
            raise ImexRefusal(
                f"Configured bind IP address '{self.bind_ip}' does not match"
                f" the discovered IP address '{entry}'",
                "Validation of network configuration failed",
            )
        return found[0]

    def _is_local(self, address: str) -> bool:
        if self.host.shared and self.command_ip:
            # Every address of 127.0.0.0/8 is local to all daemons of the machine. Only this is the daemon's.
            return address == self.host.address(self.command_ip)
        # Linux binds to all of 127.0.0.0/8, but an interface has only one address of it.
        if address.startswith("127.") and address != "127.0.0.1":
            return False
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                return False
        return True

    def server_tls(self) -> ssl.SSLContext | None:
        """The context for peers that connect, or None without authentication."""
        return self._tls("SERVER", ssl.PROTOCOL_TLS_SERVER) if self.authenticated else None

    def client_tls(self) -> ssl.SSLContext | None:
        """The context for connecting to peers, or None without authentication."""
        return self._tls("CLIENT", ssl.PROTOCOL_TLS_CLIENT) if self.authenticated else None

    def _tls(self, side: str, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        try:
            context.load_cert_chain(self.options[f"IMEX_{side}_CERT"], self.options[f"IMEX_{side}_KEY"])
            context.load_verify_locations(self.options[f"IMEX_{side}_CERT_AUTH"])
        except (KeyError, OSError) as error:
            raise ImexRefusal(f"{side.lower()} credentials: {error!r}") from error
        context.verify_mode = ssl.CERT_REQUIRED
        return context


def read_imex_options(path: Path, host: ImexHost) -> ImexOptions:
    """Read the configuration and the node file it names. Raises `Refusal`, `OSError`."""
    lines = (line.strip() for line in path.read_text().splitlines())
    options = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    if options.get("IMEX_ENABLE_AUTH_ENCRYPTION") == "1":
        if options.get("IMEX_AUTH_ENCRYPTION_MODE") != "SSL_TLS":
            raise ImexRefusal("the stand-in knows IMEX_AUTH_ENCRYPTION_MODE=SSL_TLS only")
        if options.get("IMEX_AUTH_SOURCE") != "FILE":
            raise ImexRefusal("the stand-in knows IMEX_AUTH_SOURCE=FILE only")
    nodes_file = options.get("IMEX_NODE_CONFIG_FILE") or DEFAULT_NODES
    nodes = Path(nodes_file).read_text()
    return ImexOptions(
        bind_ip=options.get("BIND_INTERFACE_IP", ""),
        port=int(options.get("SERVER_PORT", "50000")),
        command_ip=options.get("IMEX_CMD_BIND_INTERFACE_IP", ""),
        command_port=int(options.get("IMEX_CMD_PORT", "50005")),
        command_socket=options.get("IMEX_CMD_UNIX_DOMAIN_PATH", ""),
        nodes_file=nodes_file,
        nodes=tuple(line.strip() for line in nodes.splitlines() if line.strip() and line[0] != "#"),
        options=options,
        host=host,
    )
