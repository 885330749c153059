"""Carrying out single actions, and waiting for the written objects to come back."""

import pytest

from rackloom.claim.cluster.controller_runtime import EXPECTATION_SECONDS, Expectations, execute_write
from rackloom.claim.kube.api import Conflict
from rackloom.core.cluster import names
from rackloom.core.cluster.objects import NODE, CreateObject, DeleteObject
from rackloom.core.domains.snapshot import owned_object, remove_label
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.virtual import event_loop


def test_a_label_that_somebody_else_has_set_meanwhile_stays(make):
    async def story():
        api = DirectApi(FakeKube(), "controller")
        seen = owned_object(NODE, await api.create(NODE, make.node("n0", "cd-1")))
        await api.patch(NODE, "n0", None, {"metadata": {"labels": {names.COMPUTE_DOMAIN_LABEL: "cd-2"}}})
        with pytest.raises(Conflict):
            await execute_write(api, remove_label(seen, names.COMPUTE_DOMAIN_LABEL, "cd-1"))
        node = await execute_write(api, remove_label(seen, names.COMPUTE_DOMAIN_LABEL, "cd-2"))
        assert names.COMPUTE_DOMAIN_LABEL not in node["metadata"]["labels"]

    event_loop.run_simulation(1, story)


def test_what_is_gone_needs_no_deletion_and_another_of_its_name_is_left_alone(make):
    async def story():
        api = DirectApi(FakeKube(), "controller")
        gone = DeleteObject(kind=NODE, namespace=None, name="n0", uid="first")
        assert await execute_write(api, gone) is None
        await execute_write(api, CreateObject(kind=NODE, obj=make.node("n0")))
        with pytest.raises(Conflict):
            await execute_write(api, gone)

    event_loop.run_simulation(1, story)


def test_a_write_is_waited_for_until_it_or_something_newer_is_seen(make):
    world, clock = make.world(), [0.0]
    expectations = Expectations(world.at, lambda: clock[0])
    old = world.put(NODE, make.node("n0"))
    new = {**old, "metadata": {**old["metadata"], "resourceVersion": "7"}}
    expectations.expect("key", NODE, new)
    assert expectations.outstanding("key") == EXPECTATION_SECONDS
    assert expectations.outstanding("other") is None
    world.version = 8
    world.put(NODE, old)
    assert expectations.outstanding("key") is None


def test_a_write_that_never_shows_is_not_waited_for_for_ever(make):
    world, clock = make.world(), [0.0]
    expectations = Expectations(world.at, lambda: clock[0])
    expectations.expect("key", NODE, {"metadata": {"name": "n0", "uid": "u", "resourceVersion": "7"}})
    clock[0] = EXPECTATION_SECONDS - 1
    assert expectations.outstanding("key") == 1
    clock[0] = EXPECTATION_SECONDS
    assert expectations.outstanding("key") is None


def test_an_object_whose_last_finalizer_was_taken_off_is_seen_by_its_absence(make):
    expectations = Expectations(make.world().at, lambda: 0.0)
    meta = {"name": "n0", "uid": "u", "resourceVersion": "7", "deletionTimestamp": make.now}
    expectations.expect("key", NODE, {"metadata": meta})
    assert expectations.outstanding("key") is None
