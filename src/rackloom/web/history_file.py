"""The history of the last day in a file, so that it survives the process.

The file is a SQLite database, which is intact after a crash at any moment: a save is one transaction. Its
tables are

- `format`: one row, the fingerprint of the types of the records. A file of another version of the program is
  emptied, because its records would be misread.
- `part(id, kind, digest, body)`: a rack or a ComputeDomain, which many maps have in common. The body is
  MessagePack (msgspec), compressed by zlib. The digest is its SHA-256, so that equal parts are stored once.
- `map(at, parts, digest, body)`: a map without these parts, the time of its reading, and the ids of its
  parts.

`save` makes the file hold the maps that it is given and no others, so the limits of `SiteHistory` bound the
file. Beyond 256 MiB a save fails as on a full disk. `load` reads the intact records: it leaves out a part or
map with a wrong digest, and the maps that need it. A file that is damaged, or is no database, is renamed to
`*.damaged`, and a new one begins.

A file belongs to one process, and a second process is refused. Both methods block, and one may run at a time.
"""

import hashlib
import os
import sqlite3
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rackloom.core.cluster.domain_objects import ComputeDomain
from rackloom.core.diagnosis.snapshot import (
    GpuChain,
    LogicalPartitionRecord,
    MachineRecord,
    NodeRecord,
    PartitionRecord,
)
from rackloom.web.model import MapGpu, MapRack, SiteMap, rack_of_trays

T = TypeVar("T")

# A rack in a file: what its GPUs have in common stands in it once.


class _StoredGpu(msgspec.Struct, frozen=True, array_like=True):
    gpu: MapGpu
    """Without its chain."""
    chain: GpuChain | None
    """Without the objects that other chains share."""
    machine: int | None
    partition: int | None
    logical: int | None
    node: int | None
    domain: int | None
    """Positions in the lists of the rack, or None if the chain has no such object."""


class _StoredRack(msgspec.Struct, frozen=True, array_like=True):
    trays: tuple[tuple[_StoredGpu, ...], ...]
    machines: tuple[MachineRecord, ...]
    partitions: tuple[PartitionRecord, ...]
    logicals: tuple[LogicalPartitionRecord, ...]
    nodes: tuple[NodeRecord, ...]
    domains: tuple[bytes, ...]
    """The digests of its ComputeDomains."""


