"""Fabrics of a simulated site: one per domain, with GUIDs that reveal nothing."""

import itertools
from collections.abc import Iterator

import pytest

from rackloom.lab.switches.fabric import SeededNames, SimulatedFabric, fabrics_of
from rackloom.topology import profiles
from rackloom.topology.rack import RackSite, build_site


def site_of(profile: str, racks: int, seed: str = "seed") -> RackSite:
    return build_site(profiles.load_rack(profile), racks, SeededNames(seed))


def guids(fabrics: tuple[SimulatedFabric, ...]) -> Iterator[int]:
    return (guid for fabric in fabrics for guid in fabric.gpus)


@pytest.mark.parametrize(
    ("profile", "racks"), [("gb200-nvl72", 2), ("gb200-nvl36x2", 4), ("vera-rubin-nvl72", 1)]
)
def test_every_seat_of_the_site_has_a_gpu_of_its_own(profile: str, racks: int) -> None:
    site = site_of(profile, racks)
    fabrics = fabrics_of(site, "seed")
    assert [fabric.domain for fabric in fabrics] == [domain.uuid for domain in site.domains]
    for domain, fabric in zip(site.domains, fabrics, strict=True):
        seats = {
            (tray.chassis_serial, tray.slot, module)
            for tray in domain.trays
            for module in range(1, len(tray.gpus) + 1)
        }
        assert {(gpu.chassis_serial, gpu.slot, gpu.module_id) for gpu in fabric.gpus.values()} == seats
        assert fabric.limits.max_compute_nodes == len(domain.trays)
    everywhere = list(guids(fabrics))
    assert len(set(everywhere)) == len(everywhere)
    assert all(2**63 < guid < 2**64 for guid in everywhere)


def test_a_seed_gives_the_same_guids_again_and_another_seed_gives_others() -> None:
    site = site_of("gb200-nvl72", 1)
    assert list(guids(fabrics_of(site, "a"))) == list(guids(fabrics_of(site, "a")))
    assert not set(guids(fabrics_of(site, "a"))) & set(guids(fabrics_of(site, "b")))


def test_guids_do_not_tell_the_order_of_the_seats() -> None:
    (fabric,) = fabrics_of(site_of("gb200-nvl72", 1), "seed")
    seats = sorted(fabric.gpus.values(), key=lambda gpu: (gpu.slot, gpu.module_id))
    steps = {b.guid - a.guid for a, b in itertools.pairwise(seats)}
    assert len(steps) == len(seats) - 1
