"""The trays of an organisation, in use and waiting, never exceed its allocations."""

from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.place.instance_trays import AllocationUse, still_promised

numbers = st.integers(0, 6)


@given(st.one_of(st.none(), numbers), numbers, numbers, numbers, numbers)
def test_lacking_is_the_least_that_keeps_the_sum_within_what_is_allocated(
    allocated: int | None, used: int, idle: int, machines: int, reserved: int
) -> None:
    use, own = AllocationUse(allocated, used, idle), min(reserved, machines, idle)

    def is_enough(more: int) -> bool:
        total = (allocated or 0) + more
        is_within = used + machines + idle - own <= total
        # On its reserved trays an organisation may use its whole allocation, however many trays wait.
        return is_within or (own == machines and used + machines <= total)

    lacking = use.lacking(machines, own)
    assert is_enough(lacking) or not machines
    assert lacking == 0 or not is_enough(lacking - 1)


@given(st.one_of(st.none(), numbers), numbers, numbers, numbers, numbers)
def test_the_largest_request_lacks_nothing_and_a_larger_one_does(
    allocated: int | None, used: int, idle: int, free: int, reserved: int
) -> None:
    use, own = AllocationUse(allocated, used, idle), min(free, reserved, idle)
    fits = [most for most in range(1, free + 1) if not use.lacking(most, min(own, most))]
    assert use.largest_request(free, own) == max(fits, default=0)


def test_what_one_uses_beyond_its_own_takes_nothing_from_another() -> None:
    assert still_promised({"a": 2, "b": 3, "c": 1}, {"a": 5, "c": 1, "d": 4}) == 3
