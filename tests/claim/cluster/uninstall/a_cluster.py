"""A cluster with an installation in any state, on the fake API server, and the invariants of its removal.

The installed objects are read from deploy/kubernetes. All foreign objects carry the annotation `stranger`. A
write to one of them fails the test, and so does a step before its turn.
"""

import asyncio
import contextlib
import copy
from collections.abc import Awaitable, Callable, Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml

from rackloom.claim.cluster.uninstall.executor import (
    InventoryReader,
    ServedTypes,
    Uninstallation,
    UninstallLimits,
    UninstallOutcome,
)
from rackloom.claim.cluster.uninstall.inventory import ClusterInventory
from rackloom.claim.kube.api import Conflict
from rackloom.core.cluster import names
from rackloom.core.cluster.device_configs import ChannelConfig, imex_config_json
from rackloom.core.cluster.gang_objects import GANG_FINALIZER, GANG_TAINT
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    CONFIG_MAP,
    CRD,
    DAEMON_SET,
    DEPLOYMENT,
    DEVICE_CLASS,
    GANG_PLAN,
    JOB,
    LEASE,
    MUTATING_WEBHOOK,
    NAMESPACE,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    VALIDATING_WEBHOOK,
    Object,
    ResourceKind,
)
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.objects import TypeSchema
from rackloom.lab.kube.server import AdmissionReview, FakeKube
from rackloom.lab.virtual.event_loop import loop_wall_time

DEPLOY = Path(__file__).parents[4] / "deploy" / "kubernetes"
DRIVER = "rackloom-system"
DAEMONS = "rackloom-imex"
TEAM = "team"
NVIDIA = "nvidia"
STRANGER = "stranger"
CLIQUE = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31.1"
US = "rackloom-uninstall"
T = TypeVar("T")
_RBAC, _ADMISSION = "rbac.authorization.k8s.io", "admissionregistration.k8s.io"
CLUSTER_ROLE = ResourceKind(_RBAC, "v1", "ClusterRole", "clusterroles", namespaced=False)
OTHERS = (
    CLUSTER_ROLE,
    ResourceKind(_RBAC, "v1", "ClusterRoleBinding", "clusterrolebindings", namespaced=False),
    ResourceKind(_RBAC, "v1", "Role", "roles", namespaced=True),
    ResourceKind(_RBAC, "v1", "RoleBinding", "rolebindings", namespaced=True),
    ResourceKind(
        _ADMISSION, "v1", "ValidatingAdmissionPolicy", "validatingadmissionpolicies", namespaced=False
    ),
    ResourceKind(
        _ADMISSION,
        "v1",
        "ValidatingAdmissionPolicyBinding",
        "validatingadmissionpolicybindings",
        namespaced=False,
    ),
    ResourceKind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets", namespaced=True),
    ResourceKind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies", namespaced=True),
    ResourceKind("batch", "v1", "CronJob", "cronjobs", namespaced=True),
    DEPLOYMENT,
)
KINDS = {
    kind.kind: kind
    for kind in (
        *OTHERS, JOB, SERVICE, SERVICE_ACCOUNT, SECRET, DAEMON_SET, DEVICE_CLASS, CRD, NAMESPACE, CONFIG_MAP,
        MUTATING_WEBHOOK, VALIDATING_WEBHOOK,
    )
}  # fmt: skip


@cache
def shipped(overlay: str) -> tuple[tuple[ResourceKind, Object], ...]:
    """The objects of an overlay, as kustomize would label and place them, with the namespace first."""
    found = []
    for path in sorted((DEPLOY / overlay).glob("*.yaml")):
        for obj in yaml.load_all(path.read_text(), yaml.CSafeLoader):
            if obj and obj["kind"] != "Kustomization":
                kind, meta = KINDS[obj["kind"]], obj["metadata"]
                meta["labels"] = {**(meta.get("labels") or {}), "app.kubernetes.io/part-of": "rackloom"}
                if kind.namespaced:
                    meta.setdefault("namespace", DRIVER)
                found.append((kind, obj))
    return tuple(sorted(found, key=lambda each: each[0] != NAMESPACE))


