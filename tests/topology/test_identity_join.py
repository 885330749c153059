import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rackloom.errors import Refused
from rackloom.topology.join_key import Fact, GpuKey, SlotKey, Source, directness, joins, merge_keys

SOURCES = st.sampled_from(Source)


def known(values):
    """A part that may be absent. It has few values, so that keys often meet."""
    return st.none() | st.builds(Fact, st.sampled_from(values), SOURCES)


KEYS = st.builds(
    GpuKey,
    place=known([SlotKey("CH1", 0, 1), SlotKey("CH1", 0, 2)]),
    fabric_guid=known([0xA, 0xB]),
    gpu_uuid=known(["GPU-a", "GPU-b"]),
    pci_address=known(["0008:06:00.0", "0009:06:00.0"]),
)
PARTS = GpuKey.__struct_fields__


def values(key):
    return {part: getattr(key, part).value for part in PARTS if getattr(key, part) is not None}


def merged(*keys):
    try:
        result = keys[0]
        for key in keys[1:]:
            result = merge_keys(result, key)
    except Refused:
        return None
    return result


@given(KEYS, KEYS, st.booleans())
def test_joining_is_symmetric(a, b, one_machine):
    assert joins(a, b, one_machine=one_machine) is joins(b, a, one_machine=one_machine)


@given(KEYS, KEYS, st.booleans())
def test_joining_follows_the_shared_parts(a, b, one_machine):
    shared = (values(a).keys() & values(b).keys()) - (set() if one_machine else {"pci_address"})
    agree = {values(a)[part] == values(b)[part] for part in shared}
    assert joins(a, b, one_machine=one_machine) is (None if not agree else agree == {True})


@given(KEYS, KEYS)
def test_a_pci_address_alone_never_joins_two_machines(a, b):
    only_pci = GpuKey(pci_address=a.pci_address)
    assert joins(only_pci, b) is None


@given(KEYS, KEYS)
def test_merge_is_the_union_or_a_contradiction(a, b):
    result = merged(a, b)
    if joins(a, b, one_machine=True) is False:
        assert result is None
    else:
        assert values(result) == values(a) | values(b)
        assert joins(a, result, one_machine=True) is not False


@given(KEYS, KEYS)
def test_merge_keeps_the_more_direct_source(a, b):
    result = merged(a, b)
    assume(result is not None)
    for part in values(result):
        sources = [getattr(key, part).source for key in (a, b) if getattr(key, part) is not None]
        assert directness(getattr(result, part).source) == min(map(directness, sources))


@given(KEYS, KEYS, KEYS)
def test_the_order_of_merging_does_not_matter(a, b, c):
    assert merged(a, b, c) == merged(c, a, b) == merged(b, c, a) == merged(c, b, a)


@given(KEYS)
def test_merging_a_key_with_itself_adds_nothing(key):
    assert merge_keys(key, key) == key


def test_a_swapped_tray_keeps_its_place_and_is_another_gpu():
    place = Fact(SlotKey("CH1", 3, 1), Source.NMX)
    before = GpuKey(place=place, fabric_guid=Fact(0xA, Source.NMX))
    after = msgspec.structs.replace(before, fabric_guid=Fact(0xB, Source.NVML))
    assert joins(before, after) is False
    with pytest.raises(Refused) as refused:
        merge_keys(before, after)
    assert refused.value.reason == (
        "fabric_guid is 0xa (nmx) but 0xb (nvml): not one GPU, or one of the two is stale"
    )
