"""YAML as plain values, in one pass over libyaml's events, bounded in depth and in repetition by aliases.

`yaml.load` composes nodes by recursion in C, which takes stack for each level, and resolves each scalar with
regular expressions. Here a list holds the collections that are open, so depth takes no stack and is bounded.
A plain scalar is resolved once for all its occurrences. That takes a third of the time of `yaml.load`.

The values are those of YAML 1.1's safe types with two exceptions. A timestamp stays text, because Kubernetes
has none and a date in an annotation is text. A collection has no tag but `!!map` and `!!seq`. Aliases
multiply nodes, so they are counted. The bound is for a whole text, an anchor for one document.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import msgspec
import yaml
from yaml.constructor import ConstructorError, SafeConstructor

from rackloom.errors import Refused
from rackloom.runtime.foreign_text import MAX_DEPTH

MAX_ALIASED_NODES = 100_000
"""Nodes that aliases add to a text. `kubectl` writes no alias, and people write few."""
_LONGEST_REMEMBERED = 256
_LONGEST_NUMBER = 400
"""Characters. Python reads and prints longer numbers in quadratic time, or not at all."""
_TAG = "tag:yaml.org,2002:"
_NO_KEY: Any = object()
_MERGE: Any = object()
"""The key `<<`: the mapping behind it gives the keys that are not written."""
_RESOLVERS = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != f"{_TAG}timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Open(msgspec.Struct):
    """A collection whose end was not met."""

    value: Any
    anchor: str | None
    nodes_before: int
    key: Any = _NO_KEY
    """Of a mapping: the key of the next value."""
    merged: list[Any] = []
    """Of a mapping: the values behind `<<`."""
    height: int = 0
    """Levels of collections inside it, also of those that aliases name."""


class _Anchored(NamedTuple):
    """A value that an alias may name."""

    value: Any
    nodes: int
    height: int


class YamlReader:
    """Reads the documents of one text, called `file` in messages."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._nodes = 0
        """So far, with those that aliases repeat."""
        self._repeated = 0
        self._open: list[_Open] = []
        self._anchored: dict[str, _Anchored] = {}

    def documents(self, text: str) -> Iterator[Any]:
        """The documents in order, None for an empty one.

        Raises yaml.YAMLError or ValueError if it is not YAML, and Refused if it exceeds a bound.
        """
        value: Any = None
        for event in yaml.parse(text, Loader=yaml.CSafeLoader):
            match event:
                case yaml.ScalarEvent():
                    self._nodes += 1
                    value = self._scalar(event)
                    if event.anchor:
                        written = "<<" if value is _MERGE else value
                        self._anchored[event.anchor] = _Anchored(written, 1, 0)
                    self._put(event, value, 0)
                case yaml.CollectionStartEvent():
                    self._begin(event)
                case yaml.CollectionEndEvent():
                    ended = self._open.pop()
                    value, height = ended.value, ended.height + 1
                    # Written keys win over merged ones, and of merged mappings the first wins.
                    for merged in ended.merged:
                        for key, item in merged.items():
                            value.setdefault(key, item)
                    if ended.anchor:
                        nodes = self._nodes - ended.nodes_before
                        self._anchored[ended.anchor] = _Anchored(value, nodes, height)
                    self._put(event, value, height)
                case yaml.AliasEvent():
                    value, _, height = self._repeat(event)
                    self._put(event, value, height)
                case yaml.DocumentStartEvent():
                    self._anchored.clear()
                    value = None
                case yaml.DocumentEndEvent():
                    yield value

    def _put(self, event: yaml.Event, value: Any, height: int) -> None:
        """Put a finished value into the collection around it."""
        if not self._open:
            return
        around = self._open[-1]
        around.height = max(around.height, height)
        if isinstance(around.value, list):
            around.value.append(value)
        elif around.key is _NO_KEY:
            if isinstance(value, list | dict):
                raise _wrong(event, "found unhashable key")
            around.key = value
        elif around.key is _MERGE:
            mappings = value if isinstance(value, list) else [value]
            if not all(isinstance(mapping, dict) for mapping in mappings):
                raise _wrong(event, "expected a mapping to merge")
            around.merged.extend(mappings)
            around.key = _NO_KEY
        else:
            around.value[around.key] = value
            around.key = _NO_KEY

    def _scalar(self, event: yaml.ScalarEvent) -> Any:
        is_plain, _ = event.implicit
        try:
            if event.tag not in (None, "!"):
                return _constructed(event.tag, event.value)
            if not is_plain:
                return event.value
            is_key = (
                bool(self._open) and isinstance(self._open[-1].value, dict) and self._open[-1].key is _NO_KEY
            )
            if is_key and event.value == "<<":
                return _MERGE
            # Long texts are rare and would fill the memory of `_plain_value`.
            short = len(event.value) <= _LONGEST_REMEMBERED
            return _plain_value(event.value) if short else _read_plain(event.value)
        except ConstructorError as error:
            raise _wrong(event, error.problem) from error

    def _begin(self, event: yaml.CollectionStartEvent) -> None:
        is_list = isinstance(event, yaml.SequenceStartEvent)
        if event.tag not in (None, "!", f"{_TAG}{'seq' if is_list else 'map'}"):
            raise _wrong(event, f"the tag {event.tag} is not known here")
        self._open.append(_Open([] if is_list else {}, event.anchor, self._nodes))
        self._nodes += 1
        if len(self._open) > MAX_DEPTH:
            self._refuse(event, f"more than {MAX_DEPTH} fields inside each other", "nest fewer")

    def _repeat(self, event: yaml.AliasEvent) -> _Anchored:
        if any(opened.anchor == event.anchor for opened in self._open):
            self._refuse(event, f"*{event.anchor} is inside what it names", "write out what is meant")
        if event.anchor not in self._anchored:
            raise _wrong(event, f"found undefined alias {event.anchor!r}")
        found = self._anchored[event.anchor]
        self._nodes += found.nodes
        self._repeated += found.nodes
        if len(self._open) + found.height > MAX_DEPTH:
            self._refuse(event, f"more than {MAX_DEPTH} fields inside each other", "nest fewer")
        if self._repeated > MAX_ALIASED_NODES:
            reason = f"aliases repeat more than {MAX_ALIASED_NODES} fields and items"
            self._refuse(event, reason, "write out what is meant, or name less by an alias")
        return found

    def _refuse(self, event: yaml.Event, reason: str, fix: str) -> None:
        raise Refused(f"{self._file}:{_line(event)}: {reason}", nearest_fix=fix)


