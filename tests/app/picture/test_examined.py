"""The doctor's findings beside a map that moves faster: whose picture they are of is always said."""

import asyncio

import msgspec
import pytest
from tests.prove.picture.healthy import NOW, healthy

from rackloom.app.picture import examined
from rackloom.app.picture.examined import EVERY, OLDEST, Examiner
from rackloom.prove.doctor.examine import examine
from rackloom.prove.picture.join import JoinedShares, join

pytestmark = pytest.mark.anyio
WELL = healthy(racks=2, trays=2)
SICK = msgspec.structs.replace(
    WELL, fabric_gpus=(msgspec.structs.replace(WELL.fabric_gpus[0], healthy=False), *WELL.fabric_gpus[1:])
)


@pytest.fixture
def anyio_backend():
    return "asyncio"


def at(picture, seconds):
    return msgspec.structs.replace(picture, at=NOW + seconds)


async def newest(examiner, picture):
    return await examiner.newest(picture, join(picture, JoinedShares()))


async def until_news(examiner, news):
    while examiner.news < news:
        await asyncio.sleep(0.01)


async def test_the_first_picture_waits_for_its_findings():
    found = await newest(Examiner(), at(SICK, 0))
    assert (found.at, found.findings) == (NOW, examine(at(SICK, 0)))
    assert found.findings


async def test_later_ones_do_not_and_are_told_whose_findings_they_get():
    examiner = Examiner()
    await newest(examiner, at(WELL, 0))
    soon = await newest(examiner, at(SICK, EVERY - 1))
    begun = await newest(examiner, at(SICK, EVERY))
    assert [(one.at, one.findings) for one in (soon, begun)] == [(NOW, ())] * 2
    await until_news(examiner, 2)
    then = await newest(examiner, at(SICK, EVERY + 1))
    assert (then.at, then.findings) == (NOW + EVERY, examine(SICK))


async def test_findings_that_stay_the_same_are_no_news():
    examiner = Examiner()
    await newest(examiner, at(WELL, 0))
    await newest(examiner, at(WELL, OLDEST + 1))
    assert examiner.news == 1


async def test_old_findings_are_not_shown_beside_a_new_picture():
    examiner = Examiner()
    await newest(examiner, at(WELL, 0))
    found = await newest(examiner, at(SICK, OLDEST + 1))
    assert (found.at, found.findings) == (NOW + OLDEST + 1, examine(SICK))


async def test_an_examination_stands_still_while_the_next_picture_is_made(monkeypatch):
    checks, examiner = [], Examiner()
    monkeypatch.setattr(examined, "LONGEST_HALT", 60.0)
    monkeypatch.setattr(examined, "AFTER", 0.0)

    def examining(*_, between):
        checks.append("begun")
        between()
        checks.append("checked")
        return ()

    await newest(examiner, at(WELL, 0))
    monkeypatch.setattr(examined, "examine", examining)
    with examiner.halted():
        await newest(examiner, at(WELL, EVERY))
        while not checks:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert checks == ["begun"]
    while (await newest(examiner, at(WELL, EVERY + 1))).at == NOW:
        await asyncio.sleep(0.01)
    assert checks == ["begun", "checked"]


async def test_a_picture_that_is_never_finished_holds_no_examination_up_for_ever(monkeypatch):
    monkeypatch.setattr(examined, "LONGEST_HALT", 0.0)
    examiner = Examiner()
    with examiner.halted():
        assert (await newest(examiner, at(SICK, 0))).findings == examine(SICK)


async def test_an_examination_that_fails_is_not_silent(monkeypatch):
    examiner = Examiner()
    await newest(examiner, at(WELL, 0))

    def fails(*_, **__):
        raise ValueError("no such check")

    monkeypatch.setattr(examined, "examine", fails)
    await newest(examiner, at(SICK, EVERY))
    with pytest.raises(ValueError, match="no such check"):
        await asked_again_and_again(examiner)


async def asked_again_and_again(examiner):
    while True:
        await asyncio.sleep(0.01)
        await newest(examiner, at(SICK, EVERY))
