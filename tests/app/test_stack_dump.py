"""SIGUSR2 to a long-running process: it prints the stacks of all its threads and tasks, and goes on."""

import signal
import subprocess
import sys

PROGRAM = """
import asyncio
import linecache
from rackloom.app.process import stop_on_signals

async def waits_for_a_switch():
    await asyncio.Event().wait()

async def main():
    stopped = stop_on_signals()
    # As a library leaves it whose source is not there.
    linecache.cache[waits_for_a_switch.__code__.co_filename] = (0, None, None, "")
    task = asyncio.create_task(waits_for_a_switch())
    await asyncio.sleep(0)
    print("up", flush=True)
    asyncio.get_running_loop().call_later(30, stopped.set)
    await stopped.wait()
    print("stopped", flush=True)

asyncio.run(main())
"""


def test_stacks_are_told_and_the_process_goes_on():
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGUSR2)
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line == "end of stacks\n":
                break
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopped\n"
    assert lines[-1] == "end of stacks\n"
    text = "".join(lines)
    assert "most recent call first" in text
    assert "waits_for_a_switch" in text
    assert process.returncode == 0
