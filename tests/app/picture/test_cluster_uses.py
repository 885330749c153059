"""Which claims use which devices."""

from rackloom.app.picture.cluster import _uses


def test_a_claim_that_only_monitors_uses_nothing():
    held = {"driver": "gpu.nvidia.com", "pool": "n1", "device": "gpu-0"}
    results = [{**held, "adminAccess": True}, {**held, "device": "gpu-1"}, {**held, "adminAccess": False}]
    claim = {
        "metadata": {"namespace": "ops", "name": "watch", "uid": "c"},
        "status": {"allocation": {"devices": {"results": results}}},
    }
    assert [one.device for one in _uses([claim], [])] == ["gpu-1", "gpu-0"]
