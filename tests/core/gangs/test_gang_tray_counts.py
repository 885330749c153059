"""Earlier counts are kept if nothing changed, and never if something did."""

import json
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.gangs.test_gang_devices import claim, cluster, offer, pod, request, rooms, taint_rule

from rackloom.core.allocate.objects import ObjectMeta, ResourceClaim
from rackloom.core.cluster.trays import DraDevices, PlacementSite, PlacementTray
from rackloom.core.gangs.trays import TrayCountCache, TrayInputs
from rackloom.errors import Refused

ON = st.sampled_from(["n1", "n2"])
SLICES = st.lists(st.builds(lambda on, count: offer(on, count=count), ON, st.integers(1, 4)), max_size=2)
CLAIMS = st.lists(
    st.builds(
        lambda number, on, user: claim(f"c{number}", on=on, user=user, device=f"d{number}"),
        st.integers(0, 3),
        ON,
        st.sampled_from(["mine", "theirs"]),
    ),
    max_size=3,
)
RULES = st.lists(
    st.builds(lambda on, device: taint_rule("r", pool=on, device=f"d{device}"), ON, st.integers(0, 3)),
    max_size=2,
)
STATES = st.builds(
    lambda slices, claims, rules: cluster(
        slices={slice_["metadata"]["name"]: slice_ for slice_ in slices}.values(),
        claims=claims,
        pods=[pod("mine"), pod("theirs", gang=None)],
        taint_rules=rules,
    ),
    SLICES,
    CLAIMS,
    RULES,
)


def versioned(objects):
    """The objects with versions as on the API server: an object that differs has another version."""
    for slice_ in (*objects.slices, *objects.classes):
        version = str(crc32(json.dumps(slice_).encode()))
        slice_["metadata"] |= {"uid": slice_["metadata"]["name"], "resourceVersion": version}
    return objects


@settings(max_examples=60)
@given(states=st.lists(STATES, min_size=2, max_size=4), count=st.integers(1, 2))
def test_a_count_with_a_memory_equals_one_without(states, count):
    memory = TrayCountCache()
    for state in states:
        asked = request(count=count)
        assert rooms(versioned(state), asked, counted=memory) == rooms(state, asked)


class Reader:
    """Records the trays that each pass reads."""

    def __init__(self):
        self.looks = []

    def __call__(self, trays):
        self.looks.append(set(trays))
        return DraDevices(nodes=(), classes=(), slices=())


def tray_inputs(**changed):
    return {
        name: TrayInputs(labels={}, classes=(), pools=(), rules=(), taken=changed.get(name, ()))
        for name in ("n1", "n2", "n3")
    }


SITE = PlacementSite(tuple(PlacementTray(name=name, clique="c", gpus=4) for name in ("n1", "n2", "n3")))


def kind(name):
    return {name: (ResourceClaim(metadata=ObjectMeta(name=name)),)}


def test_only_trays_that_changed_are_read_again():
    reader, memory = Reader(), TrayCountCache()
    for state in (
        tray_inputs(),
        tray_inputs(),
        tray_inputs(n2=("taken",)),
        tray_inputs(n2=("taken",)),
        tray_inputs(),
    ):
        memory.with_counts(SITE, kind("a"), state, reader)
    assert reader.looks == [{"n1", "n2", "n3"}, {"n2"}, {"n2"}]


def test_a_tray_that_comes_is_read_and_one_that_went_is_forgotten():
    reader, memory = Reader(), TrayCountCache()
    memory.with_counts(SITE, kind("a"), tray_inputs(), reader)
    without = PlacementSite(SITE.trays[1:])
    memory.with_counts(
        without, kind("a"), {name: given for name, given in tray_inputs().items() if name != "n1"}, reader
    )
    memory.with_counts(SITE, kind("a"), tray_inputs(), reader)
    assert reader.looks[1:] == [{"n1"}]


def test_each_kind_of_claims_is_counted_for_itself_and_only_so_many_are_kept():
    reader, memory = Reader(), TrayCountCache()
    for name in "abcdefgh":
        memory.with_counts(SITE, kind(name), tray_inputs(), reader)
    memory.with_counts(SITE, kind("a"), tray_inputs(), reader)
    assert len(reader.looks) == 8
    memory.with_counts(SITE, kind("i"), tray_inputs(), reader)
    memory.with_counts(SITE, kind("b"), tray_inputs(), reader)
    assert len(reader.looks) == 10, "what was asked for longest ago is gone"
    memory.with_counts(SITE, kind("a"), tray_inputs(), reader)
    assert len(reader.looks) == 10


def test_what_nobody_can_serve_is_refused_each_time():
    memory = TrayCountCache()
    for _ in range(2):
        with pytest.raises(Refused, match="no-such-class"):
            rooms(cluster(slices=[offer("n1")]), request("no-such-class"), counted=memory)


def test_a_class_that_selects_otherwise_counts_at_once():
    memory = TrayCountCache()
    assert rooms(cluster(slices=[offer("n1")]), request(), counted=memory)["n1"] == 2
    objects = cluster(slices=[offer("n1")])
    objects.classes[0]["spec"]["selectors"][0]["cel"]["expression"] = "false"
    assert rooms(objects, request(), counted=memory)["n1"] == 0


def spanning(counts, *, of=2):
    """Slices of one pool that has devices on several nodes, each named apart."""
    slices = [offer(name, count=count) for name, count in counts.items()]
    for slice_ in slices:
        slice_["spec"]["pool"] = {"name": "all", "generation": 1, "resourceSliceCount": of}
        for device in slice_["spec"]["devices"]:
            device["name"] = f"{slice_['spec']['nodeName']}-{device['name']}"
    return slices


def test_a_pool_that_spans_nodes_is_there_whole_or_not_at_all():
    memory, slices = TrayCountCache(), spanning({"n1": 2, "n2": 3})
    assert rooms(cluster(slices=slices), request(), counted=memory) == {"n1": 2, "n2": 3}
    taken = [claim("c", on="all", device="n2-d0")]
    assert rooms(cluster(slices=slices, claims=taken), request(), counted=memory) == {"n1": 2, "n2": 2}
    both = [*taken, claim("e", on="all", device="n1-d1")]
    assert rooms(cluster(slices=slices, claims=both), request(), counted=memory) == {"n1": 1, "n2": 2}
    assert rooms(cluster(slices=slices[:1]), request(), counted=memory) == {"n1": 0, "n2": 0}
    assert rooms(cluster(slices=slices, claims=both), request(), counted=TrayCountCache()) == {
        "n1": 1,
        "n2": 2,
    }
