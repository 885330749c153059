"""What a hook, a person or another user may do to the file of Slurm."""

import asyncio
from pathlib import Path

import pytest
from tests.app.test_slurm_file import calls, script, topology

from rackloom.app.slurm_topology import CommandFailed, TopologyFile, run_command
from rackloom.errors import Retry

pytestmark = pytest.mark.anyio


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
    assert victim.exists() and victim.read_text() == "root:x"
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
    try:
        await run_command(hook, limit=1.0)
    except CommandFailed:
        pid = int((tmp_path / "pid").read_text())
        await asyncio.sleep(0.1)
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"
        return
    pytest.fail("no error")
