"""The chart: the checked-in files, Helm's output, and the options that values reach."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.helm import options, write_chart
from tests.cluster.build import HELM, NotBuilt, at_hand

from rackloom.cli.main import app

CHART = write_chart.CHART
VALUES = CHART.parent
KUBERNETES = write_chart.KUBERNETES
Object = dict[str, Any]
KEEP = "helm.sh/resource-policy"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@pytest.fixture(scope="session")
def helm() -> str:
    """The pinned Helm, or that of this machine."""
    try:
        folder = at_hand(HELM)
    except NotBuilt:
        folder = None
    found = str(folder / "helm") if folder else shutil.which("helm")
    if found is None:
        pytest.skip("NO HELM: `make helm` builds it, with Go")
    return found


def run(*words: str | Path, fails: bool = False) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=120)
    assert (done.returncode != 0) == fails, done.stderr + done.stdout
    return done.stdout + done.stderr if fails else done.stdout


def rendered(helm: str, *words: str | Path) -> list[Object]:
    return objects(run(helm, "template", "rackloom", CHART, *words))


def objects(text: str) -> list[Object]:
    return [obj for obj in yaml.load_all(text, Loader=LOADER) if obj]


def built(*overlays: str) -> list[Object]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("there is no kubectl on the PATH")
    return [obj for overlay in overlays for obj in objects(run(kubectl, "kustomize", KUBERNETES / overlay))]


def by_name(found: list[Object]) -> dict[tuple[str, ...], Object]:
    """Objects by their identity, without annotations that only Helm reads.

    kustomize does not know newer cluster-wide kinds and gives them a namespace. On the API server they have
    none.
    """
    named = {}
    for obj in found:
        meta = obj["metadata"]
        if obj["kind"] in write_chart.CLUSTER_KINDS:
            meta.pop("namespace", None)
        notes = {key: value for key, value in meta.pop("annotations", {}).items() if key != KEEP}
        obj["metadata"] = meta | ({"annotations": notes} if notes else {})
        key = (obj["apiVersion"], obj["kind"], meta.get("namespace", ""), meta["name"])
        assert key not in named, f"{key} is there twice"
        named[key] = obj
    return named


def test_the_chart_is_what_the_manifests_and_the_commands_make_of_it() -> None:
    written = write_chart.chart()
    by_hand = {"templates/_helpers.tpl", "templates/NOTES.txt", ".helmignore"}
    there = {str(path.relative_to(CHART)) for path in CHART.rglob("*") if path.is_file()}
    assert there == written.keys() | by_hand
    changed = [path for path, text in written.items() if (CHART / path).read_text() != text]
    assert changed == [], "run python -m deploy.helm.write_chart"


@pytest.mark.parametrize(
    ("values", "overlays"),
    [
        (None, ("base",)),
        ("channel-isolation", ("channel-isolation",)),
        ("take-over", ("take-over",)),
        ("kueue", ("kueue",)),
        ("one-process", ("one-process",)),
        ("gpus-by-count", ("gpus-by-count",)),
        ("webhook", ("base", "webhook")),
    ],
)
def test_helm_renders_what_kustomize_builds(helm: str, values: str | None, overlays: tuple[str, ...]) -> None:
    given = ("--values", VALUES / f"{values}.yaml") if values else ()
    ours, theirs = by_name(rendered(helm, *given)), by_name(built(*overlays))
    assert ours.keys() == theirs.keys()
    assert [key for key in theirs if ours[key] != theirs[key]] == []


def test_each_overlay_has_a_values_file() -> None:
    overlays = {path.parent.name for path in KUBERNETES.glob("*/kustomization.yaml")} - {"base"}
    assert overlays == {path.stem for path in VALUES.glob("*.yaml")}


def test_helm_finds_nothing_to_complain_of(helm: str) -> None:
    assert "0 chart(s) failed" in run(helm, "lint", "--strict", CHART)


SAMPLES = {"integer": 7, "number": 2.5, "string": "some-value", "boolean": True, "array": [48, 63]}


def sample(option: options.Option) -> Any:
    """A value that is not the default."""
    schema = option.schema
    if "enum" in schema:
        return next(choice for choice in schema["enum"] if choice != schema.get("default"))
    if schema["type"] == "boolean":
        return not schema["default"]
    if schema["type"] == "array" and schema["items"]["type"] == "string":
        return ["a", "b"]
    return SAMPLES[schema["type"]]


@pytest.mark.parametrize("program", options.PROGRAMS)
def test_every_option_is_a_value_or_decided_by_a_manifest(program: str) -> None:
    listed = {option.name for option in options.options(program)}
    _, commands, _ = app.parse_commands(list(options.PROGRAMS[program]))
    names = {name for argument in commands[-1].assemble_argument_collection() for name in argument.names}
    long = {name for name in names if name.startswith("--")}
    groups = {"--imex", "--gpu", "--nic"}
    assert listed == {name.removeprefix("--") for name in long - groups if not is_negative(name)}
    schema = json.loads((CHART / "values.schema.json").read_text())
    for part in (*program.split("."), "options"):
        schema = schema["properties"][part]
    assert set(schema["properties"]) == {
        option.key for option in options.options(program) if not option.is_decided
    }


def is_negative(name: str) -> bool:
    return re.match(r"--(?:\w+\.)?(?:no|empty)-", name) is not None


def test_what_is_said_to_be_decided_is_an_option() -> None:
    known = {option.name for program in options.PROGRAMS for option in options.options(program)}
    assert options.DECIDED.keys() <= known


@pytest.mark.parametrize("program", options.PROGRAMS)
def test_a_program_is_told_every_option_as_it_stands_in_the_values(
    program: str, helm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables and arguments of its pod, parsed by the command, give the values back."""
    given = {option.key: sample(option) for option in options.values_of(program)}
    values: Object = {"options": given, "enabled": True}
    for part in reversed(program.split(".")):
        values = {part: values}
    values.get("controller", {}).pop("enabled", None)
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    name = f"rackloom-{program.replace('.', '-')}"
    container = container_of(rendered(helm, "--values", tmp_path / "values.yaml"), name)
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable.get("value", "given"))
    _, bound, _ = app.parse_args(container["args"], print_error=False, exit_on_error=False)
    found = flattened(bound.arguments)
    parsed = {
        key: found[option.name.replace("-", "_")]
        for key, option in ((option.key, option) for option in options.values_of(program))
    }
    assert {key: plain(value) for key, value in parsed.items()} == given


