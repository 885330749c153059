"""`rackloom takeover plan|apply|back`: the prepared claims of one node, from NVIDIA's DRA driver and back.

It works on files of this node, while no plugin of either driver runs there. `plan` changes nothing. Exit
code 1 means that something blocks the takeover, and nothing was changed.

DRANET's NICs are not taken over. `plan` lists the NICs that are in pods. With `--driver dra.net`, `apply` and
`back` fail until no NIC is in a pod and the old driver has ended.
"""

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from rackloom.cli.common import Flag, Output, columns, emit, env_parameter, read_text, with_common_flags

if TYPE_CHECKING:
    from rackloom.claim.node.takeover.claims import Release
    from rackloom.claim.node.takeover.node_files import DriverPlan, NodePlaces

app = App(name="takeover", help="Take a node over from NVIDIA's DRA driver or DRANET, and back.")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TakeoverParameters:
    """The files of this node."""

    driver: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = ()
    "Driver: compute-domain.nvidia.com, gpu.nvidia.com or dra.net. May be repeated. Default: NVIDIA's two."
    plugins: Annotated[Path, env_parameter("KUBELET_PLUGINS_DIRECTORY_PATH")] = Path(
        "/var/lib/kubelet/plugins"
    )
    "kubelet's plugins directory."
    registry: Annotated[Path, env_parameter("KUBELET_REGISTRAR_DIRECTORY_PATH")] = Path(
        "/var/lib/kubelet/plugins_registry"
    )
    "kubelet's plugins_registry directory."
    cdi_root: Annotated[Path, env_parameter("CDI_ROOT")] = Path("/var/run/cdi")
    "Directory from which the container runtime reads CDI specs."
    kubelet_state: Path = Path("/var/lib/kubelet/dra_manager_state")
    "File with kubelet's prepared claims. It has names that NVIDIA's driver does not record."
    sysroot: Path = Path("/")
    "Directory with the host's /proc and /sys."
    nvidia_namespace: str = "nvidia-dra-driver-gpu"
    "Namespace of NVIDIA's driver. Its MPS daemons there are ended when their claims end."

    def places(self) -> "NodePlaces":
        """The paths for the plan."""
        from rackloom.claim.node.takeover.claims import NvidiaInstallation
        from rackloom.claim.node.takeover.node_files import NodePlaces

        boot_id = self.sysroot / "proc/sys/kernel/random/boot_id"
        return NodePlaces(
            plugins=self.plugins,
            registry=self.registry,
            cdi=self.cdi_root,
            kubelet_state=self.kubelet_state,
            boot_id=read_text(boot_id, "name the host's root by --sysroot").strip(),
            dranet=self.sysroot / "run/dranet/dranet.db",
            nvidia=NvidiaInstallation(
                namespace=self.nvidia_namespace,
                has_module=(self.sysroot / "sys/bus/pci/drivers/nvidia").is_dir(),
            ),
        )

    def drivers(self) -> tuple[str, ...]:
        """The requested drivers. Raises `Refused` for another one."""
        from rackloom.claim.node.takeover.dranet import DRANET
        from rackloom.claim.node.takeover.node_files import DRIVERS
        from rackloom.errors import Refused

        known = (*DRIVERS, DRANET)
        for driver in self.driver:
            if driver not in known:
                raise Refused(
                    f"no takeover of driver {driver} is known", nearest_fix=f"use {' or '.join(known)}"
                )
        return tuple(dict.fromkeys(self.driver)) or DRIVERS


ReleaseName = Literal["0.4", "0.5"]


@app.command
@with_common_flags
def plan(
    *,
    node: TakeoverParameters = TakeoverParameters(),
    back: Flag = False,
    release: ReleaseName | None = None,
    output: Output = "table",
) -> int:
    """Print the steps of `apply` or `back`. Nothing is changed, and plugins may run.

    Parameters
    ----------
    node
        The files of this node.
    back
        Print the steps back to NVIDIA's driver.
    release
        The release of NVIDIA's driver that will read the file. Default: the one that wrote it.
    """
    from rackloom.claim.node.takeover.dranet import DRANET, plan_dranet
    from rackloom.claim.node.takeover.node_files import Phase, plan_takeover, plan_way_back

    places, drivers = node.places(), node.drivers()
    plans = [
        plan_dranet(places, back=back)
        if driver == DRANET
        else plan_way_back(places, driver, _release(release))
        if back
        else plan_takeover(places, driver)
        for driver in drivers
    ]
    blocked = any(made.blocked for made in plans)
    nics = plan_dranet(places, back=back)
    if not node.driver and (nics.claims or nics.phase is Phase.DRANET):
        # This is information only: `apply` and `back` concern DRANET only if it is named.
        plans.append(nics)
    emit(plans, output, lambda: _table(plans, done=False))
    return 1 if blocked else 0


