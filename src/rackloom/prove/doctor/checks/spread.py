"""Logical partitions whose instances are in several NVLink domains.

The site makes one physical partition in each domain for them, and no memory is shared from one to the next:
whoever expects two instances of one logical partition to share some has to look at their domains. It may be
meant so, where the jobs of each domain keep to themselves.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from shlex import quote

from rackloom.prove.doctor import names
from rackloom.prove.doctor.checks.view import View, at_logical
from rackloom.prove.doctor.findings import Finding, Severity, fails
from rackloom.prove.doctor.words import some
from rackloom.prove.picture.values import MachineSeen

_NAMED = 3
"""Machines of one domain."""


def check_spread(view: View) -> Iterator[Finding]:
    """One finding for each logical partition that is more than one island of shared memory."""
    for logical, domains in sorted(_placed(view).items()):
        if len(domains) > 1:
            yield _spread(logical, domains, view)


def _placed(view: View) -> Mapping[str, Mapping[str, list[MachineSeen]]]:
    """The machines of the instances of each logical partition, by domain."""
    asked = dict.fromkeys((one.logical, one.machine) for one in view.picture.instance_gpus)
    machines = {one.id: one for one in view.picture.machines}
    found: defaultdict[str, defaultdict[str, list[MachineSeen]]] = defaultdict(lambda: defaultdict(list))
    for logical, id_ in asked:
        machine = machines.get(id_)
        if logical is not None and machine is not None and machine.domain:
            found[logical][machine.domain].append(machine)
    return found


def _spread(logical: str, domains: Mapping[str, list[MachineSeen]], view: View) -> Finding:
    seen = view.logicals.get(logical)
    name, tenant = (logical, "") if seen is None else (seen.name, seen.tenant)
    org = view.picture.tenants.get(tenant, tenant) or "ORGANISATION"
    fewest = min(domains, key=lambda one: (len(domains[one]), one))
    return fails(
        names.LOGICAL_SPREAD,
        f"logical partition {name}",
        f"its instances are in {len(domains)} NVLink domains, and share no memory from one to another",
        f"rackloom admin logical-partition create --name {quote(f'{name}-{fewest}')} --tenant {quote(org)}"
        "  # one for each domain: rackloom admin instance update-nvlink-config moves its instances",
        severity=Severity.WARNING,
        evidence=tuple(_told(domain, machines) for domain, machines in sorted(domains.items())),
        where=(at_logical(logical),),
        since=_since(domains),
    )


def _told(domain: str, machines: list[MachineSeen]) -> str:
    count = f"{len(machines)} instance{'' if len(machines) == 1 else 's'}"
    return f"records: {count} in domain {domain}, on {some([one.id for one in machines], _NAMED)}"


def _since(domains: Mapping[str, list[MachineSeen]]) -> float | None:
    """When the second domain got its first; None where that of some is not known."""
    told = [
        [one.held_since for one in machines if one.held_since is not None] for machines in domains.values()
    ]
    firsts = sorted(min(one) for one in told if one)
    return firsts[1] if len(firsts) == len(domains) else None
