"""The files that the daemon reads, written where it looks for them."""

from collections.abc import Mapping
from pathlib import Path

import structlog

from rackloom.claim.domain.names import BOOT_FILE
from rackloom.claim.domain.objects import is_ip_address
from rackloom.claim.imex.config import DAEMON_PREFIX, ImexConfig, config_text, daemon_host

_log = structlog.get_logger(__name__)

MARKER = "# Compute Domain Daemon mappings"


def config_file(directory: Path) -> Path:
    """The service's configuration file; the control tool reads it too."""
    return directory / "imexd.cfg"


class ImexFiles:
    """`imexd.cfg` and `nodes.cfg` in `directory`, and the pod's hosts file."""

    def __init__(self, directory: Path, hosts: Path) -> None:
        self.config = config_file(directory)
        self.nodes = directory / "nodes.cfg"
        self._hosts = hosts

    def write_config(self, config: ImexConfig) -> None:
        """The service's options; read once, when it starts."""
        self.config.write_text(config_text(config))

    def write_boot(self, boot_id: str) -> None:
        """The boot of the node in which the daemon has said how it is: the device plugin reads it.

        Nothing where the plugin named no boot: one of an earlier release reads no such file either. A disk
        that takes no file must not end a daemon that runs; the plugin then lets no new job in after a reboot.
        """
        if not boot_id:
            return
        try:
            (self.config.parent / BOOT_FILE).write_text(boot_id)
        except OSError as error:
            _log.warning("imex.boot-not-written", reason=str(error))

    def write_nodes(self, text: str) -> None:
        """The node file; read once, when the service starts."""
        self.nodes.write_text(text)

    def write_hosts(self, addresses: Mapping[int, str]) -> None:
        """The peers' names. In place: a pod's hosts file is a bind mount, which cannot be renamed over."""
        before = self._hosts.read_text()
        after = with_peers(before, addresses)
        if after != before:
            self._hosts.write_text(after)


def with_peers(hosts: str, addresses: Mapping[int, str]) -> str:
    """The hosts file with exactly these peers (index in the clique to address); all other lines stay.

    What is no IP address is left out: peers write their addresses themselves, and a line break in one would
    make lines of its writer's choice.
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
