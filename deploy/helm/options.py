"""The options of the programs on Kubernetes, as values of the chart.

Every option of a command is either a value `<program>.options.<name>`, or decided by the manifests
(`DECIDED`). Options that an environment variable may set become variables of the pod, the others arguments.
Names, types, defaults and descriptions are those of the commands, so that a new option is a new value.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from rackloom.cli.main import app

PROGRAMS = {
    "controller": ("controller",),
    "webhook": ("webhook",),
    "node.imex": ("node", "imex"),
    "node.gpu": ("node", "gpu"),
    "node.nic": ("node", "nic"),
    "node.all": ("node", "all"),
    "node.mps": ("node", "mps"),
}
"""The command of each program, by its path in the values."""
DECIDED = {
    "image": "image.*: the controller's own image, which a policy holds daemons to",
    "namespace": "rackloom-system: policies name accounts in it",
    "daemon-namespace": "rackloom-imex: policies name it",
    "pod": "the name of the pod",
    "node": "the node of the pod",
    "listen": "<program>.port",
    "sysroot": "where the DaemonSet mounts the host",
    "registry": "node.kubeletRoot",
    "plugins": "node.kubeletRoot",
    "cdi-root": "node.cdiRoot",
    "mps-daemons": "node.mps.enabled",
    "isolation": "imex.isolation: controller, webhook and plugin must agree",
    "mode": "imex.mode; of the webhook: webhook.mode",
    "kueue-checks": "kueue.enabled: the rights come with it",
    "kueue-quota": "kueue.quota, with kueue.enabled: the rights come with it",
    "quiet": "off: the log of a pod is whole",
    "verbose": "off: it logs each request",
    "additional-namespaces": "imex.additionalNamespaces: controller and plugin must agree",
}
"""Options without a value in the chart, and the setting that decides them."""
_JSON_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", Path: "string"}


@dataclass(frozen=True)
class Option:
    """One option of a command."""

    name: str
    """On the command line, without dashes."""
    variable: str | None
    """The environment variable that sets it."""
    schema: dict[str, Any]
    """JSON schema of its value."""

    @property
    def key(self) -> str:
        """Its name among the values: `gang-max-spares` is `gangMaxSpares`, `gpu.vfio` is `gpuVfio`."""
        return re.sub(r"[-.](\w)", lambda found: found.group(1).upper(), self.name)

    @property
    def is_decided(self) -> bool:
        """Whether the manifests decide it, also where it has the name of its plugin in front."""
        return self.name.rpartition(".")[2] in DECIDED

    def negative(self, prefix: str) -> str:
        """The option that says no (`no`) or none (`empty`): `--no-vfio`, `--gpu.no-vfio`."""
        group, dot, name = self.name.rpartition(".")
        return f"--{group}{dot}{prefix}-{name}"


def options(program: str) -> Iterator[Option]:
    """All options of a program, also those that the manifests decide."""
    _, commands, _ = app.parse_commands(list(PROGRAMS[program]))
    for argument in commands[-1].assemble_argument_collection(parse_docstring=True):
        if is_dataclass(argument.hint):
            continue
        default = argument.field_info.default
        text = argument.parameter.help or argument.field_info.help or ""
        schema = _schema(argument.hint) | {"description": " ".join(text.split())}
        if default is not argument.field_info.empty and default not in (None, "", ()):
            schema["default"] = _plain(default)
        yield Option(
            name=argument.names[0].removeprefix("--"),
            variable=next(iter(argument.parameter.env_var or ()), None),
            schema=schema,
        )


def values_of(program: str) -> list[Option]:
    """The options of a program that are values of the chart."""
    return [option for option in options(program) if not option.is_decided]


def helpers(program: str) -> str:
    """Named templates that turn the options of a program into variables and arguments."""
    variables = [_variable(option) for option in values_of(program) if option.variable]
    arguments = [_argument(option) for option in values_of(program) if not option.variable]
    given = f"{{{{- $options := .Values.{program}.options }}}}\n"
    return (
        f'{{{{- define "rackloom.env.{program}" -}}}}\n{given}{"".join(variables)}{{{{- end }}}}\n'
        f'{{{{- define "rackloom.args.{program}" -}}}}\n{given}{"".join(arguments)}{{{{- end }}}}\n'
    )


def _variable(option: Option) -> str:
    return (
        f'{{{{- if hasKey $options "{option.key}" }}}}\n- name: {option.variable}\n'
        f'  value: {{{{ include "rackloom.scalar" $options.{option.key} | quote }}}}\n{{{{- end }}}}\n'
    )


def _argument(option: Option) -> str:
    if option.schema["type"] == "boolean":
        no = option.negative("no")
        words = f'- {{{{ ternary "--{option.name}" "{no}" $options.{option.key} }}}}\n'
    elif option.schema["type"] == "array":
        flag = f"--{option.name}="
        words = (
            f"{{{{- range $options.{option.key} }}}}\n"
            f'- {{{{ include "rackloom.scalar" . | printf "{flag}%s" | quote }}}}\n'
            f"{{{{- else }}}}\n- {option.negative('empty')}\n{{{{- end }}}}\n"
        )
    else:
        text = f'include "rackloom.scalar" $options.{option.key} | printf "--{option.name}=%s" | quote'
        words = f"- {{{{ {text} }}}}\n"
    return f'{{{{- if hasKey $options "{option.key}" }}}}\n{words}{{{{- end }}}}\n'


def _schema(hint: Any) -> dict[str, Any]:
    """JSON schema of a type of an option."""
    parts = [part for part in get_args(hint) if part not in (type(None), ...)]
    if get_origin(hint) is Literal:
        return {"type": "string", "enum": parts}
    if get_origin(hint) is tuple:
        return {"type": "array", "items": _schema(parts[0])}
    if parts:  # with None
        return _schema(parts[0])
    return {"type": _JSON_TYPES[hint]}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
