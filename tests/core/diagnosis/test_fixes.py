"""Every Rackloom command that a check names as a fix exists, with its options."""

import ast
import importlib
import pkgutil
import shlex
from pathlib import Path

import pytest
from tests.core.diagnosis.cluster_faults import FAULTS
from tests.core.diagnosis.ward import WELL

import rackloom.app.doctor
import rackloom.app.snapshot.assemble
from rackloom.cli.main import app
from rackloom.core.diagnosis import checks
from rackloom.core.diagnosis.examination import examine

MODULES = (
    rackloom.app.doctor,
    rackloom.app.snapshot.assemble,
    *(
        importlib.import_module(f"{checks.__name__}.{iter_module.name}")
        for iter_module in pkgutil.iter_modules(checks.__path__)
    ),
)
ANYTHING = "1"
"""Stands for a value that is known only when the doctor looks. It is valid as a word and as a number."""


def text_of(node, module):
    """A string of the source. Its placeholders become constants of its module, or ANYTHING."""
    if isinstance(node, ast.Constant):
        return node.value
    return "".join(
        part.value
        if isinstance(part, ast.Constant)
        else str(getattr(module, getattr(part.value, "id", ""), ANYTHING))
        for part in node.values
    )


def commands(module):
    """All strings of `module` that begin as a Rackloom command."""
    tree = ast.parse(Path(module.__file__).read_text())
    inner = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        whole = isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inner
        )
        if whole and (text := text_of(node, module)).startswith(("rackloom ", "sudo rackloom ")):
            yield text


ADVICE = "rackloom up serves REST alone: with this token it does what elsewhere does"
"""A sentence about a command, which is not a command."""
COMMANDS = sorted({text for module in MODULES for text in commands(module)} - {ADVICE})


def test_there_are_fixes_of_all_kinds():
    assert {" ".join(command.split()[:3]) for command in COMMANDS} >= {
        "rackloom admin domain",
        "rackloom admin endpoint",
        "rackloom admin tray",
        "rackloom claim template",
        "rackloom up --home",
    }


def test_what_explains_a_pending_claim_names_all_that_it_needs():
    break_it, check, _ = FAULTS["claim-pending"]
    (found,) = (finding for finding in examine(break_it(WELL)) if finding.check == check)
    (ours,) = (command for command in found.fix.split(" && ") if command.startswith("rackloom "))
    app.parse_args(shlex.split(ours, comments=True)[1:], print_error=False, exit_on_error=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_fix_is_a_command_with_options_that_exist(command):
    words = shlex.split(command.removeprefix("sudo "), comments=True)
    app.parse_args(words[1:], print_error=False, exit_on_error=False)
