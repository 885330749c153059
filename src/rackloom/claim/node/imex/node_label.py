"""The node label that brings a ComputeDomain's IMEX daemon to this node."""

from rackloom.claim.domain.names import COMPUTE_DOMAIN_LABEL
from rackloom.claim.kube.api import Conflict, KubeApi, NotFound
from rackloom.claim.kube.kinds import NODE
from rackloom.errors import Retry

RETRY_SECONDS = 0.25


class NodeLabel:
    """At most one ComputeDomain has a node: a node holds one IMEX session."""

    def __init__(self, api: KubeApi, node: str) -> None:
        self._api = api
        self._node = node

    async def take(self, uid: str) -> None:
        """Have the label say `uid`. Raises `Retry` while it names another ComputeDomain."""
        node = await self._api.get(NODE, self._node)
        found = node["metadata"].get("labels", {}).get(COMPUTE_DOMAIN_LABEL)
        if found == uid:
            return
        if found is not None:
            raise Retry(
                f"node {self._node} still belongs to ComputeDomain {found}: it can be in one at a time",
                after=RETRY_SECONDS,
            )
        await self._write(node["metadata"]["resourceVersion"], uid)

    async def leave(self, uid: str) -> None:
        """Remove the label if it says `uid`."""
        try:
            node = await self._api.get(NODE, self._node)
        except NotFound:
            return
        if node["metadata"].get("labels", {}).get(COMPUTE_DOMAIN_LABEL) == uid:
            await self._write(node["metadata"]["resourceVersion"], None)

    async def _write(self, resource_version: str, uid: str | None) -> None:
        """The resourceVersion makes it a change of what was read, and of nothing newer."""
        labels = {COMPUTE_DOMAIN_LABEL: uid}
        patch = {"metadata": {"resourceVersion": resource_version, "labels": labels}}
        try:
            await self._api.patch(NODE, self._node, None, patch)
        except Conflict as conflict:
            raise Retry(f"node {self._node} changed meanwhile", after=RETRY_SECONDS) from conflict
