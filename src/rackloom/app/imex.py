"""`rackloom imex run`: one IMEX daemon, as a container of a ComputeDomain's DaemonSet."""

import asyncio
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from rackloom.app.stopping import told_to_stop, work_until
from rackloom.claim.domain import names
from rackloom.claim.domain.objects import Ref, is_ip_address
from rackloom.claim.imex.child import start
from rackloom.claim.imex.config import ImexConfig, Mode, Tls
from rackloom.claim.imex.control import ImexControl
from rackloom.claim.imex.credentials import Credentials
from rackloom.claim.imex.daemon import ImexDaemon
from rackloom.claim.imex.files import ImexFiles, config_file
from rackloom.claim.imex.member import Place
from rackloom.claim.imex.own_pod import label_pod
from rackloom.claim.imex.probe import probes_answered
from rackloom.claim.imex.status import READY
from rackloom.claim.imex.steps import Layout
from rackloom.claim.imex.supervisor import Supervisor
from rackloom.claim.kube.lightkube_api import connect
from rackloom.errors import Refused, Retry

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ImexSettings:
    """Where things are, and how peers are named. `tls` None switches authentication off."""

    directory: Path
    hosts: Path
    tls_directory: Path | None
    mode: Mode
    quorum: int
    program: Sequence[str]
    control_program: Sequence[str]
    kubeconfig: Path | None
    probe_port: int


def place_from(environment: Mapping[str, str]) -> Place:
    """Where this daemon runs, from what the device plugin and the DaemonSet put into the environment."""
    wanted = ("COMPUTE_DOMAIN_UUID", "NODE_NAME", "POD_IP", "POD_UID", "POD_NAME", "POD_NAMESPACE")
    missing = [name for name in wanted if not environment.get(name)]
    if missing:
        raise Refused(
            f"{', '.join(missing)} not set in the environment",
            nearest_fix="run it in a pod of a ComputeDomain's DaemonSet, in a runtime with CDI switched on",
        )
    most = environment.get("MAX_NODES_PER_IMEX_DOMAIN") or str(names.MAX_NODES_PER_IMEX_DOMAIN)
    if not (most.isascii() and most.isdigit() and 0 < int(most[:5]) <= 9999):
        raise Refused(f"MAX_NODES_PER_IMEX_DOMAIN is {most!r}", nearest_fix="use a number from 1 to 9999")
    if not is_ip_address(environment["POD_IP"]):
        raise Refused(f"POD_IP is {environment['POD_IP']!r}", nearest_fix="set it to the pod's address")
    return Place(
        compute_domain=environment["COMPUTE_DOMAIN_UUID"],
        clique_id=environment.get("CLIQUE_ID", ""),
        namespace=environment["POD_NAMESPACE"],
        node=environment["NODE_NAME"],
        address=environment["POD_IP"],
        pod=Ref(environment["POD_NAME"], environment["POD_UID"], environment["POD_NAMESPACE"]),
        max_nodes=int(most),
        boot_id=environment.get(names.BOOT_ID_VARIABLE, ""),
    )


def run_imex(settings: ImexSettings) -> None:
    """Run the daemon until SIGTERM or SIGINT."""
    asyncio.run(_run(settings, place_from(os.environ)))


async def _run(settings: ImexSettings, place: Place) -> None:
    stopped = told_to_stop()
    async with connect(settings.kubeconfig, user_agent="rackloom-imex") as api:
        if not place.clique_id:
            _log.info("imex.idle", reason="this node is in no NVLink clique")
            async with probes_answered(place.address, settings.probe_port, _nothing_to_do):
                await label_pod(api, place)
                await stopped.wait()
            return
        control = ImexControl(settings.control_program, config_file(settings.directory))
        files = ImexFiles(settings.directory, settings.hosts)
        daemon = ImexDaemon(
            api,
            place,
            _supervisor(settings, place, files),
            control,
            random.Random(),  # noqa: S311
            entered=partial(files.write_boot, place.boot_id),
        )
        async with probes_answered(place.address, settings.probe_port, partial(_need_ready, control)):
            await work_until(stopped, daemon.run())


def _supervisor(settings: ImexSettings, place: Place, files: ImexFiles) -> Supervisor:
    tls = None
    if settings.tls_directory is not None:
        tls = Tls(settings.tls_directory, names.imex_peer_name(place.compute_domain))
    files.write_config(ImexConfig(place.address, files.nodes, tls, settings.mode))
    layout = Layout(settings.mode, place.max_nodes, settings.quorum)
    command = (*settings.program, "-c", str(files.config))
    return Supervisor(layout, files, Credentials(tls), partial(start, command))


async def _need_ready(control: ImexControl) -> None:
    status = await control.local_status()
    if status != READY:
        raise Retry(f"nvidia-imex is {status}", after=1.0)


async def _nothing_to_do() -> None:
    """A node without NVLink fabric has no daemon to wait for."""
