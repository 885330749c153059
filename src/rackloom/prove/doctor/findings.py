"""What a check says: it holds, it does not, or it is unknown; with what to do."""

from enum import StrEnum

import msgspec


class State(StrEnum):
    """Of one thing that should be so."""

    HOLDS = "holds"
    FAILS = "fails"
    UNKNOWN = "unknown"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One check of one subject."""

    check: str
    subject: str
    """What it is about: `Pod team/worker-0`, `node tray-3`."""
    state: State
    message: str
    fix: str = ""
    """What to change; empty where it holds."""


def holds(check: str, subject: str, message: str) -> Finding:
    """It is as it should be, and was observed so."""
    return Finding(check=check, subject=subject, state=State.HOLDS, message=message)


def fails(check: str, subject: str, message: str, fix: str) -> Finding:
    """It is not."""
    return Finding(check=check, subject=subject, state=State.FAILS, message=message, fix=fix)


def unknown(check: str, subject: str, message: str, fix: str) -> Finding:
    """It could not be observed; `fix` is what would make it visible."""
    return Finding(check=check, subject=subject, state=State.UNKNOWN, message=message, fix=fix)


def verdict(findings: tuple[Finding, ...]) -> State:
    """The worst of all: one failure fails, and without one whatever is unknown keeps it unknown."""
    states = {one.state for one in findings}
    if State.FAILS in states:
        return State.FAILS
    return State.UNKNOWN if State.UNKNOWN in states or not findings else State.HOLDS