@app.command
@with_common_flags
def apply(
    *, node: TakeoverParameters = TakeoverParameters(), wait: float = 0.0, output: Output = "table"
) -> None:
    """Take over the claims that NVIDIA's driver has prepared, and keep its file. Safe to repeat.

    Parameters
    ----------
    node
        The files of this node.
    wait
        Seconds to wait while a plugin runs or a pod has a NIC of DRANET's. "inf" waits without a limit.
    """
    from rackloom.claim.node.takeover.node_files import apply_takeover

    places, drivers = node.places(), node.drivers()

    def act() -> "tuple[DriverPlan, ...]":
        drained, rest = _drained(places, drivers, back=False)
        return *apply_takeover(places, rest), *drained

    plans = _once_stopped(act, wait)
    emit(plans, output, lambda: _table(plans, done=True))


@app.command
@with_common_flags
def back(
    *,
    node: TakeoverParameters = TakeoverParameters(),
    release: ReleaseName | None = None,
    output: Output = "table",
) -> None:
    """Give the claims back to NVIDIA's driver, which finds those that are still prepared. Safe to repeat.

    Parameters
    ----------
    node
        The files of this node.
    release
        The release of NVIDIA's driver that will read the file. Default: the one that wrote it.
    """
    from rackloom.claim.node.takeover.node_files import give_back

    places = node.places()
    drained, rest = _drained(places, node.drivers(), back=True)
    plans = (*give_back(places, rest, _release(release)), *drained)
    emit(plans, output, lambda: _table(plans, done=True))


def _drained(
    places: "NodePlaces", drivers: Sequence[str], *, back: bool
) -> "tuple[tuple[DriverPlan, ...], tuple[str, ...]]":
    """The plan for DRANET, if it is named and nothing blocks it, and the other drivers."""
    from rackloom.claim.node.takeover.dranet import DRANET, require_drained

    asked = tuple(require_drained(places, back=back) for driver in drivers if driver == DRANET)
    return asked, tuple(driver for driver in drivers if driver != DRANET)


LOOK_SECONDS = 1.0
"""Seconds between two checks for a plugin that must stop."""


def _once_stopped(act: "Callable[[], Sequence[DriverPlan]]", seconds: float) -> "Sequence[DriverPlan]":
    """Call `act` until no running plugin prevents it. Raises `StillRunning` after `seconds`."""
    from rackloom.claim.node.storage import StillRunning

    # As the first process of a container, it would otherwise ignore SIGTERM.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    until, reported = time.monotonic() + seconds, ""
    while True:
        try:
            return act()
        except StillRunning as running:
            if time.monotonic() >= until:
                raise
            if reported != str(running):
                reported = str(running)
                print(f"rackloom: waiting: {running}", file=sys.stderr, flush=True)
            time.sleep(LOOK_SECONDS)


def _release(name: ReleaseName | None) -> "Release | None":
    from rackloom.claim.node.takeover.claims import Release

    return None if name is None else Release(name)


_PHASES = {
    "none": "there is no checkpoint",
    "nvidia": "the checkpoint is NVIDIA's",
    "taken-over": "the checkpoint was taken over",
    "ours": "the checkpoint is ours",
    "dranet": "DRANET is or was here",
}


def _table(plans: "Sequence[DriverPlan]", *, done: bool) -> str:
    return "\n\n".join("\n".join(_lines(plan, done=done)) for plan in plans)


def _lines(plan: "DriverPlan", *, done: bool) -> list[str]:
    found = f"{plan.driver}: {_PHASES[plan.phase]}"
    if not (plan.writes or plan.claims or plan.notes or plan.running):
        return [f"{found}; nothing to do"]
    lines = [found]
    if plan.claims:
        rows = [
            (move.uid, move.claim or "-", move.state, ", ".join(move.devices) or "-", move.fate)
            for move in plan.claims
        ]
        lines += columns(("UID", "CLAIM", "STATE", "DEVICES", "FATE"), rows).split("\n")
    for move in plan.claims:
        lines += [f"{move.fate}: {move.uid}: {move.why}"] if move.why else []
        lines += [f"  fix: {move.fix}"] if move.fix else []
    lines += [f"note: {note}" for note in plan.notes]
    lines += [f"stop first: {what}" for what in plan.running]
    if not plan.writes:
        return [*lines, "nothing to write"]
    if plan.blocked:
        return [*lines, "nothing is written while a claim is blocked"]
    return lines + [f"{'done' if done else 'would'}: {write}" for write in plan.writes]