def _wrong(event: yaml.Event, problem: str | None) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=cast(Any, event.start_mark))


def _line(at: yaml.Event | yaml.Node) -> int:
    return 1 if at.start_mark is None else at.start_mark.line + 1


def _read_plain(text: str) -> Any:
    """The value of a scalar without quotes: a number, a truth value, null, or text."""
    for tag, pattern in (*_RESOLVERS.get(text[:1], ()), *_RESOLVERS.get(None, ())):
        if pattern.match(text):
            return _constructed(tag, text)
    return text


_plain_value = lru_cache(1 << 16)(_read_plain)


def _constructed(tag: str, text: str) -> Any:
    if tag in (f"{_TAG}int", f"{_TAG}float") and len(text) > _LONGEST_NUMBER:
        raise ValueError(f"a number has {len(text)} characters")
    try:
        return SafeConstructor().construct_object(yaml.ScalarNode(tag, text), deep=True)
    except (LookupError, AttributeError, ArithmeticError, TypeError) as error:
        raise ValueError(f"{text[:40]!r} is no {tag.removeprefix(_TAG)}") from error


# Lines.


def line_of_field(text: str, document: int, path: Iterable[str | int]) -> int:
    """The line (from 1) of a field, or of the nearest field around it that a document has.

    The nodes of the whole text are composed, which is slow: call it for an error. The text must have been
    read before, which bounds its depth. The line is 1 if the composer refuses the text: unlike
    `YamlReader`, it accepts no anchor twice.
    """
    roots = _composed(text)
    if document >= len(roots):
        return 1
    node = roots[document]
    line = _line(node)
    for step in path:
        if isinstance(node, yaml.MappingNode):
            # The last of equal keys counts, as in the value.
            found = [(key, value) for key, value in node.value if str(key.value) == step]
            if not found:
                break
            key, node = found[-1]
            line = _line(key)
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            line = _line(node)
        else:
            break
    return line


@lru_cache(1)
def _composed(text: str) -> Sequence[yaml.Node]:
    """The documents of a text. The last text is remembered: one file may have many errors."""
    try:
        return tuple(yaml.compose_all(text, Loader=yaml.CSafeLoader))
    except yaml.YAMLError:
        return ()