class Cluster:
    """One fake API server. `as_` gives a client of any name. Kubelets end pods that are being deleted."""

    def __init__(self, seed: int = 1) -> None:
        self.kube = FakeKube(namespaces=("default", TEAM, NVIDIA), seed=seed)
        for kind in OTHERS:
            self.kube.serve(kind, TypeSchema(blind_writes=True))
        self.user = DirectApi(self.kube, "kubectl")
        self.has_kubelets = True
        self.judge = Judge(self.kube)
        self.kube.admission.append(self.judge)
        self._life = asyncio.create_task(self._kubelets())

    def as_(self, manager: str) -> DirectApi:
        """A client of this name."""
        return DirectApi(self.kube, manager)

    async def end(self) -> None:
        """Stop the kubelets."""
        self._life.cancel()
        await asyncio.gather(self._life, return_exceptions=True)

    async def install(
        self, *overlays: str, only: Collection[tuple[str, str]] = (), release: str | None = None
    ) -> None:
        """Apply some overlays, or `only` these objects (kind, name), marked as of a Helm `release`."""
        for overlay in overlays:
            for kind, obj in copy.deepcopy(shipped(overlay)):
                if release:
                    obj["metadata"].setdefault("annotations", {})["meta.helm.sh/release-name"] = release
                if not only or (kind.kind, obj["metadata"]["name"]) in only:
                    await self.user.create(kind, obj)

    async def look(self) -> ClusterInventory:
        """The inventory that the command sees."""
        return await self.reader().read()

    def reader(self, release: str | None = None) -> InventoryReader:
        """The reader that the command uses."""
        types = ServedTypes(kinds=tuple(self.kube.schemas))
        return InventoryReader(self.as_(US), types, DRIVER, loop_wall_time, release)

    async def uninstall(
        self, api: Any = None, still_seconds: float = 120.0, release: str | None = None
    ) -> UninstallOutcome:
        """Run the command as far as it gets."""
        limits = UninstallLimits(still_seconds, loop_wall_time, asyncio.sleep)
        work = Uninstallation(
            self.reader(release).read, api or self.as_(US), limits, lambda _: None, lambda *_: None
        )
        return await work.run()

    async def put(self, kind: ResourceKind, obj: Object, by: str = "kubectl") -> Object:
        """Create an object as a named field manager."""
        return await self.as_(by).create(kind, obj)

    async def _kubelets(self) -> None:
        """Deleted pods end. Those with claims end only while there is an IMEX plugin."""
        while True:
            await asyncio.sleep(0.5)
            sets = self.kube.store.all(DAEMON_SET)
            serves = any(
                labelled(found, "component", plugin) for found in sets for plugin in ("node-imex", "node-all")
            )
            for pod in self.kube.store.all(POD):
                has_claims = bool(pod["spec"].get("resourceClaims"))
                if "deletionTimestamp" in pod["metadata"] and (serves or not has_claims):
                    meta = pod["metadata"]
                    await DirectApi(self.kube, "kubelet").delete(
                        POD, meta["name"], meta["namespace"], grace_seconds=0
                    )

    def foreign_objects(self) -> dict[str, Object]:
        """Everything that is not ours, without the counters of the server."""
        return {
            f"{kind.kind} {obj['metadata'].get('namespace')}/{obj['metadata']['name']}": _plain(obj)
            for kind in self.kube.schemas
            for obj in self.kube.store.all(kind)
            if is_strange(obj)
        }

    def ours(self) -> list[str]:
        """Our remaining objects, by our names, labels, finalizers, taints and types."""
        return [
            f"{kind.kind} {obj['metadata'].get('namespace')}/{obj['metadata']['name']}"
            for kind in self.kube.schemas
            for obj in self.kube.store.all(kind)
            if not is_strange(obj) and any(_marks(kind, obj))
        ]


