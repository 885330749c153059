"""The `rackloom` program: finds the command, imports only that one, and turns errors into exit codes.

Exit codes: 0 done, 1 refused or unhealthy, 2 usage, 130 after Ctrl-C. `Refused` prints its reason and the
nearest fix. `Retry` and `Unknown` print their reason. A full disk and a closed pipe end the program
without a traceback.

`COMMANDS` gives each command's import path and its line in the list of commands. cyclopts imports the
path when the command is called. The list of commands and the version load no library, not even cyclopts,
because its import takes longer than both.
"""

import errno
import os
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from rackloom import __version__
from rackloom.cli.kubectl_plugin import is_kubectl_plugin
from rackloom.errors import Misuse, Refused, Retry, Unknown

if TYPE_CHECKING:
    from cyclopts import App

    app: App

NAME = "kubectl rackloom" if is_kubectl_plugin() else "rackloom"
HELP = """One control plane for rack-scale GPU fabrics: carve, claim, prove.

Where to begin:

- new here: `rackloom demo`, on simulated racks
- a tenant: `rackloom partition --help`
- an operator of racks: `rackloom serve --help`, `rackloom doctor`
- a platform engineer: `rackloom claim check FILE`, `rackloom place --help`
- an inference engineer: `rackloom transfer run`

Every command has `-q` (results and errors only) and `-v` (each request to
another system). Commands that print data have `-o json`, too.
`rackloom help COMMAND` shows one command, `rackloom version` the version.

Exit codes: 0 done, 1 refused or unhealthy, 2 usage.
"""
# Help texts are here because listing the commands must not import them.
COMMANDS = (
    ("demo", "rackloom.cli.site:demo", "Carve, claim and prove on simulated racks, each step verified."),
    ("up", "rackloom.cli.site:up", "Run a site on simulated racks, on loopback."),
    ("token", "rackloom.cli.site:token", "Print a bearer token for such a simulated site."),
    ("partition", "rackloom.cli.tenant:partition_app", "Your logical NVLink partitions."),
    ("vpc", "rackloom.cli.tenant:vpc_app", "Your VPCs, which give instances their partition."),
    ("instance", "rackloom.cli.tenant:instance_app", "Your instances: create, watch and delete them."),
    ("machine", "rackloom.cli.tenant:machine_app", "The machines that you may see."),
    ("type", "rackloom.cli.tenant:type_app", "The instance types that you may request."),
    ("allocation", "rackloom.cli.tenant:allocation_app", "The machines that are allocated to you."),
    ("examples", "rackloom.cli.examples:examples", "Write the examples of the documentation as files."),
    ("twin", "rackloom.cli.site:twin_app", "Replay incidents on the production code."),
    ("doctor", "rackloom.cli.doctor:doctor", "Find the faults of a site on all layers, and their fixes."),
    ("topology", "rackloom.cli.topology:app", "Show the wiring of hosts, known machines and racks."),
    ("claim", "rackloom.cli.claim:app", "Check, explain and allocate device claims without a cluster."),
    ("place", "rackloom.cli.place:place", "Place whole jobs, or name the cause that blocks them."),
    ("transfer", "rackloom.cli.transfer:app", "Measure a KV-cache transfer and prove its path."),
    ("nixl", "rackloom.cli.nixl:app", "Install NIXL, the library of measured transfers."),
    ("serve", "rackloom.cli.site:serve", "Run the site service on real switch controllers."),
    ("admin", "rackloom.cli.admin:app", "Operate a site: endpoints, machines, partitions, plans."),
    ("controller", "rackloom.cli.controller:controller", "Control the ComputeDomains of a cluster."),
    (
        "webhook",
        "rackloom.cli.controller:webhook",
        "Admit claims and pods: validate, keep together, hold back.",
    ),
    (
        "webhook-certificates",
        "rackloom.cli.controller:webhook_certificates",
        "Issue the webhook's certificate and its CA bundle.",
    ),
    ("crds", "rackloom.cli.controller:crds", "Print the CustomResourceDefinitions of the controller."),
    ("uninstall", "rackloom.cli.uninstall:uninstall", "Remove Rackloom from a cluster, in order."),
    ("node", "rackloom.cli.node:app", "Kubelet plugins: serve the devices of this node to pods."),
    ("takeover", "rackloom.cli.takeover:app", "Take a node over from NVIDIA's DRA driver, and back."),
    ("imex", "rackloom.cli.imex:app", "Supervise the IMEX daemon of a ComputeDomain on one node."),
    ("completion", "rackloom.cli.completion:completion", "Print the completion of a shell."),
)
"""In listed order: commands to try, for a tenant, to look and plan, to run a site, to run on
Kubernetes."""
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@cache
def command_tree() -> "App":
    """All commands. None of them is imported yet."""
    from cyclopts import App

    made = App(name=NAME, help=HELP, version=__version__, result_action="return_value")
    for place, (name, path, line) in enumerate(COMMANDS):
        made.command(path, name=name, help=line, sort_key=place)
    return made


