"""metadata.managedFields: who wrote which field, and server-side apply, which rests on it."""

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from rackloom.claim.kube.api import Object
from rackloom.twin.kube import answers, fields
from rackloom.twin.kube.client_applied import handed_over
from rackloom.twin.kube.fields import ABSENT, Fields, Path
from rackloom.twin.kube.shapes import Shape


@dataclass(frozen=True, slots=True)
class Writer:
    """Who writes: a field manager, by `Apply` or `Update`, through the object or a subresource of it."""

    manager: str
    operation: str
    api_version: str
    subresource: str = ""

    def __str__(self) -> str:
        through = f' with subresource "{self.subresource}"' if self.subresource else ""
        by = f" using {self.api_version}" if self.operation == "Update" else ""
        return f'"{self.manager}"{through}{by}'

    def same_owner(self, other: "Writer") -> bool:
        """Whether both are one owner: an apply and an update of one manager are two."""
        mine = (self.manager, self.operation, self.subresource)
        return mine == (other.manager, other.operation, other.subresource)


@dataclass(frozen=True, slots=True)
class Holding:
    """What one writer owns, and since when it has been so (RFC 3339)."""

    writer: Writer
    fields: Fields
    time: str
    entry: Object | None = None
    """Its entry in metadata.managedFields, where it is as it was read."""

    def but(self, owned: Fields) -> "Holding":
        """The same writer with these fields."""
        return self if owned == self.fields else replace(self, fields=owned, entry=None)


Holdings = tuple[Holding, ...]
_METADATA = ("labels", "annotations", "ownerReferences", "finalizers")
"""What an apply can say of metadata; the rest is the server's."""


def clone(obj: Any) -> Any:
    """A copy that shares nothing with its original, as a trip over the wire makes it (no tuples)."""
    return msgspec.json.decode(msgspec.json.encode(obj))


def holdings_of(obj: Object) -> Holdings:
    """The owners that an object names."""
    return tuple(_decode(entry) for entry in obj["metadata"].get("managedFields", ()))


def _decode(entry: Object) -> Holding:
    writer = Writer(entry["manager"], entry["operation"], entry["apiVersion"], entry.get("subresource", ""))
    return Holding(writer, fields.decode(entry["fieldsV1"]), entry.get("time", ""), entry)


def _encode(holding: Holding) -> Object:
    if holding.entry is not None:
        return holding.entry
    writer = holding.writer
    entry: Object = {
        "manager": writer.manager,
        "operation": writer.operation,
        "apiVersion": writer.api_version,
        "fieldsType": "FieldsV1",
        "fieldsV1": fields.encode(holding.fields),
    }
    # What kubectl hands over to itself has no time.
    if holding.time:
        entry["time"] = holding.time
    if writer.subresource:
        entry["subresource"] = writer.subresource
    return entry


def with_holdings(obj: Object, holdings: Holdings) -> Object:
    """`obj` with these owners; who owns nothing any more is not named."""
    entries = [_encode(holding) for holding in holdings if holding.fields]
    return {**obj, "metadata": {**obj["metadata"], "managedFields": entries}}


def updated(old: Object | None, new: Object, writer: Writer, shape: Shape, now: str) -> Object:
    """`new` with its owners after a create, replace or patch: what changed now belongs to the writer."""
    before = {} if old is None else fields.owned_values(old, shape)
    values = fields.owned_values(new, shape)
    changed = frozenset(path for path in values if before.get(path, ABSENT) != values[path])
    holdings = () if old is None else _kept(old, new)
    return with_holdings(new, _taken(holdings, writer, changed, frozenset(values), now))


def _kept(old: Object, new: Object) -> Holdings:
    """The owners before a write: a patch may have changed them, as `kubectl apply --server-side` does.

    As a real server does, what cannot be read is passed over.
    """
    if new["metadata"].get("managedFields") == old["metadata"].get("managedFields"):
        return holdings_of(old)
    try:
        return holdings_of(new)
    except (KeyError, TypeError, ValueError, AttributeError):
        return holdings_of(old)


def _taken(holdings: Holdings, writer: Writer, changed: Fields, present: Fields, now: str) -> Holdings:
    """Others lose what was changed or is gone; the writer keeps what it had and gains what it changed."""
    mine = next((one for one in holdings if one.writer.same_owner(writer)), Holding(writer, frozenset(), now))
    after = [one.but((one.fields & present) - changed) for one in holdings if one is not mine]
    kept = (mine.fields & present) | changed
    return (*after, mine if kept == mine.fields else Holding(writer, kept, now))


def applied(old: Object, wanted: Object, writer: Writer, shape: Shape, now: str, *, force: bool) -> Object:
    """`old` after a server-side apply of `wanted`. Raises `Conflict` when another manager owns a field of it.

    A field that the writer applied before and leaves out now is removed, unless someone else owns it too.
    """
    asked = fields.owned_fields(wanted, shape)
    holdings = holdings_of(old)
    others = tuple(one for one in holdings if not one.writer.same_owner(writer))
    lost = _contested(old, wanted, asked, others)
    first = len(others) == len(holdings)
    yielding = handed_over(old, writer.manager, shape) if first else frozenset()
    if not force and not {path for _, path in lost} <= yielding:
        raise answers.owned([(str(one.writer), fields.told(path)) for one, path in lost])
    mine = next((one for one in holdings if one.writer.same_owner(writer)), Holding(writer, frozenset(), now))
    taken = frozenset(path for _, path in lost)
    others = tuple(one.but(one.fields - taken) for one in others)
    merged = clone(fields.merge(old, _without_server_fields(wanted), shape))
    _give_up(merged, mine.fields - asked, asked.union(*(one.fields for one in others)))
    held = mine if asked == mine.fields and not taken else Holding(writer, asked, now)
    present = fields.owned_fields(merged, shape)
    return with_holdings(merged, tuple(one.but(one.fields & present) for one in (*others, held)))


def _contested(old: Object, wanted: Object, asked: Fields, others: Holdings) -> list[tuple[Holding, Path]]:
    """The fields that another owns and that would get another value."""
    return [
        (one, path)
        for one in others
        for path in sorted(one.fields & asked)
        if path[-1][0] == "f" and fields.find(old, path) not in (ABSENT, fields.find(wanted, path))
    ]


def _without_server_fields(wanted: Object) -> Object:
    given = wanted["metadata"]
    metadata = {key: given[key] for key in _METADATA if key in given}
    return {**wanted, "metadata": metadata}


def _give_up(merged: Object, dropped: Fields, owned: Fields) -> None:
    """Remove what nobody owns any more, in `merged`; whole items of lists before what is in them."""
    for path in sorted(dropped - owned, key=len):
        if not any(kept[: len(path)] == path for kept in owned):
            fields.remove(merged, path)
