"""What a reading that counts changes in the records: identities, partitions of ours, and every status."""

from collections.abc import Collection

import sqlalchemy as sa

from rackloom.carve.plan.values import Observation
from rackloom.carve.site import blocks, disputes, knowledge, learn, ownership, pauses, settle
from rackloom.carve.site.disputes import Dispute


def take_over(
    conn: sa.Connection, observation: Observation, now: float, left: Collection[str] = frozenset()
) -> None:
    """Write what `observation` shows. `left` are domains that its controller answered for before."""
    touched = learn.learn(conn, observation, now)
    for one in sorted(touched - {observation.domain}):
        # The same chassis under another domain uuid: what was made there, and what was ordered, still holds.
        ownership.follow(conn, one, observation.domain)
        pauses.follow(conn, one, observation.domain)
        blocks.forget(conn, one)
    ownership.recognise(conn, observation, now)
    for domain in sorted({observation.domain, *touched, *left}):
        settle.settle(conn, domain, now)


def compare(conn: sa.Connection, domain: str, now: float) -> Dispute | None:
    """Take over what the controllers of `domain` show where they agree; the dispute where they do not.

    Called when one of several told something, or tells nothing any more. In a dispute nothing is learned.
    """
    before = disputes.of_domain(conn, domain)
    dispute = disputes.judge(conn, domain, before)
    newest = knowledge.of_domain(conn, domain).observation
    if newest is None:
        settle.settle(conn, domain, now)
    else:
        take_over(conn, newest, now)
    return dispute


def give_up(conn: sa.Connection, domain: str, now: float) -> None:
    """As `compare`, where a controller tells nothing of `domain` any more.

    Those that are left need not have been read since, so what they showed counts again only after a dispute.
    """
    before = disputes.of_domain(conn, domain)
    if before is None:
        settle.settle(conn, domain, now)
    else:
        compare(conn, domain, now)
