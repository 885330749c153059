"""What a reading that counts changes in the records: identities, partitions of ours, and every status."""

from collections.abc import Collection, Sequence

import sqlalchemy as sa

from rackloom.carve.plan.values import Observation
from rackloom.carve.site import blocks, disputes, knowledge, learn, ownership, pauses, rivals, settle
from rackloom.carve.site.disputes import Dispute


def take_over(
    conn: sa.Connection, shown: Sequence[Observation], now: float, left: Collection[str] = frozenset()
) -> None:
    """Write what the controllers of a domain have `shown`, one at least, the newest first.

    `left` are domains that its controller answered for before.
    """
    observation = shown[0]
    touched = learn.learn(conn, observation, now)
    for one in sorted(touched - {observation.domain}):
        # The same chassis under another domain uuid: what was made there, and what was ordered, still holds.
        ownership.follow(conn, one, observation.domain)
        pauses.follow(conn, one, observation.domain)
        blocks.forget(conn, one)
    ownership.recognise(conn, shown, now)
    for domain in sorted({observation.domain, *touched, *left}):
        settle.settle(conn, domain, now)


def compare(
    conn: sa.Connection, domain: str, now: float, others: Collection[str] = frozenset()
) -> Dispute | None:
    """Take over what the controllers of `domain` show where they agree; the dispute where they do not.

    Called when one of several told something, or tells nothing any more. `others` are domains that may list
    the same hardware: with them, and with those that do so already, the outcome is one. In a dispute nothing
    is learned.
    """
    concerned = rivals.standing(conn, domain).union(others)
    before = disputes.of_domain(conn, domain)
    dispute = disputes.judge(conn, domain, before, concerned)
    _take_over_shown(conn, domain, now)
    for other in sorted(concerned):
        _compare_too(conn, other, domain, now)
    return dispute


def _compare_too(conn: sa.Connection, domain: str, with_domain: str, now: float) -> None:
    before = disputes.of_domain(conn, domain)
    concerned = rivals.standing(conn, domain) | {with_domain}
    dispute = disputes.judge(conn, domain, before, concerned)
    if before is not None or dispute is not None:
        _take_over_shown(conn, domain, now)


def _take_over_shown(conn: sa.Connection, domain: str, now: float) -> None:
    shown = knowledge.of_domain(conn, domain).shown
    if shown:
        take_over(conn, shown, now)
    else:
        settle.settle(conn, domain, now)


def give_up(conn: sa.Connection, domain: str, now: float) -> None:
    """As `compare`, where a controller tells nothing of `domain` any more.

    Those that are left need not have been read since, so what they showed counts again only after a dispute.
    """
    before = disputes.of_domain(conn, domain)
    if before is None:
        settle.settle(conn, domain, now)
    else:
        compare(conn, domain, now)
