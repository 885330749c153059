"""The organisation of a namespace's pods: its label, or none if namespaces may not be read."""

import asyncio

import pytest

from rackloom.app.snapshot.assemble import site_snapshot
from rackloom.app.snapshot.cluster import read_cluster
from rackloom.claim.kube.api import KubeError, ObjectList
from rackloom.core.cluster.names import ORG_LABEL
from rackloom.core.cluster.objects import NAMESPACE, ResourceKind
from rackloom.core.diagnosis.snapshot import Layer
from rackloom.lab.kube import refusals
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube
from rackloom.web.frames import ColourMode
from rackloom.web.live import LiveReading
from rackloom.web.model import SiteReading, site_map
from rackloom.web.painters import Painter


class Narrow(DirectApi):
    """For a user who may not list namespaces."""

    refusal: KubeError = refusals.forbidden(NAMESPACE, "", "not yours to see")

    async def list(self, kind: ResourceKind, namespace: str | None = None, **how: str) -> ObjectList:
        if kind == NAMESPACE:
            raise self.refusal
        return await super().list(kind, namespace, **how)


async def labelled() -> FakeKube:
    kube = FakeKube(seed=1)
    labels = {"acme-jobs": {ORG_LABEL: "acme"}, "nobodys": {ORG_LABEL: ""}, "other": {"team": "acme"}}
    for name, reported in labels.items():
        await DirectApi(kube, "admin").create(NAMESPACE, {"metadata": {"name": name, "labels": reported}})
    return kube


def test_a_namespace_is_whose_its_label_says():
    assert seen_by(DirectApi).namespaces == {"acme-jobs": "acme"}


def test_where_namespaces_may_not_be_listed_the_rest_is_read_all_the_same():
    snapshot = seen_by(Narrow)
    seen = snapshot.layer(Layer.CLUSTER)
    assert (snapshot.namespaces, seen.at, seen.unknown_since) == ({}, 1.0, None)


def test_and_operators_read_on_the_map_why_tenants_are_not_shown_their_pods():
    why = "namespaces may not be listed"
    for org, kind, reported in ((None, Narrow, True), ("acme", Narrow, False), (None, DirectApi, False)):
        whole = site_map(SiteReading(snapshot=seen_by(kind)))
        sheet = Painter(org, ColourMode.WORKLOAD, 9).follow(LiveReading(number=1, whole=whole))
        assert (why in "".join(markup for _, markup in sheet.all())) is reported


def seen_by(kind):
    async def look():
        return await site_snapshot(1.0, cluster=kind(await labelled(), "map"))

    return asyncio.run(look())


def test_any_other_failure_is_no_reading():
    class Broken(Narrow):
        refusal = KubeError(500, "InternalError", "etcd is away")

    async def look():
        await read_cluster(Broken(await labelled(), "map"))

    with pytest.raises(KubeError, match="etcd is away"):
        asyncio.run(look())
