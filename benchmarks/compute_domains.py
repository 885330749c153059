"""What ComputeDomains cost and how long they make pods wait, in virtual time; one JSON object a row.

    python benchmarks/compute_domains.py [--quick] [--domains N ...] [--pods P] [--only domain|channel]

N ComputeDomains of P pods each, all created in the same moment: in domain mode one pod per tray, in channel
mode four. Declared latencies: every API call 5 ms, a pod's start 1 s, nvidia-imex READY 0.5 s later. One
process simulates every node. Controller, plugins (without their sockets) and IMEX daemons are the
production code. A model makes the calls of Kubernetes, and nvidia-imex only becomes READY. The limit of the
controller on its calls (400 per second after a burst of 2,000) does not apply here. Virtual times are the
same in every run.

Rows `delay` say how long a pod waited for us: from its creation until the claim or template is there that
the controller makes, and from kubelet's call until its channel is prepared, without the declared starts in
between (in domain mode that of its node's daemon and its READY, in channel mode none). The calls by which
Kubernetes creates and binds the daemon are in it. Rows `calls` count what was asked of the API server until
every pod had its channel and every status was written.
"""

import argparse
import asyncio
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# The trays are those of the simulation.
sys.path.insert(0, str(Path(__file__).parents[1]))

import structlog
from compute_domains_plant import IMEX_READY, POD_START, Kubernetes, Tray
from site_figures import load
from tests.simulation.compute_domains.tray import write_kernel_files

from rackloom.claim.cluster.domain_controller import DomainController
from rackloom.claim.kube.api import EventRecorder
from rackloom.core.cluster import names
from rackloom.core.cluster.names import ImexIsolation
from rackloom.core.cluster.objects import COMPUTE_DOMAIN, NODE, POD, RESOURCE_SLICE
from rackloom.core.domains.settings import DEFAULT_DAEMON_NAMESPACE, ControllerSettings, ImexDaemonSettings
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.virtual import event_loop
from rackloom.lab.virtual.event_loop import loop_wall_time

API_SECONDS = 0.005
PODS_PER_TRAY = {ImexIsolation.DOMAIN: 1, ImexIsolation.CHANNEL: 4}
"""A tray's one channel of domain mode is one claim's; the claim of a job in channel mode has many pods."""
TRAYS_PER_CLIQUE = 18
TEAM = "team"
WINDOW = 10_000
"""Changes of a kind that a watch can go back: more than come between a client's list and its watch. To keep
all of them would fill the memory."""
OURS = ("controller", "plugin", "daemon")
GOAL_MS = {ImexIsolation.DOMAIN: 500.0, ImexIsolation.CHANNEL: 100.0}
SETTLED = 15.0
"""Seconds after the last pod: statuses are written at most once a second, meshes looked at every half."""


