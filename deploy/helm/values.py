"""The values of the chart: their defaults, their schema, and values.yaml with what each means.

Defaults that describe pods (resources, tolerations, ports) come from the manifests; `write_chart.py` puts
them in. Everything else is here.
"""

import copy
from typing import Any

import yaml
from deploy.helm import options

Values = dict[str, Any]
_POD = {
    "options": {},
    "nodeSelector": {},
    "podAnnotations": {},
    "extraEnv": [],
    "extraVolumes": [],
    "extraVolumeMounts": [],
}
_TEXTS = {
    "image": "One image is every program. Without a tag: the version of the chart. A digest beats the tag.",
    "crds": "keep: `helm uninstall` leaves the definitions, and with them all objects of users.",
    "deviceClasses": "install: those that NVIDIA's chart has too. Without: leave to it what is there.\n"
    "nics: dra.net and dranet.net, where nobody has made classes of these names for DRANET.\n"
    "gpuExtendedResourceName: nvidia.com/gpu where no device plugin serves GPUs, docs/gpus.md.",
    "namespaces": "rackloom-system and rackloom-imex. Without: make them, labelled as in namespace.yaml.",
    "imex": "What controller, webhook and IMEX plugin must be told alike. additionalNamespaces: where\n"
    "an earlier release has left IMEX daemons.",
    "kueue": "AdmissionChecks of Kueue, docs/kueue.md: for clusters with Kueue 0.15 or later. quota: which\n"
    "ComputeDomains need quota of it: none, labelled (with a queue's label) or all.",
    "controller": "Two replicas: one works, the other waits for its lease.",
    "webhook": "Admission, docs/admission.md. mode: warn or enforce.",
    "node": "The kubelet plugins. kubeletRoot: kubelet's --root-dir; cdiRoot: where CDI specs are read.\n"
    "all: one process in place of the three, for less memory; what stands under imex, gpu and nic is\n"
    "then not used. mps: the pods in which MPS daemons run, which no upgrade replaces; without them an\n"
    "upgrade of the GPU plugin ends MPS daemons, docs/gpus.md.",
}
_CHOICES = {
    "image.pullPolicy": ["", "Always", "IfNotPresent", "Never"],
    "imex.isolation": ["domain", "channel"],
    "imex.mode": ["driverManaged", "hostManaged"],
    "kueue.quota": ["none", "labelled", "all"],
    "webhook.mode": ["warn", "enforce"],
}
_PATTERNS = {
    "image.digest": "^(sha256:[0-9a-f]{64})?$",
    "node.kubeletRoot": "^/.*[^/]$",
    "node.cdiRoot": "^/.*[^/]$",
}
_ORDER = ("create", "enabled", "mode", "replicas", "port", "resources", "options")
"""These come first. The rest follows in the order of this file and the manifests."""
_OPEN = ("resources", "affinity", "nodeSelector", "podAnnotations")
"""Objects of Kubernetes, which the API server checks."""
_TYPES = {str: "string", int: "integer", bool: "boolean"}


def fixed() -> Values:
    """The values that no manifest has; programs are given the rest by the writer."""
    return {
        "image": {"repository": "rackloom", "tag": "", "digest": "", "pullPolicy": "", "pullSecrets": []},
        "crds": {"install": True, "keep": True},
        "deviceClasses": {"install": True, "nics": True, "gpuExtendedResourceName": ""},
        "namespaces": {"create": True},
        "imex": {"isolation": "domain", "mode": "driverManaged", "additionalNamespaces": []},
        "kueue": {"enabled": False, "quota": "labelled"},
        "controller": copy.deepcopy(_POD),
        "webhook": {"enabled": False, "mode": "warn", **copy.deepcopy(_POD)},
        "node": {
            "kubeletRoot": "/var/lib/kubelet",
            "cdiRoot": "/var/run/cdi",
            **{plugin: {"enabled": True, **copy.deepcopy(_POD)} for plugin in ("imex", "gpu", "nic")},
            "all": {"enabled": False, **copy.deepcopy(_POD)},
            "mps": {"enabled": True, **copy.deepcopy(_POD)},
        },
    }


def at(values: Values, path: str) -> Values:
    """The value at a path with dots."""
    for part in path.split("."):
        values = values[part]
    return values


def text(defaults: Values) -> str:
    """values.yaml: each value with its default, and the options of each program as comments."""
    lines = [
        "# Written by deploy/helm/write_chart.py; docs/install.md explains it, values.schema.json checks it.",
    ]
    for key, value in defaults.items():
        lines += ["", *(f"# {line}" for line in _TEXTS[key].splitlines()), f"{key}:"]
        lines += _entries(value, key, "  ")
    return "\n".join(lines) + "\n"


def _entries(value: Values, path: str, pad: str) -> list[str]:
    lines: list[str] = []
    for key, inner in sorted(value.items(), key=lambda entry: _rank(entry[0])):
        if key == "options":
            lines += [f"{pad}options: {{}}", *_commented(path, pad + "  ")]
        elif f"{path}.{key}" in options.PROGRAMS:
            lines += [f"{pad}{key}:", *_entries(inner, f"{path}.{key}", pad + "  ")]
        else:
            dumped = yaml.safe_dump({key: inner}, sort_keys=False, width=100)
            lines += [f"{pad}{line}" for line in dumped.splitlines()]
    return lines


def _rank(key: str) -> int:
    return _ORDER.index(key) if key in _ORDER else len(_ORDER)


def _commented(program: str, pad: str) -> list[str]:
    lines = []
    for option in options.values_of(program):
        default = option.schema.get("default", "")
        shown = yaml.safe_dump({option.key: default}).strip() if default != "" else f"{option.key}:"
        lines.append(f"{pad}# {shown}  # {option.schema['description'].partition('. ')[0].rstrip('.')}")
    return lines


def schema(defaults: Values) -> Values:
    """The JSON schema of the values; unknown names are refused."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart rackloom",
        **_object(defaults, ""),
    }


def _object(value: Values, path: str) -> Values:
    properties = {key: _schema(inner, f"{path}.{key}".removeprefix(".")) for key, inner in value.items()}
    if not path:
        properties["global"] = {"type": "object"}  # Helm gives it to every chart
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _schema(value: Any, path: str) -> Values:
    key = path.rpartition(".")[2]
    if key == "options":
        found = {option.key: option.schema for option in options.values_of(path.rpartition(".")[0])}
        return {"type": "object", "additionalProperties": False, "properties": found}
    if key in _OPEN:
        return {"type": "object"}
    if isinstance(value, dict):
        return _object(value, path)
    if isinstance(value, list):
        return {"type": "array", "items": {"type": "string" if key == "additionalNamespaces" else "object"}}
    found = {"type": _TYPES[type(value)]}
    if key == "port":
        found |= {"minimum": 1, "maximum": 65535}
    if key == "replicas":
        found |= {"minimum": 0}
    if path in _CHOICES:
        found["enum"] = _CHOICES[path]
    if path in _PATTERNS:
        found["pattern"] = _PATTERNS[path]
    return found
