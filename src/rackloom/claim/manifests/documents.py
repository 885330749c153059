"""Documents of YAML and JSON files, each of which can name the line of its fields.

JSON is decoded by msgspec, YAML in one pass over its events. No line is kept: a dump of a cluster has some
hundred thousand fields, and an error names one. `Document.where` then finds the line in the text. Text that
starts like JSON and is none (a trailing comma, several objects) is read as YAML, which contains JSON.
Most of a dump are nodes, pods and slices. In JSON, they are decoded straight into the values that plans take:
without the fields that nothing reads, and slices share their equal parts.

Lists (`kind: List`, PodList) are unfolded into their objects. A directory is read as `kubectl -f` reads it.
"""

import codecs
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from rackloom.core.allocate.objects import ResourceSlice
from rackloom.core.allocate.sharing import SharedParts
from rackloom.core.cluster.objects import NODE, POD, RESOURCE_SLICE
from rackloom.errors import Refused, Undecodable, file_error_text
from rackloom.runtime.foreign_text import decode_json
from rackloom.runtime.yaml_events import YamlReader, line_of_field

# Documents and their lines.


FieldPath = tuple[str | int, ...]
_SUFFIXES = (".yaml", ".yml", ".json")


class Source(msgspec.Struct, frozen=True):
    """A file or an answer, and its name in messages."""

    file: str
    content: bytes | None
    """None if it is read again to find a line: a dump of a cluster is larger than its kept values."""
    is_json: bool

    def line(self, document: int, path: FieldPath) -> int:
        """The line (from 1) of a field of a document, or of the nearest field around it that is there."""
        # A file that is another one by now has no such line.
        with suppress(OSError, ValueError, IndexError, yaml.YAMLError):
            text = _text_of(self)
            return _line_in_json(text, path) if self.is_json else line_of_field(text, document, path)
        return 1


@lru_cache(1)
def _text_of(source: Source) -> str:
    content = Path(source.file).read_bytes() if source.content is None else source.content
    # Parts of JSON that nothing reads may be no text.
    return content.decode(errors="replace")


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """One object of a file."""

    value: dict[str, Any]
    """The object, or its kind alone if it is in `decoded`."""
    decoded: Any = None
    """The NodeObject, the PodObject, or the ResourceSlice."""
    source: Source
    number: int
    """Of the document in the text, from 0."""
    at: FieldPath = ()
    """The path of the object in the document, for items of a list."""

    def where(self, path: FieldPath = ()) -> str:
        """`file:line` of a field, or of the nearest field around it that the file has."""
        return f"{self.source.file}:{self.source.line(self.number, (*self.at, *path))}"


def read_documents(path: Path, kinds: Collection[str] | None = None) -> list[Document]:
    """The objects of a file, or of the manifests right in a directory, as `kubectl -f` takes them.

    The items of `kind: List`, and of a PodList and its like, come one by one. `kinds`: see `parse_documents`.
    Refused with file and line.
    """
    if path.is_dir():
        return [document for file in _manifests_in(path) for document in read_documents(file, kinds)]
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unreadable(str(path), error) from error
    return parse_documents(content, str(path), kinds, keep=not path.is_file())


def _unreadable(file: str, error: OSError | UnicodeDecodeError) -> Refused:
    return Refused(f"{file} cannot be read: {file_error_text(error)}", nearest_fix="name a YAML or JSON file")


def _manifests_in(folder: Path) -> list[Path]:
    """By name. A kustomization builds manifests and is none itself."""
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


class _JsonList(msgspec.Struct, rename="camel"):
    kind: str
    items: list[msgspec.Raw]
    api_version: Any = None


CLAIM_KINDS = frozenset(
    {"Node", "ResourceSlice", "DeviceClass", "DeviceTaintRule", "ResourceClaim", "ResourceClaimTemplate"}
)
"""The kinds that bear on an allocation."""
SITE_KINDS = CLAIM_KINDS | {"Pod", "ComputeDomain", "PriorityClass"}
"""The kinds that bear on a placement."""


class _JsonItem(msgspec.Struct):
    kind: str = ""


class _JsonSlice(ResourceSlice, frozen=True, kw_only=True):
    kind: Literal["ResourceSlice"]
    api_version: Literal["resource.k8s.io/v1"]


def _items_of_kinds(listed: _JsonList, source: Source, kinds: Collection[str]) -> Iterator[Document]:
    if not _is_list({"kind": listed.kind, "items": ()}):
        raise Undecodable(source.file, "it is no List")
    each = _item_defaults({"kind": listed.kind, "apiVersion": listed.api_version})
    # A command that reads no dump starts faster without them.
    from rackloom.core.cluster.nodes import NodeObject
    from rackloom.core.cluster.pods import PodObject

    shapes = {NODE.kind: NodeObject, POD.kind: PodObject, RESOURCE_SLICE.kind: _JsonSlice}
    values, parts = {kind: {"kind": kind} for kind in shapes}, SharedParts()
    for number, raw in enumerate(listed.items):
        at, kind = ("items", number), ""
        decoded: Any = None
        with suppress(msgspec.DecodeError, UnicodeError):
            kind = msgspec.json.decode(raw, type=_JsonItem).kind or each.get("kind", "")
            if kind in kinds and kind in shapes:
                decoded = msgspec.json.decode(raw, type=shapes[kind])
            if isinstance(decoded, _JsonSlice):
                decoded = parts.of(ResourceSlice(metadata=decoded.metadata, spec=decoded.spec))
        if decoded is not None:
            yield Document(value=values[kind], decoded=decoded, source=source, number=0, at=at)
        elif not kind or kind in kinds or kind.endswith("List"):
            item = decode_json(raw, source.file, max_bytes=memoryview(raw).nbytes)
            value = each | item if isinstance(item, dict) else item
            yield from _list_items(Document(value=value, source=source, number=0, at=at))


