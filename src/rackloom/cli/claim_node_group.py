"""`rackloom claim node-group`: the nodes of an empty group, for an autoscaler that simulates one.

The node is copied from a cluster node with such hardware (`--node`), or described by a profile. Two forms
are printed: the template node with its slices, for a provider of Cluster Autoscaler or Karpenter that builds
it in its process, and the annotations that Cluster Autoscaler's Cluster API provider reads. docs/placement.md
describes the effect of each.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter

from rackloom.cli.claim_options import HardwareParameters, Slices
from rackloom.cli.common import note, with_common_flags
from rackloom.core.cluster.objects import name_in_file
from rackloom.errors import Misuse, Refused

Names = Annotated[list[str] | None, Parameter(negative="", consume_multiple=True)]
_LEFT_OUT_LABELS = ("kubernetes.io/hostname", "nvidia.com/gpu.clique")
_LEFT_OUT_DOMAINS = ("rackloom.dev", "resource.nvidia.com", "node-role.kubernetes.io")
"""Labels that belong to one node, and domains of labels that programs add to an existing node."""
_DEFAULT_PODS = "110"
"""The default of kubelet."""


@with_common_flags
def node_group(
    name: str,
    *,
    hardware: HardwareParameters = HardwareParameters(),  # noqa: B008 (a frozen value)
    node: str | None = None,
    form: Literal["template", "cluster-api"] = "template",
    cpu: str | None = None,
    memory: str | None = None,
    label: Names = None,
    taint: Names = None,
    claims: Slices = None,
) -> int:
    """Describe a new node of an empty group, so that an autoscaler starts one for claims.

    Exit code 1 if such a node would not serve a claim of --claims.

    Parameters
    ----------
    name
        Name of the group, the template node and the MachineDeployment.
    hardware
        The hardware of the nodes: a profile, or the slices that --node publishes.
    node
        A node of the slices or of the cluster that is like those of the group.
    form
        template: a Node with its ResourceSlices. cluster-api: annotations of a MachineDeployment.
    cpu
        CPUs of a node, such as 144. Default: those of --node.
    memory
        Memory of a node, such as 960Gi. Default: that of --node.
    label
        Labels of the nodes, KEY=VALUE. Those of --node that others of its kind have are added.
    taint
        Taints of the nodes, KEY=VALUE:EFFECT, such as Slurm's.
    claims
        Manifests with claims: report if such a node serves each, and if the Cluster API provider starts one.
    """
    from rackloom.core.allocate.driver_slices import GPU_DRIVER
    from rackloom.core.allocate.node_template import capacity_annotations, whole_gpus
    from rackloom.core.cluster.nodes import read_node

    if (hardware.profile is None) == (node is None):
        raise Misuse(
            "the nodes are those of a profile or like one node",
            nearest_fix="say --profile gb200-nvl72, or --node NAME with --cluster or --slices",
        )
    found, documents = _hardware(hardware)
    slices = _template(hardware.profile, found, node, name)
    nodes = (
        document.decoded or read_node(document.value)
        for document in documents
        if document.value.get("kind") == "Node" and (document.decoded or name_in_file(document.value) == node)
    )
    like = next((found for found in nodes if found.name == node), None)
    resources = _resources({} if like is None else like.amounts, cpu, memory)
    labels = _labels({} if like is None else like.labels) | dict(_pair(text) for text in label or ())
    taints = list(taint or ())
    if form == "template":
        _print([_node(name, resources, labels, taints), *map(_slice_json, slices)])
    else:
        annotations = capacity_annotations(
            resources, driver=GPU_DRIVER, gpus=whole_gpus(slices, GPU_DRIVER), labels=labels, taints=taints
        )
        _print([_machine_deployment(name, annotations)])
    return _report_claims(claims or [], found, slices, name)


def _hardware(hardware: HardwareParameters) -> tuple[Any, list[Any]]:
    """The manifests of the files and the cluster, and their documents."""
    from rackloom.claim.manifests.documents import CLAIM_KINDS, read_documents
    from rackloom.claim.manifests.read import manifests_of

    documents = [document for path in hardware.slices or () for document in read_documents(path, CLAIM_KINDS)]
    if hardware.is_live:
        from rackloom.claim.manifests.cluster import objects_from_cluster

        kinds = "resourceslices.resource.k8s.io,deviceclasses.resource.k8s.io,nodes"
        documents += objects_from_cluster(kinds, hardware.kubeconfig, hardware.context)
    return manifests_of(documents), documents


def _template(profile: str | None, found: Any, node: str | None, group: str) -> tuple[Any, ...]:
    from rackloom.core.allocate.node_template import template_of_slices

    if profile is None:
        return template_of_slices(found.slices, node or "", group)
    from rackloom.claim.node.node_template import profile_template
    from rackloom.cli.hardware import machine_of
    from rackloom.topology.profiles import load_profile
    from rackloom.topology.rack import RackProfile

    has_fabric = isinstance(load_profile(profile), RackProfile)
    return profile_template(machine_of(profile), group, has_fabric=has_fabric)


def _report_claims(paths: list[Path], found: Any, slices: tuple[Any, ...], group: str) -> int:
    """Print notes to stderr, and return the exit code."""
    if not paths:
        return 0
    from rackloom.claim.manifests.read import read_manifests
    from rackloom.cli.hardware import with_built_in_classes
    from rackloom.core.allocate.driver_slices import GPU_DRIVER
    from rackloom.core.allocate.node_template import scale_up_answers
    from rackloom.core.allocate.planning import PlacedClaim, RefusedClaim

    asked = read_manifests(paths)
    if not asked.claims:
        raise Refused("there is no claim in the files", nearest_fix="add a ResourceClaimTemplate")
    classes = with_built_in_classes((*asked.classes, *found.classes))
    answers = scale_up_answers(asked.claims, classes, slices, group, GPU_DRIVER)
    for answer in answers:
        if isinstance(answer.template, RefusedClaim):
            note(f"{answer.claim}: a new node does not serve it{_fix_text(answer.template)}")
        elif isinstance(answer.cluster_api, PlacedClaim):
            note(f"{answer.claim}: a new node serves it, and the Cluster API provider would start one")
        else:
            unknown = "a new node serves it, but the Cluster API provider does not know"
            note(f"{answer.claim}: {unknown}{_fix_text(answer.cluster_api)}")
    return int(any(isinstance(answer.template, RefusedClaim) for answer in answers))


def _fix_text(refused: Any) -> str:
    return "" if refused.nearest_fix is None else f"; it would if you {refused.nearest_fix}"


# Values of the node.


def _resources(known: Mapping[str, Any], cpu: str | None, memory: str | None) -> dict[str, str]:
    """The resources of a template node. Values from the command line override those of the model node."""
    wanted = ("cpu", "memory", "ephemeral-storage", "pods")
    given = {"pods": _DEFAULT_PODS} | {key: str(known[key]) for key in wanted if key in known}
    return given | {key: value for key, value in (("cpu", cpu), ("memory", memory)) if value is not None}


def _labels(like: Mapping[str, str]) -> dict[str, str]:
    return {
        key: value
        for key, value in like.items()
        if key not in _LEFT_OUT_LABELS and not key.partition("/")[0].endswith(_LEFT_OUT_DOMAINS)
    }


def _pair(text: str) -> tuple[str, str]:
    key, found, value = text.partition("=")
    if not found:
        raise Misuse(f"a label is {text!r}", nearest_fix="say KEY=VALUE")
    return key, value


def _taint(text: str) -> dict[str, str]:
    pair, _, effect = text.rpartition(":")
    key, _, value = pair.partition("=")
    if not key or effect not in ("NoSchedule", "PreferNoSchedule", "NoExecute"):
        raise Misuse(f"a taint is {text!r}", nearest_fix="say KEY=VALUE:NoSchedule")
    return {"key": key, "effect": effect} | ({"value": value} if value else {})


# Documents.


def _node(
    name: str, resources: Mapping[str, str], labels: Mapping[str, str], taints: list[str]
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}},
        "spec": {"taints": [_taint(text) for text in taints]},
        "status": {"capacity": dict(resources), "allocatable": dict(resources)},
    }


def _slice_json(slice_: Any) -> dict[str, Any]:
    made: dict[str, Any] = msgspec.to_builtins(slice_)
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", **made}


def _machine_deployment(name: str, annotations: Mapping[str, str]) -> dict[str, Any]:
    """A MachineDeployment for a server-side apply: it has only the annotations."""
    return {
        "apiVersion": "cluster.x-k8s.io/v1beta2",
        "kind": "MachineDeployment",
        "metadata": {"name": name, "annotations": dict(annotations)},
    }


def _print(documents: list[dict[str, Any]]) -> None:
    import yaml

    print(yaml.safe_dump_all(documents, sort_keys=False), end="")
