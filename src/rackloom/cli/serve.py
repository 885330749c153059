"""`rackloom serve`: the site service on real switch controllers."""

from functools import partial
from pathlib import Path


def serve(*, config: Path) -> None:
    """Serve a site: REST for tenants, admin gRPC for operators, metrics, and the reconciler behind them.

    Parameters
    ----------
    config
        TOML file; docs/operating.md names every setting.
    """
    from rackloom.app.serve import run_serve

    run_serve(config, partial(print, flush=True))
