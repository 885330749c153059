"""slurmctld with topology/block, given the options and the topology.yaml that are rendered for it.

Nodes are of the cloud kind, which are allocated while they are off: no slurmd has to run. Slurm is taken from
PATH, or from the directory in RACKLOOM_SLURM, which `fetch_slurm.sh` beside this file fills.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.cluster.build import Tools
from tests.cluster.processes import start
from tests.cluster.renderings.applied import RACKLOOM
from tests.cluster.renderings.jobs import job
from tests.ports import reserved_ports
from tests.waiting import until, until_so

pytestmark = pytest.mark.anyio
HOME = os.environ.get("RACKLOOM_SLURM", "")
PROGRAMS = ("slurmctld", "sbatch", "squeue", "scontrol")
FIRST_WITH_YAML = (25, 5)
"""Earlier ones have no topology.yaml."""
RACKS, TRAYS, SEGMENT = 3, 18, 16
CONF = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/slurm
SlurmUser=root
{plugins}
StateSaveLocation={folder}
SlurmctldPidFile={folder}/slurmctld.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
TopologyPlugin=topology/block
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ResumeProgram={idle}
SuspendProgram={idle}
SuspendTime=600
NodeName=rack-[0-{racks}]-tray-[0-{trays}] CPUs=64 Gres=gpu:4 State=CLOUD NodeAddr=127.0.0.1
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@dataclass(frozen=True, slots=True)
class Slurm:
    """A separate controller, by its configuration."""

    conf: Path

    def ask(self, program: str, *words: str) -> str:
        env = {**os.environ, "SLURM_CONF": str(self.conf)}
        command = [of_slurm(program), *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


def of_slurm(program: str) -> str:
    """The path of a program of Slurm, or empty."""
    return shutil.which(program, path=f"{HOME}/bin:{os.environ['PATH']}") or ""


@pytest.fixture
def needs_slurm(binaries: Callable[[Tools], Path]) -> None:
    """Skips if there is no Slurm that reads topology.yaml."""
    lacking = [name for name in PROGRAMS if not of_slurm(name)]
    if lacking or os.geteuid() != 0:
        pytest.skip(f"needs root and Slurm 25.05 or later on PATH, or RACKLOOM_SLURM; not there: {lacking}")
    command = [of_slurm("slurmctld"), "-V"]
    version = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = re.search(r"(\d+)\.(\d+)", version)
    if found is None or tuple(map(int, found.groups())) < FIRST_WITH_YAML:
        pytest.skip(f"needs Slurm 25.05 or later for topology.yaml, here is {version.strip()}")


@pytest.fixture
def slurm(needs_slurm: None, tmp_path: Path) -> Iterator[Slurm]:
    """A controller that is not started yet. It will read `topology.yaml` beside its configuration."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    key = folder / "slurm.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    idle = folder / "idle"
    idle.write_text("#!/bin/sh\n")
    idle.chmod(0o755)
    conf = folder / "slurm.conf"
    plugins = f"PluginDir={HOME}/plugins" if HOME else ""
    size = {"racks": RACKS - 1, "trays": TRAYS - 1}
    with reserved_ports() as port:
        conf.write_text(CONF.format(port=port, folder=folder, idle=idle, plugins=plugins, **size))
        yield Slurm(conf)


def printed(file: Path, *words: str) -> tuple[str, str]:
    """The options and the topology.yaml for simulated racks."""
    where = ("--profile", "gb200-nvl72", "--racks", str(RACKS))
    command: list[str | Path] = [RACKLOOM, "place", file, *where, "--render", "slurm", *words]
    text = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    options = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    rest = [line for line in text.splitlines() if not line.startswith("#SBATCH")]
    return "\n".join(options), "\n".join(rest)


@pytest.mark.parametrize("members", [TRAYS, 2 * SEGMENT])
async def test_a_job_gets_the_trays_of_the_plan(slurm: Slurm, tmp_path: Path, members: int) -> None:
    file = job(tmp_path, "default", members)
    words = () if members == TRAYS else ("--segment", str(SEGMENT))
    options, topology = printed(file, *words)
    folder = slurm.conf.parent
    (folder / "topology.yaml").write_text(topology)
    script = folder / "job.sh"
    script.write_text(f"#!/bin/sh\n{options}\ntrue\n")
    child = start("slurmctld", [of_slurm("slurmctld"), "-D", "-f", slurm.conf], folder)
    try:
        await until(lambda: answers(slurm), "slurmctld answers")
        blocks = slurm.ask("scontrol", "show", "topology").count("BlockName=")
        assert blocks == RACKS

        slurm.ask("sbatch", str(script))

        given = await until(lambda: allocated(slurm), "the job has nodes")
    finally:
        child.stop()
    asked = options.partition("--nodelist=")[2].split()[0]
    assert sorted(given) == sorted(asked.split(","))
    assert len(given) == members


