"""Writes the chart rackloom/ from deploy/kubernetes: `python -m deploy.helm.write_chart`.

The chart installs the same objects that kustomize builds from the base and the overlay `webhook`. This
program reads the same files, and puts expressions of Helm in the places that values may change. The defaults
of these values are taken from the files, those of options from the commands (`options.py`). A test compares
what is checked in with what this program writes, and another what `helm template` renders with what `kubectl
kustomize` builds, for the defaults and for each values file beside this program.

An expression is put into an object as a token, which `text_of` replaces once the object is YAML.
"""

import copy
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from deploy.helm import options, values

HERE = Path(__file__).parent
CHART = HERE / "rackloom"
ROOT = HERE.parents[1]
KUBERNETES = ROOT / "deploy" / "kubernetes"
SYSTEM = "rackloom-system"
Object = dict[str, Any]
Block = Callable[[str], str]
_WRITTEN = "{{/* Written by deploy/helm/write_chart.py; the reasons stand in deploy/kubernetes. */}}\n"
_NIC_CLASSES = ("dra.net", "dranet.net")
CLUSTER_KINDS = {
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
    "DeviceClass",
    "MutatingWebhookConfiguration",
    "Namespace",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
    "ValidatingWebhookConfiguration",
}
_TOKEN = re.compile(r"TOKEN(\d+)X")


class Tokens:
    """Expressions of Helm that stand in objects under names that YAML leaves alone."""

    def __init__(self) -> None:
        self._found: list[str | Block] = []

    def inline(self, expression: str) -> str:
        """An expression within a scalar."""
        return self._add(f"{{{{ {expression} }}}}")

    def block(self, lines: Block) -> str:
        """Lines in place of an entry of a mapping or a list; the function is given their indentation."""
        return self._add(lines)

    def _add(self, content: str | Block) -> str:
        self._found.append(content)
        return f"TOKEN{len(self._found) - 1}X"

    def text_of(self, obj: Object) -> str:
        """The template of an object."""
        lines = yaml.safe_dump(obj, sort_keys=False, width=10**6).splitlines()
        return "".join(f"{self._line(line)}\n" for line in lines)

    def _line(self, line: str) -> str:
        whole = re.fullmatch(r"( *)(?:- )?TOKEN(\d+)X(?:: null)?", line)
        content = self._found[int(whole.group(2))] if whole else None
        if whole and callable(content):
            return content(whole.group(1)).rstrip("\n")
        return _TOKEN.sub(lambda found: str(self._found[int(found.group(1))]), line)


def documents(folder: Path) -> Iterator[tuple[str, Object]]:
    """Each object that a folder of kustomize names, with its file."""
    for name in yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]:
        if name.endswith(".yaml"):
            for obj in yaml.safe_load_all((folder / name).read_text()):
                # Values that YAML would write as aliases are written out.
                yield name, json.loads(json.dumps(obj))


