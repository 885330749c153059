"""`python -m rackloom.twin.imex.ctl (-c FILE | -u SOCKET) (-q | -N [-j])`: a stand-in for nvidia-imex-ctl."""

import argparse
import asyncio
import json
import sys
from pathlib import Path

from rackloom.twin.imex.links import ask
from rackloom.twin.imex.settings import Refusal, read_settings, surroundings

PATIENCE = 5.0
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
        answer = asyncio.run(ask(where, question, patience=PATIENCE))
    except (Refusal, OSError, TimeoutError, ValueError) as error:
        print(f"nvidia-imex-ctl (stand-in): {error!r}", file=sys.stderr)  # noqa: T201
        return 1
    print(json.dumps(answer) if options.json else answer["status"])  # noqa: T201
    return 0


def command_address(config: Path) -> tuple[str, int]:
    """Where the daemon of a configuration file is asked."""
    settings = read_settings(config, surroundings())
    return settings.around.address(settings.command_ip) or "127.0.0.1", settings.command_port


if __name__ == "__main__":
    sys.exit(main())
