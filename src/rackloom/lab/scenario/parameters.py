"""Types of the parameters of scenario steps. Each carries its check and the fix that a refusal names.

A step is a function, and the annotations of its parameters are these types. When a file is read, the
check of each annotation gets the value, the key as the file spells it, and the facts of the file up
to this step (`FileSoFar`). It yields a `Problem` for everything that cannot be. A check may also record
a name that later steps may use: `made_name` records, `used_name` looks up.

`kind_named` and `manifest_objects` read the kinds and manifests that files name.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, get_args

import msgspec

from rackloom.claim.node.gpu.plugin import GPU_DRIVER
from rackloom.claim.node.nic.plugin import NIC_DRIVER
from rackloom.core.cluster import objects
from rackloom.core.cluster.names import IMEX_DRIVER
from rackloom.core.cluster.objects import Object, ResourceKind
from rackloom.core.diagnosis import catalogue
from rackloom.core.partitions.domain import PartitionOperation
from rackloom.errors import Refused, Undecodable
from rackloom.lab.kube.controllers.mpi_jobs import MPI_JOB
from rackloom.lab.switches.nmxc import NMXC_RPCS
from rackloom.runtime.foreign_text import decode_yaml
from rackloom.topology.part_names import read_part_name


class FileSoFar(msgspec.Struct, kw_only=True):
    """The facts of a file that are known when one of its steps is checked."""

    racks: tuple[str, ...]
    """Names of racks with a switch controller."""
    trays: tuple[str, ...]
    """Names of trays."""
    gpus: int
    """GPUs of a tray."""
    made: defaultdict[str, set[str]] = msgspec.field(default_factory=lambda: defaultdict(set))
    """Names that steps have made so far, by the kind of thing they name."""
    step: Any = None
    """The step that is checked."""


Problems = Iterator[tuple[str, str]]
"""The impossible part, and the text to write instead."""
Check = Callable[[Any, str, FileSoFar], Problems]


# Numbers.


def at_least(least: int) -> Check:
    """The number is not smaller."""

    def check(value: int, key: str, _: FileSoFar) -> Problems:
        if value < least:
            yield f"{key} = {value} is too small", f"a number from {least} up"

    return check


def _finite(value: float, key: str, _: FileSoFar) -> Problems:
    if not math.isfinite(value):
        yield f"{key} = {value} is no number to reckon with", "a finite number"


def _seconds(value: float, key: str, file: FileSoFar) -> Problems:
    yield from _finite(value, key, file)
    if value < 0:
        yield f"{key} is negative", "give seconds from 0 up"


def _rate(value: float, key: str, file: FileSoFar) -> Problems:
    yield from _finite(value, key, file)
    if not 0 <= value <= 1:
        yield f"{key} is not a part of all", "a number from 0 to 1"


Count = Annotated[int, at_least(0)]
Ordinal = Annotated[int, at_least(1)]
Number = Annotated[float, _finite]
Seconds = Annotated[float, _seconds]
Rate = Annotated[float, _rate]


# Parts, by the names that they have on every surface.


FIRST_RACK = "rack-01"


def _among(parts: Callable[[FileSoFar], Sequence[str]], more: str = "") -> Check:
    """The value, or each of several, names one of the parts that are there."""

    def check(value: str | tuple[str, ...], key: str, file: FileSoFar) -> Problems:
        known = parts(file)
        for name in (value,) if isinstance(value, str) else value:
            if str(read_part_name(name)) not in known:
                yield f"{key} = {name!r} is not there", f"one of {known[0]} to {known[-1]}{more}"

    return check


def _gpus(file: FileSoFar) -> list[str]:
    return [f"gpu-{number}" for number in range(file.gpus)]


_rack = _among(lambda file: file.racks, ", or write more racks above the steps")


def _other_rack(value: str, key: str, file: FileSoFar) -> Problems:
    yield from _rack(value, key, file)
    if value == file.step.rack:
        yield f"{value} is its own domain already", f"another rack in {key}"


def _nic(value: str, key: str, file: FileSoFar) -> Problems:
    part = read_part_name(value)
    if str(part.tray) not in file.trays or part.nic is None:
        yield f"{key} = {value!r} is not there", f"a NIC of a tray, such as {file.trays[0]}/nic-0"


def _tray_count(value: int, key: str, file: FileSoFar) -> Problems:
    most = len(file.trays) // len(file.racks)
    if not 1 <= value <= most:
        yield f"{key} = {value} is not there", f"a number from 1 to {most}"


TrayCount = Annotated[int, _tray_count]
Rack = Annotated[str, _rack]
OtherRack = Annotated[str, _other_rack]
Tray = Annotated[str, _among(lambda file: file.trays)]
Trays = Annotated[tuple[str, str], _among(lambda file: file.trays)]
Gpu = Annotated[str, _among(lambda file: [f"{tray}/{gpu}" for tray in file.trays for gpu in _gpus(file)])]
"""A GPU of a rack, such as `rack-01/slot-2/gpu-2`."""
Nic = Annotated[str, _nic]
InstanceGpu = Annotated[str, _among(_gpus)]
"""A GPU of an instance, such as `gpu-2`."""
InstanceGpus = Annotated[tuple[str, ...], _among(_gpus)]


# Names that steps make, and names that they use.


MADE_BY = {
    "logical partition": "make-logical-partition",
    "VPC": "make-vpc",
    "group": "make-instances",
    "instance": "make-instances",
    "partition by hand": "partition-by-hand",
    "list read by hand": "list-read-by-hand",
}
"""The step that makes each kind of thing."""


def made_name(what: str) -> Check:
    """The value names `what` in all later steps."""

    def check(value: str, _: str, file: FileSoFar) -> Problems:
        file.made[what].add(value)
        yield from ()

    return check


def _made_group(value: str, _: str, file: FileSoFar) -> Problems:
    file.made["group"].add(value)
    file.made["instance"].update(f"{value}/{number}" for number in range(1, file.step.count + 1))
    yield from ()


def used_name(what: str) -> Check:
    """The value, or each of several, is a name that an earlier step made. An empty text names nothing."""

    def check(value: str | tuple[str, ...], key: str, file: FileSoFar) -> Problems:
        made = file.made[what]
        for name in (value,) if isinstance(value, str) else value:
            if name and name not in made:
                fix = ", ".join(sorted(made))
                fix = f"one of {fix}" if made else f'make it before, with do = "{MADE_BY[what]}"'
                yield f"{key}: there is no {what} {name!r} yet", fix

    return check


def _by_gpu(value: tuple[str, ...], key: str, file: FileSoFar) -> Problems:
    if len(value) != file.gpus:
        yield f"a tray has {file.gpus} GPUs, named are {len(value)}", f"name {file.gpus}"
    yield from used_name("logical partition")(value, key, file)


NewLogicalPartition = Annotated[str, made_name("logical partition")]
LogicalPartition = Annotated[str, used_name("logical partition")]
LogicalPartitionByGpu = Annotated[tuple[str, ...], _by_gpu]
NewVpc = Annotated[str, made_name("VPC")]
Vpc = Annotated[str, used_name("VPC")]
NewGroup = Annotated[str, _made_group]
Group = Annotated[str, used_name("group")]
Groups = Annotated[tuple[str, ...], used_name("group")]
Instance = Annotated[str, used_name("instance")]
"""`group/number`."""
NewForeignPartition = Annotated[str, made_name("partition by hand")]
ForeignPartition = Annotated[str, used_name("partition by hand")]
NewListRead = Annotated[str, made_name("list read by hand")]
ListRead = Annotated[str, used_name("list read by hand")]


# Words of which a wrong one would do nothing, or find nothing, ever.


def _one_of(what: str, known: Iterable[str]) -> Check:
    def check(value: str, _: str, __: FileSoFar) -> Problems:
        if value and value not in known:
            yield f"there is no {what} {value!r}", f"one of {', '.join(known)}"

    return check


OPERATION_TAGS = sorted(str(kind.__struct_config__.tag) for kind in get_args(PartitionOperation))
DoctorCheck = Annotated[str, _one_of("check", sorted(catalogue.Check))]
Rpc = Annotated[str, _one_of("RPC", sorted(NMXC_RPCS))]
OperationKind = Annotated[str, _one_of("kind of operation", OPERATION_TAGS)]
Driver = Annotated[str, _one_of("driver", (GPU_DRIVER, IMEX_DRIVER, NIC_DRIVER))]


# Kinds and manifests.


KINDS_BY_NAME: Mapping[tuple[str, str], ResourceKind] = {
    (kind.api_version, kind.kind): kind
    for kind in (*vars(objects).values(), MPI_JOB)
    if isinstance(kind, ResourceKind)
}


def kind_named(name: str) -> ResourceKind:
    """The kind that files call so. Refused for one that Rackloom does not know."""
    for (_, known), kind in KINDS_BY_NAME.items():
        if known == name:
            return kind
    known_names = ", ".join(sorted(known for _, known in KINDS_BY_NAME))
    raise Refused(f"kind {name} is not known", nearest_fix=f"one of {known_names}")


def manifest_objects(manifest: str, namespace: str) -> Iterator[tuple[ResourceKind, Object]]:
    """The objects of a manifest. Refused if it is not YAML, or has an object of an unknown kind."""
    try:
        documents = [found for found in decode_yaml(manifest, "the manifest") if found is not None]
    except Undecodable as error:
        raise Refused(f"the manifest is not YAML: {error.reason}", nearest_fix="correct that line") from error
    for document in documents:
        name = document if isinstance(document, dict) else {}
        kind = KINDS_BY_NAME.get((name.get("apiVersion", ""), name.get("kind", "")))
        if kind is None:
            known = ", ".join(f"{version} {name}" for version, name in sorted(KINDS_BY_NAME))
            raise Refused("the manifest has an object of no known kind", nearest_fix=f"one of {known}")
        if kind.namespaced:
            document.setdefault("metadata", {}).setdefault("namespace", namespace)
        yield kind, document


def _kind(value: str, _: str, __: FileSoFar) -> Problems:
    try:
        kind_named(value)
    except Refused as refused:
        yield refused.reason, refused.nearest_fix or "name another"


def _manifest(value: str, _: str, file: FileSoFar) -> Problems:
    """A manifest names its objects, and in its texts those that controllers shall make of them."""
    try:
        found = [manifest for _, manifest in manifest_objects(value, file.step.namespace)]
    except Refused as refused:
        yield refused.reason, refused.nearest_fix or "correct the manifest"
        return
    if not found:
        yield "the manifest holds no object", "write at least one"
    file.made["object"].update(_all_texts(found))


def _all_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _all_texts(inner)


def _named_object(value: str, _: str, file: FileSoFar) -> Problems:
    # An object that was never made is gone from the start: expecting that could not fail.
    if value not in file.made["object"]:
        yield f"no step before names an object {value!r}", "submit it, or expect it as an object, before"


KindName = Annotated[str, _kind]
Manifest = Annotated[str, _manifest]
ObjectName = Annotated[str, made_name("object")]
NamedObject = Annotated[str, _named_object]