class Judge:
    """An admission hook: we write only our objects, and in order."""

    def __init__(self, kube: FakeKube) -> None:
        self._kube = kube
        self.writes: list[tuple[str, str, str]] = []
        self.shared: tuple[str, ...] = ()
        """Names of device classes and definitions that are to stay."""

    async def __call__(self, review: AdmissionReview) -> None:
        """Raises AssertionError if a write is forbidden."""
        if review.user != US:
            return
        old = review.old or {}
        self.writes.append((review.operation, review.kind.kind, old["metadata"]["name"]))
        assert review.operation in ("UPDATE", "DELETE"), "nothing is made"
        if review.kind == NODE:
            assert _foreign_part(old) == _foreign_part(review.object or {}), "labels and taints of others"
        else:
            assert not is_strange(old), review
        if review.operation == "DELETE":
            self._in_turn(review.kind, old)
        elif review.kind == COMPUTE_DOMAIN and names.FINALIZER not in _held(review.object or {}):
            assert not self._daemons(old["metadata"]["uid"]), "its daemons run"

    def _in_turn(self, kind: ResourceKind, obj: Object) -> None:
        webhooks = [*self._of(MUTATING_WEBHOOK), *self._of(VALIDATING_WEBHOOK)]
        domains, plans = self._of(COMPUTE_DOMAIN), self._of(GANG_PLAN)
        held = obj["metadata"].get("labels") or {}
        is_plugin = kind == DAEMON_SET and names.COMPUTE_DOMAIN_LABEL not in held
        if kind in (DEPLOYMENT, DEVICE_CLASS, CRD, NAMESPACE) or is_plugin:
            assert not webhooks, "a webhook outlives what it needs"
        if is_plugin or kind in (CRD, NAMESPACE):
            assert not domains
            assert not plans
            assert not self._daemons("")
            assert not self._of(DEPLOYMENT), "the controller makes things anew"
        if is_plugin:
            classes = {found["metadata"]["name"] for found in self._of(DEVICE_CLASS)}
            assert classes <= set(self.shared), "new claims may be allocated"
            assert not self._users(), "a pod holds devices"
        if kind.kind in ("ClusterRole", "ServiceAccount") or kind == NAMESPACE:
            assert not [each for each in self._of(DAEMON_SET) if not _is_going(each)]
        if kind == NAMESPACE:
            stay = {each["metadata"]["name"] for each in self._of(CRD) if not _is_going(each)}
            assert stay <= set(self.shared)

    def _of(self, kind: ResourceKind) -> list[Object]:
        return [obj for obj in self._kube.store.all(kind) if not is_strange(obj)]

    def _daemons(self, uid: str) -> list[Object]:
        pods = (pod["metadata"].get("labels") or {} for pod in self._of(POD))
        return [held for held in pods if names.COMPUTE_DOMAIN_LABEL in held and uid in str(held)]

    def _users(self) -> list[Object]:
        claims = self._kube.store.all(RESOURCE_CLAIM)
        return [claim for claim in claims if (claim.get("status") or {}).get("reservedFor")]


def strange(name: str, namespace: str | None = None, **more: Any) -> Object:
    """An object of another owner."""
    meta = {"name": name, "annotations": {STRANGER: "yes", **more.pop("annotations", {})}}
    meta |= {"labels": more.pop("labels")} if "labels" in more else {}
    meta |= {"namespace": namespace} if namespace else {}
    return {"metadata": meta, **more}


def is_strange(obj: Object) -> bool:
    """Whether an object has another owner."""
    return STRANGER in (obj["metadata"].get("annotations") or {})


def labelled(obj: Object, key: str, value: str) -> bool:
    """Whether an object carries a recommended label with this value."""
    return (obj["metadata"].get("labels") or {}).get(f"app.kubernetes.io/{key}") == value


def pod(name: str, namespace: str, node: str | None = "n0", **meta: Any) -> Object:
    """A pod that runs."""
    spec: Object = {"containers": [{"name": "main", "image": "none"}]}
    spec |= {"nodeName": node} if node else {}
    return {"metadata": {"name": name, "namespace": namespace, **meta}, "spec": spec}


async def running(cluster: Cluster, obj: Object, *, by: str = "kubectl") -> Object:
    """Create a pod that is ready."""
    made = await cluster.put(POD, obj, by)
    conditions = [{"type": "Ready", "status": "True"}]
    status = {"status": {"phase": "Running", "conditions": conditions}}
    meta = made["metadata"]
    return await cluster.as_("kubelet").patch(
        POD, meta["name"], meta["namespace"], status, subresource="status"
    )


async def programs(cluster: Cluster, *components: str) -> None:
    """The pods of our Deployments and DaemonSets, owned by them."""
    for kind in (DEPLOYMENT, DAEMON_SET):
        for owner in cluster.kube.store.all(kind):
            component = (owner["metadata"].get("labels") or {}).get("app.kubernetes.io/component")
            if component in components:
                reference = {"apiVersion": "apps/v1", "kind": kind.kind, "controller": True}
                reference |= {key: owner["metadata"][key] for key in ("name", "uid")}
                labels = {key: owner["metadata"]["labels"][key] for key in owner["metadata"]["labels"]}
                labels.pop("app.kubernetes.io/part-of")
                await running(
                    cluster, pod(f"{component}-0", DRIVER, labels=labels, ownerReferences=[reference])
                )


