"""Sites as context managers, and the operations of a test on one.

`Site` speaks to the control of a running site (`app/twin/control.py`): every step of a scenario can be
played on it. An action that does not come about and an expectation that is not observed raise
`StepNotObserved`, an AssertionError, so that a test fails with the observation. A step that cannot be
played at all (an unknown step, a tray that is not there) raises `rackloom.errors.Refused` with the nearest
fix.

`AsyncSite` does each of these calls in a thread, so that an event loop is never blocked.
"""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rackloom.testing.failures import StepNotObserved, TimedOut
from rackloom.testing.temporary_home import temporary_home

if TYPE_CHECKING:
    from rackloom.app.twin.control_client import ControlClient
    from rackloom.app.twin.control_messages import SiteReport, TrayReport
    from rackloom.lab.scenario.played import PlayedScenario, PlayedStep

Fault = str | Mapping[str, Any]
"""A fault by its word (`"switch-stops"`), or with its keys (`{"do": "gpu-lost", "tray": 3, "gpu": 1}`)."""
T = TypeVar("T")
DEFAULT_WITHIN = 60.0
"""Seconds in which something is expected."""
START_SECONDS = 300.0
"""How long a start may take: seconds on a quiet machine, minutes on one that is overloaded."""


class Site:
    """A running simulated site. It lives as long as the context that gave it."""

    def __init__(self, home: Path, report: "SiteReport", client: "ControlClient") -> None:
        self.home = home
        """The folder of its records, keys and logs."""
        self._report = report
        self._client = client

    # Properties.

    @property
    def url(self) -> str:
        """Address of REST and the rack map, such as http://127.0.0.1:8080."""
        return self._report.url

    @property
    def kubeconfig(self) -> Path:
        """The file that opens its cluster, as its administrator."""
        return Path(self._report.kubeconfig)

    @property
    def racks(self) -> int:
        """How many NVLink domains it has."""
        return self._report.racks

    @property
    def profile(self) -> str:
        """The profile of each rack, as `rackloom topology list` names it."""
        return self._report.profile

    @property
    def seed(self) -> str:
        """All its names are drawn from it."""
        return self._report.seed

    @property
    def trays(self) -> "tuple[TrayReport, ...]":
        """Its trays: name, node of the cluster, machine of REST."""
        return self._report.trays

    @property
    def log(self) -> Path:
        """Its log: JSON lines."""
        return self.home / "logs" / "rackloom.log"

    def node(self, tray: str) -> str:
        """Name of the node that a tray is, such as `rack-01/slot-2`. Raises KeyError."""
        return {found.name: found.node for found in self.trays}[tray]

    def api(self, org: str = "demo") -> str:
        """Address of REST for an organisation, without a slash at its end."""
        return f"{self.url}/v2/org/{org}/nico"

    def token(self, org: str = "demo", role: str = "TENANT_ADMIN", *, hours: float = 24.0) -> str:
        """A bearer token for REST. Any name becomes a tenant. `demo` is the provider too."""
        from rackloom.app.home import Home, mint_token

        return mint_token(Home(self.home), org=org, roles=[role], hours=hours)

    # Faults and steps.

    def inject(self, fault: Fault, **keys: Any) -> str:
        """Break something, and return the action taken. Keys are those of scenario files, with underscores.

        Raises:
            Refused: there is no such fault, or it cannot be on this site.
            StepNotObserved: it did not come about.
        """
        return _observed(self._client.fault(_table("do", fault, keys)))

    def do(self, step: Fault, **keys: Any) -> str:
        """Do a step of a user, a tenant or an operator, such as `submit` or `make-instances`.

        Raises as `inject` does.
        """
        return _observed(self._client.step(_table("do", step, keys)))

    def expect(self, what: Fault, *, within: float = DEFAULT_WITHIN, **keys: Any) -> str:
        """Wait until something is observed, and return the observation. Raises as `inject` does."""
        return _observed(self._client.step(_table("expect", what, {"within": within, **keys})))

    def clear(self) -> str:
        """Repair everything, on every layer, and forget faults that have not struck yet."""
        return self._client.clear()

    def play(
        self, file: Path | str, report: "Callable[[PlayedStep], None]" = lambda _: None
    ) -> "PlayedScenario":
        """Play a scenario file, or one that ships by its name. `report` gets each step as it is over.

        Raises:
            Refused: the file is wrong, or is not about such a site.
            StepNotObserved: a step did not come about. The text is the transcript.
        """
        from rackloom.lab.scenario.files import find_scenario
        from rackloom.lab.scenario.played import render_step, render_summary

        played = self._client.play(find_scenario(Path(file)), report)
        if not played.ok:
            raise StepNotObserved("\n".join([*map(render_step, played.lines), render_summary(played)]))
        return played

    def wait_until(
        self,
        condition: Callable[[], T],
        *,
        within: float = DEFAULT_WITHIN,
        what: str = "",
        pause: float = 0.1,
    ) -> T:
        """Call `condition` until its result is true, and return that. Raises TimedOut."""
        deadline = time.monotonic() + within
        while True:
            is_last = time.monotonic() >= deadline
            if found := condition():
                return found
            if is_last:
                raise TimedOut(_timed_out(condition, what, within))
            time.sleep(pause)

    @property
    def asynchronous(self) -> "AsyncSite":
        """The same site for asyncio."""
        return AsyncSite(self)


