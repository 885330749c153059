"""The file that slurmctld reads: replaced whole, kept while the source is unknown, read after a change."""

import asyncio
import json
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from rackloom.app import slurm_topology
from rackloom.app.slurm_topology import (
    CommandFailed,
    SlurmOptions,
    TopologyFile,
    file_stamps,
    follow_site_files,
    read_site_files,
    run_command,
    run_slurm_topology,
)
from rackloom.claim.cluster.slurm_controller import SlurmRule
from rackloom.core.place.slurm_topology import SLURM_TAINT, SlurmTopology, read_topology
from rackloom.errors import Refused, Retry

pytestmark = pytest.mark.anyio


def topology(**blocks: str) -> SlurmTopology:
    """`x="a b"`: the block x with the nodes a and b."""
    return SlurmTopology(blocks={name: tuple(nodes.split()) for name, nodes in blocks.items()}, block_size=2)


def script(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def calls(folder: Path) -> int:
    counted = folder / "calls"
    return len(counted.read_text().splitlines()) if counted.exists() else 0


def hook(folder: Path) -> str:
    """Counts its calls, and fails while the file `down` is there."""
    return script(folder, "hook", f"echo x >>{folder}/calls\ntest ! -e {folder}/down")


async def test_the_hook_runs_only_after_a_change(tmp_path: Path) -> None:
    kept = TopologyFile(tmp_path / "topology.yaml", hook=hook(tmp_path))
    await kept.publish(topology(x="a b"))
    await kept.publish(topology(x="a b"))
    assert calls(tmp_path) == 1
    await kept.publish(topology(x="a b c"))
    assert calls(tmp_path) == 2
    assert read_topology((tmp_path / "topology.yaml").read_text()) == topology(x="a b c")
    assert (tmp_path / "topology.yaml").stat().st_mode & 0o777 == 0o644


async def test_a_hook_that_failed_is_run_again_also_by_the_next_process(tmp_path: Path) -> None:
    (tmp_path / "down").touch()
    path, command = tmp_path / "topology.yaml", hook(tmp_path)
    kept = TopologyFile(path, hook=command)
    pauses = []
    for _ in range(8):
        with pytest.raises(Retry) as failed:
            await kept.publish(topology(x="a b"))
        pauses.append(failed.value.after)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    (tmp_path / "down").unlink()

    await TopologyFile(path, hook=command).publish(topology(x="a b"))

    assert calls(tmp_path) == 9
    await TopologyFile(path, hook=command).publish(topology(x="a b"))
    assert calls(tmp_path) == 9


async def test_a_node_waits_for_its_job_and_is_reported(tmp_path: Path) -> None:
    busy = script(tmp_path, "busy", f"cat {tmp_path}/jobs")
    (tmp_path / "jobs").write_text("b\n")
    path = tmp_path / "topology.yaml"
    kept = TopologyFile(path, busy=busy)
    await kept.publish(topology(x="a b", y="c"))
    with capture_logs() as logs, pytest.raises(Retry, match="wait for their jobs"):
        await kept.publish(topology(x="a", y="b c"))
    assert read_topology(path.read_text()) == topology(x="a", y="c")
    assert [entry["nodes"] for entry in logs if entry["event"] == "slurm.nodes_waiting"] == ["b"]

    (tmp_path / "jobs").unlink()
    with pytest.raises(Retry):  # whether jobs run is not known
        await kept.publish(topology(x="a", y="b c"))
    (tmp_path / "jobs").write_text("a\n")
    await kept.publish(topology(x="a", y="b c"))
    assert read_topology(path.read_text()) == topology(x="a", y="b c")


async def test_without_busy_a_move_is_reported_loudly(tmp_path: Path) -> None:
    kept = TopologyFile(tmp_path / "topology.yaml")
    await kept.publish(topology(x="a b", y="c"))
    with capture_logs() as logs:
        await kept.publish(topology(x="a", y="b c"))
    moved = [entry for entry in logs if entry["event"] == "slurm.node_moved"]
    assert moved == [
        {"event": "slurm.node_moved", "log_level": "warning", "node": "b", "source": "x", "target": "y"}
    ]


async def test_a_file_that_cannot_be_written_is_tried_again(tmp_path: Path) -> None:
    with pytest.raises(Retry, match="could not be written"):
        await TopologyFile(tmp_path / "missing" / "topology.yaml").publish(topology(x="a"))


def is_running(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().split()[2] != "Z"


async def test_a_command_is_bounded_with_what_it_starts(tmp_path: Path) -> None:
    endless = script(tmp_path, "endless", f"sleep 60 & echo $! >{tmp_path}/child\nwait")
    begun = time.monotonic()
    with pytest.raises(CommandFailed, match="took more than 1 s"):
        await run_command(endless, limit=1.0)
    assert time.monotonic() - begun < 10
    assert not is_running(int((tmp_path / "child").read_text()))
    with pytest.raises(CommandFailed, match="No such file"):
        await run_command(str(tmp_path / "none"))
    with pytest.raises(CommandFailed, match="ended with 3: broken"):
        await run_command(script(tmp_path, "bad", "echo broken >&2; exit 3"))


def nodes_file(folder: Path, **cliques: str) -> Path:
    items = [
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {"nvidia.com/gpu.clique": clique}},
            "spec": {"taints": [{"key": SLURM_TAINT, "effect": "NoExecute"}]},
        }
        for name, clique in cliques.items()
    ]
    path = folder / "nodes.json"
    partial = folder / "nodes.json.new"
    partial.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    partial.replace(path)
    return path


