"""Whether the answers that clients got can be explained by some order of their requests.

A history is the clients' record of each request: client, action, object, time and answer. It is linearizable
when all requests can be put in one order in which every answer is right, and in which a request that was
answered before another one was made comes before that one. Then no acknowledged write is lost or made twice,
no reader sees an old state, and no deleted object comes back.

Each object is a register: absent, or present with a value. Linearizability is local: a history is
linearizable exactly when it is so for each object (Herlihy and Wing, 1990), so every object is checked
separately. The search is that of Wing and Gong (1993) with the memory of Lowe (2017), as in Porcupine:

1. Candidates are the requests that may come next: made before any request that is left was answered.
2. A candidate without an effect whose answer is right now is taken at once. It can be moved here in every
   order, so nothing is lost by it.
3. Else each candidate whose answer is right is tried, and the others after it. A pair of requests that
   were taken and the state they led to is tried once.

A request without an answer (a timeout, a lost connection, a 5xx) may have been carried out at any time since
it was made, also after its client gave up, or never. It may be taken, and need not be.

A list is a read, at the same moment, of every object with a name that begins with its prefix. Checking it
object by object finds missing, old and returned objects, but not two objects that were never there together.
An object that is listed twice is a violation too.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import StrEnum
from math import inf

import msgspec


class ClientAction(StrEnum):
    """The kind of a client's request."""

    CREATE = "create"
    WRITE = "write"
    DELETE = "delete"
    READ = "read"
    LIST = "list"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a client. Times are of one clock, which does not go back."""

    client: str
    action: ClientAction
    object: str = ""
    """Of a list: the prefix of the names that it shows."""
    value: str | None = None
    """The value that a create or write stores, or that a read returned. None if the object was not there."""
    listed: tuple[tuple[str, str], ...] = ()
    """The result of a list: objects and their values."""
    refused: bool = False
    """A create: the object exists. A write or delete: it does not exist."""
    invoked_at: float
    returned_at: float | None
    """None: no answer, and whether it was carried out is unknown."""


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a history that no order of its requests explains."""

    object: str
    reason: str
    events: tuple[Event, ...]

    def __str__(self) -> str:
        return "\n  ".join([f"{self.object}: {self.reason}", *map(_line, self.events)])


def find_violations(history: Sequence[Event]) -> list[Violation]:
    """The answers in `history` that no order of its requests explains. Empty if it is linearizable."""
    found = [violation for event in history for violation in _listed_twice(event)]
    for name, events in sorted(_by_object(history).items()):
        taken = _longest_order(events)
        if taken is not None:
            found.append(_unexplained(name, events, taken))
    return found


def count_outcomes(history: Iterable[Event]) -> Counter[str]:
    """How many requests of each kind were acknowledged, refused, or not answered."""
    return Counter(f"{event.action} {_outcome(event)}" for event in history)


def _outcome(event: Event) -> str:
    if event.returned_at is None:
        return "unknown"
    return "refused" if event.refused else "acknowledged"


# From a history to the requests of each object.


def _by_object(history: Iterable[Event]) -> dict[str, list[Event]]:
    objects: dict[str, list[Event]] = defaultdict(list)
    lists = []
    for event in history:
        if event.returned_at is not None and event.returned_at < event.invoked_at:
            raise ValueError(f"answered before it was requested: {_line(event)}")
        if event.action is ClientAction.LIST:
            lists.append(event)
        else:
            objects[event.object].append(event)
    for event in lists:
        for name, _ in event.listed:
            # No request created an object that is only listed.
            objects.setdefault(name, [])
    for event in lists:
        values = dict(event.listed)
        for name, events in objects.items():
            if not name.startswith(event.object):
                continue
            read = {"action": ClientAction.READ, "object": name, "value": values.get(name), "listed": ()}
            events.append(msgspec.structs.replace(event, **read))
    return objects


def _listed_twice(event: Event) -> Iterator[Violation]:
    for name, count in Counter(name for name, _ in event.listed).items():
        if count > 1:
            yield Violation(object=name, reason=f"one list has it {count} times", events=(event,))


# The search for an order of one object's requests.


_State = str | None
"""The value of an object. None if it is absent."""
_IMPOSSIBLE = object()