class ChartWriter:
    """Collects the templates of the chart and the defaults of its values."""

    def __init__(self) -> None:
        self.tokens = Tokens()
        self.files: dict[str, str] = {}
        self.defaults = values.fixed()
        self.version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

    def write(self) -> dict[str, str]:
        """Every file of the chart, by its path in it."""
        for name, obj in documents(KUBERNETES / "base"):
            self._add(name, obj)
        for name, obj in documents(KUBERNETES / "one-process"):
            self._add(name, obj, ".Values.node.all.enabled")
        for name, obj in documents(KUBERNETES / "webhook"):
            if obj["kind"] in ("Job", "CronJob"):
                self._job(obj)
            self._add(f"webhook-{name}".replace("webhook-webhook", "webhook"), obj, ".Values.webhook.enabled")
        for name, obj in documents(KUBERNETES / "kueue"):
            self._add(f"kueue-{name}", obj, ".Values.kueue.enabled")
        for name, obj in documents(KUBERNETES / "take-over"):
            self._earlier(f"take-over-{name}", obj)
        helpers = "\n".join(options.helpers(program) for program in options.PROGRAMS)
        return {
            "Chart.yaml": self._chart(),
            "values.yaml": values.text(self.defaults),
            "values.schema.json": json.dumps(values.schema(self.defaults), indent=2) + "\n",
            "templates/_options.tpl": f"{_WRITTEN}{helpers}",
            **{f"templates/{name}": _WRITTEN + text for name, text in sorted(self.files.items())},
        }

    def _chart(self) -> str:
        chart = {
            "apiVersion": "v2",
            "name": "rackloom",
            "description": "ComputeDomains, GPUs and NICs as claims: controller, webhook and node plugins",
            "type": "application",
            "version": self.version,
            "appVersion": self.version,
            "kubeVersion": ">=1.34.0-0",
            "annotations": {"licenses": "Apache-2.0"},
        }
        return "# Written by deploy/helm/write_chart.py.\n" + yaml.safe_dump(chart, sort_keys=False)

    def _add(self, name: str, obj: Object, condition: str | None = None) -> None:
        kind, meta = obj["kind"], obj["metadata"]
        meta.setdefault("labels", {})["app.kubernetes.io/part-of"] = "rackloom"
        if kind not in CLUSTER_KINDS:
            meta.setdefault("namespace", SYSTEM)
        if kind == "DeviceClass" and meta["name"].endswith("nvidia.com"):
            condition = ".Values.deviceClasses.install"
            if meta["name"] == "gpu.nvidia.com":
                name_of_count = self._line(
                    "extendedResourceName", ".Values.deviceClasses.gpuExtendedResourceName"
                )
                obj["spec"][name_of_count] = None
        elif kind == "DeviceClass" and meta["name"] in _NIC_CLASSES:
            condition = ".Values.deviceClasses.nics"
        elif kind == "Namespace":
            condition = ".Values.namespaces.create"
        elif kind == "CustomResourceDefinition":
            condition = ".Values.crds.install"
            meta["annotations"] = {**meta.get("annotations", {}), self._keep(): None}
        elif kind in ("Deployment", "DaemonSet"):
            condition = self._workload(obj) or condition
        elif meta["name"] == "rackloom-controller-daemons" and kind == "ValidatingAdmissionPolicy":
            (image,) = (each for each in obj["spec"]["variables"] if each["name"] == "image")
            image["expression"] = "'" + self.tokens.inline('include "rackloom.image" .') + "'"
        elif kind == "PodDisruptionBudget":
            program = meta["name"].removeprefix("rackloom-")
            # With one replica a budget of one would hold up every drain.
            condition = f"and {condition or 'true'} (gt (int .Values.{program}.replicas) 1)"
        self._put(name, self.tokens.text_of(obj), f"if {condition}" if condition else None)

    def _keep(self) -> str:
        lines = ("{{- if .Values.crds.keep }}", "helm.sh/resource-policy: keep", "{{- end }}")
        return self.tokens.block(lambda pad: "\n".join(f"{pad}{line}" for line in lines))

    def _put(self, name: str, text: str, opening: str | None) -> None:
        text = f"---\n{text}"
        if opening:
            text = f"{{{{- {opening} }}}}\n{text}{{{{- end }}}}\n"
        self.files[name] = self.files.get(name, "") + text

    def _earlier(self, name: str, obj: Object) -> None:
        """Rights in a namespace where an earlier release has left daemons: in each that the values name."""
        obj["metadata"].setdefault("labels", {})["app.kubernetes.io/part-of"] = "rackloom"
        obj["metadata"]["namespace"] = self.tokens.inline(".")
        for subject in obj.get("subjects", ()):
            if subject["name"] == "compute-domain-daemon-service-account":
                subject["namespace"] = self.tokens.inline(".")
        self._put(name, self.tokens.text_of(obj), "range .Values.imex.additionalNamespaces")

    def _workload(self, obj: Object) -> str | None:
        """Put a program's values into its Deployment or DaemonSet; the condition under which it is there."""
        program = obj["metadata"]["name"].removeprefix("rackloom-").replace("node-", "node.")
        path, mine = f".Values.{program}", values.at(self.defaults, program)
        spec, template = obj["spec"], obj["spec"]["template"]
        pod = template["spec"]
        (container,) = pod["containers"]
        if "replicas" in spec:
            mine["replicas"] = spec["replicas"]
            spec["replicas"] = self.tokens.inline(f"{path}.replicas")
        container["image"] = self.tokens.inline('include "rackloom.image" . | quote')
        self._ports(container, path, mine)
        for key, place in (("resources", container), ("tolerations", pod), ("affinity", pod)):
            mine[key] = copy.deepcopy(place.pop(key, [] if key == "tolerations" else {}))
            place[self._yaml(key, f"{path}.{key}")] = None
        mine["priorityClassName"] = pod["priorityClassName"]
        pod["priorityClassName"] = self.tokens.inline(f"{path}.priorityClassName | quote")
        pod[self._yaml("nodeSelector", f"{path}.nodeSelector")] = None
        pod[self._yaml("imagePullSecrets", ".Values.image.pullSecrets")] = None
        container[self._line("imagePullPolicy", ".Values.image.pullPolicy")] = None
        template["metadata"][self._yaml("annotations", f"{path}.podAnnotations")] = None
        self._environment(container, program)
        container["args"].append(self._include(f"rackloom.args.{program}"))
        for key, place, extra in (
            ("volumeMounts", container, "extraVolumeMounts"),
            ("volumes", pod, "extraVolumes"),
        ):
            if key in place:
                place[key].append(self._items(f"{path}.{extra}"))
            else:
                place[self._yaml(key, f"{path}.{extra}")] = None
        if obj["kind"] == "DaemonSet":
            self._folders(pod)
            return self._where_it_runs(program)
        return None

    def _job(self, obj: Object) -> None:
        """The webhook's certificates: pods from its image that run where its own pods do."""
        spec = obj["spec"]
        if obj["kind"] == "Job":
            # Helm replaces the Job of each revision: the pod template of a Job never changes.
            obj["metadata"]["name"] = obj["metadata"]["name"][:-1] + self.tokens.inline(".Release.Revision")
        pod = spec.get("jobTemplate", {"spec": spec})["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        container["image"] = self.tokens.inline('include "rackloom.image" . | quote')
        container[self._line("imagePullPolicy", ".Values.image.pullPolicy")] = None
        container["env"].append(self._items(".Values.webhook.extraEnv"))
        pod[self._yaml("imagePullSecrets", ".Values.image.pullSecrets")] = None
        pod["priorityClassName"] = self.tokens.inline(".Values.webhook.priorityClassName | quote")
        for key in ("tolerations", "affinity", "nodeSelector"):
            pod[self._yaml(key, f".Values.webhook.{key}")] = None

    def _where_it_runs(self, program: str) -> str:
        """One process for all drivers takes the place of the three plugins."""
        enabled = f".Values.{program}.enabled"
        if program == "node.mps":
            return f"and {enabled} (or .Values.node.gpu.enabled .Values.node.all.enabled)"
        return enabled if program == "node.all" else f"and {enabled} (not .Values.node.all.enabled)"

    def _ports(self, container: Object, path: str, mine: Object) -> None:
        if "--listen" not in container["args"]:
            return
        where = container["args"].index("--listen") + 1
        host, _, port = container["args"][where].rpartition(":")
        mine["port"] = int(port)
        token = self.tokens.inline(f"{path}.port")
        container["args"][where] = f"{host}:{token}"
        for named in container.get("ports", ()):
            named["containerPort"] = token
        for name, probe in container.items():
            if name.endswith("Probe") and probe.get("httpGet", {}).get("port") == int(port):
                probe["httpGet"]["port"] = token

    def _environment(self, container: Object, program: str) -> None:
        """The settings of several programs, and the options of this one."""
        for variable in container["env"]:
            if variable["name"] == "IMAGE_NAME":
                variable["value"] = self.tokens.inline('include "rackloom.image" . | quote')
            elif variable["name"] == "ADMISSION_MODE":
                variable["value"] = self.tokens.inline(".Values.webhook.mode")
            elif variable["name"] == "MPS_DAEMONS":
                variable["value"] = self.tokens.inline('ternary "pod" "here" .Values.node.mps.enabled')
            elif variable["name"] == "IMEX_ISOLATION":
                variable["value"] = self.tokens.inline(".Values.imex.isolation")
        if program == "controller":
            container["env"].append(self._include("rackloom.env.kueue"))
        if program in ("controller", "node.imex", "node.all"):
            container["env"].append(self._include("rackloom.env.domains"))
        if program.startswith("node."):
            container["env"].append(self._include("rackloom.env.kubelet"))
        container["env"].append(self._include(f"rackloom.env.{program}"))
        container["env"].append(self._items(f".Values.{program}.extraEnv"))

    def _folders(self, pod: Object) -> None:
        """Kubelet's folder, and that of CDI specs, where the values say they are."""
        places = {
            "/var/lib/kubelet": self.tokens.inline(".Values.node.kubeletRoot"),
            "/var/run/cdi": self.tokens.inline(".Values.node.cdiRoot"),
        }
        mounts = [mount for mount in pod["containers"][0]["volumeMounts"] if isinstance(mount, dict)]
        paths = [volume["hostPath"] for volume in pod["volumes"] if isinstance(volume, dict)]
        for entry, key in [*((mount, "mountPath") for mount in mounts), *((path, "path") for path in paths)]:
            for place, token in places.items():
                entry[key] = entry[key].replace(place, token)

    def _yaml(self, key: str, path: str) -> str:
        return self.tokens.block(
            lambda pad: (
                f"{pad}{{{{- with {path} }}}}\n{pad}{key}:\n"
                f"{pad}  {{{{- toYaml . | nindent {len(pad) + 2} }}}}\n{pad}{{{{- end }}}}"
            )
        )

    def _line(self, key: str, path: str) -> str:
        return self.tokens.block(
            lambda pad: f"{pad}{{{{- with {path} }}}}\n{pad}{key}: {{{{ . }}}}\n{pad}{{{{- end }}}}"
        )

    def _items(self, path: str) -> str:
        return self.tokens.block(
            lambda pad: f"{pad}{{{{- with {path} }}}}{{{{- toYaml . | nindent {len(pad)} }}}}{{{{- end }}}}"
        )

    def _include(self, name: str) -> str:
        return self.tokens.block(
            lambda pad: (
                f'{pad}{{{{- with include "{name}" $ }}}}{{{{- . | nindent {len(pad)} }}}}{{{{- end }}}}'
            )
        )


def chart() -> dict[str, str]:
    """Every file of the chart that is written, by its path in it."""
    return ChartWriter().write()


if __name__ == "__main__":
    for path, content in chart().items():
        (CHART / path).parent.mkdir(parents=True, exist_ok=True)
        (CHART / path).write_text(content)