class AsyncSite:
    """A running simulated site, for asyncio. `site` has its properties. The methods are those of `Site`."""

    def __init__(self, site: Site) -> None:
        self.site = site

    async def inject(self, fault: Fault, **keys: Any) -> str:
        """As `Site.inject`."""
        return await asyncio.to_thread(self.site.inject, fault, **keys)

    async def do(self, step: Fault, **keys: Any) -> str:
        """As `Site.do`."""
        return await asyncio.to_thread(self.site.do, step, **keys)

    async def expect(self, what: Fault, *, within: float = DEFAULT_WITHIN, **keys: Any) -> str:
        """As `Site.expect`."""
        return await asyncio.to_thread(self.site.expect, what, within=within, **keys)

    async def clear(self) -> str:
        """As `Site.clear`."""
        return await asyncio.to_thread(self.site.clear)

    async def play(self, file: Path | str) -> "PlayedScenario":
        """As `Site.play`."""
        return await asyncio.to_thread(self.site.play, file)

    async def wait_until(
        self,
        condition: Callable[[], T | Awaitable[T]],
        *,
        within: float = DEFAULT_WITHIN,
        what: str = "",
        pause: float = 0.1,
    ) -> T:
        """As `Site.wait_until`, but `condition` may be asynchronous."""
        deadline = time.monotonic() + within
        while True:
            is_last = time.monotonic() >= deadline
            answer = condition()
            found: Any = await answer if inspect.isawaitable(answer) else answer
            if found:
                return found  # type: ignore[no-any-return]
            if is_last:
                raise TimedOut(_timed_out(condition, what, within))
            await asyncio.sleep(pause)


def _observed(played: "PlayedStep") -> str:
    if not played.ok:
        raise StepNotObserved(f"{played.what}: {played.seen}")
    return played.seen


def _table(key: str, step: Fault, keys: Mapping[str, Any]) -> dict[str, Any]:
    """A step as a file would have it."""
    named = {key: step} if isinstance(step, str) else dict(step)
    return {**named, **{name.replace("_", "-"): value for name, value in keys.items()}}


def _timed_out(condition: object, what: str, within: float) -> str:
    return f"not within {within:g} s: {what or getattr(condition, '__name__', condition)}"


# Starting one.


@contextmanager
def start_site(
    *,
    racks: int = 1,
    profile: str = "gb200-nvl72",
    seed: str | int = "0",
    faults: Iterable[Fault] = (),
    home: Path | None = None,
    in_process: bool = False,
    within: float = START_SECONDS,
) -> Iterator[Site]:
    """Run a simulated site while the context is entered. Every tray is a node of its cluster then.

    `seed` fixes its names and its random draws, not the order in which its parts run. `faults` are injected
    before the context is entered. Without a `home` it has a temporary one, which is gone afterwards.
    `in_process`: in a thread of this process, which starts sooner and shares its interpreter lock and memory,
    instead of a child process. `within`: seconds for the start.

    Raises:
        Refused: a profile, a number of racks or a fault that there is not.
        SiteFailed: it did not start, or ended before the context did.
    """
    fresh: AbstractContextManager[Path] = temporary_home() if home is None else nullcontext(home.resolve())
    with fresh as place:
        running: AbstractContextManager[tuple[SiteReport, ControlClient]]
        if in_process:
            from rackloom.testing.in_process import site_in_thread

            running = site_in_thread(place, racks=racks, profile=profile, seed=str(seed), within=within)
        else:
            from rackloom.testing.child_process import site_in_child

            running = site_in_child(
                place,
                racks=racks,
                profile=profile,
                seed=str(seed),
                within=within,
                is_temporary=home is None,
            )
        with running as (report, client):
            site = Site(place, report, client)
            for fault in faults:
                site.inject(fault)
            yield site


@asynccontextmanager
async def start_site_async(**options: Any) -> AsyncIterator[AsyncSite]:
    """As `start_site`, with the same options, without blocking the event loop."""
    manager = start_site(**options)
    starting = asyncio.ensure_future(asyncio.to_thread(manager.__enter__))
    try:
        site = await asyncio.shield(starting)
    except asyncio.CancelledError:
        # The thread goes on: what it started has to be ended.
        await asyncio.wait({starting})
        if starting.exception() is None:
            await asyncio.to_thread(manager.__exit__, None, None, None)
        raise
    try:
        yield AsyncSite(site)
    except BaseException as error:
        if not await asyncio.to_thread(manager.__exit__, type(error), error, error.__traceback__):
            raise
    else:
        await asyncio.to_thread(manager.__exit__, None, None, None)
