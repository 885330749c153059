"""A domain is never Ready by an answer that the driver could not read."""

from collections import Counter
from pathlib import Path

import pytest
import structlog
from tests.carve.reconcile.damaged_answers import Site

from rackloom.lab.virtual.event_loop import run_simulation

INTENT_EVERY = 10
"""So many seeds damage the first reading after a change of the intent."""


async def damage(site: Site, seeds: range) -> Counter[str]:
    """Damage one pass for each seed, and mend it. Returns how the readings ended."""
    await site.open()
    kept = await site.new_instance()
    await site.mended(1)
    ended: Counter[str] = Counter()
    for seed in seeds:
        new = await site.new_instance() if seed % INTENT_EVERY == 0 else None
        await site.damaged_pass(seed)
        try:
            await site.check()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
        ended.update(
            ["read"] if site.driver.read else {type(error).__name__ for error in site.driver.failures}
        )
        ended["new"] += new is not None
        ended["struck"] += bool(site.damager.struck)
        if new is not None:
            await site.ask("DELETE", f"instance/{new}")
        await site.mended(1)
        assert list(await site.ready()) == [kept]
    return ended


def play(kind: str, seeds: range, keys: Path) -> Counter[str]:
    with structlog.testing.capture_logs():
        return run_simulation(1, lambda: damage(Site(kind, keys), seeds))


@pytest.mark.parametrize("kind", ["nmx-m", "nmx-c"])
def test_no_damaged_answer_leaves_a_domain_ready(kind: str, tmp_path: Path) -> None:
    ended = play(kind, range(30), tmp_path)
    assert ended["struck"] > 15
    assert ended["FabricUnavailable"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("kind", ["nmx-m", "nmx-c"])
def test_a_thousand_seeds_of_each_protocol(kind: str, part: int, tmp_path: Path) -> None:
    ended = play(kind, range(250 * part, 250 * (part + 1)), tmp_path)
    assert ended["struck"] > 120
