"""The steps of a fix: each command with its action and its effect on running work.

A fix is a line of shell commands joined by `&&`, with advice after `#`. `repair_steps` takes it apart. The
action of a command is looked up by its beginning in one table. A command that the table does not know counts
as disruptive, because it may not be safe. A test finds every fix of every check in the table. Effects:

- safe: it reads, or only changes the resources that new work may use. Running work goes on.
- disruptive: something that runs ends or waits, and is created again.
- destructive: something is removed that is not created again automatically.
"""

import re
from enum import StrEnum

import msgspec


class Effect(StrEnum):
    """How much a command disturbs."""

    SAFE = "safe"
    DISRUPTIVE = "disruptive"
    DESTRUCTIVE = "destructive"


class RepairStep(msgspec.Struct, frozen=True):
    """One command of a fix."""

    command: str
    effect: Effect
    does: str
    """In a clause without a subject: `keeps new pods off the node`."""


class CommandRule(msgspec.Struct, frozen=True):
    """The action and effect of commands with this beginning."""

    beginning: str
    effect: Effect
    does: str


_SAFE, _DISRUPTIVE, _DESTRUCTIVE = Effect
_READS = "only reads"
COMMAND_RULES = tuple(
    CommandRule(*rule)
    for rule in (
        ("kubectl get", _SAFE, _READS),
        ("kubectl describe", _SAFE, _READS),
        ("kubectl cordon", _SAFE, "keeps new pods off the node; pods on it go on"),
        ("kubectl uncordon", _SAFE, "lets new pods onto the node"),
        ("kubectl label node", _SAFE, "changes which jobs may use the node; pods on it go on"),
        ("kubectl delete pod", _DISRUPTIVE, "ends the pod; what controls it makes a new one"),
        (
            "kubectl delete resourceslices",
            _DISRUPTIVE,
            "withdraws devices that no plugin publishes again",
        ),
        (
            "kubectl delete resourceclaim",
            _DESTRUCTIVE,
            "deletes the claim; no pod can start with it",
        ),
        ("systemctl reboot", _DISRUPTIVE, "restarts the machine: everything on it ends"),
        ("nvidia-smi --gpu-reset", _DISRUPTIVE, "resets the GPU: a process that uses it fails"),
        ("sh -c 'rdma link; ip -br link'", _SAFE, "shows the links of the node, in a pod for debugging"),
        ("systemctl disable --now nvidia-imex", _DISRUPTIVE, "ends the host's own IMEX session"),
        ("systemctl restart", _DISRUPTIVE, "restarts the container runtime: no pod starts meanwhile"),
        ("containerd config dump", _SAFE, _READS),
        ("rdma link show", _SAFE, _READS),
        ("ip link show", _SAFE, _READS),
        ("sudo rackloom doctor", _SAFE, _READS),
        ("rackloom doctor", _SAFE, _READS),
        ("rackloom up", _DISRUPTIVE, "starts the site again"),
        ("rackloom token", _SAFE, "prints a token; keep it secret"),
        ("rackloom topology discover", _SAFE, _READS),
        ("rackloom claim explain", _SAFE, _READS),
        ("rackloom claim template", _SAFE, "prints claims that fit the hardware"),
        ("rackloom transfer run", _SAFE, "measures again, and loads the link meanwhile"),
        ("rackloom admin domain show", _SAFE, _READS),
        ("rackloom admin machine nvlink-info show", _SAFE, _READS),
        ("rackloom admin partition show", _SAFE, _READS),
        ("rackloom admin plan", _SAFE, "prints what would be done, and does none of it"),
        ("rackloom admin tray cordon", _SAFE, "keeps new instances off the tray; those on it go on"),
        ("rackloom admin domain resume", _DISRUPTIVE, "does what tenants have asked for meanwhile"),
        ("rackloom admin endpoint create", _SAFE, "reads one more switch controller"),
        ("rackloom admin endpoint update", _SAFE, "reads the switch controller at another address"),
        ("rackloom admin machine nvlink-info populate", _SAFE, "records what the switch controller reports"),
        ("rackloom admin logical-partition create", _SAFE, "makes a record; no GPU joins it yet"),
        ("rackloom partition create", _SAFE, "makes a logical partition; no GPU joins it yet"),
        ("rackloom vpc create", _SAFE, "makes a VPC; GPUs of its instances join the partition that it names"),
        ("rackloom instance create", _SAFE, "takes free machines; instances that you have go on"),
        ("rackloom instance delete", _DESTRUCTIVE, "ends the instance with all that runs on it"),
        ("rackloom admin partition release", _DESTRUCTIVE, "deletes the partition: its GPUs share no memory"),
    )
)
_UNKNOWN = CommandRule("", _DISRUPTIVE, "changes something: read about it before you run it")
_AND = re.compile(r" && (?=(?:[^']*'[^']*')*[^']*$)")
_ADVICE = re.compile(r"  # (?=(?:[^']*'[^']*')*[^']*$)")
_VARIABLES = re.compile(r"(?:[A-Z_]+=\S+ )+")
_OPTIONS = re.compile(r"(kubectl) (?:(?:-n|--kubeconfig|--context) (?:'[^']*'|\S+) )+")
_ON_NODE = re.compile(r"kubectl debug node/\S+ .* -- chroot /host ")


def repair_steps(fix: str) -> tuple[RepairStep, ...]:
    """The commands of a fix, in their order. An empty fix has no commands."""
    commands, *_ = _ADVICE.split(fix)
    return tuple(repair_step(command) for command in _AND.split(commands.strip()) if command)


def repair_advice(fix: str) -> str:
    """The advice of a fix, beside its commands. Empty if it has none."""
    return "  # ".join(_ADVICE.split(fix)[1:])


def repair_step(command: str) -> RepairStep:
    """One command, with its action and effect."""
    rule = command_rule(command)
    return RepairStep(command, rule.effect, rule.does)


def command_rule(command: str) -> CommandRule:
    """The rule of a command, regardless of its site, or the rule of unknown commands."""
    bare = _ON_NODE.sub("", _OPTIONS.sub(r"\1 ", _VARIABLES.sub("", command)))
    return next((rule for rule in COMMAND_RULES if f"{bare} ".startswith(f"{rule.beginning} ")), _UNKNOWN)


def is_known(command: str) -> bool:
    """Whether the table has a rule for a command."""
    return command_rule(command) is not _UNKNOWN
