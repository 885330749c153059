"""How deep and how wide a text may be: composing it takes a stack, and aliases repeat what they name.

libyaml composes by recursion in C, so thousands of brackets would end the process; its events take no stack,
and by them a text is bounded before it is composed.
"""

from collections.abc import Iterable

import yaml

from rackloom.errors import Refused

DEEPEST = 100
"""Fields and list items inside each other: schemas of custom resources have about 40."""
MOST_REPEATED = 100_000
"""Nodes that aliases add to a text. `kubectl` writes no alias; by hand few are written."""


def check_bounds(events: Iterable[yaml.Event], file: str) -> None:
    """Refused with the line of what is too deep, of an alias of what is around it, or of one too many."""
    walk = _Walk(file)
    for event in events:
        if isinstance(event, yaml.ScalarEvent):
            walk.nodes += 1
        elif isinstance(event, yaml.CollectionStartEvent):
            walk.open(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            walk.close()
        elif isinstance(event, yaml.AliasEvent):
            walk.repeat(event)
        elif isinstance(event, yaml.DocumentStartEvent):
            walk.start()


class _Walk:
    """The documents of a file. Anchors of scalars are not kept, as an alias of one is one node."""

    def __init__(self, file: str) -> None:
        self.nodes = 0
        """So far, with those that aliases repeat."""
        self._file = file
        self._repeated = 0
        self._around: list[tuple[str | None, int]] = []
        """The anchor of each collection that is open, and the nodes before it."""
        self._sizes: dict[str | None, int] = {}

    def start(self) -> None:
        """Anchors are those of one document; what aliases may repeat counts for all of the file."""
        self._sizes.clear()

    def open(self, event: yaml.CollectionStartEvent) -> None:
        self._around.append((event.anchor, self.nodes))
        self.nodes += 1
        if len(self._around) > DEEPEST:
            self._refuse(event, f"more than {DEEPEST} fields inside each other", "nest fewer")

    def close(self) -> None:
        anchor, before = self._around.pop()
        if anchor is not None:
            self._sizes[anchor] = self.nodes - before

    def repeat(self, event: yaml.AliasEvent) -> None:
        if any(anchor == event.anchor for anchor, _ in self._around):
            self._refuse(event, f"*{event.anchor} is inside what it names", "write out what is meant")
        size = self._sizes.get(event.anchor, 1)
        self.nodes += size
        self._repeated += size
        if self._repeated > MOST_REPEATED:
            told = f"aliases repeat more than {MOST_REPEATED} fields and items"
            self._refuse(event, told, "write out what is meant, or name less by an alias")

    def _refuse(self, event: yaml.Event, reason: str, fix: str) -> None:
        line = f":{event.start_mark.line + 1}" if event.start_mark is not None else ""
        raise Refused(f"{self._file}{line}: {reason}", nearest_fix=fix)