def flattened(arguments: dict[str, Any]) -> dict[str, Any]:
    """Parameters by their names. Those of groups are also listed with the group's name in front."""
    flat: dict[str, Any] = {}
    for name, value in arguments.items():
        if hasattr(value, "__dataclass_fields__"):
            flat |= vars(value) | {f"{name}.{key}": inner for key, inner in vars(value).items()}
        else:
            flat[name] = value
    return flat


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value


def container_of(found: list[Object], name: str) -> Object:
    (workload,) = (
        obj for obj in found if obj["metadata"]["name"] == name and obj["kind"] in ("Deployment", "DaemonSet")
    )
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def test_whole_numbers_stay_whole(helm: str) -> None:
    found = rendered(helm, "--set", "controller.options.gangLostAfter=86400000")
    variables = container_of(found, "rackloom-controller")["env"]
    assert {"name": "GANG_LOST_AFTER_SECONDS", "value": "86400000"} in variables


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("controller.options.gangSpares=1", "gangSpares"),
        ("imex.isolation=chanel", "isolation"),
        ("controller.port=99999", "port"),
        ("node.gpu.options.vfio=maybe", "vfio"),
        ("imagee.tag=1", "imagee"),
    ],
)
def test_a_wrong_value_is_refused_by_name(helm: str, setting: str, complaint: str) -> None:
    assert complaint in run(helm, "template", "rackloom", CHART, "--set", setting, fails=True)


