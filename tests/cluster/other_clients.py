"""Other clients of an API server, who write all the time: who takes himself for alone fails beside them."""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from tests.claim.kube.world import WIDGET

from rackloom.claim.kube.api import Kind, KubeApi, KubeError, Object
from rackloom.claim.kube.kinds import (
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
)

_PAUSE = 0.005
"""Seconds between two writes of one of them: far less than a test takes from one call to the next."""
_CLASS = "none.other-clients.test"
_REQUEST = {"name": "one", "exactly": {"deviceClassName": _CLASS}}
_SLICE = {
    "driver": _CLASS,
    "allNodes": True,
    "pool": {"name": "other", "generation": 1, "resourceSliceCount": 1},
}
_ROOM = {"cpu": "4", "memory": "8Gi", "pods": "10"}
_READY = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "made for a test"}
KINDS: dict[Kind, Object] = {
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
"""What they write. Pods for any node and nodes for any pod are among it, as on any cluster."""


@contextlib.asynccontextmanager
async def beside_other_clients(api: KubeApi) -> AsyncIterator[Counter[str]]:
    """Objects of many kinds come and go meanwhile, in a namespace of theirs or in none; counted by kind."""
    name, counts = "other-clients", Counter[str]()
    await api.create(NAMESPACE, {"metadata": {"name": name}})
    kinds = list(KINDS)
    clients = [asyncio.create_task(_write(api, name, some, counts)) for some in (kinds[::2], kinds[1::2])]
    try:
        yield counts
    finally:
        for client in clients:
            client.cancel()
        ended = await asyncio.gather(*clients, return_exceptions=True)
        await api.delete(NAMESPACE, name)
    assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended


async def _write(api: KubeApi, namespace: str, kinds: Sequence[Kind], counts: Counter[str]) -> None:
    for number in itertools.count():
        for kind in kinds:
            # A server may be busy, a kind not served yet, and a namespace may have no service account yet.
            with contextlib.suppress(KubeError):
                await _one_life(api, kind, _named(kind, namespace, f"other-{number}"))
                counts[kind.kind] += 1


async def _one_life(api: KubeApi, kind: Kind, obj: Object) -> None:
    name, namespace = obj["metadata"]["name"], obj["metadata"].get("namespace")
    await api.create(kind, obj)
    await asyncio.sleep(_PAUSE)
    await api.patch(kind, name, namespace, {"metadata": {"labels": {"changed": "yes"}}})
    await asyncio.sleep(_PAUSE)
    await api.delete(kind, name, namespace, grace_seconds=0)
    await asyncio.sleep(_PAUSE)


def _named(kind: Kind, namespace: str, name: str) -> Object:
    meta = {"name": name} | ({"namespace": namespace} if kind.namespaced else {})
    told = {"involvedObject": {"namespace": namespace, "name": name}} if kind == EVENT else {}
    return {"metadata": meta} | KINDS[kind] | told
