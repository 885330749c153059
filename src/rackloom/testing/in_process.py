"""A site in a thread of this process, with its own event loop.

It starts sooner than a child and needs no second interpreter. It shares this process's interpreter lock, so
a test that computes makes it slow. Use a child process for more than a rack or two.

It leaves its host as it was: umask, garbage collector, signals and limits are not touched. Its log file is a
handler of the logger `rackloom` for as long as the site runs. Several sites in one process each log the lines
of all. structlog, which has one configuration for each process, is configured only if its host did not.
"""

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rackloom.testing.failures import SiteFailed

if TYPE_CHECKING:
    from rackloom.app.twin.control_client import ControlClient
    from rackloom.app.twin.control_messages import SiteReport
    from rackloom.app.twin.up import UpOptions

END_SECONDS = 60.0


@contextmanager
def site_in_thread(
    home: Path, *, racks: int, profile: str, seed: str, within: float
) -> "Iterator[tuple[SiteReport, ControlClient]]":
    """A site in a thread, and a client of its control. Raises as `start_site` does."""
    from rackloom.app.process import log_beside_host
    from rackloom.app.twin.control_client import ControlClient, wait_for_site
    from rackloom.app.twin.up import UpOptions
    from rackloom.errors import Refused

    with log_beside_host() as log:
        options = UpOptions(port=0, racks=racks, profile=profile, seed=seed, log=log, own_process=False)
        thread = _SiteThread(home, options)
        thread.start()
        try:
            try:
                report = wait_for_site(home, within, lambda: not thread.is_alive())
            except Refused as refused:
                raise thread.error or SiteFailed(f"the site did not start: {refused.reason}") from refused
            with closing(ControlClient(home)) as client:
                yield report, client
            if not thread.is_alive():
                raise SiteFailed(f"the site ended by itself: {thread.error}") from thread.error
        finally:
            thread.end()
    if thread.is_alive():
        raise SiteFailed(f"the site did not end within {END_SECONDS:g} s")


class _SiteThread(threading.Thread):
    """Runs one site. `error` is the exception with which it ended."""

    def __init__(self, home: Path, options: "UpOptions") -> None:
        super().__init__(name="rackloom-site", daemon=True)
        self.error: BaseException | None = None
        self._home = home
        self._options = options
        self._begun = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Event | None = None

    def run(self) -> None:
        """Serve until `end` is called."""
        import uvloop

        try:
            uvloop.run(self._serve())
        except BaseException as error:
            self.error = error
        finally:
            self._begun.set()

    async def _serve(self) -> None:
        from rackloom.app.home import Home
        from rackloom.app.twin.up import serve_up

        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        self._begun.set()
        await serve_up(Home(self._home), self._options, lambda _: None, self._stopped)

    def end(self) -> None:
        """Have the site end, and wait for it."""
        self._begun.wait()
        if self._loop is not None and self._stopped is not None and self.is_alive():
            try:
                self._loop.call_soon_threadsafe(self._stopped.set)
            except RuntimeError:  # Its loop has ended already.
                logging.getLogger(__name__).debug("the site had ended")
        self.join(END_SECONDS)
