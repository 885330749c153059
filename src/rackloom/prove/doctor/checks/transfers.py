"""The newest measured transfers: whether they kept what the topology promises, and why not."""

from collections.abc import Iterator

from rackloom.prove.doctor import names
from rackloom.prove.doctor.checks.view import View, at_device, at_node
from rackloom.prove.doctor.findings import Finding, Severity, fails, unknown
from rackloom.prove.picture.values import TransferSeen

_AGAIN = "rackloom transfer run --save transfer.json  # and rackloom transfer report transfer.json"


def check_transfers(view: View) -> Iterator[Finding]:
    """All findings about transfers. One that nothing was promised of is no finding."""
    nics = {
        _key(chain.transfer): tuple(map(at_device, chain.nics))
        for chain in view.chains
        if chain.transfer is not None and chain.nics
    }
    for one in view.picture.transfers:
        where = nics.get(_key(one), (at_node(one.node),))
        subject = f"transfer on {one.node} through {one.device or 'no device'}"
        rate = f"record: {one.gigabytes_per_second:.2f} GB/s{' (emulated)' if one.emulated else ''}"
        if one.verdict == "fails":
            yield fails(
                names.TRANSFER,
                subject,
                one.reason,
                _AGAIN,
                severity=Severity.WARNING,
                evidence=(rate,),
                where=where,
                since=one.at,
            )
        elif one.verdict == "unknown":
            yield unknown(
                names.TRANSFER, subject, one.reason, _AGAIN, evidence=(rate,), where=where, since=one.at
            )


def _key(one: TransferSeen) -> tuple[str, str, float]:
    """What tells transfers of one picture apart."""
    return one.node, one.device, one.at
