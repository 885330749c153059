"""Commands that run a site: `serve` on real racks; `up`, `token`, `demo`, `twin` on simulated ones.

`twin play` reads and validates the scenario before it imports a whole site, so that a mistake in the file
is reported at once.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, ArgumentCollection, Group, Parameter
from cyclopts.validators import Number

# The site service.


def serve(*, config: Path) -> None:
    """Serve a site: REST for tenants, admin gRPC for operators, metrics, and the reconciler behind them.

    Parameters
    ----------
    config
        TOML file; docs/operating.md names every setting.
    """
    from rackloom.app.site.service import run_serve

    run_serve(config, partial(print, flush=True))


# The embedded site, and tokens for it.


TokenRole = Literal["TENANT_ADMIN", "PROVIDER_ADMIN", "PROVIDER_VIEWER"]


def _require_simulated_cluster(named: ArgumentCollection) -> None:
    if sum(source.has_tokens for source in named) > 1:
        raise ValueError("--demo runs its job on the simulated cluster: leave out --kubeconfig")


_CLUSTER_GROUP = Group(validator=_require_simulated_cluster)


def up(
    *,
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = 8080,
    home: Path | None = None,
    racks: int = 2,
    profile: str = "gb200-nvl72",
    kubeconfig: Annotated[Path | None, Parameter(group=_CLUSTER_GROUP)] = None,
    demo: Annotated[bool, Parameter(negative="", group=_CLUSTER_GROUP)] = False,
    browser: bool | None = None,
    traces: str | None = None,
) -> None:
    """Run a site on simulated racks, and a Kubernetes cluster of their trays, in one process, on loopback.

    Switch controllers, machines, the cluster's own parts and its nodes are simulated; the site service, the
    ComputeDomain controller, the node plugins and the scheduler's allocator are those of real racks. HOME
    remembers the site; the cluster starts empty each time.

    Parameters
    ----------
    port
        TCP port of the REST service on 127.0.0.1; 0 picks a free one.
    home
        Directory for the store, keys, logs and the cluster's kubeconfig; default: rackloom below the XDG
        data directory.
    racks
        How many racks the site has.
    profile
        Rack profile, as `rackloom topology list` names them.
    kubeconfig
        A real cluster: the trays become nodes of it, labelled rackloom.dev/simulated, until the end.
    demo
        Two tenants, a whole-rack job, a measured transfer, and a GPU that is lost and comes back.
    browser
        Open the rack map, signed in; by default with --demo on a desktop.
    traces
        Send spans to the OpenTelemetry collector at this URL, such as http://127.0.0.1:4318.
    """
    from rackloom.app.home import Home, default_home
    from rackloom.app.twin.up import UpOptions, run_up

    wanted = UpOptions(
        port=port,
        racks=racks,
        profile=profile,
        kubeconfig=kubeconfig,
        traces=traces,
        open_browser=demo and _has_desktop() if browser is None else browser,
    )
    at, announce = Home(home or default_home()), partial(print, flush=True)
    if not demo:
        run_up(at, wanted, announce)
        return
    from rackloom.app.demo.running import check_demo_racks, keep_demo

    check_demo_racks(racks, profile)
    run_up(at, wanted, announce, partial(keep_demo, at, announce))


def _has_desktop() -> bool:
    """Whether a browser could show a window: without one, a text browser would take the terminal."""
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def token(
    *,
    org: str,
    role: Annotated[list[TokenRole], Parameter(consume_multiple=True, negative="")],
    home: Path | None = None,
    hours: float = 24.0,
) -> None:
    """Print a bearer token for the site that lives in HOME, running or not.

    Parameters
    ----------
    org
        Organisation that the token speaks for; `demo` is provider and tenant of an embedded site.
    role
        What it may do there; give it more than once for several roles.
    home
        Home of the `rackloom up`; default: the one that it uses.
    hours
        How long the token is valid.
    """
    from rackloom.app.home import Home, default_home, mint_token

    print(mint_token(Home(home or default_home()), org=org, roles=role, hours=hours))


# The demonstration.


def demo(*, as_json: Annotated[bool, Parameter(name="--json", negative="")] = False) -> int:
    """Carve a rack, claim devices, prove the path: on simulated hardware, every step verified by looking.

    Parameters
    ----------
    as_json
        Print one JSON object instead of the story.
    """
    from rackloom.app.demo.run import run_demo

    return run_demo(as_json=as_json)


# Scenarios.


twin_app = App(name="twin", help="Incidents replayed on the production code, over simulated racks.")


@twin_app.command
def play(
    file: Path,
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    speed: Literal["real", "virtual"] = "real",
    home: Path | None = None,
) -> int:
    """Play a scenario: exit 0 only if everything that it expects was observed.

    Parameters
    ----------
    file
        A scenario file, or the name of one that `rackloom twin list` shows.
    as_json
        Print one JSON object instead of the transcript.
    speed
        Real time, over sockets; or virtual time, in which an hour takes seconds.
    home
        Directory for records, keys and logs of the simulated site, kept afterwards; default: a temporary one.
    """
    from rackloom.lab.scenario.playing import render_step, render_summary
    from rackloom.lab.scenario.reading import find_scenario, read_scenario

    # A mistake in the file is reported before a whole site is imported.
    scenario = read_scenario(find_scenario(file))
    from rackloom.app.twin.scenarios import play_scenario

    report = (lambda _: None) if as_json else (lambda played: print(render_step(played), flush=True))
    played = play_scenario(scenario, speed=speed, home=home, report=report)
    if as_json:
        import msgspec

        print(msgspec.json.encode(played).decode())
    else:
        print(render_summary(played))
    return 0 if played.ok else 1


@twin_app.command(name="list")
def list_scenarios() -> None:
    """List the scenarios that ship with Rackloom."""
    from rackloom.cli.common import columns
    from rackloom.lab.scenario.reading import shipped_scenarios

    rows = [
        (scenario.name, ",".join(sorted(scenario.layers)), ",".join(sorted(scenario.speeds)), scenario.title)
        for scenario in shipped_scenarios()
    ]
    print(columns(("SCENARIO", "LAYERS", "SPEEDS", "WHAT HAPPENS"), rows))
