"""Other clients of an API server, who write all the time: who takes himself for alone fails beside them."""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from tests.claim.kube.world import WIDGET
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi, KubeError
from rackloom.core.cluster.objects import (
    CONFIG_MAP,
    DEVICE_CLASS,
    EVENT,
    LEASE,
    NAMESPACE,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_SLICE,
    SECRET,
    Object,
    ResourceKind,
)

_PAUSE = 0.005
"""Seconds between two writes of one client: far less than the time between two calls of a test."""
_MARK = "other-"
"""The prefix of all their names."""
_HOME = f"{_MARK}clients"
_CLASS = "none.other-clients.test"
_REQUEST = {"name": "one", "exactly": {"deviceClassName": _CLASS}}
_SLICE = {
    "driver": _CLASS,
    "allNodes": True,
    "pool": {"name": "other", "generation": 1, "resourceSliceCount": 1},
}
_ROOM = {"cpu": "4", "memory": "8Gi", "pods": "10"}
_READY = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "made for a test"}
KINDS: dict[ResourceKind, Object] = {
    WIDGET: {"spec": {"size": 1}},
    CONFIG_MAP: {"data": {"x": "1"}},
    SECRET: {"stringData": {"x": "1"}},
    LEASE: {"spec": {"holderIdentity": "other"}},
    EVENT: {"type": "Normal", "reason": "Other"},
    POD: {"spec": {"containers": [{"name": "main", "image": "none.invalid/none"}]}},
    RESOURCE_CLAIM: {"spec": {"devices": {"requests": [_REQUEST]}}},
    RESOURCE_SLICE: {"spec": _SLICE},
    DEVICE_CLASS: {"spec": {}},
    NODE: {"status": {"capacity": _ROOM, "allocatable": _ROOM, "conditions": [_READY]}},
    NAMESPACE: {},
}
"""The objects that they write. They include pods for any node and nodes for any pod, as on any cluster."""
_CLUSTER_WIDE = [kind for kind in KINDS if not kind.namespaced]
"""The namespace is among these, and takes the other objects with it."""


@contextlib.asynccontextmanager
async def beside_other_clients(api: KubeApi) -> AsyncIterator[Counter[str]]:
    """Objects of many kinds come and go inside the context, in a namespace or in none. Counts them by kind.

    At the end all of them are gone, so that the next test's pods find none of their nodes.
    """
    counts, ended = Counter[str](), asyncio.Event()
    await api.create(NAMESPACE, {"metadata": {"name": _HOME}})
    kinds = list(KINDS)
    clients = [asyncio.create_task(_write(api, some, counts, ended)) for some in (kinds[::2], kinds[1::2])]
    try:
        yield counts
    finally:
        ended.set()
        failures = await asyncio.gather(*clients, return_exceptions=True)
        await until(lambda: _none_left(api), "what other clients wrote is gone")
    assert failures == [None, None], failures


async def _write(
    api: KubeApi, kinds: Sequence[ResourceKind], counts: Counter[str], ended: asyncio.Event
) -> None:
    for number, kind in enumerate(itertools.cycle(kinds)):
        if ended.is_set():
            return
        # A server may be busy, a kind not served yet, and a namespace may have no service account yet.
        with contextlib.suppress(KubeError):
            await _one_life(api, kind, _named(kind, f"{_MARK}{number}"))
            counts[kind.kind] += 1


async def _none_left(api: KubeApi) -> bool:
    """Deletes objects that an error left. A namespace goes only a while after its deletion."""
    left = [(kind, obj) for kind in _CLUSTER_WIDE for obj in await _written(api, kind)]
    for kind, obj in left:
        if "deletionTimestamp" not in obj["metadata"]:
            with contextlib.suppress(KubeError):
                await api.delete(kind, obj["metadata"]["name"])
    return not left


async def _written(api: KubeApi, kind: ResourceKind) -> list[Object]:
    return [item for item in (await api.list(kind)).items if item["metadata"]["name"].startswith(_MARK)]


async def _one_life(api: KubeApi, kind: ResourceKind, obj: Object) -> None:
    name, namespace = obj["metadata"]["name"], obj["metadata"].get("namespace")
    await api.create(kind, obj)
    await asyncio.sleep(_PAUSE)
    await api.patch(kind, name, namespace, {"metadata": {"labels": {"changed": "yes"}}})
    await asyncio.sleep(_PAUSE)
    await api.delete(kind, name, namespace, grace_seconds=0)
    await asyncio.sleep(_PAUSE)


def _named(kind: ResourceKind, name: str) -> Object:
    meta = {"name": name} | ({"namespace": _HOME} if kind.namespaced else {})
    involved = {"involvedObject": {"namespace": _HOME, "name": name}} if kind == EVENT else {}
    return {"metadata": meta} | KINDS[kind] | involved
