"""A runbook for each check: the meaning of its findings, how to see them, how to mend them, their effects.

A finding describes the problem in one place and has the commands for that place. Its runbook describes every
place. Every interface shows the same texts: `rackloom doctor --runbook NAME`, the rack map, and the pages of
the documentation. They stand in `runbooks.toml`, which is read once per process. The title is that of the
finding (`titles`). Causes and consequences are those of the catalogue, by which findings are folded.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from textwrap import fill

import msgspec

from rackloom.core.diagnosis.catalogue import EXPLAINS, Check, runbook_name
from rackloom.core.diagnosis.titles import TITLES


class Runbook(msgspec.Struct, frozen=True, kw_only=True):
    """Background on the findings of one check."""

    name: str
    """As findings name it: `device-untainted`."""
    check: Check
    title: str
    """The title of such a finding, with words in place of names."""
    means: str
    """The problem, and the users that it affects."""
    look: str
    """How to see it without the doctor."""
    mend: str
    """The remedy, and the sign that the problem is over."""
    causes: tuple[Check, ...]
    """Checks with findings that may explain it: mend these first."""
    consequences: tuple[Check, ...]
    """Checks with findings that follow from it: they end with it."""


_TEXTS = Path(__file__).with_name("runbooks.toml")
_WIDTH = 100
_WORDS = {"place": "PLACE", "subject": "SUBJECT", "message": "REASON"}


@cache
def runbooks() -> Mapping[str, Runbook]:
    """The runbook of every check, by its name and in the order of the catalogue."""
    found, texts = {}, tomllib.loads(_TEXTS.read_text("utf-8"))
    for check in Check:
        name = runbook_name(check)
        found[name] = Runbook(
            name=name,
            check=check,
            title=TITLES[check].format(**_WORDS),
            **texts[name],
            causes=tuple(cause for cause in Check if check in EXPLAINS.get(cause, ())),
            consequences=tuple(effect for effect in Check if effect in EXPLAINS.get(check, ())),
        )
    return found


def runbook_text(runbook: Runbook) -> str:
    """The runbook for a terminal."""
    parts = [
        f"{runbook.check}\n{_indented(f'Its findings begin: {runbook.title}')}",
        f"What it means\n{_indented(runbook.means)}",
        f"See for yourself\n{_indented(runbook.look)}",
        f"Mend it\n{_indented(runbook.mend)}",
    ]
    for head, checks in (("May come from", runbook.causes), ("May bring with it", runbook.consequences)):
        if checks:
            parts.append(f"{head}\n" + "\n".join(f"  {check} ({runbook_name(check)})" for check in checks))
    return "\n\n".join(parts)


def _indented(text: str) -> str:
    return fill(text, _WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
