"""Random clusters as the API server would list them, with the facts that follow from how each was made.

The facts are computed here from the choices of the generator, by the rules of Kubernetes, and never by the
readers under test:

- GPUs of a node: allocatable of the device plugin, or whole GPUs that the DRA driver publishes. Pods that
  count GPUs get the first, and the second if the first is 0 or missing (kube-scheduler,
  `shouldDelegateResourceToDRA`). A MIG device is a part of a GPU that is published beside it.
- A claim for a MIG device holds the whole of its GPU. The node of a device is that of its slice.
- Effective request of a pod (Kubernetes, "Init Containers", "Sidecar Containers"): the larger of the sum of
  all containers and sidecars, and of each init container together with the sidecars before it.
- A limit without a request is a request (API server, defaults of a container).
- A pod that has ended holds nothing. A pod that is being deleted holds its devices until it has ended.
- Devices of a claim with admin access are free for others.
- Owner: the gang, else the job of a label that its controller writes, else the controller, else the pod.
- Open: not cordoned, Ready is True, and no NoSchedule or NoExecute taint. A node without a Ready condition is
  closed: its kubelet has not reported, and the node controller counts it as Unknown.
"""

import random
from typing import Any, NamedTuple

GPU = "nvidia.com/gpu"
DRIVER = "gpu.nvidia.com"
IMEX = "compute-domain.nvidia.com"
Object = dict[str, Any]


class NodeFacts(NamedTuple):
    """The facts of one node. GPUs by plugin are None if the node does not name the resource."""

    by_plugin: int | None
    by_claim: int
    clique: str | None
    cordoned: bool
    ready: bool
    taints: frozenset[str]


class Cluster(NamedTuple):
    """Lists of objects, and the facts behind them."""

    nodes: list[Object]
    pods: list[Object]
    claims: list[Object]
    slices: list[Object]
    facts: dict[str, NodeFacts]
    held: dict[str, dict[str, int]]
    """GPUs by node and by owner (`owner_key`)."""
    channels: dict[str, set[str]]
    """Owners of the IMEX channel of a node."""
    unreadable: set[str]
    """`Kind namespace/name` of each object that no reader can read."""


class Odds(NamedTuple):
    """The share of a cluster's parts that are unusual. 0 makes a plain cluster."""

    unusual: float = 0.35
    broken: float = 0.0


PLAIN = Odds(unusual=0.0)


def random_cluster(seed: int, odds: Odds = Odds(), trays: int = 8) -> Cluster:  # noqa: B008 (a value)
    """The cluster of a seed."""
    return _Maker(seed, odds).cluster(trays)


