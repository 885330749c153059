from itertools import chain

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.errors import Refused
from rackloom.topology.join_key import Source
from rackloom.topology.profiles import load_rack, rack_names
from rackloom.topology.rack import build_site

PROFILES = st.sampled_from(rack_names()).map(load_rack)


class Numbered:
    def site(self):
        return "test-site"

    def rack(self, index):
        return f"rack-{index}"

    def chassis_serial(self, rack):
        return f"CH{rack:03d}"

    def domain_uuid(self, index):
        return f"domain-{index}"


def gpus(site):
    return [gpu for domain in site.domains for tray in domain.trays for gpu in tray.gpus]


def test_one_nvl72_rack_is_one_domain_of_18_trays():
    site = build_site(load_rack("gb200-nvl72"), 1, Numbered())
    (domain,) = site.domains
    assert (site.name, domain.uuid, domain.racks) == ("test-site", "domain-0", ("rack-0",))
    assert (
        [tray.slot for tray in domain.trays] == [tray.tray_index for tray in domain.trays] == list(range(18))
    )
    assert {tray.chassis_serial for tray in domain.trays} == {"CH000"}
    assert [gpu.place.value.module_id for gpu in domain.trays[0].gpus] == [1, 2, 3, 4]


def test_two_cabled_racks_are_one_domain_with_two_chassis():
    site = build_site(load_rack("gb200-nvl36x2"), 4, Numbered())
    first, second = site.domains
    assert (first.racks, second.racks) == (("rack-0", "rack-1"), ("rack-2", "rack-3"))
    assert [(tray.chassis_serial, tray.slot) for tray in first.trays] == [
        (serial, slot) for serial in ("CH000", "CH001") for slot in range(9)
    ]


def test_several_domains_share_a_rack_and_its_chassis_without_sharing_a_slot():
    profile = msgspec.structs.replace(load_rack("gb200-nvl72"), domains_per_rack=2, trays_per_domain=9)
    site = build_site(profile, 1, Numbered())
    assert [domain.racks for domain in site.domains] == [("rack-0",), ("rack-0",)]
    trays = list(chain.from_iterable(domain.trays for domain in site.domains))
    assert [tray.slot for tray in trays] == list(range(18))


@given(PROFILES, st.integers(1, 4))
def test_a_site_has_every_gpu_of_its_domains_at_its_own_place(profile, groups):
    site = build_site(profile, groups * profile.racks_per_domain, Numbered())
    places = [gpu.place.value for gpu in gpus(site)]
    assert len(site.domains) == groups * profile.domains_per_rack
    assert len(places) == len(set(places)) == len(site.domains) * profile.gpus_per_domain
    for gpu in gpus(site):
        assert gpu.place.source is Source.DECLARED
        assert (gpu.fabric_guid, gpu.gpu_uuid, gpu.pci_address) == (None, None, None)


@given(PROFILES, st.integers(-2, 9))
def test_racks_make_whole_domains_or_the_fix_does(profile, racks):
    try:
        site = build_site(profile, racks, Numbered())
    except Refused as refused:
        enough = int(refused.nearest_fix.split()[1])
        assert enough > racks
        assert build_site(profile, enough, Numbered()).domains
    else:
        assert racks * profile.domains_per_rack == len(site.domains) * profile.racks_per_domain


def test_half_a_domain_is_refused_in_words():
    with pytest.raises(Refused) as refused:
        build_site(load_rack("gb200-nvl36x2"), 3, Numbered())
    assert refused.value.reason == "3 racks of gb200-nvl36x2 do not make whole domains: each spans 2 racks"
    assert refused.value.nearest_fix == "use 4 racks"
