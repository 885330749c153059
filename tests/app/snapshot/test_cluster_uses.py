"""Which claims use which devices, and since when."""

import pytest

from rackloom.app.snapshot.cache import ReadCache
from rackloom.app.snapshot.cluster import allocated_devices

CLAIM = {
    "metadata": {"namespace": "ops", "name": "watch", "uid": "c", "resourceVersion": "1"},
    "status": {},
}
HELD = {"driver": "gpu.nvidia.com", "pool": "n1", "device": "gpu-0"}


def claim(*results, users=()):
    reserved = [{"uid": f"uid-{name}", "name": name} for name in users]
    return {**CLAIM, "status": {"allocation": {"devices": {"results": results}}, "reservedFor": reserved}}


def pod(name, started=None, version="1"):
    meta = {"namespace": "ops", "name": name, "uid": f"uid-{name}", "resourceVersion": version}
    return {"metadata": meta, "status": {} if started is None else {"startTime": started}}


def test_a_claim_that_only_monitors_uses_nothing():
    results = [{**HELD, "adminAccess": True}, {**HELD, "device": "gpu-1"}, {**HELD, "adminAccess": False}]
    assert [device.device for device in allocated_devices([claim(*results)], [], ReadCache())] == [
        "gpu-1",
        "gpu-0",
    ]


@pytest.mark.parametrize(
    ("pods", "since"),
    [
        ([pod("a", "2026-01-01T00:00:09Z"), pod("b", "2026-01-01T00:00:05Z")], 1767225605.0),
        ([pod("a", "2026-01-01T00:00:09Z"), pod("b")], None),
        ([pod("a", "2026-01-01T00:00:09Z")], None),
    ],
)
def test_a_use_is_as_old_as_its_oldest_pod_where_every_pod_says_so(pods, since):
    (use,) = allocated_devices([claim(HELD, users=("a", "b"))], pods, ReadCache())
    assert (use.pods, use.since) == (("ops/a", "ops/b"), since)


def test_a_pod_that_changed_changes_its_use_although_the_claim_did_not():
    known, held = ReadCache(), claim(HELD, users=("a",))
    before = allocated_devices([held], [pod("a")], known)
    same = allocated_devices([held], [pod("a")], known)
    after = allocated_devices([held], [pod("a", "2026-01-01T00:00:09Z", version="2")], known)
    assert before[0] is same[0]
    assert (before[0].since, after[0].since) == (None, 1767225609.0)


def test_a_use_names_the_jobs_of_its_pods_once_each():
    owner = {"kind": "Job", "name": "train", "controller": True}
    pods = [pod("a"), pod("b"), pod("c")]
    for made in pods[:2]:
        made["metadata"]["ownerReferences"] = [owner]
    (use,) = allocated_devices([claim(HELD, users=("a", "b", "c"))], pods, ReadCache())
    assert use.jobs == ("Job ops/train",)
