"""The site of `gangs.py --real`: etcd and kube-apiserver of tests/cluster, and `rackloom controller`.

No scheduler and no controller-manager run, so nothing but the benchmark changes the objects.
"""

import asyncio
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path

from site_figures import memory

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.cluster.build import CONTROL_PLANE, made  # noqa: E402
from tests.cluster.control_plane import ControlPlane  # noqa: E402
from tests.cluster.processes import Child, start  # noqa: E402

from rackloom.claim.kube.api import Conflict, KubeError  # noqa: E402
from rackloom.claim.kube.client import KubeClient, RateLimiter  # noqa: E402
from rackloom.claim.kube.connection import http_client  # noqa: E402
from rackloom.core.cluster.objects import GANG_PLAN, NAMESPACE, NODE, POD, Object, ResourceKind  # noqa: E402

AT_ONCE = 24
"""Requests of the benchmark at a time."""
SERVICE_ACCOUNT = ResourceKind("", "v1", "ServiceAccount", "serviceaccounts", namespaced=True)


class BareServer(ControlPlane):
    """No controller-manager takes the taint of a new node away."""

    def _apiserver(self) -> list[str]:
        return [*super()._apiserver(), "--disable-admission-plugins=TaintNodesByCondition"]


class RealSite:
    """A `gangs.Site` on a real API server."""

    def __init__(self, server: BareServer, api: KubeClient, whole: Iterable[ResourceKind]) -> None:
        self._server, self._api = server, api
        self._whole = {kind.plural for kind in whole}
        self._plans: dict[str, Object] = {}
        self.controller: Child | None = None
        self.following: asyncio.Task[None] | None = None

    async def add(self, kind: ResourceKind, objects: Iterable[Object]) -> None:
        """Many requests at a time."""
        rest = iter(objects)

        async def create() -> None:
            for obj in rest:
                await self._api.create(kind, as_sent(obj))

        await asyncio.gather(*(create() for _ in range(AT_ONCE)))

    async def start(self) -> float:
        """The process lists the cluster while it starts, and all of its memory counts."""
        self.following = asyncio.create_task(self._follow())
        command = [sys.executable, "-m", "rackloom.cli.main", "controller", "--image", "none"]
        words = ["--kubeconfig", str(self._server.admin), "--quiet"]
        self.controller = start("controller", [*command, *words], self._server.logs)
        return 0.0

    async def _follow(self) -> None:
        version = ""
        while True:
            # A type that is new is not served at once, and a server ends a watch after minutes.
            with suppress(KubeError):
                version = version or (await self._api.list(GANG_PLAN)).resource_version
                async with aclosing(self._api.watch(GANG_PLAN, resource_version=version)) as events:
                    async for event in events:
                        version = event.object["metadata"]["resourceVersion"]
                        if event.type != "BOOKMARK":
                            self._plans[event.object["metadata"]["name"]] = event.object
            await asyncio.sleep(0.2)

    async def write(self, kind: ResourceKind, obj: Object) -> None:
        """Annotations and the cordon of a node change, and the phase of a pod. Classes are installed."""
        meta = obj["metadata"]
        try:
            await self._api.create(kind, as_sent(obj))
        except Conflict:
            if kind == NODE:
                spec = {"unschedulable": obj["spec"].get("unschedulable")}
                patch = {"metadata": {"annotations": meta["annotations"]}, "spec": spec}
                await self._api.patch(kind, meta["name"], None, patch)
            elif kind == POD:
                status = {"status": {"phase": obj["status"]["phase"]}}
                await self._api.patch(kind, meta["name"], meta["namespace"], status, subresource="status")

    def plans(self) -> Iterable[Object]:
        """As the watch shows them."""
        return self._plans.values()

    async def lists(self) -> int:
        """By the server's own count."""
        async with http_client(self._server.admin, None) as client:
            page = (await client.get("/metrics")).text
        counted = re.finditer(r"^apiserver_request_total\{(.*)\} (\S+)$", page, re.MULTILINE)
        labels = ((dict(re.findall(r'(\w+)="([^"]*)"', found[1])), float(found[2])) for found in counted)
        return int(
            sum(n for found, n in labels if found["verb"] == "LIST" and found["resource"] in self._whole)
        )

    def spent(self) -> float:
        """User and system time of the controller."""
        if self.controller is None:
            return 0.0
        fields = Path(f"/proc/{self.controller.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self, field: str) -> float:
        """Of the controller."""
        assert self.controller is not None
        return memory(field, self.controller.process.pid)

    def check(self) -> None:
        """Raise if the controller, or the watch of its plans, has ended."""
        if self.controller is not None and self.controller.ended():
            raise SystemExit(self.controller.tail())
        if self.following is not None and self.following.done():
            self.following.result()


def as_sent(obj: Object) -> Object:
    """An object without the fields that a server sets."""
    unset = ("uid", "resourceVersion", "creationTimestamp", "managedFields")
    meta = {name: value for name, value in obj["metadata"].items() if name not in unset}
    return {**obj, "metadata": meta}


@asynccontextmanager
async def real_site(team: str, whole: Iterable[ResourceKind]) -> AsyncIterator[RealSite]:
    """A server with our custom resources and a namespace, and no other objects."""
    with tempfile.TemporaryDirectory() as folder:
        server = BareServer(made(CONTROL_PLANE), Path(folder))
        client = http_client(server.admin, None)
        api = KubeClient(client, RateLimiter(10_000.0, 10_000))
        site = RealSite(server, api, whole)
        try:
            for name in ("etcd", "kube-apiserver"):
                server.start_one(name)
            await asyncio.to_thread(server.wait_until_ready)
            apply = ["kubectl", "--kubeconfig", server.admin, "apply", "--server-side", "-k"]
            base = [*apply, ROOT / "deploy/kubernetes/base"]
            await asyncio.to_thread(subprocess.run, base, check=True, stdout=subprocess.DEVNULL)
            await api.create(NAMESPACE, {"metadata": {"name": team}})
            account = {"metadata": {"name": "default", "namespace": team}}
            await api.create(SERVICE_ACCOUNT, account)
            yield site
        finally:
            if site.following is not None:
                site.following.cancel()
            if site.controller is not None:
                site.controller.stop()
            await api.aclose()
            server.stop()