async def answers(slurm: Slurm) -> bool:
    try:
        return "UP" in slurm.ask("scontrol", "ping")
    except AssertionError:
        return False


async def allocated(slurm: Slurm) -> list[str]:
    nodes = slurm.ask("squeue", "--noheader", "--format=%N").strip()
    return slurm.ask("scontrol", "show", "hostnames", nodes).split() if nodes else []


async def test_a_kept_topology_follows_the_nodes_while_jobs_run(slurm: Slurm, tmp_path: Path) -> None:
    """A change reaches slurmctld, a node with a job waits, and a source without nodes changes nothing."""
    folder, nodes = slurm.conf.parent, tmp_path / "nodes.json"
    racks = {name: name.rpartition("-tray-")[0] for name in EVERY_NODE}
    write_nodes(nodes, racks)
    settle = script(slurm, "reconfigure", "scontrol reconfigure && sleep 1 && scontrol ping")
    hosts = "xargs --no-run-if-empty scontrol show hostnames"
    busy = script(slurm, "busy", f"squeue --noheader --format=%N | {hosts}")
    options = ("--site", nodes, "--to", folder / "topology.yaml", "--busy", busy, "--every", "1")
    write_once(*options)
    controller = start("slurmctld", [of_slurm("slurmctld"), "-D", "-f", slurm.conf], folder)
    keeper = None
    try:
        await until(lambda: answers(slurm), "slurmctld answers")
        keep: list[str | Path] = [RACKLOOM, "topology", "slurm", *options, "--hook", settle]
        keeper = start("keeper", keep, folder)
        await until(lambda: has_blocks(slurm, {f"rack-{rack}": TRAYS for rack in range(RACKS)}), "all blocks")
        job_script = folder / "job.sh"
        job_script.write_text("#!/bin/sh\n#SBATCH --nodes=1 --nodelist=rack-0-tray-0\ntrue\n")
        slurm.ask("sbatch", str(job_script))
        await until(lambda: allocated(slurm), "the job has a node")

        # Two trays move to a new partition. One has a job, so it waits outside of all blocks.
        split = racks | {"rack-0-tray-0": "new", "rack-0-tray-1": "new"}
        write_nodes(nodes, split)
        await until(lambda: has_blocks(slurm, {"rack-0": TRAYS - 2, "new": 1}), "the idle tray has moved")
        assert await allocated(slurm) == ["rack-0-tray-0"]

        write_nodes(nodes, {})
        keeper_log = folder / "keeper.log"
        await until_so(lambda: "slurm.source_unknown" in keeper_log.read_text(), "the source is unknown")
        assert await has_blocks(slurm, {"rack-0": TRAYS - 2, "new": 1})

        write_nodes(nodes, split)
        slurm.ask("scontrol", "update", "node=rack-0-tray-0", "state=down", "reason=ends-the-job")
        await until(lambda: has_blocks(slurm, {"rack-0": TRAYS - 2, "new": 2}), "the tray has moved")
    finally:
        if keeper is not None:
            keeper.stop()
        controller.stop()


EVERY_NODE = [f"rack-{rack}-tray-{tray}" for rack in range(RACKS) for tray in range(TRAYS)]


def write_nodes(path: Path, cliques: Mapping[str, str]) -> None:
    """A saved cluster whose nodes are all Slurm's, replaced atomically."""
    items = [
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {"nvidia.com/gpu.clique": clique}},
            "spec": {"taints": [{"key": "slinky.slurm.net/slurm", "effect": "NoExecute"}]},
        }
        for name, clique in cliques.items()
    ]
    partial = path.with_suffix(".new")
    partial.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    partial.replace(path)


def script(slurm: Slurm, name: str, commands: str) -> Path:
    """A command that runs against this controller."""
    path = slurm.conf.parent / name
    exports = f"export SLURM_CONF={slurm.conf} PATH={HOME}/bin:$PATH"
    path.write_text(f"#!/bin/sh\n{exports}\n{commands}\n")
    path.chmod(0o755)
    return path


def write_once(*options: str | Path) -> None:
    """Write the topology that slurmctld starts with."""
    subprocess.run([RACKLOOM, "topology", "slurm", *options, "--once"], timeout=300, check=True)


async def has_blocks(slurm: Slurm, nodes: Mapping[str, int]) -> bool:
    """Whether slurmctld has the named blocks, each with its number of nodes."""
    try:
        lines = slurm.ask("scontrol", "show", "topology").splitlines()
    except AssertionError:
        return False
    found = {}
    for line in lines:
        words = dict(word.split("=", 1) for word in line.split())
        found[words["BlockName"]] = len(slurm.ask("scontrol", "show", "hostnames", words["Nodes"]).split())
    return all(found.get(name) == count for name, count in nodes.items())
