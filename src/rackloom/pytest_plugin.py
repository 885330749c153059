"""The pytest plugin: the fixture `rackloom_site` gives a test a simulated site (`rackloom.testing`).

    @pytest.mark.rackloom(racks=2, seed="7", faults=["switch-stops"])
    def test_my_scheduler(rackloom_site):
        ...

The marker takes options of `rackloom.testing.start_site`, and `scope`: `"function"` (a fresh site) or
`"session"` (one site for all tests with the same racks, profile and seed). `--rackloom-scope` sets the
default. A shared site is healed after each test, and keeps the objects that tests made in it.

pytest imports this file in every run of every project that has Rackloom installed. So it imports pytest
alone. A test that uses a site imports the rest.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack
from inspect import signature
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rackloom.testing import Site

MARKER_TEXT = (
    "rackloom(racks=1, profile='gb200-nvl72', seed='0', faults=(), scope=None, in_process=False): "
    "the simulated site that the fixture rackloom_site gives to this test"
)
_SCOPES = ("function", "session")
_SHARED = ("racks", "profile", "seed", "in_process")
"""Options in which the tests of one shared site agree."""
_OPTIONS = (*_SHARED, "faults", "scope")
_LOG_LINES = 20
"""Of the site's log, in the report of a test that failed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the plugin."""
    parser.getgroup("rackloom").addoption(
        "--rackloom-scope",
        choices=_SCOPES,
        default="function",
        help="how long a site of rackloom_site lives where its marker does not say: %(choices)s",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", MARKER_TEXT)


class SharedSites:
    """The sites that live as long as the session, by their options."""

    def __init__(self) -> None:
        self._running = ExitStack()
        self._sites: dict[tuple[str, ...], Site] = {}

    def get(self, options: dict[str, Any]) -> Site:
        """The site with these options, which is started where there is none."""
        from rackloom.testing import start_site

        taken = signature(start_site).parameters
        key = tuple(str(options.get(name, taken[name].default)) for name in _SHARED)
        if key not in self._sites:
            self._sites[key] = self._running.enter_context(start_site(**options))
        return self._sites[key]

    def close(self) -> None:
        """End them all."""
        self._running.close()


@pytest.fixture(scope="session")
def rackloom_shared_sites() -> Generator[SharedSites, None, None]:
    """The sites that tests share."""
    sites = SharedSites()
    try:
        yield sites
    finally:
        sites.close()


@pytest.fixture
def rackloom_site(request: pytest.FixtureRequest) -> Generator[Site, None, None]:
    """A simulated site, as the marker `rackloom` of the test describes it."""
    from rackloom.cli.program import unsupported_system

    problem = unsupported_system()
    if problem is not None:
        pytest.fail(problem, False)
    marker = request.node.get_closest_marker("rackloom")
    options = {} if marker is None else dict(marker.kwargs)
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown or (marker is not None and marker.args):
        what = ", ".join(unknown) or "an option without a name"
        pytest.fail(f"@pytest.mark.rackloom does not know {what}: it takes {', '.join(_OPTIONS)}", False)
    scope = options.pop("scope", None) or request.config.getoption("--rackloom-scope")
    if scope not in _SCOPES:
        pytest.fail(f"@pytest.mark.rackloom(scope={scope!r}): it is one of {', '.join(_SCOPES)}", False)
    from rackloom.testing import start_site

    if scope == "function":
        with start_site(**options) as site:
            yield site
        return
    faults = options.pop("faults", ())
    site = request.getfixturevalue("rackloom_shared_sites").get(options)
    try:
        for fault in faults:
            site.inject(fault)
        yield site
    finally:
        site.clear()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Show which site a test failed on, and the end of its log."""
    outcome = yield
    site = getattr(item, "funcargs", {}).get("rackloom_site")
    if site is None:
        return
    report = outcome.get_result()
    if report.when == "call" and report.failed:
        lines = site.log.read_text().splitlines()[-_LOG_LINES:] if site.log.exists() else []
        shown = f"seed {site.seed!r}, {site.racks} x {site.profile}, at {site.url}"
        report.sections.append(("rackloom site", "\n".join([shown, *lines])))
