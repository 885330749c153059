"""Fixes as they run against the site that was examined: with the options of its cluster and operators."""

import re
from collections.abc import Iterable

import msgspec

from rackloom.prove.doctor.findings import Finding

_KUBECTL = re.compile(r"\bkubectl (?=[-a-z])")
_ADMIN = re.compile(r"\brackloom admin (?=[a-z])")
_COMMENT = "  # "


class Ways(msgspec.Struct, frozen=True, kw_only=True):
    """How commands reach a site. Empty: as they do of themselves."""

    kubectl: str = ""
    """Options of kubectl."""
    admin: str = ""
    """Variables before `rackloom admin`."""
    admin_lacks: str = ""
    """What whoever runs it must still add, in words."""
    instead: str = ""
    """A command in its place, where the site has no admin interface."""
    then: str = ""
    """What is done with that one."""


def runnable(findings: Iterable[Finding], ways: Ways) -> tuple[Finding, ...]:
    """The findings, each with its fix as a command for this site."""
    return tuple(msgspec.structs.replace(one, fix=_for_site(one.fix, ways)) for one in findings)


def _for_site(fix: str, ways: Ways) -> str:
    if ways.kubectl:
        fix = _KUBECTL.sub(lambda _: f"kubectl {ways.kubectl} ", fix)
    if _ADMIN.match(fix) is None:
        return fix
    if ways.instead:
        command, _, comment = fix.partition(_COMMENT)
        return _with_comment(ways.instead, f"{ways.then} {command}", comment)
    command, _, comment = _ADMIN.sub(lambda _: _joined(ways.admin, "rackloom admin "), fix).partition(
        _COMMENT
    )
    return _with_comment(command, comment, ways.admin_lacks)


def _joined(*words: str) -> str:
    return " ".join(word for word in words if word)


def _with_comment(command: str, *told: str) -> str:
    comment = "; ".join(one for one in told if one)
    return f"{command}{_COMMENT}{comment}" if comment else command