async def claim_of(
    cluster: Cluster, holder: Object, *, driver: str, pool: str = "n0", domain: str | None = None
) -> Object:
    """A claim that is allocated on a pool and reserved for a pod."""
    meta = holder["metadata"]
    spec: Object = {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "c"}}]}}
    if domain is not None:
        opaque = {"driver": driver, "parameters": imex_config_json(ChannelConfig(domain_id=domain))}
        spec["devices"]["config"] = [{"opaque": opaque}]
    owner = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
    claim_meta = {"name": f"claim-{meta['name']}", "namespace": meta["namespace"], "ownerReferences": [owner]}
    made = await cluster.put(RESOURCE_CLAIM, {"metadata": claim_meta, "spec": spec})
    result = {"request": "r", "driver": driver, "pool": pool, "device": "d"}
    status = {
        "allocation": {"devices": {"results": [result]}},
        "reservedFor": [{"resource": "pods", "name": meta["name"], "uid": meta["uid"]}],
    }
    return await cluster.as_("kube-scheduler").patch(
        RESOURCE_CLAIM, made["metadata"]["name"], meta["namespace"], {"status": status}, subresource="status"
    )


async def tray(cluster: Cluster, name: str, **labels: str) -> Object:
    """A node with a foreign label and a foreign taint."""
    taint = {"key": "example.com/other", "effect": "NoSchedule"}
    made = {"metadata": {"name": name, "labels": {"zone": "a", **labels}}, "spec": {"taints": [taint]}}
    return await cluster.put(NODE, made)


async def slice_of(cluster: Cluster, driver: str, pool: str, *, by: str, **meta: Any) -> Object:
    """A published pool."""
    spec = {"driver": driver, "nodeName": pool, "devices": []}
    spec["pool"] = {"name": pool, "generation": 1, "resourceSliceCount": 1}
    name = f"{pool.replace('/', '-').lower()}-{driver}"
    return await cluster.put(RESOURCE_SLICE, {"metadata": {"name": name, **meta}, "spec": spec}, by)


async def domain_of(cluster: Cluster, name: str, *, namespace: str = TEAM, **labels: str) -> str:
    """A ComputeDomain with all that the controller and the plugin made for it. Returns its UID."""
    controller = "rackloom-controller"
    spec = {"channel": {"resourceClaimTemplate": {"name": f"channel-{name}"}}}
    meta = {"name": name, "namespace": namespace, "labels": labels}
    made = await cluster.put(COMPUTE_DOMAIN, {"metadata": meta, "spec": spec})
    uid = made["metadata"]["uid"]
    held = {"finalizers": [names.FINALIZER], "labels": {**labels, names.COMPUTE_DOMAIN_LABEL: uid}}
    await cluster.as_(controller).patch(COMPUTE_DOMAIN, name, namespace, {"metadata": held})
    await belongings(cluster, uid, namespace, f"channel-{name}", node=f"node-of-{name}")
    return uid


_SPECS: dict[ResourceKind, Object] = {
    RESOURCE_CLAIM_TEMPLATE: {"spec": {}},
    DAEMON_SET: {"selector": {}, "template": {}},
}
"""The least that the API server takes."""


