"""The launcher of MPS daemons as a process: `rackloom node mps`, in a pod that outlives the GPU plugin's.

It needs no API server. Only its container matters: the daemons that it starts for the plugin run there and
end when this process does.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from rackloom.app.process import freeze_loaded_objects, run_until_stopped, stop_on_signals
from rackloom.claim.node.gpu.driver_programs import DriverPrograms
from rackloom.claim.node.gpu.mps_launcher import daemons_home, launcher_socket, serve_launches


class MpsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Paths that the launcher shares with the GPU plugin, and the root of NVIDIA's driver."""

    plugins: Path
    """kubelet's plugins directory."""
    driver_root: Path
    """Root of NVIDIA's driver in this container."""


def run_mps(options: MpsOptions, announce: Callable[[str], None]) -> None:
    """Start MPS daemons for the GPU plugin until SIGTERM or SIGINT."""
    asyncio.run(_serve(options, announce))


async def _serve(options: MpsOptions, announce: Callable[[str], None]) -> None:
    stopped = stop_on_signals()
    freeze_loaded_objects()
    path = launcher_socket(daemons_home(options.plugins))
    announce(f"rackloom: starting MPS daemons for the plugin that asks on {path}")
    await run_until_stopped(stopped, serve_launches(path, DriverPrograms(options.driver_root)))
