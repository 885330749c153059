"""The `rackloom` program: finds the command, imports only that one, and turns errors into exit codes.

Exit codes: 0 done, 1 refused or unhealthy, 2 usage.
"""

import sys

from cyclopts import App

from rackloom import __version__
from rackloom.errors import Refused, Retry, Unknown

app = App(
    name="rackloom",
    help="One control plane for rack-scale GPU fabrics: carve, claim, prove.",
    version=__version__,
    result_action="return_value",
)
app.command("rackloom.cli.demo:demo", name="demo")
app.command("rackloom.cli.up:up", name="up")
app.command("rackloom.cli.up:token", name="token")
app.command("rackloom.cli.topology:app", name="topology")
app.command("rackloom.cli.claim:app", name="claim")
app.command("rackloom.cli.transfer:app", name="transfer")


def main() -> None:
    """Entry point of the console script."""
    try:
        result = app()
    except Refused as refused:
        _complain(refused.reason, refused.nearest_fix)
        sys.exit(1)
    except (Retry, Unknown) as trouble:
        _complain(trouble.reason, None)
        sys.exit(1)
    sys.exit(result if isinstance(result, int) else 0)


def _complain(reason: str, fix: str | None) -> None:
    print(f"rackloom: {reason}", file=sys.stderr)
    if fix is not None:
        print(f"  fix: {fix}", file=sys.stderr)


if __name__ == "__main__":
    main()
