"""Small clusters, in the form that the API uses."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from rackloom.core.allocate.allocator import SearchMode, allocate
from rackloom.core.allocate.inputs import DeviceId, Features, InUse
from rackloom.core.allocate.objects import DeviceClass, Node, ResourceClaim, ResourceSlice
from rackloom.core.allocate.outcome import Outcome

ALL_FEATURES = Features(list_type_attributes=True)
NOTHING = InUse()
Fields = dict[str, Any]


class Cluster:
    """One node `n`, driver `d.example.com` with class `any`, and the objects that a test adds."""

    node = msgspec.convert({"metadata": {"name": "n", "labels": {"zone": "a"}}}, Node)
    classes = msgspec.convert([{"metadata": {"name": "any"}, "spec": {}}], list[DeviceClass])
    features = ALL_FEATURES

    def slice(self, devices: Sequence[Fields], name: str = "s", **spec: Any) -> ResourceSlice:
        """A slice of pool `p` on the node, unless `spec` overrides that."""
        place = (
            {"nodeName": "n"}
            if not {"nodeSelector", "allNodes", "perDeviceNodeSelection"} & set(spec)
            else {}
        )
        pool = {"name": "p", "generation": 1, "resourceSliceCount": 1} | spec.pop("pool", {})
        fields = {"driver": "d.example.com", "pool": pool, "devices": list(devices), **place, **spec}
        return msgspec.convert({"metadata": {"name": name}, "spec": fields}, ResourceSlice)

    def claim(self, *requests: Fields, name: str = "c", **devices: Any) -> ResourceClaim:
        """A claim of requests as `request` and `first_of` make them."""
        spec = {"devices": {"requests": list(requests), **devices}}
        return msgspec.convert({"metadata": {"name": name}, "spec": spec}, ResourceClaim)

    def request(self, name: str = "r", count: int = 1, select: str | None = None, **ask: Any) -> Fields:
        """One exact request."""
        return {"name": name, "exactly": self.ask(count, select, **ask)}

    def first_of(self, name: str, *asks: Fields) -> Fields:
        """A request of alternatives, named a0, a1, ..."""
        return {
            "name": name,
            "firstAvailable": [{"name": f"a{number}", **ask} for number, ask in enumerate(asks)],
        }

    def ask(self, count: int = 1, select: str | None = None, **ask: Any) -> Fields:
        """The body of a request."""
        selectors = [{"cel": {"expression": select}}] if select else []
        mode = {"allocationMode": "ExactCount", "count": count}
        return {"deviceClassName": "any", "selectors": selectors} | mode | ask

    def allocate(
        self,
        slices: Sequence[ResourceSlice],
        *claims: ResourceClaim,
        state: InUse = NOTHING,
        features: Features | None = None,
        proceed: Callable[[], bool] = lambda: True,
        mode: SearchMode = "exact",
    ) -> Outcome:
        """The answer for all claims as those of one pod."""
        return allocate(
            self.node,
            self.classes,
            slices,
            claims,
            state=state,
            features=features or self.features,
            proceed=proceed,
            mode=mode,
        )

    def in_use(self, *devices: str) -> InUse:
        """Devices of pool `p` in use."""
        return InUse(dedicated=frozenset(DeviceId("d.example.com", "p", device) for device in devices))


@pytest.fixture
def cluster() -> Cluster:
    """A cluster that a test fills."""
    return Cluster()
