"""How fast node plugins prepare, attach and publish, and how much memory each holds, one JSON object a row.

    python benchmarks/node.py [--quick] [--only gpu|nic|imex]

Each plugin runs in a process of its own behind its real unix socket. kubelet, API server and container
runtime are simulated in the same process: their time and memory are part of the figures. Each claim has one
device, is prepared by a call of its own and given back before the next one. `publish` is from the start of
the plugin to a complete pool of 128 GPUs, and then the change of one. `claims` counts samples; `before_mib`
is what the process held before the plugin was started. The NIC rows need root: without it one row says so.
"""

import argparse
import asyncio
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import structlog

PARTS = {"gpu": "node_gpus", "nic": "node_nics", "imex": "node_imex"}
CLAIMS, QUICK_CLAIMS = 1000, 20


def print_rows(plugin: str, claims: int) -> None:
    """Print the rows of one plugin."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    # Paths of unix sockets must be short.
    with tempfile.TemporaryDirectory(prefix="rl") as folder:
        for line in asyncio.run(importlib.import_module(PARTS[plugin]).measured(Path(folder), claims)):
            print(json.dumps(line), flush=True)


def every(words: list[str]) -> None:
    """Each plugin in a process of its own: its memory is not to be another's."""
    for plugin in PARTS:
        # A crash in native code says where.
        command = [sys.executable, "-X", "faulthandler", __file__, *words, "--only", plugin]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few claims: shows that it works, no more")
    parser.add_argument("--only", choices=PARTS, help="the rows of one plugin")
    options = parser.parse_args()
    if options.only is None:
        every(["--quick"] if options.quick else [])
    else:
        print_rows(options.only, QUICK_CLAIMS if options.quick else CLAIMS)