def test_the_image_is_the_same_for_programs_daemons_and_the_policy(helm: str) -> None:
    digest = f"sha256:{'a' * 64}"
    image = f"registry.example/gpu/rackloom@{digest}"
    words = ("--set", "image.repository=registry.example/gpu/rackloom", "--set", f"image.digest={digest}")
    found = rendered(helm, *words, "--set", "webhook.enabled=true")
    pods = [obj for obj in found if obj["kind"] in ("Deployment", "DaemonSet")]
    assert {obj["spec"]["template"]["spec"]["containers"][0]["image"] for obj in pods} == {image}
    assert len(pods) == 6
    jobs = [obj["spec"].get("jobTemplate", obj)["spec"] for obj in found if obj["kind"].endswith("Job")]
    assert [job["template"]["spec"]["containers"][0]["image"] for job in jobs] == [image] * 2
    assert {"name": "IMAGE_NAME", "value": image} in container_of(found, "rackloom-controller")["env"]
    assert f"expression: '''{image}'''" in yaml.safe_dump_all(found, width=1000)


def test_another_kubelet_folder_is_told_and_mounted(helm: str) -> None:
    text = run(
        helm, "template", "rackloom", CHART, "--set", "node.kubeletRoot=/data/kubelet,node.cdiRoot=/data/cdi"
    )
    assert "/var/lib/kubelet" not in text
    assert "/var/run/cdi" not in text
    for plugin in ("imex", "gpu", "nic"):
        container = container_of(objects(text), f"rackloom-node-{plugin}")
        variables = {each["name"]: each.get("value") for each in container["env"]}
        assert variables["KUBELET_PLUGINS_DIRECTORY_PATH"] == "/data/kubelet/plugins"
        assert variables["KUBELET_REGISTRAR_DIRECTORY_PATH"] in {
            mount["mountPath"] for mount in container["volumeMounts"]
        }
        assert variables["CDI_ROOT"] in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_definitions_outlive_the_release_and_may_be_left_alone(helm: str) -> None:
    definitions = [obj for obj in rendered(helm) if obj["kind"] == "CustomResourceDefinition"]
    assert len(definitions) == 3
    assert all(obj["metadata"]["annotations"][KEEP] == "keep" for obj in definitions)
    without = rendered(helm, "--set", "crds.install=false")
    assert not [obj for obj in without if obj["kind"] == "CustomResourceDefinition"]


def test_the_classes_of_nvidias_chart_may_be_left_to_it(helm: str) -> None:
    def classes(*words: str) -> set[str]:
        return {obj["metadata"]["name"] for obj in rendered(helm, *words) if obj["kind"] == "DeviceClass"}

    everything, of_nics = classes(), {"dra.net", "dranet.net"}
    left = classes("--set", "deviceClasses.install=false")
    assert {name for name in everything if name.endswith(".rackloom.dev")} | of_nics == left
    assert everything - classes("--set", "deviceClasses.nics=false") == of_nics


def test_parts_that_are_switched_off_are_not_there(helm: str) -> None:
    words = ("--set", "node.nic.enabled=false,namespaces.create=false,controller.replicas=1")
    found = {(obj["kind"], obj["metadata"]["name"]) for obj in rendered(helm, *words)}
    assert ("DaemonSet", "rackloom-node-nic") not in found
    assert ("PodDisruptionBudget", "rackloom-controller") not in found
    assert not [name for kind, name in found if kind == "Namespace"]


@pytest.mark.parametrize("plugin", ["gpu", "all"])
@pytest.mark.parametrize(("enabled", "where"), [("true", "pod"), ("false", "here")])
def test_the_plugin_looks_for_mps_daemons_where_they_are(
    helm: str, plugin: str, enabled: str, where: str
) -> None:
    words = f"node.mps.enabled={enabled},node.all.enabled={str(plugin == 'all').lower()}"
    found = rendered(helm, "--set", words)
    names = [obj["metadata"]["name"] for obj in found if obj["kind"] == "DaemonSet"]
    assert ("rackloom-node-mps" in names) == (where == "pod")
    container = container_of(found, f"rackloom-node-{plugin}")
    assert {"name": "MPS_DAEMONS", "value": where} in container["env"]


def test_without_a_plugin_of_gpus_there_is_no_pod_for_mps_daemons(helm: str) -> None:
    found = rendered(helm, "--set", "node.gpu.enabled=false")
    assert "rackloom-node-mps" not in [obj["metadata"]["name"] for obj in found if obj["kind"] == "DaemonSet"]