async def until(holds: object) -> None:
    for _ in range(400):
        if holds():  # type: ignore[operator]
            return
        await asyncio.sleep(0.02)
    raise AssertionError("did not come true")


async def test_an_unreadable_or_emptied_source_keeps_the_topology(tmp_path: Path) -> None:
    path, source = tmp_path / "topology.yaml", nodes_file(tmp_path, a="x.1", b="x.1")
    work = follow_site_files((source,), SlurmRule(), TopologyFile(path), 0.02, lambda: 86_400.0)
    with capture_logs() as logs:
        task = asyncio.create_task(work)
        await until(path.exists)
        for broken in ("{", json.dumps({"kind": "List", "items": []})):
            source.write_text(broken)
            await until(lambda: logs and logs[-1]["event"] == "slurm.source_unknown")
            await asyncio.sleep(0.1)
            assert "a,b" in path.read_text()
            nodes_file(tmp_path, a="x.1", b="x.1")
            await until(lambda: logs[-1]["event"] == "slurm.source_known")
        nodes_file(tmp_path, a="x.1", b="x.1", c="x.1")
        await until(lambda: "a,b,c" in path.read_text())
        task.cancel()
    unknown = [entry for entry in logs if entry["event"] == "slurm.source_unknown"]
    assert [entry["since"] for entry in unknown] == ["1970-01-02T00:00:00Z"] * 2


async def test_files_are_read_again_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`wall` runs ahead, so that no file counts as just changed."""
    path, source = tmp_path / "topology.yaml", nodes_file(tmp_path, a="x.1", b="x.1")
    looks, readings = 0, 0

    def wall() -> float:
        nonlocal looks
        looks += 1
        return time.time() + 10.0

    def read(paths: tuple[Path, ...], rule: SlurmRule) -> SlurmTopology:
        nonlocal readings
        readings += 1
        return read_site_files(paths, rule)

    monkeypatch.setattr(slurm_topology, "read_site_files", read)
    task = asyncio.create_task(follow_site_files((source,), SlurmRule(), TopologyFile(path), 0.01, wall))
    await until(lambda: looks > 5)
    assert readings == 1
    # Slurm's file is looked after at every look.
    path.unlink()
    await until(path.exists)
    assert readings == 1
    nodes_file(tmp_path, a="x.1", b="x.1", c="x.1")
    await until(lambda: "a,b,c" in path.read_text())
    assert readings == 2
    task.cancel()


async def test_a_file_that_has_just_changed_is_read_again(tmp_path: Path) -> None:
    source = nodes_file(tmp_path, a="x.1")
    assert file_stamps((source,), source.stat().st_ctime + 1.0) is None
    stamps = file_stamps((source,), source.stat().st_ctime + 3.0)
    source.read_text()
    assert file_stamps((source,), source.stat().st_ctime + 3.0) == stamps
    nodes_file(tmp_path, b="x.1")
    assert file_stamps((source,), source.stat().st_ctime + 3.0) != stamps
    assert file_stamps((source, tmp_path / "none"), time.time() + 10.0) is None


def test_once_writes_once_and_refuses_what_is_empty(tmp_path: Path) -> None:
    path, source = tmp_path / "topology.yaml", nodes_file(tmp_path, a="x.1")
    run_slurm_topology(SlurmOptions(rule=SlurmRule(), sites=(source,), file=path, once=True))
    assert "nodes: a" in path.read_text()
    with pytest.raises(Refused, match="no node of Slurm has a clique"):
        read_site_files((source,), SlurmRule(taint="other"))


async def test_a_link_in_place_of_the_partial_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "shadow"
    victim.write_text("root:x")
    victim.chmod(0o600)
    folder = tmp_path / "slurm"
    folder.mkdir()
    (folder / ".topology.yaml.partial").symlink_to(victim)
    kept = TopologyFile(folder / "topology.yaml")
    try:
        await kept.publish(topology(x="a b"))
    except Retry:
        await kept.publish(topology(x="a b"))
    assert victim.read_text() == "root:x"
    assert victim.stat().st_mode & 0o777 == 0o600
    assert not (folder / "topology.yaml").is_symlink()


async def test_a_file_of_a_person_in_another_encoding_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "topology.yaml"
    path.write_bytes("# Bl\xf6cke\n".encode("latin-1"))
    await TopologyFile(path).publish(topology(x="a b"))
    assert "block: x" in path.read_text()


async def test_ranges_of_busy_nodes_are_not_taken_for_idle_ones(tmp_path: Path) -> None:
    busy = script(tmp_path, "busy", "echo 'a[1-2]'")
    kept = TopologyFile(tmp_path / "topology.yaml", busy=busy)
    await kept.publish(topology(x="a1 b", y="a2 c"))
    with pytest.raises(Retry):
        await kept.publish(topology(x="a2 b", y="a1 c"))
    assert "a1" not in (tmp_path / "topology.yaml").read_text()


async def test_a_hook_that_leaves_a_program_behind(tmp_path: Path) -> None:
    hook = script(tmp_path, "hook", f"sleep 30 & echo $! >{tmp_path}/pid")
    with pytest.raises(CommandFailed):
        await run_command(hook, limit=1.0)
    await asyncio.sleep(0.1)
    assert has_ended(int((tmp_path / "pid").read_text()))


def has_ended(pid: int) -> bool:
    """True also for a zombie process."""
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"
