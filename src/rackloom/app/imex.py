"""`rackloom imex run`: one IMEX daemon, as a container of a ComputeDomain's DaemonSet.

The device plugin (CDI) and the DaemonSet describe the member in environment variables: ComputeDomain,
node, pod, address, clique and boot id. `member_from_environment` reads and validates them.

A node without an NVLink clique has nothing to supervise: the process labels its pod, answers probes with
success and waits for the signal. In a clique it writes the daemon's configuration (mutual TLS unless
authentication is switched off), supervises `nvidia-imex`, and keeps its peers current. kubelet's probes
succeed while the local daemon reports READY.
"""

import asyncio
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from rackloom.app.process import (
    allow_open_files,
    freeze_loaded_objects,
    run_until_stopped,
    stop_on_signals,
)
from rackloom.claim.imex.config import (
    ImexConfig,
    ImexFiles,
    ImexTls,
    NodeFileMode,
    config_file,
)
from rackloom.claim.imex.daemon import ImexDaemon, answer_probes
from rackloom.claim.imex.member import DaemonIdentity, label_pod
from rackloom.claim.imex.nvidia_imex import READY, ImexControl, start_imex
from rackloom.claim.imex.supervisor import PeerLayout, Supervisor
from rackloom.claim.kube.client import connect
from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import ObjectRef
from rackloom.core.domains.clique import is_ip_address
from rackloom.core.domains.imex_settings import ImexSettings
from rackloom.errors import Refused, Retry
from rackloom.serving.limits import Process, files_needed

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ImexDaemonOptions:
    """Paths, ports, and the names of peers. `tls` None switches authentication off."""

    directory: Path
    hosts: Path
    tls_directory: Path | None
    mode: NodeFileMode
    quorum: int
    program: Sequence[str]
    control_program: Sequence[str]
    kubeconfig: Path | None
    context: str | None
    probe_port: int
    settings: ImexSettings


def member_from_environment(environment: Mapping[str, str]) -> DaemonIdentity:
    """The identity of this daemon, from the environment set by the device plugin and the DaemonSet."""
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
    return DaemonIdentity(
        compute_domain=environment["COMPUTE_DOMAIN_UUID"],
        clique_id=environment.get("CLIQUE_ID", ""),
        namespace=environment["POD_NAMESPACE"],
        node=environment["NODE_NAME"],
        address=environment["POD_IP"],
        pod=ObjectRef(environment["POD_NAME"], environment["POD_UID"]),
        max_nodes=int(most),
        boot_id=environment.get(names.BOOT_ID_VARIABLE, ""),
    )


def run_imex(settings: ImexDaemonOptions) -> None:
    """Run the daemon until SIGTERM or SIGINT."""
    allow_open_files(files_needed(Process.IMEX))
    asyncio.run(_run_daemon(settings, member_from_environment(os.environ)))


async def _run_daemon(settings: ImexDaemonOptions, place: DaemonIdentity) -> None:
    stopped = stop_on_signals()
    async with connect(settings.kubeconfig, settings.context, user_agent="rackloom-imex") as api:
        if not place.clique_id:
            _log.info("imex.idle", reason="this node is in no NVLink clique")
            async with answer_probes(place.address, settings.probe_port, _always_ready):
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
        async with answer_probes(place.address, settings.probe_port, partial(_check_ready, control)):
            freeze_loaded_objects()
            await run_until_stopped(stopped, daemon.run())


def _supervisor(settings: ImexDaemonOptions, place: DaemonIdentity, files: ImexFiles) -> Supervisor:
    tls = None
    if settings.tls_directory is not None:
        tls = ImexTls(settings.tls_directory, names.imex_peer_name(place.compute_domain))
    config = ImexConfig(place.address, files.nodes, tls, settings.mode, settings=settings.settings)
    files.write_config(config)
    layout = PeerLayout(settings.mode, place.max_nodes, settings.quorum)
    command = (*settings.program, "-c", str(files.config))
    return Supervisor(layout, files, tls, partial(start_imex, command))


async def _check_ready(control: ImexControl) -> None:
    status = await control.local_status()
    if status != READY:
        raise Retry(f"nvidia-imex is {status}", after=1.0)


async def _always_ready() -> None:
    """A node without NVLink fabric has no daemon to wait for."""
