"""A controller that dies, hangs or is cut off: how soon its tenants read and hear that it is unknown.

The timer never starts a pass here: what makes the domain unknown is the loss of the notifications. Times are
from the moment of the loss to the REST answer, and to the event on an open stream.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.carve.reconcile.served_rack import Tenant, make_fabric, served_rack

from rackloom.carve.fabric.nmxc import driver
from rackloom.lab.faults import frozen
from rackloom.lab.switches.servers import NmxcServer

ROOT = Path(__file__).parents[3]
LOST_SECONDS = 2.0
"""From the loss of a subscription to Unknown."""
INTERVAL = 6.0
"""Between the site's passes. The rate of heart beats follows from it. A longer one takes longer to test."""


async def seconds_to_unknown(tenant: Tenant, instance: str, began: float) -> tuple[float, float]:
    """Seconds from `began` until REST and the event stream say Unknown."""
    read, heard = await asyncio.gather(
        tenant.until(instance, "Unknown"), tenant.until_told(instance, "Unknown")
    )
    return read - began, heard - began


def play(
    url: str, home: Path, lose: Callable[[], Awaitable[None]], heart_beat_seconds: int
) -> tuple[float, float]:
    """Seconds from `lose` to Unknown of a Ready instance, in REST and as an event."""

    async def scenario() -> tuple[float, float]:
        async with (
            served_rack(url, home, heart_beat_seconds=heart_beat_seconds) as site,
            site.tenant("one") as tenant,
            tenant.listening(),
        ):
            instance = await tenant.instance()
            await tenant.until_told(instance, "Ready")
            began = time.monotonic()
            await lose()
            return await seconds_to_unknown(tenant, instance, began)

    return asyncio.run(scenario())


@contextmanager
def controller(*prefix: str, host: str = "127.0.0.1") -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """A controller's process and its URL. `prefix` is a command that runs another."""
    command = [*prefix, sys.executable, "-m", "tests.carve.reconcile.controller_process", host]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_a_controller_that_goes_away_is_unknown_without_waiting_for_the_timer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            NmxcServer(make_fabric()) as switch,
            served_rack(switch.url, tmp_path) as site,
            site.tenant("one") as tenant,
        ):
            instance = await tenant.instance()
            await tenant.until(instance, "Ready")
            await switch.go_away()
            await tenant.until(instance, "Unknown")
            await switch.come_back()
            await tenant.until(instance, "Ready")

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_frozen_controller_is_unknown_and_ready_again_when_it_thaws(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            NmxcServer(make_fabric()) as switch,
            served_rack(switch.url, tmp_path, heart_beat_seconds=1) as site,
            site.tenant("one") as tenant,
        ):
            instance = await tenant.instance()
            await tenant.until(instance, "Ready")
            async with frozen(switch):
                await tenant.until(instance, "Unknown")
            await tenant.until(instance, "Ready")

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_killed_controller_is_unknown_within_two_seconds(tmp_path: Path) -> None:
    with controller() as (url, process):

        async def kill() -> None:
            process.kill()

        read, heard = play(url, tmp_path, kill, driver.heart_beat_rate(INTERVAL))
    print(f"SIGKILL: REST {read:.2f} s, event {heard:.2f} s")  # noqa: T201
    assert max(read, heard) < LOST_SECONDS


@pytest.mark.slow
def test_a_stopped_controller_is_unknown_within_an_interval(tmp_path: Path) -> None:
    with controller() as (url, process):

        async def stop() -> None:
            process.send_signal(signal.SIGSTOP)

        read, heard = play(url, tmp_path, stop, driver.heart_beat_rate(INTERVAL))
    print(f"SIGSTOP: REST {read:.2f} s, event {heard:.2f} s")  # noqa: T201
    assert max(read, heard) < INTERVAL


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def namespace() -> Iterator[str]:
    """A network namespace behind a pair of interfaces: 10.255.7.1 here, 10.255.7.9 there."""
    name = f"rl{os.getpid()}"
    ip("netns", "add", name)
    try:
        ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name)
        ip("address", "add", "10.255.7.1/28", "dev", f"{name}a")
        ip("link", "set", f"{name}a", "up")
        ip("-n", name, "address", "add", "10.255.7.9/28", "dev", f"{name}b")
        ip("-n", name, "link", "set", f"{name}b", "up")
        yield name
    finally:
        ip("netns", "delete", name)


@pytest.mark.slow
@pytest.mark.root
def test_a_controller_whose_packets_vanish_is_unknown_within_an_interval(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and ip, for a network namespace")
    with ExitStack() as stack:
        try:
            name = stack.enter_context(namespace())
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespace can be made here: {error.stderr!r}")
        url, _ = stack.enter_context(controller("ip", "netns", "exec", name, host="10.255.7.9"))

        async def cut() -> None:
            # The controller's packets are silently dropped: no FIN, no RST, no acknowledgement.
            ip("-n", name, "route", "add", "blackhole", "10.255.7.1/32")

        read, heard = play(url, tmp_path, cut, driver.heart_beat_rate(INTERVAL))
    print(f"packets vanish: REST {read:.2f} s, event {heard:.2f} s")  # noqa: T201
    assert max(read, heard) < INTERVAL
