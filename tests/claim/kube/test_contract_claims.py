"""An API server's contract with Rackloom: claims."""

import pytest
from tests.claim.kube.world import Play, World, refused

from rackloom.claim.kube.api import Rejected
from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import Object


def _claim(name: str) -> Object:
    exactly = {"deviceClassName": "none.rackloom.test"}
    return {"spec": {"devices": {"requests": [{"name": name, "exactly": exactly}]}}}


def test_claims_have_their_counts_filled_in_and_stay_as_they_are(play: Play) -> None:
    async def scenario(world: World) -> None:
        filled = {"deviceClassName": "none.rackloom.test", "allocationMode": "ExactCount", "count": 1}
        claim = await world.api.create(objects.RESOURCE_CLAIM, world.named("a", **_claim("r")))
        assert claim["spec"]["devices"]["requests"] == [{"name": "r", "exactly": filled}]
        template = world.named("a", spec=_claim("r"))
        made = await world.api.create(objects.RESOURCE_CLAIM_TEMPLATE, template)
        assert made["spec"]["spec"]["devices"]["requests"] == [{"name": "r", "exactly": filled}]
        with pytest.raises(Rejected) as error:
            await world.api.patch(objects.RESOURCE_CLAIM, "a", world.namespace, _claim("other"))
        code, reason, message = refused(error)
        assert (code, reason) == (422, "Invalid")
        assert message.startswith('ResourceClaim.resource.k8s.io "a" is invalid: spec: Invalid value: ')
        assert message.endswith("field is immutable")
        other = {"spec": _claim("other")}
        with pytest.raises(Rejected) as error:
            await world.api.patch(objects.RESOURCE_CLAIM_TEMPLATE, "a", world.namespace, other)
        assert refused(error)[:2] == (422, "Invalid")

    play(scenario)


def test_a_taint_of_a_device_that_says_no_time_gets_one(play: Play) -> None:
    taint = {"key": "a.rackloom.test/lost", "effect": "NoSchedule"}

    async def scenario(world: World) -> None:
        name = f"{world.namespace}-slice"
        spec = {
            "driver": "a.rackloom.test",
            "nodeName": "none",
            "pool": {"name": name, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "a", "taints": [taint]}],
        }
        made = await world.api.create(objects.RESOURCE_SLICE, {"metadata": {"name": name}, "spec": spec})
        (dated,) = made["spec"]["devices"][0]["taints"]
        assert dated == {**taint, "timeAdded": dated["timeAdded"]}
        first = objects.epoch_seconds(dated["timeAdded"])
        second = {"key": "a.rackloom.test/hot", "effect": "NoSchedule"}
        spec["devices"] = [{"name": "a", "taints": [dated, second]}]
        changed = await world.api.patch(objects.RESOURCE_SLICE, name, None, {"spec": spec})
        kept, later = changed["spec"]["devices"][0]["taints"]
        assert kept == dated
        assert first is not None
        assert objects.epoch_seconds(later["timeAdded"]) >= first
        await world.api.delete(objects.RESOURCE_SLICE, name)

    play(scenario)
