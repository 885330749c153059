"""Documents of a YAML or JSON file, with the line of every field, bounded before they are composed.

Errors must name a line, so the text is composed into nodes once, from which both values and positions
come. Lists (`kind: List`, PodList) are unfolded into their objects. A directory is read as `kubectl -f`
reads it. YAML timestamps stay text, because Kubernetes has none. JSON surrogate pairs are joined first,
because YAML does not.

`foreign_text` bounds depth and repetition before libyaml composes, which takes stack for each level.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from rackloom.errors import Refused, file_error_text
from rackloom.runtime.foreign_text import check_yaml_bounds

# Documents and their lines.


FieldPath = tuple[str | int, ...]
_SUFFIXES = (".yaml", ".yml", ".json")
_ESCAPED = re.compile(r"\\(?:u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})|[^u])", re.IGNORECASE)
"""A character that JSON escapes in two halves; any other escape, so that the backslash of none is taken."""


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """One object of a file."""

    file: str
    value: dict[str, Any]
    lines: dict[FieldPath, int]
    """Line (from 1) of every field and list item."""

    def where(self, path: FieldPath = ()) -> str:
        """`file:line` of a field, or of the nearest field around it that the file has."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.file}:{self.lines.get(path, 1)}"


class _Loader(yaml.CSafeLoader):
    """YAML without timestamps: Kubernetes has none, and dates in annotations must stay text.

    Composed by libyaml, which takes a tenth of the time: a dump of a cluster has tens of megabytes.
    """


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_documents(path: Path) -> list[Document]:
    """The objects of a file, or of the manifests right in a directory, as `kubectl -f` takes them.

    The items of `kind: List`, and of a PodList and its like, come one by one. Refused with file and line.
    """
    if path.is_dir():
        return [document for file in _manifests_in(path) for document in read_documents(file)]
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(
            f"{path} cannot be read: {file_error_text(error)}", nearest_fix="name a YAML or JSON file"
        ) from error
    return parse_documents(text, str(path))


def _manifests_in(folder: Path) -> list[Path]:
    """By name; a kustomization says how to build manifests and is none itself."""
    found = sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and file.suffix in _SUFFIXES and file.stem.lower() != "kustomization"
    )
    if not found:
        raise Refused(
            f"{folder} has no manifest", nearest_fix=f"name a directory with files {', '.join(_SUFFIXES)}"
        )
    return found


def parse_documents(text: str, file: str) -> list[Document]:
    """The objects of a text, called `file` in messages. Refused with file and line."""
    text = _surrogates_joined(text)
    loader = _Loader(text)
    found: list[Document] = []
    try:
        check_yaml_bounds(yaml.parse(text, Loader=_Loader), file)
        while (node := loader.get_node() if loader.check_node() else None) is not None:
            value = loader.construct_document(node)
            if value is not None:
                found += _list_items(Document(file=file, value=value, lines=dict(_lines(node, ()))))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or error
        raise Refused(f"{file}{line}: not YAML: {problem}", nearest_fix="correct the line") from error
    except RecursionError as error:
        raise Refused(f"{file}: fields are too deep inside each other", nearest_fix="nest fewer") from error
    except ValueError as error:
        raise Refused(f"{file}: a value cannot be read: {error}", nearest_fix="put it in quotes") from error
    finally:
        loader.dispose()
    return found


def _surrogates_joined(text: str) -> str:
    """JSON with the characters beyond 16 bits as such: YAML does not put the halves of one together."""
    if "\\" not in text or not text.lstrip("\ufeff \t\r\n").startswith(("{", "[")):
        return text
    return _ESCAPED.sub(_joined_character, text)


def _joined_character(escaped: re.Match[str]) -> str:
    high, low = escaped.groups()
    if high is None:
        return escaped[0]
    return bytes.fromhex(high + low).decode("utf-16-be")


def _lines(node: yaml.Node, path: FieldPath) -> Iterator[tuple[FieldPath, int]]:
    yield path, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _lines(value, (*path, str(key.value)))
            yield (*path, str(key.value)), key.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield from _lines(value, (*path, number))


def _list_items(document: Document) -> Iterator[Document]:
    value: object = document.value
    if not isinstance(value, dict):
        raise Refused(
            f"{document.where()}: an object is a mapping, not a {type(value).__name__}",
            nearest_fix="begin each object with apiVersion and kind, and part them with ---",
        )
    items = value.get("items")
    if not _is_list(value):
        yield document
        return
    if not isinstance(items, list):
        raise Refused(f"{document.where(('items',))}: a List has items")
    each = _item_defaults(value)
    inner: dict[str | int, dict[FieldPath, int]] = {}
    for path, line in document.lines.items():
        if path[:1] == ("items",) and len(path) > 1:
            inner.setdefault(path[1], {})[path[2:]] = line
    for number, item in enumerate(items):
        value = each | item if isinstance(item, dict) else item
        yield from _list_items(Document(file=document.file, value=value, lines=inner.get(number, {})))


def _is_list(value: dict[str, Any]) -> bool:
    """`kind: List`, or the list of one kind (PodList) as the API serves it."""
    kind = value.get("kind")
    return kind == "List" or (isinstance(kind, str) and kind.endswith("List") and "items" in value)


def _item_defaults(value: dict[str, Any]) -> dict[str, Any]:
    """What the API leaves out in the items of the list of one kind: theirs are all the same."""
    kind = value["kind"].removesuffix("List")
    return {"apiVersion": value.get("apiVersion"), "kind": kind} if kind else {}
