"""Traps of one selector, judged by running it on the devices that it will meet."""

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from rackloom.claim.allocate import cel
from rackloom.claim.allocate.candidates import Candidate
from rackloom.claim.allocate.slices import GPU_DRIVER, NIC_DRIVER
from rackloom.claim.traps.constants import constant, literals
from rackloom.claim.traps.evidence import Evidence, names_read, truth
from rackloom.claim.traps.finding import FieldPath, Finding, Trap

_KNOWN_DOMAINS = frozenset({GPU_DRIVER, NIC_DRIVER, "resource.kubernetes.io"})
_ADDRESS = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
_UUID = r"(?:GPU|MIG)-[0-9a-f-]{8,}"
_ID = re.compile(f"{_ADDRESS}|{_UUID}", re.IGNORECASE)
_SHOWN = 3
"""Devices that a finding names."""


def selector_traps(
    expression: str, met: Sequence[Candidate], evidence: Evidence, path: FieldPath
) -> Iterator[Finding]:
    """Traps of a selector that is asked of the devices `met`."""
    try:
        program = cel.compile(expression)
    except cel.CompileError as error:
        why = f"line {error.line}, column {error.column}: {error.message}"
        yield Finding(
            trap=Trap.DOES_NOT_COMPILE, path=path, why=why, fix=error.hint or "correct the expression"
        )
        return
    only = constant(program)
    if only is not None:
        why = f"it is {str(only).lower()} whatever the device"
        fix = "leave it out" if only else "correct the comparison"
        yield Finding(trap=Trap.CONSTANT, path=path, why=why, fix=fix)
        return
    found = list(_on_devices(program, met, evidence, path))
    yield from found
    if evidence.given and met and not found and all(truth(program, one) is False for one in met):
        why = f"it is true for none of the {len(met)} devices that it is asked of"
        fix = "compare with values that exist here"
        yield Finding(trap=Trap.MATCHES_NOTHING, path=path, why=why, fix=fix)


def _on_devices(
    program: cel.Program, met: Sequence[Candidate], evidence: Evidence, path: FieldPath
) -> Iterator[Finding]:
    failing = [one for one in met if evidence.fails(program, one)]
    unchecked = _unchecked_driver(program, met, failing, path)
    if unchecked is not None:
        yield unchecked
        return
    lacking = [name for name in names_read(program) if _unpublished(name, met, evidence)]
    yield from (_never_published(name, met, evidence, path) for name in lacking)
    if failing and not lacking:
        yield _failing(program, failing, met, path)
    if evidence.given:
        yield from _foreign_ids(program, evidence, path)


def _unchecked_driver(
    program: cel.Program, met: Sequence[Candidate], failing: Sequence[Candidate], path: FieldPath
) -> Finding | None:
    """Set where the devices of several drivers are asked for attributes of one of them."""
    drivers = sorted({one.id.driver for one in met})
    asked = sorted({name.partition("/")[0] for name in names_read(program)} & set(drivers))
    others = [one for one in failing if one.id.driver not in asked]
    if len(asked) != 1 or not others:
        return None
    return Finding(
        trap=Trap.NO_DRIVER_CHECK,
        path=path,
        why=f"devices of {', '.join(drivers)} are asked, and {_listed(others)} cannot answer: "
        "the error stops the pod on every node",
        fix=f"begin with: device.driver == '{asked[0]}' &&",
    )


def _unpublished(name: str, met: Sequence[Candidate], evidence: Evidence) -> bool:
    """Whether no device has the attribute. Without nodes, that is known of well-known domains only."""
    known = evidence.given or name.partition("/")[0] in _KNOWN_DOMAINS
    return known and bool(met) and all(evidence.lacks(one, name) for one in met)


def _never_published(name: str, met: Sequence[Candidate], evidence: Evidence, path: FieldPath) -> Finding:
    whom = f"none of the {len(met)} devices that are asked" if evidence.given else "no driver that is known"
    near = _similar(name, met)
    return Finding(
        trap=Trap.UNPUBLISHED,
        path=path,
        why=f"{whom} publishes {name}",
        fix=f"use {' or '.join(near)}" if near else "select by what is published: rackloom claim template",
    )


def _similar(name: str, met: Sequence[Candidate]) -> list[str]:
    """Published names that look like it, the nearest first."""
    names = {
        key if "/" in key else f"{one.id.driver}/{key}" for one in met for key in one.device.attributes
    } - {name}
    by_identifier = {one.rpartition("/")[2]: one for one in sorted(names)}
    near = get_close_matches(name.rpartition("/")[2], by_identifier, n=_SHOWN)
    return [by_identifier[one] for one in near]


def _failing(
    program: cel.Program, failing: Sequence[Candidate], met: Sequence[Candidate], path: FieldPath
) -> Finding:
    """A selector without an answer for some devices."""
    missing = [name for name in names_read(program) if any(one.attribute(name) is None for one in failing)]
    reason = f"without {', '.join(missing)}" if missing else f"({truth(program, failing[0])})"
    return Finding(
        trap=Trap.DEREFERENCE if missing else Trap.FAILS,
        path=path,
        why=f"{_listed(failing)} ({len(failing)} of {len(met)} devices) {reason} cannot answer: "
        "the error stops the pod on every node",
        fix=" and ".join(_guarded(name, met) for name in missing) or "compare values of one type",
    )


def _guarded(name: str, met: Sequence[Candidate]) -> str:
    domain, _, identifier = name.partition("/")
    values = [value for one in met if (value := one.attribute(name)) is not None]
    default = '""'
    if values and values[0].int_ is not None:
        default = "-1"
    if values and values[0].bool_ is not None:
        default = "false"
    return f'write device.attributes["{domain}"].?{identifier}.orValue({default})'


def _foreign_ids(program: cel.Program, evidence: Evidence, path: FieldPath) -> Iterator[Finding]:
    """PCI addresses and UUIDs that no device has."""
    texts = {value for value in literals(program.expression) if isinstance(value, str)}
    ids = {text for text in texts if _ID.fullmatch(text)}
    known = {value.string for one in evidence.devices for value in one.device.attributes.values()}
    missing = sorted(ids - known)
    if missing:
        respelt = [_respelt(one) for one in missing if _respelt(one) in known]
        why = f"no device here has {', '.join(missing)}"
        ours = "make the claim for this machine: rackloom claim template"
        fix = f"write {', '.join(respelt)}" if respelt else ours
        yield Finding(trap=Trap.FOREIGN_ID, path=path, why=why, fix=fix)


def _respelt(text: str) -> str:
    """nvidia-smi prints eight digits of the PCI domain in upper case, drivers publish four in lower case."""
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _listed(devices: Sequence[Candidate]) -> str:
    names = [f"{one.id.driver}/{one.id.device}" for one in devices[:_SHOWN]]
    return ", ".join(names) + (" and others" if len(devices) > _SHOWN else "")