def __getattr__(name: str) -> object:
    """Make `app` when a program imports it."""
    if name == "app":
        return command_tree()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> None:
    """Entry point of the console script."""
    # A program that was started with its output closed (`>&-`) has no stream: discard its output.
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (open until the end)
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    # gRPC logs a line for each failed handshake, so any stranger could fill the log. It reads this variable
    # on import, and the commands import it.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        result = _run_command()
        sys.stdout.flush()  # A pipe is block-buffered: flush now, to find out if the reader has closed it.
    except Refused as refused:
        _print_error(refused.reason, refused.nearest_fix)
        sys.exit(2 if isinstance(refused, Misuse) else 1)
    except (Retry, Unknown) as trouble:
        _print_error(trouble.reason, None)
        sys.exit(1)
    except BrokenPipeError:
        # The reader (head, a pager) has closed the pipe. The interpreter must not report that at exit.
        _discard_output()
        sys.exit(1)
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        _discard_output()
        _print_error(f"what this writes has no room: {error.strerror}", "make room on that disk")
        sys.exit(1)
    sys.exit(result if isinstance(result, int) else 0)


def _run_command() -> object:
    """Run the command. The version and the list of commands need no library."""
    words = sys.argv[1:]
    if words in (["--version"], ["version"]):
        print(__version__)
        return 0
    if words in ([], ["--help"], ["-h"], ["help"]):
        print(_list_of_commands())
        return 0
    if words[0] == "help":
        words = [*words[1:], "--help"]
    # Describe the command that is called, or that --help names.
    tree = command = command_tree()
    for word in words:
        if word.startswith("-") or word not in command:
            break
        command = command[word]
    describe(command)
    if command.default_command is None:
        # A list of commands is plain text: loading Markdown takes as long as everything else.
        command.help_format = "plaintext"
    return tree(words)


def _list_of_commands() -> str:
    """The help of the program as a whole."""
    width = max(len(name) for name, _, _ in COMMANDS)
    lines = (f"  {name.ljust(width)}  {line}" for name, _, line in COMMANDS)
    return "\n".join((f"Usage: {NAME} COMMAND\n", HELP, "Commands:", *lines))


def describe(command: "App") -> None:
    """Make the help of a command show its docstring instead of its line in the list of commands."""
    if command.default_command is not None and command.default_command.__doc__:
        command.help = None


def _discard_output() -> None:
    """Discard the buffer: the interpreter would try to write it at exit, and fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_RED, _GREEN = 31, 32


def _print_error(reason: str, fix: str | None) -> None:
    print(f"{_coloured('rackloom:', _RED)} {reason}", file=sys.stderr)
    if fix is not None:
        print(f"  {_coloured('fix:', _GREEN)} {fix}", file=sys.stderr)


def _coloured(word: str, colour: int) -> str:
    """A word in a colour (its number for terminals), if standard error is a terminal with colours."""
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb" or not sys.stderr.isatty()
    return word if plain else f"\x1b[{colour}m{word}\x1b[0m"


if __name__ == "__main__":
    main()
