"""One complete read of a cluster, and which of its objects belong to this installation.

A name proves nothing. An object is ours by one of these:

- *installed*: it carries the label `app.kubernetes.io/part-of: rackloom`, which deploy/kubernetes puts
  on all that it installs, and is cluster-scoped or in a namespace of ours. What a Helm release claims
  is not ours.
- *written at work*: one of our programs wrote it. The API server records the writer of each field in
  `metadata.managedFields`; the names of our programs begin with `rackloom`.
- *of a ComputeDomain*: it carries the UID label of a ComputeDomain of ours, or of none that exists.

NVIDIA's DRA driver uses the same CRDs, classes, labels and finalizers. It is present if somebody else
publishes devices of `compute-domain.nvidia.com`, or runs its programs. Then a ComputeDomain is ours
only if our controller wrote it and NVIDIA's did not.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from rackloom.core.cluster import names
from rackloom.core.cluster.claims import (
    AllocatedDevice,
    ClaimConsumer,
    allocated_devices,
    claim_consumers,
    class_selectors,
)
from rackloom.core.cluster.domain_objects import claimed_domain_uid
from rackloom.core.cluster.nodes import slice_pool
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    CRD,
    DAEMON_SET,
    DEPLOYMENT,
    DEVICE_CLASS,
    NAMESPACE,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    SECRET,
    Object,
    ResourceKind,
    annotations_of,
    field_managers,
    finalizers_of,
    has_pod_ended,
    is_being_deleted,
    is_pod_ready,
    labels_of,
    name_of,
    namespace_of,
    owners_of,
    uid_of,
)
from rackloom.core.cluster.pods import command_words
from rackloom.core.domains.observe import INDEXES

PART_OF_LABEL = "app.kubernetes.io/part-of"
PART_OF = "rackloom"
COMPONENT_LABEL = "app.kubernetes.io/component"
FIELD_MANAGER_PREFIX = "rackloom"
"""What the names of our programs at the API server begin with."""
PLUGINS: Mapping[str, str] = {
    names.IMEX_DRIVER: "node-imex",
    names.GPU_DRIVER: "node-gpu",
    "dra.net": "node-nic",
}
"""The driver that each node plugin serves, and its component label."""
ALL_PLUGINS = "node-all"
"""The component label of the node plugin that serves all drivers in one process."""
MPS_DAEMONS = "node-mps"
"""The component label of the pods in which the GPU plugin has MPS daemons started."""
NODE_COMPONENTS = (*PLUGINS.values(), ALL_PLUGINS, MPS_DAEMONS)
"""The programs on nodes: they go together, once no job is left."""
COMPONENTS = frozenset({"controller", "webhook", *NODE_COMPONENTS})
"""Our programs, by the component label of their Deployments and DaemonSets."""
DOMAIN_KINDS = (RESOURCE_CLAIM_TEMPLATE, DAEMON_SET, SECRET, RESOURCE_CLAIM, NODE, COMPUTE_DOMAIN_CLIQUE, POD)
"""Kinds whose objects carry the UID of a ComputeDomain as a label."""
_HELM = "meta.helm.sh/release-name"
_FOREIGN_PROGRAMS = ("compute-domain-controller", "compute-domain-kubelet-plugin")
_EVERY_NAMESPACE_HAS = frozenset({("ConfigMap", "kube-root-ca.crt"), ("ServiceAccount", "default")})
_OF_KUBERNETES = frozenset({"Event", "Endpoints", "EndpointSlice"})


class DeviceHolder(msgspec.Struct, frozen=True):
    """A pod that holds devices of one of our drivers through a claim."""

    pod: Object
    claim: Object
    driver: str
    domain: str | None
    """UID of the ComputeDomain whose channel it holds. None for a GPU or a NIC."""
    clique: str | None
    """Clique of the pool that the channel is from, in channel mode."""


class ClusterInventory:
    """The objects that were read; a `ClusterIndex` for the decisions of the controller.

    `namespace` is the driver's; `now` is seconds since the epoch; `unread`: types that could not be listed;
    `helm_release`: the Helm release by which Rackloom was installed.
    """

    def __init__(
        self,
        objects: Mapping[ResourceKind, Iterable[Object]],
        *,
        namespace: str,
        now: float,
        unread: Sequence[str] = (),
        helm_release: str | None = None,
    ) -> None:
        self._objects = {kind: {uid_of(obj): obj for obj in found} for kind, found in objects.items()}
        self._index: dict[tuple[ResourceKind, str], dict[str, list[Object]]] = {}
        self.now = now
        self.unread = tuple(unread)
        self._helm_release = helm_release
        labelled = {name_of(obj) for obj in self.all(NAMESPACE) if is_part_of_rackloom(obj)}
        self.homes = frozenset({namespace, *labelled})
        """Our namespaces."""

    def all(self, kind: ResourceKind) -> list[Object]:
        """Every object of a kind that was read."""
        return list(self._objects.get(kind, {}).values())

    def kinds(self) -> tuple[ResourceKind, ...]:
        """The kinds that were read."""
        return tuple(self._objects)

    def at(self, kind: ResourceKind, namespace: str | None, name: str) -> Object | None:
        """The object of this name."""
        found = self._indexed(kind, "", _place_of).get(f"{namespace or ''}/{name}", ())
        return next(iter(found), None)

    def by(self, kind: ResourceKind, index: str, value: str) -> Sequence[Object]:
        """The objects that an indexer of `observe.INDEXES` files under a value."""
        return self._indexed(kind, index, INDEXES[kind][index]).get(value, ())

    def _indexed(self, kind: ResourceKind, index: str, values: Any) -> dict[str, list[Object]]:
        key = (kind, index)
        if key not in self._index:
            index_values: dict[str, list[Object]] = defaultdict(list)
            for obj in self.all(kind):
                for value in values(obj):
                    index_values[value].append(obj)
            self._index[key] = dict(index_values)
        return self._index[key]

    # What was installed.

    @cached_property
    def installed(self) -> tuple[tuple[ResourceKind, Object], ...]:
        """All objects that carry Rackloom's label and may be deleted, of any kind."""
        return tuple(
            (kind, obj)
            for kind in self.kinds()
            for obj in self.all(kind)
            if is_part_of_rackloom(obj) and self.is_at_home(obj) and self.foreign_release_of(obj) is None
        )

    def is_at_home(self, obj: Object) -> bool:
        """Whether an object is of the whole cluster, or in a namespace of ours."""
        namespace = namespace_of(obj)
        return namespace is None or namespace in self.homes

    def foreign_release_of(self, obj: Object) -> str | None:
        """The Helm release that says an object is its own, where it is not the one of this installation."""
        found = annotations_of(obj).get(_HELM)
        return None if found == self._helm_release else found

    def pods_of(self, component: str) -> list[Object]:
        """Pods of one of our programs, by the label of its Deployment or DaemonSet."""
        return [
            pod
            for pod in self.all(POD)
            if namespace_of(pod) in self.homes and labels_of(pod).get(COMPONENT_LABEL) == component
        ]

    def runs(self, component: str) -> bool:
        """Whether a pod of one of our programs is ready."""
        return any(is_pod_ready(pod) and not is_being_deleted(pod) for pod in self.pods_of(component))

    def serves(self, driver: str) -> bool:
        """Whether our plugin of a driver is installed and is to stay, so that it can give devices back."""
        return any(
            kind == DAEMON_SET
            and labels_of(obj).get(COMPONENT_LABEL) in (PLUGINS[driver], ALL_PLUGINS)
            and not is_being_deleted(obj)
            for kind, obj in self.installed
        )

    def foreign_content(self, namespace: str) -> tuple[tuple[ResourceKind, Object], ...]:
        """Objects in a namespace of ours that are not ours, are not in every namespace, and have no owner."""
        return tuple(
            (kind, obj)
            for kind in self.kinds()
            if kind.kind not in _OF_KUBERNETES
            for obj in self.all(kind)
            if namespace_of(obj) == namespace and not self._belongs_at_home(kind, obj)
        )

    def _belongs_at_home(self, kind: ResourceKind, obj: Object) -> bool:
        domain = labels_of(obj).get(names.COMPUTE_DOMAIN_LABEL)
        return (
            (is_part_of_rackloom(obj) and self.foreign_release_of(obj) is None)
            or bool(owners_of(obj))
            or (domain is not None and domain not in self._foreign_domains)
            or (kind.kind, name_of(obj)) in _EVERY_NAMESPACE_HAS
            or (was_written_by_us(obj) and kind != POD)
        )

    # ComputeDomains.

    @cached_property
    def foreign_drivers(self) -> frozenset[str]:
        """Drivers that we serve and of which another program publishes devices."""
        slices = (obj for obj in self.all(RESOURCE_SLICE) if not was_written_by_us(obj))
        return frozenset(PLUGINS.keys() & {slice_pool(obj).driver for obj in slices})

    @cached_property
    def has_foreign_controller(self) -> bool:
        """Whether NVIDIA's driver handles ComputeDomains here too."""
        programs = (
            obj
            for kind in (DEPLOYMENT, DAEMON_SET)
            for obj in self.all(kind)
            if not is_part_of_rackloom(obj) and namespace_of(obj) not in self.homes
        )
        return names.IMEX_DRIVER in self.foreign_drivers or any(
            program in word
            for workload in programs
            for word in command_words(workload)
            for program in _FOREIGN_PROGRAMS
        )

    def is_shared(self, kind: ResourceKind, obj: Object) -> bool:
        """Whether another driver that is at work here uses a definition or a device class too."""
        if kind == CRD:
            return self.has_foreign_controller and defined_group(obj) == names.GROUP
        selectors = " ".join(class_selectors(obj)) if kind == DEVICE_CLASS else ""
        return any(f"'{driver}'" in selectors for driver in self.foreign_drivers)

    @cached_property
    def domains(self) -> tuple[Object, ...]:
        """The ComputeDomains that our controller manages, or that go with our CRD."""
        name = f"{COMPUTE_DOMAIN.plural}.{COMPUTE_DOMAIN.group}"
        goes = any(
            kind == CRD and name_of(obj) == name and not self.is_shared(kind, obj)
            for kind, obj in self.installed
        )
        return tuple(obj for obj in self.all(COMPUTE_DOMAIN) if goes or self._is_ours(obj))

    def _is_ours(self, domain: Object) -> bool:
        if not was_written_by_us(domain) or not (self.installed or is_being_deleted(domain)):
            return False
        return not (self.has_foreign_controller and set(_FOREIGN_PROGRAMS) & set(field_managers(domain)))

    @cached_property
    def _foreign_domains(self) -> frozenset[str]:
        every = {uid_of(domain) for domain in self.all(COMPUTE_DOMAIN)}
        return frozenset(every - {uid_of(domain) for domain in self.domains})

    def is_warm(self, domain: Object) -> bool:
        """Whether the controller made a ComputeDomain itself, for a clique in channel mode."""
        return names.WARM_CLIQUE_LABEL in labels_of(domain) and namespace_of(domain) in self.homes

    @cached_property
    def outlived(self) -> tuple[str, ...]:
        """UIDs of ComputeDomains that are gone, of which something of ours is left."""
        living = {uid_of(obj) for obj in self.all(COMPUTE_DOMAIN)}
        found: dict[str, bool] = {}
        for kind in DOMAIN_KINDS:
            for obj in self.all(kind):
                uid = labels_of(obj).get(names.COMPUTE_DOMAIN_LABEL)
                if kind == POD and namespace_of(obj) not in self.daemon_namespaces:
                    continue
                if uid and uid not in living:
                    is_shared = self.has_foreign_controller and namespace_of(obj) not in self.homes
                    found[uid] = found.get(uid, False) or not is_shared or was_written_by_us(obj)
        return tuple(sorted(uid for uid, was_ours in found.items() if was_ours))

    @cached_property
    def daemon_namespaces(self) -> tuple[str, ...]:
        """Namespaces of our IMEX daemons: our own, and those of installations that were taken over."""
        # An object was made for a ComputeDomain if it has the finalizer too, not only the label.
        others = {
            namespace
            for kind in (DAEMON_SET, SECRET)
            for obj in self.all(kind)
            if names.COMPUTE_DOMAIN_LABEL in labels_of(obj) and names.FINALIZER in finalizers_of(obj)
            if not self.has_foreign_controller and (namespace := namespace_of(obj))
        }
        return (*sorted(self.homes), *sorted(others - self.homes))

    def daemons(self, uid: str) -> list[Object]:
        """The daemon pods of a ComputeDomain."""
        return [pod for pod in self.by(POD, "domain", uid) if namespace_of(pod) in self.daemon_namespaces]

    def certificates(self, uid: str) -> list[Object]:
        """The Secrets of a ComputeDomain's daemons; no cache of the controller has them, and so no index."""
        ours = (names.imex_secret_name(uid), names.imex_authority_name(uid))
        return [
            secret
            for secret in self.all(SECRET)
            if name_of(secret) in ours
            and namespace_of(secret) in self.daemon_namespaces
            and labels_of(secret).get(names.COMPUTE_DOMAIN_LABEL) == uid
        ]

    def warm_domain(self, clique: str) -> Object | None:
        """The ComputeDomain that keeps a clique's IMEX domain up."""
        return next(filter(self.is_warm, self.by(COMPUTE_DOMAIN, "clique", clique)), None)

    # Pods that hold devices.

    @cached_property
    def uses(self) -> tuple[DeviceHolder, ...]:
        """Pods that have not ended and hold devices of our drivers, but for our own daemons."""
        return tuple(use for claim in self.all(RESOURCE_CLAIM) for use in self._uses_of(claim))

    def _uses_of(self, claim: Object) -> Iterator[DeviceHolder]:
        devices = filter(self._is_published, allocated_devices(claim))
        pools = {device.driver: device.pool for device in devices}
        for pod in filter(None, map(self._holder, claim_consumers(claim))):
            for driver, pool in pools.items():
                is_channel = driver == names.IMEX_DRIVER
                yield DeviceHolder(
                    pod=pod,
                    claim=claim,
                    driver=driver,
                    domain=claimed_domain_uid(claim) or "" if is_channel else None,
                    clique=names.clique_of_pool(pool) if is_channel else None,
                )

    def _is_published(self, device: AllocatedDevice) -> bool:
        """Whether a device is ours; without its slice, unless another program serves the driver now."""
        if_gone = device.driver not in self.foreign_drivers
        return device.driver in PLUGINS and self._pools.get((device.driver, device.pool), if_gone)

    @cached_property
    def _pools(self) -> dict[tuple[str, str], bool]:
        found = ((slice_pool(obj), was_written_by_us(obj)) for obj in self.all(RESOURCE_SLICE))
        return {(pool.driver, pool.name): is_ours for pool, is_ours in found}

    def _holder(self, consumer: ClaimConsumer) -> Object | None:
        """The pod that may use a claim. None if it is gone or has ended, or is one of our daemons."""
        pod = self._objects.get(POD, {}).get(consumer.uid)
        if pod is None or has_pod_ended(pod):
            return None
        is_at_home = namespace_of(pod) in self.daemon_namespaces
        return None if is_at_home and names.COMPUTE_DOMAIN_LABEL in labels_of(pod) else pod


def is_part_of_rackloom(obj: Object) -> bool:
    """Whether an object carries the label of what deploy/kubernetes installs."""
    return labels_of(obj).get(PART_OF_LABEL) == PART_OF


def was_written_by_us(obj: Object) -> bool:
    """Whether one of our programs wrote any field of an object."""
    return any(writer.startswith(FIELD_MANAGER_PREFIX) for writer in field_managers(obj))


def defined_group(definition: Object) -> str:
    """The API group of a CustomResourceDefinition, which the API server requires in its name."""
    return name_of(definition).partition(".")[2]


def is_sole_label_writer(obj: Object, label: str) -> bool:
    """Whether our programs, and nobody else, own a label of an object."""
    owners = list(field_managers(obj, label))
    return bool(owners) and all(owner.startswith(FIELD_MANAGER_PREFIX) for owner in owners)


def _place_of(obj: Object) -> tuple[str, ...]:
    return (f"{namespace_of(obj) or ''}/{name_of(obj)}",)