async def belongings(cluster: Cluster, uid: str, namespace: str, template: str, *, node: str) -> None:
    """Templates, DaemonSet, Secret, daemon, clique object and node label of a ComputeDomain."""
    controller = "rackloom-controller"
    labels = {names.COMPUTE_DOMAIN_LABEL: uid}
    daemon = names.daemon_name(uid)
    wanted: list[tuple[ResourceKind, str, str, dict[str, str]]] = [
        (RESOURCE_CLAIM_TEMPLATE, namespace, template, {names.TARGET_LABEL: names.TARGET_WORKLOAD}),
        (RESOURCE_CLAIM_TEMPLATE, DAEMONS, daemon, {names.TARGET_LABEL: names.TARGET_DAEMON}),
        (DAEMON_SET, DAEMONS, daemon, {}),
        (SECRET, DAEMONS, names.imex_secret_name(uid), {}),
    ]
    for kind, place, name, more in wanted:
        meta = {
            "name": name,
            "namespace": place,
            "labels": {**labels, **more},
            "finalizers": [names.FINALIZER],
        }
        made = await cluster.put(kind, {"metadata": meta, "spec": _SPECS.get(kind, {})}, controller)
        if kind == DAEMON_SET:
            owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": name, "controller": True}
            owner["uid"] = made["metadata"]["uid"]
    daemon_pod = pod(f"daemon-{uid[:8]}", DAEMONS, node, labels=labels, ownerReferences=[owner])
    daemon_pod["spec"]["resourceClaims"] = [{"name": "daemon", "resourceClaimTemplateName": daemon}]
    await running(cluster, daemon_pod, by="kube-controller-manager")
    clique = {"name": f"{uid}.{CLIQUE}", "namespace": DAEMONS, "labels": labels}
    await cluster.put(COMPUTE_DOMAIN_CLIQUE, {"metadata": clique, "daemons": []}, "rackloom-imex")
    plugin = cluster.as_(f"rackloom-{names.IMEX_DRIVER}")
    with contextlib.suppress(Conflict):
        await tray(cluster, node)
    await plugin.patch(NODE, node, None, {"metadata": {"labels": labels}})


async def plan_of(cluster: Cluster, name: str, *trays: str) -> str:
    """A GangPlan, and the taints of its trays. Returns its UID."""
    meta = {"name": name, "namespace": TEAM, "finalizers": [GANG_FINALIZER]}
    made = await cluster.put(GANG_PLAN, {"metadata": meta, "spec": {}}, "rackloom-controller")
    uid = str(made["metadata"]["uid"])
    for tray in trays:
        await tainted(cluster, tray, uid)
    return uid


async def tainted(cluster: Cluster, tray: str, uid: str) -> None:
    """Reserve a tray."""
    found = await cluster.user.get(NODE, tray)
    taints = [
        *found["spec"]["taints"],
        {"key": GANG_TAINT, "value": uid, "effect": "NoSchedule"},
    ]
    await cluster.as_("rackloom-controller").patch(NODE, tray, None, {"spec": {"taints": taints}})


async def lease(cluster: Cluster) -> None:
    """The lease of an election."""
    meta = {"name": "rackloom-controller", "namespace": DRIVER}
    await cluster.put(LEASE, {"metadata": meta, "spec": {"holderIdentity": "c"}}, "rackloom-controller")


def _is_going(obj: Object) -> bool:
    return "deletionTimestamp" in obj["metadata"]


def _held(obj: Object) -> list[str]:
    return list(obj["metadata"].get("finalizers") or ())


def _foreign_part(found: Object) -> Object:
    labels = {
        key: value
        for key, value in found["metadata"]["labels"].items()
        if not key.startswith(("rackloom.dev/", "resource.nvidia.com/")) and key != names.GPU_CLIQUE_LABEL
    }
    taints = [taint for taint in found["spec"].get("taints") or () if taint["key"] != GANG_TAINT]
    return {"labels": labels, "taints": taints}


def _plain(obj: Object) -> Object:
    meta = {key: value for key, value in obj["metadata"].items() if key not in _COUNTED}
    return {**obj, "metadata": meta}


_COUNTED = ("managedFields", "resourceVersion", "generation")


def _marks(kind: ResourceKind, obj: Object) -> Iterator[bool]:
    meta = obj["metadata"]
    keys = [key for field in ("labels", "annotations", "finalizers") for key in meta.get(field) or ()]
    if kind == NODE:
        keys += [taint["key"] for taint in obj["spec"].get("taints") or ()]
    yield any(key.startswith(("rackloom.dev/", "resource.nvidia.com/")) for key in keys)
    yield labelled(obj, "part-of", "rackloom")
    yield meta["name"].startswith(("rackloom-", "computedomain"))
    yield meta.get("namespace") in (DRIVER, DAEMONS)
    yield kind in (COMPUTE_DOMAIN, COMPUTE_DOMAIN_CLIQUE, GANG_PLAN, DEVICE_CLASS, RESOURCE_SLICE)


async def on_a_cluster(story: Callable[[Cluster], Awaitable[T]]) -> T:
    """Run a story on a fresh cluster."""
    cluster = Cluster()
    try:
        return await story(cluster)
    finally:
        await cluster.end()
