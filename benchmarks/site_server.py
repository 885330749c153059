"""The site's REST service as a process of its own, without racks: `python site_server.py HOME`.

It is put together as `rackloom serve` does it, with the limits of its listener and those of each organisation
in place, but so high that they delay nobody. Prints its port, and serves until its standard input ends.
"""

import sys
import time
from pathlib import Path

import uvloop
from site_plant import new_id
from site_process import announce, wait_for_end_of_input

from rackloom.app.listeners import serve_http
from rackloom.app.process import freeze_loaded_objects, shorten_switch_interval
from rackloom.carve.api.app import create_app
from rackloom.carve.api.auth import LocalIssuer
from rackloom.carve.api.limits import CallerLimits, RequestLimits
from rackloom.carve.api.routing import ApiDeps
from rackloom.carve.store.database import Store
from rackloom.carve.store.journal import MonotonicSiteClock
from rackloom.serving.limits import SITE_REST

UNREACHED = RequestLimits(rate=1e6, burst=1_000_000, concurrent=1000, waiting=1000)


def site_deps(store: Store, home: Path) -> ApiDeps:
    """What the application needs: nothing reconciles, and recorded readings stay valid."""
    clock = MonotonicSiteClock(time.time, time.monotonic, 0.0)
    return ApiDeps(
        store=store,
        clock=clock,
        ids=new_id,
        wake=lambda _domains, _org: None,
        verifier=LocalIssuer(home / "keys").verifier(clock),
        auto_tenant=True,
        valid_seconds=1e9,
    )


async def serve(home: Path) -> None:
    """Serve until the standard input ends."""
    shorten_switch_interval()
    store = Store.open(home)
    try:
        app = create_app(site_deps(store, home), CallerLimits(tenant=UNREACHED, provider=UNREACHED))
        async with serve_http(app, "127.0.0.1:0", limits=SITE_REST) as port:
            freeze_loaded_objects()
            announce(port)
            await wait_for_end_of_input()
    finally:
        await store.close()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1])))