def parse_documents(
    content: bytes | str, file: str, kinds: Collection[str] | None = None, *, keep: bool = True
) -> list[Document]:
    """The objects of a content, called `file` in messages. Refused with file and line.

    `keep`: False if `file` can be read again, to find a line for an error.

    `kinds`: those that the reader needs. Other items of a List in JSON are left out, and nodes, pods and
    slices have their values in `Document.decoded`.
    """
    content = content.encode() if isinstance(content, str) else content
    if content.lstrip(codecs.BOM_UTF8 + b" \t\r\n").startswith((b"{", b"[")):
        # YAML reads more than JSON, and names the line of an error.
        source = Source(file, content if keep else None, is_json=True)
        bare = content.removeprefix(codecs.BOM_UTF8)
        if kinds is not None:
            with suppress(Undecodable):
                listed = decode_json(bare, file, _JsonList, max_bytes=len(content))
                return list(_items_of_kinds(listed, source, kinds))
        with suppress(Undecodable):
            value = decode_json(bare, file, max_bytes=len(content))
            return list(_list_items(Document(value=value, source=source, number=0)))
    if len(content) > LARGE_YAML_BYTES:
        _recommend_json(file)
    source = Source(file, content if keep else None, is_json=False)
    try:
        text = content.decode()
        return [
            document
            for number, value in enumerate(YamlReader(file).documents(text))
            if value is not None
            for document in _list_items(Document(value=value, source=source, number=number))
        ]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or error
        raise Refused(f"{file}{line}: not YAML: {problem}", nearest_fix="correct the line") from error
    except UnicodeDecodeError as error:
        raise _unreadable(file, error) from error
    except ValueError as error:
        raise Refused(f"{file}: a value cannot be read: {error}", nearest_fix="put it in quotes") from error


LARGE_YAML_BYTES = 20_000_000
"""About 3,000 nodes with their slices. YAML takes some 0.2 s of CPU for each MB, and JSON a tenth of it."""


@lru_cache
def _recommend_json(file: str) -> None:
    """Recommend JSON on standard error, once for a file: a service reads the same files again."""
    sys.stderr.write(f"rackloom: {file} is large for YAML: write it with `kubectl get ... -o json`\n")


_NO_SPACE = re.compile(r"[^ \t\n\r]")


def _line_in_json(text: str, path: FieldPath) -> int:
    """The line of a field of valid JSON, or of the nearest field around it that is there."""
    shown = value = _after_space(text, 1 if text.startswith("\ufeff") else 0)
    for step in path:
        found = _members(text, value).get(step)
        if found is None:
            break
        shown, value = found
    return text.count("\n", 0, shown) + 1


@lru_cache(8)
def _members(text: str, begin: int) -> Mapping[str | int, tuple[int, int]]:
    """The members of the object or list at `begin`: the start of each, and that of its value.

    The decoder in C skips the values. Lists of the last text are remembered: one file may have many errors.
    """
    # Only an error needs the decoder, and a command starts faster without it.
    from json import JSONDecoder

    decoder = JSONDecoder(parse_int=str, parse_float=str)
    found: dict[str | int, tuple[int, int]] = {}
    if text[begin] not in "{[":
        return found
    at, number = _after_space(text, begin + 1), 0
    while text[at] not in "}]":
        member, key = at, number
        if text[begin] == "{":
            key, at = decoder.raw_decode(text, at)
            at = _after_space(text, _after_space(text, at) + 1)
        # The last of equal keys counts, as in the value.
        found[key] = member, at
        _, at = decoder.raw_decode(text, at)
        at = _after_space(text, at)
        if text[at] == ",":
            at = _after_space(text, at + 1)
        number += 1
    return found


def _after_space(text: str, at: int) -> int:
    found = _NO_SPACE.search(text, at)
    return len(text) if found is None else found.start()


def _list_items(document: Document) -> Iterator[Document]:
    value: object = document.value
    if not isinstance(value, dict):
        raise Refused(
            f"{document.where()}: an object is a mapping, not a {type(value).__name__}",
            nearest_fix="begin each object with apiVersion and kind, and part them with ---",
        )
    if not _is_list(value):
        yield document
        return
    items = value.get("items")
    # A server writes an empty list of one kind as null, too.
    if items is None and value["kind"] != "List":
        return
    if not isinstance(items, list):
        raise Refused(f"{document.where(('items',))}: a List has items")
    each = _item_defaults(value)
    for number, item in enumerate(items):
        yield from _list_items(
            Document(
                value=each | item if isinstance(item, dict) else item,
                source=document.source,
                number=document.number,
                at=(*document.at, "items", number),
            )
        )


def _is_list(value: dict[str, Any]) -> bool:
    """`kind: List`, or the list of one kind (PodList) as the API serves it."""
    kind = value.get("kind")
    if kind == "List" or not isinstance(kind, str):
        return kind == "List"
    # A custom resource may have such a name, too, and other items.
    return kind.endswith("List") and isinstance(value.get("items", 0), list | None)


def _item_defaults(value: dict[str, Any]) -> dict[str, Any]:
    """The fields that the API leaves out in the items of a list of one kind: they are all the same."""
    kind = value["kind"].removesuffix("List")
    return {"apiVersion": value.get("apiVersion"), "kind": kind} if kind else {}
