"""A site in a child process, which ends with the process that started it.

The child ends in order on SIGTERM, at the end of the context, and when its standard input is closed: the
kernel does that if the starting process is killed. It has its own process group, so that Ctrl-C at a
terminal reaches the tests and their debugger alone. Its output goes into a temporary file. If it fails, the
end of that file is part of the error.

`python -m rackloom.testing.child_process` is the child.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rackloom.testing.failures import SiteFailed

if TYPE_CHECKING:
    from rackloom.app.twin.control_client import ControlClient
    from rackloom.app.twin.control_messages import SiteReport

END_SECONDS = 30.0
"""How long a site may take to end before it is killed."""
SHOWN_CHARACTERS = 4000
"""Of the output of a site that failed."""
_REFUSED = 3
"""The child's exit code for a refusal. The last line of its output is the reason and the fix."""


@contextmanager
def site_in_child(
    home: Path, *, racks: int, profile: str, seed: str, within: float, is_temporary: bool = False
) -> "Iterator[tuple[SiteReport, ControlClient]]":
    """A site in a child process, and a client of its control. Raises as `start_site` does.

    A temporary home is removed by the child, in case that no other process is left to do it.
    """
    from rackloom.app.twin.control_client import ControlClient, wait_for_site
    from rackloom.errors import Refused

    chosen = {"home": str(home), "temporary": is_temporary, "racks": racks, "profile": profile, "seed": seed}
    with tempfile.TemporaryFile() as output:
        # Safe path: a file of the tests beside the child must not stand in for a module.
        command = [sys.executable, "-P", "-m", __name__, json.dumps(chosen)]
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            try:
                report = wait_for_site(home, within, lambda: child.poll() is not None)
            except Refused as refused:
                raise _failure(child, output, refused.reason) from refused
            with closing(ControlClient(home)) as client:
                yield report, client
            if child.poll() is not None:
                raise SiteFailed(f"the site ended by itself ({child.returncode})\n{_tail(output)}")
        finally:
            _end(child)


def _failure(child: "subprocess.Popen[bytes]", output: IO[bytes], reason: str) -> Exception:
    from rackloom.errors import Refused

    text = _tail(output)
    if child.poll() == _REFUSED:
        found = json.loads(text.splitlines()[-1])
        return Refused(found["reason"], nearest_fix=found["fix"])
    if child.returncode is not None:
        return SiteFailed(f"the site did not start: it ended with {child.returncode}\n{text}")
    return SiteFailed(f"the site did not start: {reason}\n{text}")


def _tail(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode(errors="replace").strip()[-SHOWN_CHARACTERS:]


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Have the child end. Kill it if it does not."""
    # Closing the pipe is not enough: a process that the tests forked may hold its end, too.
    child.terminate()
    assert child.stdin is not None  # noqa: S101 (a pipe was asked for)
    child.stdin.close()
    try:
        child.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


# The child.


def main() -> None:
    """Run the site that the argument describes, until SIGTERM or the end of standard input."""
    import uvloop

    from rackloom.app.process import allow_open_files, keep_files_private, shorten_switch_interval
    from rackloom.errors import Refused
    from rackloom.serving.limits import Process, files_needed

    options = json.loads(sys.argv[1])
    try:
        allow_open_files(files_needed(Process.UP, racks=options["racks"]))
        shorten_switch_interval()
        keep_files_private()
        uvloop.run(_run(options))
    except Refused as refused:
        print(json.dumps({"reason": refused.reason, "fix": refused.nearest_fix}))  # noqa: T201
        sys.exit(_REFUSED)
    finally:
        if options["temporary"]:
            shutil.rmtree(options["home"], ignore_errors=True)


async def _run(options: dict[str, Any]) -> None:
    from rackloom.app.home import Home
    from rackloom.app.process import stop_on_signals
    from rackloom.app.twin.up import UpOptions, serve_up

    stopped, loop = stop_on_signals(), asyncio.get_running_loop()

    def follow_parent() -> None:
        # Not by sys.stdin: this thread would hold its lock when the interpreter ends.
        os.read(0, 1)
        loop.call_soon_threadsafe(stopped.set)

    threading.Thread(target=follow_parent, daemon=True).start()
    wanted = UpOptions(port=0, racks=options["racks"], profile=options["profile"], seed=options["seed"])
    await serve_up(Home(Path(options["home"])), wanted, lambda _: None, stopped)


if __name__ == "__main__":
    main()
