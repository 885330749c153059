"""`python -m rackloom.twin.imex.ctl -c FILE (-q | -N [-j])`: the stand-in for nvidia-imex-ctl."""

import argparse
import asyncio
import json
import sys
from pathlib import Path

from rackloom.twin.imex.links import ask
from rackloom.twin.imex.settings import Refusal, read_settings, surroundings


def main() -> int:
    """Ask the daemon that runs with the configuration file."""
    parser = argparse.ArgumentParser(prog="nvidia-imex-ctl")
    parser.add_argument("-c", "--config", type=Path, required=True)
    parser.add_argument("-q", action="store_true", dest="local")
    parser.add_argument("-N", action="store_true", dest="domain")
    parser.add_argument("-j", action="store_true", dest="json")
    options = parser.parse_args()
    try:
        settings = read_settings(options.config, surroundings())
        question = "local" if options.local else "domain"
        answer = asyncio.run(ask(settings.bind_ip, settings.command_port, question, patience=5))
    except (Refusal, OSError, TimeoutError, ValueError) as error:
        print(f"nvidia-imex-ctl (stand-in): {error!r}", file=sys.stderr)  # noqa: T201
        return 1
    print(json.dumps(answer) if options.json else answer["status"])  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
