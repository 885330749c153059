"""What listing the free machines of a large site costs each request."""

from rackloom.carve.tenancy import placement


def test_a_request_makes_no_slot_of_a_domain_anew() -> None:
    """5,000 domains lose a machine each: their slots are those of the first request."""
    domains = [f"{number:032x}" for number in range(5_000)]
    for domain in domains:
        assert len(placement._machine_slots(domain, 18)) == 18
    made = placement._new_slots.cache_info().misses
    for domain in domains:
        assert len(placement._machine_slots(domain, 17)) == 17
    assert placement._new_slots.cache_info().misses == made
