"""Switch controllers: whether each domain has one that answers, and does what is asked."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from shlex import quote

import msgspec

from rackloom.prove.doctor import names
from rackloom.prove.doctor.checks.view import View, at_domain, at_machine
from rackloom.prove.doctor.findings import Finding, Severity, fails, unknown
from rackloom.prove.picture.values import DomainSeen, Layer, MachineSeen, SilentController

AWAY_SECONDS = 3600.0
"""A switch tray that starts again is back within minutes; after an hour nobody waits for it any more."""
_SHOW = "rackloom admin domain show"
_NEW = "--endpoint https://SWITCH-CONTROLLER:9370"


def check_controllers(view: View) -> Iterator[Finding]:
    """All findings about switch controllers."""
    held = Counter(one.domain for one in view.picture.machines if one.instance is not None)
    for domain in view.picture.domains:
        yield from _answers(domain, held[domain.uuid])
        yield from _paused(domain)
    if view.can_see(Layer.FABRIC):
        for domain in view.picture.domains:
            yield from _away(domain, view.picture.at)
        for uuid, machines in _without_controller(view).items():
            yield _none_left(uuid, machines)


def _answers(domain: DomainSeen, held: int) -> Iterator[Finding]:
    if domain.unknown_since is not None:
        found = unknown(
            names.CONTROLLER,
            f"domain {domain.uuid}",
            _silence(domain),
            f"{_SHOW} {quote(domain.uuid)}  # then see to the switch tray of {', '.join(domain.endpoints)}",
            evidence=(
                *(f"asked through {url}" for url in domain.endpoints),
                *((f"records: instances in it: {held}",) if held else ()),
            ),
            where=(at_domain(domain.uuid),),
            since=domain.unknown_since,
        )
        yield msgspec.structs.replace(found, instances=held)


def _silence(domain: DomainSeen) -> str:
    if domain.disputed or not domain.silent:
        return domain.problem or "it cannot be read"
    return f"no switch controller of it can be read: {domain.problem}"


def _paused(domain: DomainSeen) -> Iterator[Finding]:
    if domain.paused:
        yield fails(
            names.DOMAIN_PAUSED,
            f"domain {domain.uuid}",
            "it is paused: nothing that tenants ask for is done",
            f"rackloom admin domain resume --domain {quote(domain.uuid)}",
            severity=Severity.WARNING,
            evidence=("records: paused by an operator",),
            where=(at_domain(domain.uuid),),
        )


def _away(domain: DomainSeen, now: float) -> Iterator[Finding]:
    """Those that do not come back: together where all of them are away, else each by itself."""
    away = [one for one in domain.silent if now - one.since >= AWAY_SECONDS]
    if away and len(away) == len(domain.endpoints):
        said = "none of its switch controllers can be read any more: nothing that tenants ask for is done"
        yield _gone(domain, away, said, Severity.ERROR)
        return
    answering = len(domain.endpoints) - len(domain.silent)
    for one in away:
        said = f"it can be read no more; of its domain's {len(domain.endpoints)} controllers {answering} can"
        yield _gone(domain, [one], said, Severity.WARNING)


def _gone(domain: DomainSeen, away: list[SilentController], said: str, severity: Severity) -> Finding:
    alone = severity is Severity.WARNING
    return fails(
        names.CONTROLLER_AWAY,
        f"controller {away[0].url} of domain {domain.uuid}" if alone else f"domain {domain.uuid}",
        said,
        f"rackloom admin endpoint update --chassis-serial {quote(away[0].chassis[0])} {_NEW}"
        f"  # if it was replaced; else see to the switch tray behind {away[0].url}",
        severity=severity,
        evidence=tuple(f"records: {one.url} speaks for chassis {', '.join(one.chassis)}" for one in away),
        where=() if alone else (at_domain(domain.uuid),),
        since=max(one.since for one in away),
    )


def _without_controller(view: View) -> Mapping[str, list[MachineSeen]]:
    """Machines of domains and chassis that nobody speaks for, by domain.

    Of a controller that never answered the chassis is known, and not yet the domain.
    """
    spoken_for = {serial for one in view.picture.domains for serial in one.chassis}
    found: defaultdict[str, list[MachineSeen]] = defaultdict(list)
    for machine in view.picture.machines:
        alone = machine.domain not in view.domains and machine.chassis_serial not in spoken_for
        if machine.domain and alone:
            found[machine.domain].append(machine)
    return found


def _none_left(uuid: str, machines: list[MachineSeen]) -> Finding:
    serials = sorted({one.chassis_serial for one in machines})
    held = sum(one.instance is not None for one in machines)
    return fails(
        names.CONTROLLER_AWAY,
        f"domain {uuid}",
        "no switch controller is registered for it: nobody knows how it is, and nothing can be changed in it",
        f"rackloom admin endpoint create --chassis-serial {quote(serials[0])} {_NEW}",
        severity=Severity.ERROR if held else Severity.WARNING,
        evidence=(
            f"records: machines of chassis {', '.join(serials)}: {len(machines)}, with an instance: {held}",
        ),
        where=(at_domain(uuid), *(at_machine(one.id) for one in machines)),
    )
