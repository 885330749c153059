"""The stand-in for nvidia-imex-ctl.

Usage: `python -m rackloom.lab.imex.ctl (-c FILE | -u SOCKET) (-q | -N [-j])`. It requests a status from the
daemon that runs with the configuration file, or that listens at the Unix socket: the daemon's own (`-q`) or
that of its domain (`-N`). It exits with 1 if there is no answer.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path

from rackloom.lab.imex.service import ask_daemon
from rackloom.lab.imex.settings import ImexRefusal, imex_host_from_environment, read_imex_options

ANSWER_TIMEOUT = 5.0
"""Seconds for an answer."""


def main() -> int:
    """Ask the daemon that runs with the configuration file, or that listens at the socket."""
    parser = argparse.ArgumentParser(prog="nvidia-imex-ctl")
    parser.add_argument("-c", "--config", type=Path)
    parser.add_argument("-u", dest="socket")
    parser.add_argument("-q", action="store_true", dest="local")
    parser.add_argument("-N", action="store_true", dest="domain")
    parser.add_argument("-j", action="store_true", dest="json")
    options = parser.parse_args()
    try:
        where = options.socket or command_address(options.config)
        question = "local" if options.local else "domain"
        answer = asyncio.run(ask_daemon(where, question, patience=ANSWER_TIMEOUT))
    except (ImexRefusal, OSError, TimeoutError, ValueError) as error:
        print(f"nvidia-imex-ctl (stand-in): {error!r}", file=sys.stderr)  # noqa: T201
        return 1
    print(json.dumps(answer) if options.json else answer["status"])  # noqa: T201
    return 0


def command_address(config: Path) -> tuple[str, int]:
    """The command address of the daemon of a configuration file."""
    settings = read_imex_options(config, imex_host_from_environment())
    return settings.host.address(settings.command_ip) or "127.0.0.1", settings.command_port


if __name__ == "__main__":
    sys.exit(main())