class _Maker:
    def __init__(self, seed: int, odds: Odds) -> None:
        self.rng = random.Random(seed)
        # Draws that the recorded placements do not have.
        self.more = random.Random(f"more of {seed}")
        self.odds = odds
        self.number = 0
        self.found = Cluster([], [], [], [], {}, {}, {}, set())

    def odd(self) -> bool:
        return self.rng.random() < self.odds.unusual

    def broken(self) -> bool:
        return self.rng.random() < self.odds.broken

    def name(self, prefix: str) -> str:
        self.number += 1
        return f"{prefix}-{self.number}"

    def meta(self, name: str, namespace: str | None = None, **more: Any) -> Object:
        self.number += 1
        there = {} if namespace is None else {"namespace": namespace}
        return {
            "name": name,
            "uid": f"uid-{self.number}",
            "resourceVersion": str(self.number),
            **there,
            **more,
        }

    def cluster(self, trays: int) -> Cluster:
        for number in range(self.rng.randint(1, trays)):
            self.node(f"tray-{number}", f"c.{number % 2}")
        nodes = [node["metadata"]["name"] for node in self.found.nodes]
        # Free devices by node: a claim is given none twice.
        free = {
            node: [
                device["name"]
                for slice_ in self.found.slices
                if slice_["spec"]["nodeName"] == node
                for device in slice_["spec"]["devices"]
                if device["attributes"]["type"]["string"] == "gpu"
            ]
            for node in nodes
        }
        for _ in range(self.rng.randint(0, 2 * len(nodes))):
            self.pod(self.rng.choice(nodes), free)
        for slice_ in tuple(self.found.slices):
            self.publish_oddly(slice_["spec"])
        return self.found

    def publish_oddly(self, spec: Object) -> None:
        """Void slices beside the newest ones, and GPUs of drivers that publish no type."""
        if self.more.random() < self.odds.unusual:
            for device in spec["devices"]:
                if device["attributes"]["type"] == {"string": "gpu"}:
                    del device["attributes"]["type"]
        if self.more.random() < self.odds.unusual:
            gone = {
                "name": "gpu-9",
                "attributes": {"type": {"string": "gpu"}, "uuid": {"string": "GPU-gone"}},
            }
            old = {**spec, "pool": {**spec["pool"], "generation": 0}, "devices": [gone]}
            self.found.slices.append({"metadata": self.meta(f"{spec['nodeName']}-void"), "spec": old})

    # Nodes.

    def node(self, name: str, clique: str) -> None:
        rng = self.rng
        published = rng.choice([0, 4])
        plugin: int | None = rng.choice([None, 4]) if published else 4
        if self.odd():
            published, plugin = rng.choice([(4, 3), (3, 4), (0, 0), (4, 0), (2, None)])
        where = None if self.odd() and rng.random() < 0.3 else clique
        ready = rng.choice([True, True, True, False])
        conditions: list[Object] = [{"type": "MemoryPressure", "status": "False"}]
        status: str | None = "True" if ready else "False"
        if self.odd():
            status = rng.choice(["Unknown", None])
        if status is not None:
            conditions.append({"type": "Ready", "status": status})
        taints: list[Object] = []
        if self.odd():
            taints = [
                rng.choice(
                    [
                        {"key": "dedicated", "value": "ml", "effect": "NoSchedule"},
                        {"key": "maintenance", "effect": "NoExecute"},
                        {"key": "spot", "effect": "PreferNoSchedule"},
                    ]
                )
            ]
        cordoned = rng.random() < 0.1
        amounts: Object = {"cpu": "96", "memory": "1Ti", "pods": "110"}
        # GPUs behind the NVSwitches of a single machine share memory with no other machine.
        is_alone = where is None and self.more.random() < 0.5
        label = "00000000-0000-0000-0000-000000000000.0" if is_alone else where
        if plugin is not None:
            amounts[GPU] = rng.choice([str(plugin), plugin])
        node = {
            "metadata": self.meta(name, labels={"nvidia.com/gpu.clique": label} if label else {"zone": "a"}),
            "spec": {"taints": taints, **({"unschedulable": True} if cordoned else {})},
            "status": {"allocatable": amounts, "conditions": conditions},
        }
        if self.broken():
            rng.choice([_break_amount, _break_taints, _break_conditions])(node)
            self.found.unreadable.add(f"Node {name}")
        self.found.nodes.append(node)
        blocking = {taint["key"] for taint in taints if taint["effect"] != "PreferNoSchedule"}
        self.found.facts[name] = NodeFacts(
            by_plugin=plugin,
            by_claim=published,
            clique=where,
            cordoned=cordoned,
            ready=status == "True",
            taints=frozenset(blocking),
        )
        self.slices(name, published)

    def slices(self, node: str, gpus: int) -> None:
        devices: list[Object] = [
            {
                "name": f"gpu-{number}",
                "attributes": {"type": {"string": "gpu"}, "uuid": {"string": f"GPU-{node}-{number}"}},
            }
            for number in range(gpus)
        ]
        if gpus and self.odd():
            parent = {"string": f"GPU-{node}-0"}
            devices += [
                {"name": f"gpu-0-mig-{part}", "attributes": {"type": {"string": "mig"}, "parentUUID": parent}}
                for part in range(2)
            ]
        if not devices:
            return
        # Drivers are free to name a pool.
        pool_name = f"pool-of-{node}" if self.more.random() < self.odds.unusual else node
        # A pool may be spread over two slices.
        cut = self.rng.randint(1, len(devices)) if self.odd() else len(devices)
        parts = [part for part in (devices[:cut], devices[cut:]) if part]
        for number, part in enumerate(parts):
            pool = {"name": pool_name, "generation": 1, "resourceSliceCount": len(parts)}
            spec = {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": part}
            self.found.slices.append({"metadata": self.meta(f"{node}-{number}"), "spec": spec})

    # Pods and their claims.

    def pod(self, node: str, free: dict[str, list[str]]) -> None:
        rng = self.rng
        name = self.name("pod")
        namespace = rng.choice(["default", "ml"])
        spec, gpus = self.containers()
        labels, owners, owner = self.owner(namespace, name)
        phase = rng.choice(["Running", "Running", "Running", "Pending", "Succeeded", "Failed"])
        ended = phase in ("Succeeded", "Failed")
        meta = self.meta(name, namespace, labels=labels, ownerReferences=owners)
        if self.odd():
            meta["deletionTimestamp"] = "2026-11-01T10:00:00Z"
        status: Object = {"phase": phase}
        is_bound = rng.random() < 0.9
        if is_bound:
            spec["nodeName"] = node
        pod = {"metadata": meta, "spec": spec, "status": status}
        is_readable = True
        if self.broken():
            spec["containers"][0]["resources"] = {"limits": {GPU: rng.choice(["abc", "1.5", {}, "-1"])}}
            self.found.unreadable.add(f"Pod {namespace}/{name}")
            is_readable = False
        self.found.pods.append(pod)
        holds = is_bound and not ended and is_readable
        if holds and gpus:
            self.hold(node, owner, gpus)
        if free[node] and rng.random() < 0.4:
            self.claim(pod, node, owner if is_readable else None, free, holds=holds)

    def hold(self, node: str, owner: str, gpus: int) -> None:
        held = self.found.held.setdefault(node, {})
        held[owner] = held.get(owner, 0) + gpus

    def containers(self) -> tuple[Object, int]:
        """Containers of a pod, and the GPUs that it requests in effect."""
        rng = self.rng
        amounts = ("limits",) if not self.odd() else ("limits", "requests")

        def container(gpus: int, **more: Any) -> Object:
            resources = {kind: {GPU: rng.choice([str(gpus), gpus])} for kind in amounts} if gpus else {}
            return {"name": self.name("c"), "resources": resources, **more}

        main = [rng.choice([0, 1, 2, 4])]
        if self.odd():
            main.append(1)
        spec: Object = {"containers": [container(gpus) for gpus in main]}
        together, most, sidecars = sum(main), 0, 0
        if self.odd():
            inits: list[Object] = []
            for _ in range(rng.randint(1, 2)):
                gpus = rng.choice([1, 2, 4])
                if rng.random() < 0.5:
                    sidecars += gpus
                    most = max(most, sidecars)
                    inits.append(container(gpus, restartPolicy="Always"))
                else:
                    most = max(most, sidecars + gpus)
                    inits.append(container(gpus))
            spec["initContainers"] = inits
        return spec, max(together + sidecars, most)

    def owner(self, namespace: str, name: str) -> tuple[Object, list[Object], str]:
        """Labels, owner references, and the key of the owner."""
        rng = self.rng
        job = rng.choice(["train", "serve"])
        kind = rng.choice(["Job", "StatefulSet"]) if self.odd() else "StatefulSet"
        reference = [{"kind": kind, "name": job, "uid": f"uid-{namespace}-{kind}-{job}", "controller": True}]
        labels: Object = {"app": job}
        if kind == "Job":
            labels["batch.kubernetes.io/job-name"] = job
        choice = rng.random()
        if choice < 0.2:
            labels["rackloom.dev/gang"] = "big"
            return labels, reference, f"{namespace}/gang big"
        if choice < 0.3:
            return labels | {"batch.kubernetes.io/job-name": ""}, [], f"{namespace}/Pod {name}"
        return labels, reference, f"{namespace}/{kind} {job}"

    def claim(
        self, pod: Object, node: str, owner: str | None, free: dict[str, list[str]], *, holds: bool
    ) -> None:
        """An allocated claim. A pod that has ended may still be listed as its user."""
        rng = self.rng
        meta = pod["metadata"]
        taken = [free[node].pop() for _ in range(rng.randint(1, len(free[node])))]
        gpus = len(taken)
        published = {
            device["name"]: slice_["spec"]["pool"]["name"]
            for slice_ in self.found.slices
            if slice_["spec"]["nodeName"] == node
            for device in slice_["spec"]["devices"]
        }
        if "gpu-0" in taken and "gpu-0-mig-0" in published:
            # Both parts in place of the GPU.
            taken = [name for name in taken if name != "gpu-0"] + ["gpu-0-mig-0", "gpu-0-mig-1"]
        is_admin = self.odd()
        results = [
            {
                "request": "gpus",
                "driver": DRIVER,
                "pool": published[device],
                "device": device,
                **({"adminAccess": True} if is_admin else {}),
            }
            for device in taken
        ]
        has_channel = rng.random() < 0.3
        if has_channel:
            channel = {"request": "channel", "driver": IMEX, "pool": node, "device": "channel-0"}
            results.append(channel | ({"adminAccess": True} if is_admin else {}))
        name = self.name("claim")
        pod["spec"]["resourceClaims"] = [{"name": "devices", "resourceClaimName": name}]
        users = [{"resource": "pods", "name": meta["name"], "uid": meta["uid"]}]
        if owner is None or self.odd():
            # Its pod is gone or cannot be read: the claim still holds its devices.
            users, owner = [], f"{meta['namespace']}/claim {name}"
        self.found.claims.append(
            {
                "metadata": self.meta(name, meta["namespace"]),
                "spec": {"devices": {"requests": []}},
                "status": {"allocation": {"devices": {"results": results}}, "reservedFor": users},
            }
        )
        if not is_admin:
            self.hold(node, owner, gpus)
        if has_channel and not is_admin:
            self.found.channels.setdefault(node, set()).add(owner)


def _break_amount(node: Object) -> None:
    node["status"]["allocatable"][GPU] = "many"


def _break_taints(node: Object) -> None:
    node["spec"]["taints"] = "dedicated"


def _break_conditions(node: Object) -> None:
    node["status"]["conditions"] = [{"type": 7}]