def _after(event: Event, state: _State) -> object:
    """The state after `event` if its answer is right in `state`, or else _IMPOSSIBLE."""
    exists = state is not None
    if event.action is ClientAction.READ:
        return state if event.value == state else _IMPOSSIBLE
    if event.refused:
        return state if exists == (event.action is ClientAction.CREATE) else _IMPOSSIBLE
    if exists == (event.action is ClientAction.CREATE):
        return _IMPOSSIBLE
    return None if event.action is ClientAction.DELETE else event.value


def _has_effect(event: Event) -> bool:
    return event.action is not ClientAction.READ and not event.refused


def _may_matter(unanswered: Event, read: Collection[str | None]) -> bool:
    """Whether taking it can explain an answer. A read cannot, nor a write that no read returned."""
    is_write = unanswered.action is ClientAction.WRITE
    return unanswered.value in read if is_write else _has_effect(unanswered)


class _Search:
    """The requests of one object, as bits: bit i of `taken` stands for request i."""

    def __init__(self, events: Iterable[Event]) -> None:
        in_order = sorted(events, key=lambda event: event.invoked_at)
        read = {event.value for event in in_order if event.action is ClientAction.READ}
        answered = [event for event in in_order if event.returned_at is not None]
        unknown = [event for event in in_order if event.returned_at is None and _may_matter(event, read)]
        self.events = answered + unknown
        self.answered = len(answered)
        self.returned = [inf if event.returned_at is None else event.returned_at for event in answered]
        self.all_answered = (1 << len(answered)) - 1

    def candidates(self, taken: int) -> list[int]:
        """The requests that may come next, answered ones first."""
        earliest = inf
        found = []
        first = (~taken & (taken + 1)).bit_length() - 1
        for number in range(first, self.answered):
            if taken >> number & 1:
                continue
            if self.events[number].invoked_at > earliest:
                break
            found.append(number)
            earliest = min(earliest, self.returned[number])
        found += [number for number in range(self.answered, len(self.events)) if not taken >> number & 1]
        return [number for number in found if self.events[number].invoked_at <= earliest]

    def steps(self, taken: int, state: _State) -> list[tuple[int, _State]]:
        """The requests that may be taken next, each with the state that it leads to."""
        steps: list[tuple[int, _State]] = []
        for number in self.candidates(taken):
            after = _after(self.events[number], state)
            if after is _IMPOSSIBLE:
                continue
            step = (taken | 1 << number, after if isinstance(after, str) else None)
            if not _has_effect(self.events[number]):
                return [step]
            steps.append(step)
        return steps


def _longest_order(events: Iterable[Event]) -> list[Event] | None:
    """None if an order explains all answers, or else the requests of the longest that explains some."""
    search = _Search(events)
    seen: set[tuple[int, _State]] = set()
    open_ends: list[tuple[int, _State]] = [(0, None)]
    longest = 0
    while open_ends:
        taken, state = open_ends.pop()
        if taken & search.all_answered == search.all_answered:
            return None
        longest = max(longest, taken, key=lambda bits: (bits & search.all_answered).bit_count())
        # The last is tried first: those with an answer before those that perhaps never happened.
        for step in reversed(search.steps(taken, state)):
            if step not in seen:
                seen.add(step)
                open_ends.append(step)
    return [event for number, event in enumerate(search.events) if longest >> number & 1]


SHOWN_EVENTS = 20
"""Of a violation: enough to see the events around it."""


def _unexplained(name: str, events: Iterable[Event], taken: Sequence[Event]) -> Violation:
    left = sorted(
        (event for event in events if event not in taken),
        key=lambda event: inf if event.returned_at is None else event.returned_at,
    )
    before = sorted(taken, key=lambda event: event.invoked_at)[-SHOWN_EVENTS // 2 :]
    return Violation(
        object=name,
        reason=f"no order explains the answer to: {_line(left[0])}",
        events=tuple(before + left[: SHOWN_EVENTS // 2]),
    )


def _line(event: Event) -> str:
    returned = "?" if event.returned_at is None else f"{event.returned_at:.3f}"
    return (
        f"{event.invoked_at:.3f}..{returned} {event.client} {event.action} {event.object}"
        f" {event.value} {_outcome(event)}"
    )
