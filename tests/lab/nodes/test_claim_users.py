"""Claims that pods of one node share: prepared for the first, unprepared with the last."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.claim.node.plugin_manager import (
    KubeletPluginManager,
    NotPrepared,
    PreparedDevice,
    SocketDraManager,
)

from rackloom.core.cluster.objects import Object
from rackloom.errors import Retry
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.nodes.dra_manager import ClaimInfoCache, PodClaim

DRIVER = "gpu.test"


def pod(name: str) -> Object:
    return {"metadata": {"name": name, "namespace": "n", "uid": f"uid-{name}"}}


def claim(name: str, *users: str, uid: str = "") -> Object:
    """A claim that is allocated, and reserved for pods of these names."""
    results = [{"driver": DRIVER, "request": "r", "pool": "p", "device": "d"}]
    return {
        "metadata": {"name": name, "namespace": "n", "uid": uid or f"uid-{name}"},
        "status": {
            "allocation": {"devices": {"results": results}},
            "reservedFor": [{"resource": "pods", "name": user, "uid": f"uid-{user}"} for user in users],
        },
    }


def names(claims: Sequence[PodClaim]) -> list[str]:
    return [used.ref.name for used in claims]


def start(users: ClaimInfoCache, name: str, *claims: Object) -> list[str]:
    """The claims that are prepared for a pod that starts."""
    fresh = users.begin(pod(name), claims)
    users.note_started(pod(name), fresh)
    return names(fresh)


def stop(users: ClaimInfoCache, name: str, *claims: Object) -> list[str]:
    """The claims that are unprepared when a pod ends."""
    last = users.end(pod(name), claims)
    users.forget(last)
    return names(last)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz")), max_size=30))
def test_a_claim_is_prepared_as_long_as_somebody_uses_it(turns: list[tuple[str, str]]) -> None:
    users, running, prepared = ClaimInfoCache(), dict[str, str](), set[str]()
    for name, used in turns:
        shared = claim(used, *"abc")
        if name in running:
            used = running.pop(name)
            gone = stop(users, name, claim(used, *"abc"))
            assert gone == ([] if used in running.values() else [used])
            prepared -= set(gone)
        else:
            fresh = start(users, name, shared)
            assert fresh == ([] if used in prepared else [used])
            running[name] = used
            prepared |= set(fresh)
    assert prepared == set(running.values())


def test_a_pod_that_could_not_start_is_asked_for_what_it_lacks() -> None:
    users = ClaimInfoCache()
    shared, own = claim("shared", "a", "b"), claim("own", "b")
    assert start(users, "a", shared) == ["shared"]
    assert names(users.begin(pod("b"), [shared, own])) == ["own"]
    assert names(users.begin(pod("b"), [shared, own])) == ["own"], "as long as its plugin refuses"
    assert stop(users, "a", shared) == []
    assert stop(users, "b", shared, own) == ["shared", "own"]


def test_what_could_not_be_unprepared_is_asked_for_again() -> None:
    users = ClaimInfoCache()
    shared = claim("shared", "a")
    start(users, "a", shared)
    assert names(users.end(pod("a"), [shared])) == ["shared"]
    assert stop(users, "a", shared) == ["shared"]


def test_what_an_earlier_process_prepared_goes_with_the_last_pod_that_has_a_reservation() -> None:
    assert stop(ClaimInfoCache(), "a", claim("shared", "a", "b")) == []
    assert stop(ClaimInfoCache(), "b", claim("shared", "b")) == ["shared"]
    unallocated = {**claim("x"), "status": {}}
    assert stop(ClaimInfoCache(), "a", unallocated) == []


def test_a_kubelet_that_was_restarted_prepares_again_and_knows_the_users() -> None:
    users = ClaimInfoCache()
    shared = claim("shared", "a", "b")
    assert start(users, "a", shared) == ["shared"]
    assert start(users, "b", shared) == []
    assert start(users, "a", shared) == ["shared"]
    assert start(users, "b", shared) == []
    assert stop(users, "a", shared) == []
    assert stop(users, "b", shared) == ["shared"]


def test_a_pod_that_went_while_the_node_was_off_keeps_nothing() -> None:
    users = ClaimInfoCache()
    start(users, "a", claim("shared", "a", "b"))
    start(users, "b", claim("shared", "a", "b"))
    start(users, "b", claim("shared", "b"))
    assert stop(users, "b", claim("shared", "b")) == ["shared"]


def test_another_claim_of_the_name_waits_until_the_old_one_is_given_back() -> None:
    users = ClaimInfoCache()
    start(users, "a", claim("x", "a"))
    with pytest.raises(
        Retry, match="old ResourceClaim with same name x and different UID uid-x still exists"
    ):
        users.begin(pod("b"), [claim("x", "b", uid="new")])
    assert stop(users, "a", claim("x")) == ["x"]
    assert start(users, "b", claim("x", "b", uid="new")) == ["x"]


class Asked(KubeletPluginManager):
    """A kubelet that records the names of claims in place of plugin calls. Claims in `refused` fail."""

    def __init__(self, registry: Path) -> None:
        super().__init__(registry, DirectApi(FakeKube(), "kubelet"), "n1")
        self.asked: list[str] = []
        self.refused: set[str] = set()

    async def prepare(self, *claims: PodClaim) -> dict[str, tuple[PreparedDevice, ...]]:
        self._ask("+", claims)
        return {}

    async def unprepare(self, *claims: PodClaim) -> None:
        self._ask("-", claims)

    def _ask(self, sign: str, claims: Sequence[PodClaim]) -> None:
        for used in claims:
            if used.ref.name in self.refused:
                raise NotPrepared(f"{used.ref.name} is not done")
            self.asked.append(sign + used.ref.name)


def test_plugins_are_asked_for_the_first_and_the_last_pod(tmp_path: Path) -> None:
    async def run() -> None:
        kubelet = Asked(tmp_path)
        devices = SocketDraManager({"n1": kubelet})
        shared = claim("shared", "a", "b")
        with pytest.raises(Retry, match=r"DRA driver gpu\.test is not registered"):
            await devices.prepare("n1", pod("a"), [shared])
        await devices.unprepare("n1", pod("a"), [shared])
        assert kubelet.asked == [], "a pod goes although its plugin was never there"
        kubelet.plugins[DRIVER] = object()  # type: ignore[assignment]  # never called: the methods above are
        kubelet.refused = {"shared"}
        with pytest.raises(Retry, match="shared is not done"):
            await devices.prepare("n1", pod("a"), [shared])
        kubelet.refused = set()
        await devices.prepare("n1", pod("a"), [shared])
        await devices.prepare("n1", pod("b"), [shared])
        await devices.unprepare("n1", pod("a"), [shared])
        kubelet.refused = {"shared"}
        with pytest.raises(Retry, match="shared is not done"):
            await devices.unprepare("n1", pod("b"), [shared])
        kubelet.refused = set()
        assert kubelet.asked == ["+shared"]
        await devices.unprepare("n1", pod("b"), [shared])
        assert kubelet.asked == ["+shared", "-shared"]

    asyncio.run(run())
