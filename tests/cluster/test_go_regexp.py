"""Patterns of selectors have the same meaning as in Kubernetes, which runs Go's regexp."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.build import Tools, made
from tests.cluster.conftest import ASKED_BY
from tests.cluster.regexp_patterns import PatternMaker

from rackloom.core.allocate.cel.regex import Regex

_PROGRAM = Tools(Path(__file__).parent / "go_regexp", {"go-regexp": "."})
_SEEDS = range(5)
_PATTERNS_EACH = 3_000

pytestmark = pytest.mark.skipif(
    not os.environ.get(ASKED_BY), reason=f"{ASKED_BY} is not set: make test-cluster"
)


@pytest.fixture(scope="module")
def program() -> Path:
    if shutil.which("go") is None:
        pytest.skip("NEEDS GO: its regexp is what patterns are compared with")
    return made(_PROGRAM) / "go-regexp"


@pytest.mark.parametrize("seed", _SEEDS)
def test_patterns_mean_what_they_mean_to_go(program: Path, seed: int) -> None:
    cases = list(PatternMaker(seed).cases(_PATTERNS_EACH))
    answers = _ask_go(program, cases)
    assert sum(not answer["refused"] for answer in answers) > _PATTERNS_EACH // 4
    different = [
        (pattern, answer, ours)
        for (pattern, subjects), answer in zip(cases, answers, strict=True)
        if (ours := _rackloom(pattern, subjects)) != (None if answer["refused"] else answer["matches"])
    ]
    assert different == []


def _ask_go(program: Path, cases: list[tuple[str, list[str]]]) -> list[dict[str, Any]]:
    questions = "".join(
        json.dumps({"pattern": pattern, "subjects": subjects}) + "\n" for pattern, subjects in cases
    )
    done = subprocess.run([program], input=questions, capture_output=True, check=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def _rackloom(pattern: str, subjects: list[str]) -> list[list[list[int]]] | None:
    """The matches in each subject, or None if the pattern is refused."""
    try:
        regex = Regex(pattern)
    except ValueError:
        return None
    return [[list(span) for span in regex.spans(subject.encode())] for subject in subjects]
