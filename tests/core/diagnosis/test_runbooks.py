"""Every finding names its runbook, and every interface shows the same texts."""

import json
import re

import msgspec
import pytest
from tests.core.diagnosis import cluster_faults, fabric_faults
from tests.core.diagnosis.ward import WELL

from rackloom.cli.doctor import doctor
from rackloom.cli.main import app
from rackloom.core.diagnosis.catalogue import Check, runbook_name
from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.report import render_findings
from rackloom.core.diagnosis.runbooks import runbook_text, runbooks
from rackloom.errors import Refused

FAULTS = fabric_faults.FAULTS | cluster_faults.FAULTS


def test_every_check_has_a_runbook_of_its_own_name():
    assert [book.check for book in runbooks().values()] == list(Check)
    assert all(re.fullmatch("[a-z][a-z-]*", name) for name in runbooks())


@pytest.mark.parametrize("book", runbooks().values(), ids=list(runbooks()))
def test_a_runbook_says_what_to_do_in_sentences(book):
    for text in (book.means, book.look, book.mend):
        assert 20 < len(text) < 420
        assert text.endswith(".")
    assert "{" not in book.title
    assert len({book.means, book.look, book.mend}) == 3


@pytest.mark.parametrize("book", runbooks().values(), ids=list(runbooks()))
def test_what_a_runbook_tells_to_run_of_ours_exists(book):
    for text in (book.look, book.mend):
        for words in re.findall(r"rackloom (admin [a-z]+ show|admin plan|[a-z]+ explain|transfer run)", text):
            command = app
            for word in words.split():
                command = command[word]
        for name in re.findall(r"see ([a-z]+-[a-z-]+)", text):
            assert name in runbooks()


@pytest.mark.parametrize("fault", FAULTS)
def test_every_finding_names_its_runbook(fault):
    snapshot = FAULTS[fault][0](WELL)
    for finding in examine(snapshot):
        assert runbooks()[finding.runbook].check == finding.check
        assert json.loads(msgspec.json.encode(finding))["runbook"] == finding.runbook
        assert f"runbook: rackloom doctor --runbook {finding.runbook}" in render_findings(
            snapshot, (finding,)
        )


def test_causes_and_consequences_are_those_by_which_findings_are_folded():
    books = runbooks()
    for name, book in books.items():
        for cause in book.causes:
            assert book.check in books[runbook_name(cause)].consequences, name


def test_the_command_prints_it_by_either_name_and_lists_them_for_another(capsys):
    expected = runbook_text(runbooks()["gpu-health"]) + "\n"
    assert max(map(len, expected.splitlines())) <= 100
    for name in ("gpu-health", "GPU health"):
        assert doctor(runbook=name) == 0
        assert capsys.readouterr().out == expected
    with pytest.raises(Refused) as refused:
        doctor(runbook="measles")
    assert "device-untainted" in refused.value.nearest_fix
