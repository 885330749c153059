"""Commands that run a site: `serve` on real racks, and `up`, `token`, `demo`, `twin` on simulated ones.

`twin play` reads and validates the scenario before it imports a whole site, so that a mistake in the file
is reported at once.
"""

import os
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, ArgumentCollection, Group, Parameter
from cyclopts.validators import Number

from rackloom.cli.common import (
    FILE,
    KubeContext,
    Output,
    announce,
    columns,
    emit,
    with_common_flags,
)
from rackloom.errors import Misuse

if TYPE_CHECKING:
    from rackloom.app.twin.control_messages import SiteReport
    from rackloom.lab.scenario.played import PlayedStep

# The site service.


@with_common_flags
def serve(*, config: Path) -> None:
    """Serve a site: REST for tenants, admin gRPC for operators, metrics, and the reconciler behind them.

    Parameters
    ----------
    config
        TOML file. docs/operating.md describes every setting.
    """
    from rackloom.app.site.service import run_serve

    run_serve(config, announce)


# The embedded site, and tokens for it.


TokenRole = Literal["TENANT_ADMIN", "PROVIDER_ADMIN", "PROVIDER_VIEWER"]


def _require_simulated_cluster(named: ArgumentCollection) -> None:
    if sum(source.has_tokens for source in named) > 1:
        raise ValueError("--demo runs its job on the simulated cluster: leave out --kubeconfig")


_CLUSTER_GROUP = Group(validator=_require_simulated_cluster)


@with_common_flags
def up(
    *,
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = 8080,
    home: Path | None = None,
    racks: int = 2,
    profile: str = "gb200-nvl72",
    seed: str | None = None,
    kubeconfig: Annotated[
        Path | None,
        Parameter(
            group=_CLUSTER_GROUP,
            help="A cluster that others run: the trays become nodes of it, labelled and tainted as "
            "simulated, until the end. docs/twin.md says what is made there, and when it is refused.",
        ),
    ] = None,
    context: KubeContext = None,
    taint: bool = True,
    demo: Annotated[bool, Parameter(negative="", group=_CLUSTER_GROUP)] = False,
    browser: bool | None = None,
    traces: str | None = None,
) -> None:
    """Run a site on simulated racks, and a Kubernetes cluster of their trays, in one process, on loopback.

    Switch controllers, machines, the cluster's other parts and its nodes are simulated. The site service, the
    ComputeDomain controller, the node plugins and the scheduler's allocator are the real ones. HOME keeps the
    state of the site. The cluster starts empty each time.

    Parameters
    ----------
    port
        TCP port of the REST service on 127.0.0.1. 0 picks a free one.
    home
        Directory for the store, keys, logs and the cluster's kubeconfig. Default: $RACKLOOM_HOME, else
        rackloom below the XDG data directory.
    racks
        The number of racks.
    profile
        Rack profile, by its name in `rackloom topology list`.
    seed
        Text from which all names of a new home are generated. Default: random names.
    taint
        Taint the nodes (rackloom.dev/simulated=true:NoSchedule), so that other pods stay away.
    demo
        Show two tenants, a whole-rack job, a measured transfer, and a GPU that is lost and comes back.
    browser
        Open the rack map, signed in. Default with --demo on a desktop.
    traces
        Send spans to the OpenTelemetry collector at this URL, such as http://127.0.0.1:4318.
    """
    from rackloom.app.home import Home, default_home
    from rackloom.app.twin.guest import GuestOptions
    from rackloom.app.twin.up import UpOptions, run_up

    if context is not None and kubeconfig is None:
        raise Misuse("--context names a context of a file", nearest_fix="give --kubeconfig FILE too")
    guest = None if kubeconfig is None else GuestOptions(kubeconfig, context, taint=taint)
    wanted = UpOptions(
        port=port,
        racks=racks,
        profile=profile,
        seed=seed,
        guest=guest,
        traces=traces,
        open_browser=demo and _has_desktop() if browser is None else browser,
    )
    at = Home(home or default_home())
    if not demo:
        run_up(at, wanted, announce)
        return
    from rackloom.app.demo.running import check_demo_racks, keep_demo

    check_demo_racks(racks, profile)
    run_up(at, wanted, announce, partial(keep_demo, at, announce))


def _has_desktop() -> bool:
    """Whether a browser could show a window: without one, a text browser would take the terminal."""
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


