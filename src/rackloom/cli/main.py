"""The `rackloom` program: finds the command, imports only that one, and turns errors into exit codes.

Exit codes: 0 done, 1 refused or unhealthy, 2 usage.
"""

import os
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
# Help texts stand here because listing the commands must not import them.
COMMANDS = (
    ("demo", "rackloom.cli.demo:demo", "Tell the whole story on simulated racks, each step verified."),
    ("up", "rackloom.cli.up:up", "Run a site on simulated racks, on loopback."),
    ("token", "rackloom.cli.up:token", "Print a bearer token for such a site."),
    ("serve", "rackloom.cli.serve:serve", "Run the site service on real switch controllers."),
    ("admin", "rackloom.cli.admin:app", "Operate a site: endpoints, machines, partitions, plans."),
    ("topology", "rackloom.cli.topology:app", "What is wired to what, on known machines and racks."),
    ("claim", "rackloom.cli.claim:app", "What device claims would get here, and why not."),
    ("place", "rackloom.cli.place:place", "Where whole jobs would go, or what blocks them."),
    ("controller", "rackloom.cli.controller:controller", "Control the ComputeDomains of a cluster."),
    ("imex", "rackloom.cli.imex:app", "Supervise the IMEX daemon of a ComputeDomain on one node."),
    ("node", "rackloom.cli.node:app", "Kubelet plugins: serve the devices of this node to pods."),
    ("webhook", "rackloom.cli.webhook:webhook", "Admit claims and pods: validate, keep together, hold back."),
    ("twin", "rackloom.cli.twin:app", "Replay incidents on the production code."),
    ("doctor", "rackloom.cli.doctor:doctor", "What is wrong with a site, over all layers, and the fix."),
    ("transfer", "rackloom.cli.transfer:app", "Measure a KV-cache transfer and prove its path."),
)
for _name, _path, _help in COMMANDS:
    app.command(_path, name=_name, help=_help)


def main() -> None:
    """Entry point of the console script."""
    try:
        result = app()
        sys.stdout.flush()  # A pipe is written in blocks: whether anybody reads the last shows here.
    except Refused as refused:
        _complain(refused.reason, refused.nearest_fix)
        sys.exit(1)
    except (Retry, Unknown) as trouble:
        _complain(trouble.reason, None)
        sys.exit(1)
    except BrokenPipeError:
        # The reader (head, a pager) has seen enough; the interpreter must not complain about it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    sys.exit(result if isinstance(result, int) else 0)


def _complain(reason: str, fix: str | None) -> None:
    print(f"rackloom: {reason}", file=sys.stderr)
    if fix is not None:
        print(f"  fix: {fix}", file=sys.stderr)


if __name__ == "__main__":
    main()
