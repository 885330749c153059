"""The NRI plugin on the wire, with a runtime written apart from it."""

import asyncio
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.claim.node.nri.nri_runtime import NriRuntime
from tests.waiting import until_so

from rackloom.claim.node.nri import nri_pb2 as wire
from rackloom.claim.node.nri.client import MalformedFrame, NriPlugin, TtrpcFrame, read_frames
from rackloom.claim.node.tasks import beside
from rackloom.errors import Refused


class RecordingHooks:
    """Records the calls of the runtime."""

    def __init__(self):
        self.events = []
        self.trouble = None

    async def synchronize(self, living):
        self.events.append(("synchronize", tuple((sandbox.pod, sandbox.netns) for sandbox in living)))

    async def run(self, sandbox):
        self.events.append(("run", sandbox.pod, sandbox.netns))
        if self.trouble:
            raise self.trouble

    async def stop(self, sandbox):
        self.events.append(("stop", sandbox.pod, sandbox.netns))


@pytest.fixture
def path():
    with tempfile.TemporaryDirectory(prefix="rl") as root:
        yield Path(root) / "nri.sock"


@pytest.mark.parametrize("one_method", [True, False])
def test_a_runtime_tells_of_sandboxes(path, one_method):
    hooks = RecordingHooks()

    async def story():
        serving = NriRuntime(path, one_method_for_events=one_method).serving()
        async with serving as runtime, beside(NriPlugin("dra.net", hooks, path).run()):
            await runtime.ready.wait()
            assert [(request.plugin_name, request.plugin_idx) for request in runtime.registered] == [
                ("dra.net", "00")
            ]
            assert runtime.events == 0b11
            assert await runtime.run("pod-1", "/var/run/netns/a") == ""
            hooks.trouble = Refused("it is broken", nearest_fix="mend it")
            assert await runtime.run("pod-2", "") == "it is broken; mend it"
            assert await runtime.stop("pod-1") == ""

    asyncio.run(story())
    assert hooks.events == [
        ("synchronize", ()),
        ("run", "pod-1", "/var/run/netns/a"),
        ("run", "pod-2", ""),
        ("stop", "pod-1", "/var/run/netns/a"),
    ]


def test_after_a_restart_of_the_runtime_all_sandboxes_are_told_of_at_once(path, monkeypatch):
    monkeypatch.setattr("rackloom.claim.node.nri.client.RECONNECT_SECONDS", 0.01)
    hooks = RecordingHooks()

    async def story():
        plugin = NriPlugin("dra.net", hooks, path)
        async with beside(plugin.run()):
            first = NriRuntime(path)
            async with first.serving():
                await first.ready.wait()
                for number in range(3):
                    await first.run(f"pod-{number}", f"/n/{number}")
            second = NriRuntime(path)
            second.sandboxes = first.sandboxes
            async with second.serving():
                await second.ready.wait()
                assert plugin.connected.is_set()

    asyncio.run(story())
    assert hooks.events[-1] == ("synchronize", tuple((f"pod-{n}", f"/n/{n}") for n in range(3)))


def test_what_it_does_not_know_it_says_so(path):
    async def story():
        plugin = NriPlugin("dra.net", RecordingHooks(), path)
        async with NriRuntime(path).serving() as runtime, beside(plugin.run()):
            await runtime.ready.wait()
            assert (await runtime.call("CreateContainer", wire.Status())).status.code == 12

    asyncio.run(story())


def test_a_runtime_that_refuses_is_asked_again(path, monkeypatch):
    monkeypatch.setattr("rackloom.claim.node.nri.client.RECONNECT_SECONDS", 0.01)

    async def story():
        runtime = NriRuntime(path)
        runtime.refuse = "no plugins today"
        async with runtime.serving(), beside(NriPlugin("dra.net", RecordingHooks(), path).run()):
            await until_so(lambda: len(runtime.registered) > 1, "it registers again")
            runtime.refuse = ""
            await runtime.ready.wait()

    asyncio.run(story())


def read(data):
    async def all_of():
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return [frame async for frame in read_frames(reader)]

    return asyncio.run(all_of())


@given(
    st.lists(st.tuples(st.integers(1, 2), st.integers(0, 2**32 - 1), st.binary(max_size=50)), max_size=5),
    st.integers(1, 30),
)
def test_frames_come_back_however_they_are_cut(sent, size):
    wanted = [TtrpcFrame(connection=c, stream=s, type=1, data=d) for c, s, d in sent]
    cut = b""
    for frame in wanted:
        whole = frame.encode()[8:]
        for at in range(0, len(whole), size):
            part = whole[at : at + size]
            cut += struct.pack(">II", frame.connection, len(part)) + part
    assert read(cut) == wanted
    assert read(b"".join(frame.encode() for frame in wanted)) == wanted


@given(st.binary(max_size=200))
def test_hostile_bytes_end_the_connection_and_nothing_else(data):
    try:
        found = read(data)
    except MalformedFrame:
        return
    assert len(found) <= len(data) // 18


def test_a_message_that_is_too_long_is_not_waited_for():
    with pytest.raises(MalformedFrame):
        read(struct.pack(">II", 1, 10) + struct.pack(">IIBB", 5 << 20, 1, 1, 0))
    with pytest.raises(MalformedFrame):
        read(struct.pack(">II", 1, 1 << 30))