class Plant:
    """All of one measurement."""

    def __init__(self, isolation: ImexIsolation, domains: int, pods: int, root: Path) -> None:
        self.isolation = isolation
        self.kube = FakeKube(namespaces=("default", TEAM, DEFAULT_DAEMON_NAMESPACE), window=WINDOW)
        self.user = DirectApi(self.kube, "user")
        write_kernel_files(root)
        self.jobs = dict.fromkeys(range(domains), pods)
        self.trays: dict[str, Tray] = {}
        self.places = dict(self._places(root))
        self.kubernetes = Kubernetes(self.kube, self.trays, self.places, seed=1)

    def _places(self, root: Path) -> Any:
        """Each job on trays of its own, no job in two cliques."""
        clique, free, each = 0, 0, PODS_PER_TRAY[self.isolation]
        for job, pods in self.jobs.items():
            trays = -(-pods // each)
            if trays > free:
                clique, free = clique + 1, TRAYS_PER_CLIQUE
            first = TRAYS_PER_CLIQUE - free
            free -= trays
            made = [Tray(self.kube, root, clique, first + number, self.isolation) for number in range(trays)]
            self.trays |= {tray.name: tray for tray in made}
            for pod in range(pods):
                yield f"job-{job}-{pod}", made[pod // each].name

    async def begin(self) -> None:
        """Nodes and the controller; in channel mode every clique is warm."""
        for tray in self.trays.values():
            await self.user.create(NODE, tray.node())
        api = DirectApi(self.kube, "controller")
        recorder = EventRecorder(api, "rackloom-controller", "benchmark", loop_wall_time)
        settings = ControllerSettings(daemon=ImexDaemonSettings(image="none"), isolation=self.isolation)
        rng = random.Random(1)  # noqa: S311 (reproducible on purpose)
        self.controller = asyncio.create_task(
            DomainController(api, settings, recorder, loop_wall_time, rng).run()
        )
        while self.isolation is ImexIsolation.CHANNEL and not await self._is_warm():  # noqa: ASYNC110
            await asyncio.sleep(1.0)
        await asyncio.sleep(5.0)

    async def _is_warm(self) -> bool:
        offered = (await self.user.list(NODE, labels=names.CHANNELS_READY_LABEL)).items
        slices = (await self.user.list(RESOURCE_SLICE)).items
        return len(offered) == len(self.trays) and bool(slices)

    async def job(self, number: int, pods: int) -> None:
        """`kubectl apply` of a ComputeDomain and its pods, one after the other."""
        spec = {"channel": {"resourceClaimTemplate": {"name": f"channel-{number}"}}}
        made = await self.user.create(
            COMPUTE_DOMAIN, {"metadata": {"name": f"job-{number}", "namespace": TEAM}, "spec": spec}
        )
        claim: dict[str, str] = {"resourceClaimTemplateName": f"channel-{number}"}
        if self.isolation is ImexIsolation.CHANNEL:  # as the webhook rewrites it
            claim = {"resourceClaimName": names.shared_claim_name(made["metadata"]["uid"])}
        for pod in range(pods):
            entry = {"name": "channel", **claim}
            spec = {"containers": [{"name": "main", "image": "none"}], "resourceClaims": [entry]}
            meta = {"name": f"job-{number}-{pod}", "namespace": TEAM}
            await self.user.create(POD, {"metadata": meta, "spec": spec})

    async def end(self) -> None:
        """Stop everything."""
        self.controller.cancel()
        await asyncio.gather(self.controller, return_exceptions=True)
        await self.kubernetes.stop()


async def measured(isolation: ImexIsolation, domains: int, pods: int, root: Path) -> list[dict[str, Any]]:
    """The rows of one mode, for `domains` ComputeDomains of `pods` pods each."""
    began, spent_before = time.perf_counter(), time.process_time()
    plant = Plant(isolation, domains, pods, root)
    plant.kube.faults.delay(API_SECONDS)
    await plant.begin()
    plant.kube.calls.clear()
    await asyncio.gather(*(plant.job(number, count) for number, count in plant.jobs.items()))
    while len(delays := _delays(plant)) < domains * pods:
        failed = plant.kubernetes.failed()
        if failed:
            raise failed[0]
        await asyncio.sleep(1.0)
    await asyncio.sleep(SETTLED)
    calls = dict(plant.kube.calls)
    ready = await _ready(plant)
    await plant.end()
    about = {"mode": isolation.value, "domains": domains, "pods": domains * pods, "trays": len(plant.trays)}
    spent = {
        "cpu_s": round(time.process_time() - spent_before, 1),
        "wall_s": round(time.perf_counter() - began, 1),
    }
    figures = {"ready_domains": ready, **spent, **load()}
    return [{"measure": "delay", **about, **_spread(isolation, delays), **figures}, *_calls(calls, about)]


def _delays(plant: Plant) -> list[float]:
    """Seconds of every workload pod that has its channel."""
    waited = plant.kubernetes.waited
    here = {
        pod["metadata"]["uid"] for pod in plant.kube.store.all(POD) if pod["metadata"]["namespace"] == TEAM
    }
    declared = POD_START + IMEX_READY if plant.isolation is ImexIsolation.DOMAIN else 0.0
    return [seconds - declared for uid, seconds in waited.items() if uid in here]


def _spread(isolation: ImexIsolation, delays: list[float]) -> dict[str, Any]:
    ordered = sorted(delays)
    p99 = ordered[int(len(ordered) * 0.99)] * 1e3
    return {
        "p50_ms": round(ordered[len(ordered) // 2] * 1e3, 1),
        "p99_ms": round(p99, 1),
        "most_ms": round(ordered[-1] * 1e3, 1),
        "goal_p99_ms": GOAL_MS[isolation],
        "met": p99 < GOAL_MS[isolation],
    }


async def _ready(plant: Plant) -> int:
    found = (await plant.user.list(COMPUTE_DOMAIN, TEAM)).items
    return sum((domain.get("status") or {}).get("status") == "Ready" for domain in found)


def _calls(calls: dict[Any, int], about: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per actor of ours, and one for all of them."""
    counted = {who: {call: n for call, n in calls.items() if call.user == who} for who in OURS}
    rows = [{"measure": "calls", **about, "actor": who, **_of(counted[who], about)} for who in OURS]
    together = Counter({call: n for counts in counted.values() for call, n in counts.items()})
    return [*rows, {"measure": "calls", **about, "actor": "all of ours", **_of(dict(together), about)}]


def _of(calls: dict[Any, int], about: dict[str, Any]) -> dict[str, Any]:
    pods = about["pods"]
    writes = Counter[str]()
    for call, count in calls.items():
        if call.is_write:
            writes[f"{call.verb} {call.resource}"] += count
    reads = {
        verb: sum(n for call, n in calls.items() if call.verb == verb) for verb in ("get", "list", "watch")
    }
    return {
        "writes_per_pod": round(sum(writes.values()) / pods, 3),
        "writes": dict(writes.most_common()),
        **{f"{verb}s_per_pod": round(count / pods, 3) for verb, count in reads.items()},
    }


def run(isolation: ImexIsolation, domains: int, pods: int) -> None:
    """Print the rows of one mode; ends with an error where a ComputeDomain is not Ready at the end."""
    level = structlog.make_filtering_bound_logger(logging.ERROR)
    structlog.configure(wrapper_class=level, logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    memory = Path("/dev/shm")  # noqa: S108 (checkpoints are synced; how fast the disk is, is not asked here)
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as root:
        for row in event_loop.run_simulation(1, lambda: measured(isolation, domains, pods, Path(root))):
            print(json.dumps(row), flush=True)
            if row.get("ready_domains", domains) != domains:
                sys.exit(f"{row['ready_domains']} of {domains} ComputeDomains are Ready")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--domains", type=int, nargs="+", default=[100, 1000], help="how many ComputeDomains, each a run"
    )
    parser.add_argument("--pods", type=int, default=2, help="pods of each ComputeDomain, at most 18")
    parser.add_argument("--quick", action="store_true", help="10 ComputeDomains: shows that it works")
    parser.add_argument(
        "--only", choices=[mode.value for mode in ImexIsolation], help="one mode instead of both"
    )
    asked = parser.parse_args()
    if not 1 <= asked.pods <= TRAYS_PER_CLIQUE or min(asked.domains) < 1:
        parser.error(f"--domains: at least 1; --pods: 1 to {TRAYS_PER_CLIQUE}, as many as a rack has trays")
    sizes = [10] if asked.quick else asked.domains
    for domains in sizes:
        for isolation in [ImexIsolation(asked.only)] if asked.only else ImexIsolation:
            process = get_context("spawn").Process(target=run, args=(isolation, domains, asked.pods))
            process.start()
            process.join()
            if process.exitcode:
                sys.exit(f"mode {isolation.value}, {domains}: the measurement ended with {process.exitcode}")


if __name__ == "__main__":
    main()