class _Shared:
    """Values that several others have in common, each once."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self.values: list[Any] = []

    def place(self, value: object) -> int | None:
        """The position of a value, or None for None."""
        if value is None:
            return None
        if id(value) not in self._places:
            self._places[id(value)] = len(self.values)
            self.values.append(value)
        return self._places[id(value)]


def _stored_rack(rack: MapRack) -> tuple[_StoredRack, list[ComputeDomain]]:
    """The rack without its ComputeDomains, and these."""
    machines, partitions, logicals, nodes, domains = (_Shared() for _ in range(5))

    def stored(gpu: MapGpu) -> _StoredGpu:
        bare, chain = msgspec.structs.replace(gpu, chain=None), gpu.chain
        if chain is None:
            return _StoredGpu(bare, None, None, None, None, None, None)
        own = msgspec.structs.replace(
            chain, machine=None, partition=None, logical=None, node=None, compute_domain=None
        )
        return _StoredGpu(
            bare,
            own,
            machines.place(chain.machine),
            partitions.place(chain.partition),
            logicals.place(chain.logical),
            nodes.place(chain.node),
            domains.place(chain.compute_domain),
        )

    trays = tuple([tuple(map(stored, tray)) for tray in rack.trays])
    stored_rack = _StoredRack(
        trays=trays,
        machines=tuple(machines.values),
        partitions=tuple(partitions.values),
        logicals=tuple(logicals.values),
        nodes=tuple(nodes.values),
        domains=(),
    )
    return stored_rack, domains.values


def _rack_of(stored: _StoredRack, domains: Sequence[ComputeDomain]) -> MapRack:
    """Raises LookupError if it refers to a value that it does not have."""

    def gpu(found: _StoredGpu) -> MapGpu:
        if found.chain is None:
            return found.gpu
        chain = msgspec.structs.replace(
            found.chain,
            machine=_at(stored.machines, found.machine),
            partition=_at(stored.partitions, found.partition),
            logical=_at(stored.logicals, found.logical),
            node=_at(stored.nodes, found.node),
            compute_domain=_at(domains, found.domain),
        )
        return msgspec.structs.replace(found.gpu, chain=chain)

    return rack_of_trays(tuple([tuple(map(gpu, tray)) for tray in stored.trays]))


def _at(values: Sequence[T], place: int | None) -> T | None:
    return None if place is None else values[place]


# Bodies and digests.


_ENCODER = msgspec.msgpack.Encoder(order="deterministic")
_FINGERPRINT = hashlib.sha256(
    b"rackloom map history 1" + msgspec.json.encode(msgspec.json.schema(SiteMap), order="sorted")
).hexdigest()
"""Differs if the types of the records in the file differ."""


def _body(value: object) -> bytes:
    # The fastest level: each rack is written when it changes.
    return zlib.compress(_ENCODER.encode(value), 1)


def _decoded(body: bytes, kind: type[T]) -> T:
    """Raises ValueError or zlib.error."""
    return msgspec.msgpack.decode(zlib.decompress(body), type=kind)


def _digest(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def _map_digest(at: float, parts: bytes, body: bytes) -> bytes:
    return _digest(repr(at).encode(), parts, body)


_UNREADABLE = (ValueError, LookupError, TypeError, zlib.error)

# The file.


_MOST_PAGES = 65536
"""Pages of 4 KiB: 256 MiB."""
_NEW_TABLES = (
    "DELETE FROM format",
    "DROP TABLE IF EXISTS part",
    "DROP TABLE IF EXISTS map",
    "CREATE TABLE part("
    "id INTEGER PRIMARY KEY, kind TEXT NOT NULL, digest BLOB NOT NULL UNIQUE, body BLOB NOT NULL)",
    "CREATE TABLE map(at REAL PRIMARY KEY, parts BLOB NOT NULL, digest BLOB NOT NULL, body BLOB NOT NULL)",
)
DAMAGED = ".damaged"
"""Ends the name of a file that was set aside."""


class LoadedHistory(msgspec.Struct, frozen=True):
    """The contents of a file."""

    maps: tuple[SiteMap, ...] = ()
    """The oldest first."""
    damaged: bool = False
    """Whether something in it could not be read."""


class HistoryFile:
    """The history in the file `path`, which only its owner may read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = None
        self._saved: dict[float, tuple[int, ...]] = {}
        """The parts of each map in the file."""
        self._parts: dict[bytes, int] = {}
        """The id of each part in the file, by digest."""
        self._digests: dict[int, bytes] = {}
        """The digests of parts that were saved by this process."""
        self._known: dict[int, tuple[object, int, tuple[int, ...]]] = {}
        """By the identity of an object in the file: the object, its id there, and the ids of its parts."""

    def load(self) -> LoadedHistory:
        """The maps in the file, none if there is no file yet. Raises OSError or sqlite3.Error."""
        if not self.path.exists():
            return LoadedHistory()
        try:
            found = self._read(self._open())
        # A damaged value may have another type. If a name is damaged, sqlite3 cannot decode its own message.
        except (sqlite3.DatabaseError, *_UNREADABLE) as error:
            if isinstance(error, sqlite3.OperationalError):  # locked by another process, or cannot be opened
                self.close()
                raise
            found = LoadedHistory(damaged=True)
        if found.damaged:
            self.close()
            self.path.replace(self.path.with_name(self.path.name + DAMAGED))
        return found

    def save(self, maps: Sequence[SiteMap]) -> None:
        """Have the file hold these maps, and no others.

        Raises OSError or sqlite3.Error, and then leaves the file as it was.
        """
        try:
            self._save(self._open(), maps)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file. It does not have changes that were not committed."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._known, self._digests = {}, {}

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None:
            return self._connection
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = sqlite3.connect(self.path, timeout=1.0, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute(f"PRAGMA max_page_count={_MOST_PAGES}")
            connection.execute("BEGIN EXCLUSIVE")
            self._prepare(connection)
            self._parts = dict(connection.execute("SELECT digest, id FROM part"))
            rows = connection.execute("SELECT at, parts FROM map")
            self._saved = {at: tuple(array("Q", parts)) for at, parts in rows}
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Create the tables. Those of another version are replaced."""
        connection.execute("CREATE TABLE IF NOT EXISTS format(fingerprint TEXT NOT NULL)")
        if connection.execute("SELECT * FROM format").fetchall() != [(_FINGERPRINT,)]:
            for statement in _NEW_TABLES:
                connection.execute(statement)
            connection.execute("INSERT INTO format VALUES (?)", (_FINGERPRINT,))

    # Reading.

    def _read(self, connection: sqlite3.Connection) -> LoadedHistory:
        bodies: dict[int, tuple[str, bytes, bytes]] = {}
        whole = True
        for part, kind, digest, body in _rows(connection, "SELECT id, kind, digest, body FROM part"):
            if part is None or _digest(body) != digest:
                whole = False
            else:
                bodies[part] = kind, digest, body
        domains, racks = _decoded_parts(bodies)
        whole = whole and len(domains) + len(racks) == len(bodies)
        maps = []
        for at, parts, digest, body in _rows(
            connection, "SELECT at, parts, digest, body FROM map ORDER BY at"
        ):
            found = None if at is None else _decoded_map(at, parts, digest, body, domains, racks)
            if found is None:
                whole = False
            else:
                maps.append(found)
        return LoadedHistory(tuple(maps), not whole)

    # Writing.

    def _save(self, connection: sqlite3.Connection, maps: Sequence[SiteMap]) -> None:
        wanted = {whole.at: whole for whole in maps}
        new = [whole for at, whole in wanted.items() if at not in self._saved]
        gone = [at for at in self._saved if at not in wanted]
        if not new and not gone:
            return
        connection.execute("BEGIN IMMEDIATE")
        saved = {at: parts for at, parts in self._saved.items() if at in wanted}
        # First delete maps that are no longer needed, which makes room on a full disk.
        connection.executemany("DELETE FROM map WHERE at = ?", [(at,) for at in gone])
        used = {part for parts in saved.values() for part in parts}
        for whole in new:
            saved[whole.at] = self._insert(connection, whole)
            used.update(saved[whole.at])
        left = {digest: part for digest, part in self._parts.items() if part not in used}
        connection.executemany("DELETE FROM part WHERE id = ?", [(part,) for part in left.values()])
        connection.execute("COMMIT")
        self._saved = saved
        self._parts = {digest: part for digest, part in self._parts.items() if part in used}
        self._digests = {part: digest for part, digest in self._digests.items() if part in used}
        current = {id(part) for whole in maps for part in (*whole.racks, *whole.compute_domains)}
        self._known = {
            name: entry for name, entry in self._known.items() if entry[1] in used and name in current
        }

    def _insert(self, connection: sqlite3.Connection, whole: SiteMap) -> tuple[int, ...]:
        """The ids of all parts of a map, first those of its racks and ComputeDomains in their order."""
        racks = [self._rack(connection, rack) for rack in whole.racks]
        domains = [self._domain(connection, domain) for domain in whole.compute_domains]
        own = [part for part, _ in (*racks, *domains)]
        parts = (*own, *{part for _, below in racks for part in below}.difference(own))
        packed = array("Q", parts).tobytes()
        counts = len(racks), len(domains)
        body = _body((counts, msgspec.structs.replace(whole, racks=(), compute_domains=())))
        row = whole.at, packed, _map_digest(whole.at, packed, body), body
        connection.execute("INSERT INTO map VALUES (?, ?, ?, ?)", row)
        return parts

    def _rack(self, connection: sqlite3.Connection, rack: MapRack) -> tuple[int, tuple[int, ...]]:
        if (known := self._known.get(id(rack))) is not None:
            return known[1:]
        stored, domains = _stored_rack(rack)
        below = tuple([self._domain(connection, domain)[0] for domain in domains])
        stored = msgspec.structs.replace(stored, domains=tuple([self._digests[part] for part in below]))
        return self._part(connection, "rack", rack, _body(stored), below)

    def _domain(self, connection: sqlite3.Connection, domain: ComputeDomain) -> tuple[int, tuple[int, ...]]:
        if (known := self._known.get(id(domain))) is not None:
            return known[1:]
        return self._part(connection, "domain", domain, _body(domain), ())

    def _part(
        self, connection: sqlite3.Connection, kind: str, value: object, body: bytes, below: tuple[int, ...]
    ) -> tuple[int, tuple[int, ...]]:
        digest = _digest(body)
        part = self._parts.get(digest)
        if part is None:
            row = kind, digest, body
            part = connection.execute("INSERT INTO part(kind, digest, body) VALUES (?, ?, ?)", row).lastrowid
            assert part is not None  # noqa: S101 (a row was inserted)
            self._parts[digest] = part
        self._digests[part] = digest
        self._known[id(value)] = value, part, below
        return part, below


def _rows(connection: sqlite3.Connection, query: str) -> Iterator[tuple[Any, ...]]:
    """The readable rows, then one row of Nones if the rest of the file cannot be read."""
    cursor = connection.execute(query)
    try:
        yield from cursor
    except sqlite3.DatabaseError:
        yield (None,) * len(cursor.description)


def _decoded_parts(
    bodies: Mapping[int, tuple[str, bytes, bytes]],
) -> tuple[dict[int, ComputeDomain], dict[int, MapRack]]:
    """ComputeDomains and racks by id, without those that cannot be read."""
    domains: dict[int, ComputeDomain] = {}
    by_digest: dict[bytes, ComputeDomain] = {}
    for part, digest, body in _of_kind(bodies, "domain"):
        try:
            by_digest[digest] = domains[part] = _decoded(body, ComputeDomain)
        except _UNREADABLE:
            continue
    racks: dict[int, MapRack] = {}
    for part, _, body in _of_kind(bodies, "rack"):
        try:
            stored = _decoded(body, _StoredRack)
            racks[part] = _rack_of(stored, [by_digest[digest] for digest in stored.domains])
        except _UNREADABLE:
            continue
    return domains, racks


def _of_kind(bodies: Mapping[int, tuple[str, bytes, bytes]], kind: str) -> Iterable[tuple[int, bytes, bytes]]:
    return [(part, digest, body) for part, (of, digest, body) in bodies.items() if of == kind]


def _decoded_map(
    at: float,
    parts: bytes,
    digest: bytes,
    body: bytes,
    domains: Mapping[int, ComputeDomain],
    racks: Mapping[int, MapRack],
) -> SiteMap | None:
    """The map of a row, or None if it or a part of it cannot be read."""
    try:
        if _map_digest(at, parts, body) != digest:
            return None
        (racks_of, domains_of), bare = _decoded(body, tuple[tuple[int, int], SiteMap])
        ids = array("Q", parts)
        return msgspec.structs.replace(
            bare,
            racks=tuple([racks[part] for part in ids[:racks_of]]),
            compute_domains=tuple([domains[part] for part in ids[racks_of : racks_of + domains_of]]),
        )
    except _UNREADABLE:
        return None
