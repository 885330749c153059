"""`rackloom up` and `rackloom token`: the embedded site and a way into it."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

Role = Literal["TENANT_ADMIN", "PROVIDER_ADMIN", "PROVIDER_VIEWER"]


def up(
    *,
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = 8080,
    home: Path | None = None,
    racks: int = 2,
    profile: str = "gb200-nvl72",
    kubeconfig: Path | None = None,
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
    """
    from rackloom.app.home import Home, default_home
    from rackloom.app.whole.running import Wanted, run_up

    wanted = Wanted(port=port, racks=racks, profile=profile, kubeconfig=kubeconfig)
    run_up(Home(home or default_home()), wanted, partial(print, flush=True))


def token(
    *,
    org: str,
    role: Annotated[list[Role], Parameter(consume_multiple=True, negative="")],
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
    from rackloom.app.home import Home, default_home
    from rackloom.app.tokens import mint

    print(mint(Home(home or default_home()), org=org, roles=role, hours=hours))
