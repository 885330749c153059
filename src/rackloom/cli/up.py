"""`rackloom up` and `rackloom token`: the embedded site and a way into it."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

Role = Literal["TENANT_ADMIN", "PROVIDER_ADMIN", "PROVIDER_VIEWER"]


def up(
    *,
    port: int = 8080,
    home: Path | None = None,
    racks: int = 2,
    profile: str = "gb200-nvl72",
) -> None:
    """Run a site on simulated racks: switch controllers, reconciler and REST, in one process, on loopback.

    Parameters
    ----------
    port
        TCP port of the REST service on 127.0.0.1; 0 picks a free one.
    home
        Directory for the store, keys and logs; default: rackloom below the XDG data directory.
    racks
        How many racks the site has.
    profile
        Rack profile, as `rackloom topology list` names them.
    """
    from rackloom.app.embedded import run_up
    from rackloom.app.home import Home, default_home

    say = partial(print, flush=True)
    run_up(Home(home or default_home()), port=port, racks=racks, profile=profile, announce=say)


def token(
    *,
    org: str,
    role: Annotated[list[Role], Parameter(consume_multiple=True)],
    home: Path | None = None,
    hours: float = 24.0,
) -> None:
    """Print a bearer token for the site that lives in HOME.

    Parameters
    ----------
    org
        Organisation that the token speaks for; `demo` is provider and tenant of an embedded site.
    role
        What it may do there; give it more than once for several roles.
    home
        Home directory of the site.
    hours
        How long the token is valid.
    """
    from rackloom.app.home import Home, default_home
    from rackloom.app.tokens import mint

    print(mint(Home(home or default_home()), org=org, roles=role, hours=hours))
