"""The doctor's findings beside a map that changes faster: they name the snapshot they belong to."""

import asyncio
import itertools
import threading
import time

import msgspec
import pytest
from tests.core.diagnosis.healthy import NOW, healthy

from rackloom.app.snapshot import background_examiner
from rackloom.app.snapshot.background_examiner import EVERY_SECONDS, OLDEST_SECONDS, Examiner
from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.incremental import JoinedShares, join_shares
from rackloom.core.diagnosis.reexamination import Examined, examine_again

pytestmark = pytest.mark.anyio
WELL = healthy(racks=2, trays=2)
SICK = msgspec.structs.replace(
    WELL, fabric_gpus=(msgspec.structs.replace(WELL.fabric_gpus[0], healthy=False), *WELL.fabric_gpus[1:])
)


@pytest.fixture
def anyio_backend():
    return "asyncio"


def at(snapshot, seconds):
    return msgspec.structs.replace(snapshot, at=NOW + seconds)


async def newest(examiner, snapshot):
    return await examiner.newest(snapshot, join_shares(snapshot, JoinedShares()))


async def until_news(examiner, news):
    while examiner.news < news:
        await asyncio.sleep(0.01)


async def test_the_first_picture_waits_for_its_findings():
    found = await newest(Examiner(), at(SICK, 0))
    assert (found.at, found.findings) == (NOW, examine(at(SICK, 0)))
    assert found.findings


async def test_a_quick_examination_is_waited_for(monkeypatch):
    monkeypatch.setattr(background_examiner, "QUICK_SECONDS", 60.0)
    examiner = Examiner()
    await newest(examiner, at(WELL, 0))
    sick = await newest(examiner, at(SICK, 1))
    healed = await newest(examiner, at(WELL, 2))
    assert (sick.at, sick.findings) == (NOW + 1, examine(at(SICK, 1)))
    assert (healed.at, healed.findings) == (NOW + 2, ())


async def test_a_slow_one_is_not_and_the_findings_say_whose_they_are(monkeypatch):
    examiner, held = Examiner(), threading.Event()
    await newest(examiner, at(WELL, 0))

    def slow(*given):
        held.wait(60)
        return examine_again(*given)

    monkeypatch.setattr(background_examiner, "examine_again", slow)
    monkeypatch.setattr(background_examiner, "QUICK_SECONDS", 0.01)
    begun = await newest(examiner, at(SICK, 1))
    soon = await newest(examiner, at(SICK, 2))
    assert [(examination.at, examination.findings) for examination in (begun, soon)] == [(NOW, ())] * 2
    held.set()
    await until_news(examiner, 2)
    then = await newest(examiner, at(SICK, 3))
    assert (then.at, then.findings) == (NOW + 1, examine(SICK))


async def test_a_change_during_an_examination_is_examined_next_though_no_other_reading_comes(monkeypatch):
    examiner, held, checking = Examiner(), threading.Event(), threading.Event()
    await newest(examiner, at(WELL, 0))

    def slow(*given):
        checking.set()
        held.wait(60)
        return examine_again(*given)

    monkeypatch.setattr(background_examiner, "examine_again", slow)
    monkeypatch.setattr(background_examiner, "REST", 0.0)
    await newest(examiner, at(SICK, 1))
    await asyncio.to_thread(checking.wait, 60)
    await newest(examiner, at(WELL, 2))
    held.set()
    await asyncio.wait_for(until_news(examiner, 3), 60)
    assert (await newest(examiner, at(WELL, 2))).at == NOW + 2


async def test_a_site_that_changes_all_the_time_is_examined_a_quarter_of_the_time(monkeypatch):
    examiner, runs = Examiner(), []

    def slow(*_):
        runs.append(time.monotonic())
        time.sleep(0.05)
        return Examined()

    await newest(examiner, at(WELL, 0))
    monkeypatch.setattr(background_examiner, "QUICK_SECONDS", 0.01)
    monkeypatch.setattr(background_examiner, "examine_again", slow)
    for turn in range(100):
        await newest(examiner, at((SICK, WELL)[turn % 2], turn / 100))
        await asyncio.sleep(0.01)
    apart = [later - sooner for sooner, later in itertools.pairwise(runs)]
    assert len(runs) > 2
    assert min(apart) >= 0.05 * 4


async def test_a_reading_in_which_only_times_differ_wakes_nobody(monkeypatch):
    examiner = Examiner()
    await newest(examiner, at(WELL, 0))
    monkeypatch.setattr(background_examiner, "examine_again", lambda *_: pytest.fail("examined"))
    later = msgspec.structs.replace(
        at(WELL, 5),
        layers=tuple(msgspec.structs.replace(layer, at=NOW + 5) for layer in WELL.layers),
        domains=tuple(msgspec.structs.replace(domain, observed_at=NOW + 5) for domain in WELL.domains),
    )
    await newest(examiner, later)
    await asyncio.sleep(0.1)
    assert (await newest(examiner, later)).at == NOW


async def test_findings_that_stay_the_same_are_no_news():
    examiner = Examiner()
    await newest(examiner, at(WELL, 0))
    await newest(examiner, at(WELL, OLDEST_SECONDS + 1))
    assert examiner.news == 1


async def test_old_findings_are_not_shown_beside_a_new_picture():
    examiner = Examiner()
    await newest(examiner, at(WELL, 0))
    found = await newest(examiner, at(SICK, OLDEST_SECONDS + 1))
    assert (found.at, found.findings) == (NOW + OLDEST_SECONDS + 1, examine(SICK))


async def test_an_examination_stands_still_while_the_next_picture_is_made(monkeypatch):
    checks, examiner = [], Examiner()
    monkeypatch.setattr(background_examiner, "LONGEST_HALT_SECONDS", 60.0)
    monkeypatch.setattr(background_examiner, "DELAY_SECONDS", 0.0)

    def examining(_, __, ___, between):
        checks.append("begun")
        between()
        checks.append("checked")
        return Examined()

    await newest(examiner, at(WELL, 0))
    monkeypatch.setattr(background_examiner, "examine_again", examining)
    with examiner.halted():
        await newest(examiner, at(WELL, EVERY_SECONDS))
        while not checks:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert checks == ["begun"]
    while (await newest(examiner, at(WELL, EVERY_SECONDS + 1))).at == NOW:
        await asyncio.sleep(0.01)
    assert checks == ["begun", "checked"]


async def test_a_picture_that_is_never_finished_holds_no_examination_up_for_ever(monkeypatch):
    monkeypatch.setattr(background_examiner, "LONGEST_HALT_SECONDS", 0.0)
    examiner = Examiner()
    with examiner.halted():
        assert (await newest(examiner, at(SICK, 0))).findings == examine(SICK)


async def test_an_examination_that_fails_is_not_silent(monkeypatch):
    examiner = Examiner()
    await newest(examiner, at(WELL, 0))

    def fails(*_):
        raise ValueError("no such check")

    monkeypatch.setattr(background_examiner, "examine_again", fails)
    with pytest.raises(ValueError, match="no such check"):
        await asked_again_and_again(examiner)


async def asked_again_and_again(examiner):
    while True:
        await asyncio.sleep(0.01)
        await newest(examiner, at(SICK, EVERY_SECONDS))


async def test_the_site_is_examined_beside_the_event_loop(monkeypatch):
    threads = []

    def watched(*given):
        threads.append(threading.current_thread())
        return examine_again(*given)

    monkeypatch.setattr(background_examiner, "examine_again", watched)
    await newest(Examiner(), at(SICK, 0))
    assert threads
    assert threading.main_thread() not in threads