@with_common_flags
def token(
    *,
    org: str,
    role: Annotated[list[TokenRole], Parameter(consume_multiple=True, negative="")],
    home: Path | None = None,
    hours: float = 24.0,
    output: Output = "table",
) -> None:
    """Print a bearer token for the site in HOME, running or not.

    Parameters
    ----------
    org
        Organisation of the token. `demo` is provider and tenant of an embedded site.
    role
        Role of the token. May be repeated.
    home
        Home of the `rackloom up`. Default: the one that `rackloom up` uses.
    hours
        Hours for which the token is valid.
    """
    from rackloom.app.home import Home, default_home, mint_token

    made = mint_token(Home(home or default_home()), org=org, roles=role, hours=hours)
    emit({"token": made, "org": org, "roles": role, "hours": hours}, output, lambda: made)


# The demonstration.


@with_common_flags
def demo(*, output: Output = "table") -> int:
    """Carve a rack, claim devices, prove the path: on simulated hardware, every step verified by looking."""
    from rackloom.app.demo.run import report_summary, run_demo

    report = run_demo(_say if output == "table" else _say_nothing)
    emit(report, output, lambda: report_summary(report))
    return 0 if report.ok else 1


def _say(text: str) -> None:
    """Print a part of the result as soon as it is known."""
    print(text, flush=True)


def _say_nothing(_: str) -> None:
    """Print nothing: the whole result is printed at the end."""


# Scenarios.


twin_app = App(name="twin", help="Incidents replayed on the production code, over simulated racks.")


@twin_app.command
@with_common_flags
def play(
    file: Annotated[Path, FILE],
    *,
    output: Output = "table",
    speed: Literal["real", "virtual"] = "real",
    home: Path | None = None,
    on: Path | None = None,
) -> int:
    """Play a scenario: exit 0 only if everything that it expects was observed.

    Parameters
    ----------
    file
        A scenario file, or the name of one that `rackloom twin list` shows.
    speed
        Real time over sockets, or virtual time, in which an hour takes seconds.
    home
        Directory for records, keys and logs of the simulated site, which is kept. Default: a temporary one.
    on
        Home of a running `rackloom up` to play it on, in real time, instead of on a new simulated site.
    """
    from rackloom.lab.scenario.files import find_scenario
    from rackloom.lab.scenario.played import render_step, render_summary
    from rackloom.lab.scenario.reading import read_scenario

    if on is not None and (home is not None or speed != "real"):
        raise Misuse("a running site has its own home and clock", nearest_fix="leave --home and --speed out")
    found = find_scenario(file)
    say = _say if output == "table" else _say_nothing

    def report(played: "PlayedStep") -> None:
        say(render_step(played))

    if on is not None:
        from rackloom.app.twin.control_client import ControlClient

        with closing(ControlClient(on)) as site:
            played = site.play(found, report)
    else:
        # Report a mistake in the file before a whole site is imported.
        scenario = read_scenario(found)
        from rackloom.app.twin.scenarios import play_scenario

        played = play_scenario(scenario, speed=speed, home=home, report=report)
    emit(played, output, lambda: render_summary(played))
    return 0 if played.ok else 1


@twin_app.command
@with_common_flags
def status(
    *,
    home: Path | None = None,
    wait: Annotated[float, Parameter(validator=Number(gte=0))] = 0.0,
    output: Output = "table",
) -> None:
    """Show the `rackloom up` that runs in HOME, with a line `key=value` for each of its properties.

    JSON and YAML also list the trays.

    Parameters
    ----------
    home
        Home of the site. Default: the one that `rackloom up` uses.
    wait
        Wait up to this number of seconds until it answers and all trays are nodes of its cluster.
    """
    from rackloom.app.home import default_home
    from rackloom.app.twin.control_client import wait_for_site

    report = wait_for_site(home or default_home(), wait)
    emit(report, output, lambda: _property_lines(report))


def _property_lines(report: "SiteReport") -> str:
    import msgspec

    values = {key: value for key, value in msgspec.to_builtins(report).items() if key != "trays"}
    return "\n".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()
    )


@twin_app.command
@with_common_flags
def schema() -> None:
    """Print the JSON schema of scenario files."""
    import json

    from rackloom.lab.scenario.schema import scenario_schema

    print(json.dumps(scenario_schema(), indent=2))


@twin_app.command(name="list")
@with_common_flags
def list_scenarios(*, output: Output = "table") -> None:
    """List the scenarios that ship with Rackloom."""
    from rackloom.lab.scenario.reading import shipped_scenarios

    rows = [
        (scenario.name, ",".join(sorted(scenario.layers)), ",".join(sorted(scenario.speeds)), scenario.title)
        for scenario in shipped_scenarios()
    ]
    keys = ("scenario", "layers", "speeds", "title")
    value = [dict(zip(keys, row, strict=True)) for row in rows]
    emit(value, output, lambda: columns(("SCENARIO", "LAYERS", "SPEEDS", "WHAT HAPPENS"), rows))
