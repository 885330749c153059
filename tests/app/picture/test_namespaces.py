"""Whose pods a namespace holds: what its label says, and nobody's where that may not be read."""

import asyncio

import pytest

from rackloom.app.picture.cluster import ORG_LABEL, read_cluster
from rackloom.app.picture.look import site_picture
from rackloom.claim.kube.api import Kind, KubeError, Listed
from rackloom.claim.kube.kinds import NAMESPACE
from rackloom.prove.picture.values import Layer
from rackloom.twin.kube import answers
from rackloom.twin.kube.direct import DirectApi
from rackloom.twin.kube.server import FakeKube
from rackloom.web.colouring import Mode
from rackloom.web.live import Now
from rackloom.web.parts import Painter
from rackloom.web.reading import Reading
from rackloom.web.scene import scene


class Narrow(DirectApi):
    """Of somebody who may not list namespaces."""

    refusal: KubeError = answers.forbidden(NAMESPACE, "", "not yours to see")

    async def list(self, kind: Kind, namespace: str | None = None, **how: str) -> Listed:
        if kind == NAMESPACE:
            raise self.refusal
        return await super().list(kind, namespace, **how)


async def labelled() -> FakeKube:
    kube = FakeKube(seed=1)
    labels = {"acme-jobs": {ORG_LABEL: "acme"}, "nobodys": {ORG_LABEL: ""}, "other": {"team": "acme"}}
    for name, told in labels.items():
        await DirectApi(kube, "admin").create(NAMESPACE, {"metadata": {"name": name, "labels": told}})
    return kube


def test_a_namespace_is_whose_its_label_says():
    assert seen_by(DirectApi).namespaces == {"acme-jobs": "acme"}


def test_where_namespaces_may_not_be_listed_the_rest_is_read_all_the_same():
    picture = seen_by(Narrow)
    seen = picture.layer(Layer.CLUSTER)
    assert (picture.namespaces, seen.at, seen.unknown_since) == ({}, 1.0, None)


def test_and_operators_read_on_the_map_why_tenants_are_not_shown_their_pods():
    why = "namespaces may not be listed"
    for org, kind, told in ((None, Narrow, True), ("acme", Narrow, False), (None, DirectApi, False)):
        whole = scene(Reading(picture=seen_by(kind)))
        sheet = Painter(org, Mode.WORKLOAD, 9).follow(Now(number=1, whole=whole))
        assert (why in "".join(markup for _, markup in sheet.all())) is told


def seen_by(kind):
    async def look():
        return await site_picture(1.0, cluster=kind(await labelled(), "map"))

    return asyncio.run(look())


def test_any_other_failure_is_no_reading():
    class Broken(Narrow):
        refusal = KubeError(500, "InternalError", "etcd is away")

    async def look():
        await read_cluster(Broken(await labelled(), "map"))

    with pytest.raises(KubeError, match="etcd is away"):
        asyncio.run(look())
