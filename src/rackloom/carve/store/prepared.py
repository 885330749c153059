"""Statements that are compiled once and then handed to SQLite's driver without a detour.

SQLAlchemy takes some 15 microseconds to execute a statement that it has compiled before, and SQLite 2 to run
one that finds a row by its key. A request runs a dozen of them. `PreparedStatement` keeps the text of its
statement, the order of its parameters, and how values of each type are converted; a connection to SQLite then
runs it in a third of the time. Results are rows of SQLAlchemy, like those of any other statement, or what the
caller makes of the values (`records`): a field of a named tuple is read in a tenth of the time.

`PreparedListing` selects by a list of ids. The text of such a statement depends on how many there are, so it
is prepared for 1, 2, 4, 8 ... ids, and the last id fills up what is left: `IN` asks for a set.

On PostgreSQL, where a statement waits for the network, it runs as any other statement does. So does one that
is completed for each execution: with defaults that SQLAlchemy fills in, or with lists of values.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.engine import IteratorResult
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.sql.compiler import SQLCompiler

T = TypeVar("T")
Converter = Callable[[Any], Any]
_DIALECT = SQLiteDialect_pysqlite()


class PreparedStatement:
    """A select of columns, or a change of rows, with parameters that have the same names each time.

    One with a parameter that stands for a list of values has another text each time, and is not prepared.
    """

    def __init__(self, statement: sa.Select[Any] | sa.Insert | sa.Update | sa.Delete, *values: str) -> None:
        """`values` are the columns that an insertion or a change writes."""
        self._statement = statement
        self._values = values

    def one_or_none(self, conn: sa.Connection, parameters: Mapping[str, object]) -> sa.Row[Any] | None:
        """The only row, or None."""
        if not self._runs_directly(conn):
            return conn.execute(self._statement, parameters).one_or_none()
        # The driver's list, not its cursor: an open one would keep the statement in use.
        found = self._execute(conn, parameters).fetchall()
        return self._result(found).one_or_none() if found else None

    def all(self, conn: sa.Connection, parameters: Mapping[str, object]) -> Sequence[sa.Row[Any]]:
        """All rows."""
        if not self._runs_directly(conn):
            return conn.execute(self._statement, parameters).all()
        return self._result(self._execute(conn, parameters).fetchall()).all()

    def records(
        self, conn: sa.Connection, make: Callable[[Any], T], parameters: Mapping[str, object]
    ) -> list[T]:
        """What `make` makes of each row; it is given the values in the order of the columns."""
        if not self._runs_directly(conn):
            return list(map(make, conn.execute(self._statement, parameters)))
        found = self._execute(conn, parameters).fetchall()
        return list(map(make, map(self._converted, found) if self._results else found))

    def change(self, conn: sa.Connection, parameters: Mapping[str, object]) -> int:
        """Insert, update or delete rows; returns how many."""
        if not self._runs_directly(conn):
            return conn.execute(self._statement, parameters).rowcount
        changed: int = self._execute(conn, parameters).rowcount
        return changed

    def change_each(self, conn: sa.Connection, rows: Sequence[Mapping[str, object]]) -> None:
        """Insert, update or delete with each of `rows`, at least one, as parameters."""
        if self._runs_directly(conn):
            driver: Any = conn.connection.dbapi_connection
            driver.executemany(self._text, [self._ordered(row) for row in rows])
        else:
            conn.execute(self._statement, rows)

    def _runs_directly(self, conn: sa.Connection) -> bool:
        return conn.dialect.name == "sqlite" and self._has_constant_text

    def _execute(self, conn: sa.Connection, parameters: Mapping[str, object]) -> Any:
        driver: Any = conn.connection.dbapi_connection
        return driver.execute(self._text, self._ordered(parameters))

    def _ordered(self, parameters: Mapping[str, object]) -> list[object]:
        """The parameters as the driver takes them."""
        if self._constants:
            parameters = {**self._constants, **parameters}
        return [
            parameters[name] if convert is None else convert(parameters[name])
            for name, convert in self._parameters
        ]

    def _result(self, found: Iterable[tuple[Any, ...]]) -> IteratorResult[Any]:
        return IteratorResult(self._metadata, map(self._converted, found))

    def _converted(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        if not self._results:
            return row
        changed = list(row)
        for index, convert in self._results:
            changed[index] = convert(changed[index])
        return tuple(changed)

    @cached_property
    def _compiled(self) -> SQLCompiler:
        return self._statement.compile(dialect=_DIALECT, column_keys=list(self._values) or None)

    @cached_property
    def _has_constant_text(self) -> bool:
        made = self._compiled
        return not (made.insert_prefetch or made.post_compile_params or made.literal_execute_params)

    @cached_property
    def _text(self) -> str:
        return self._compiled.string

    @cached_property
    def _parameters(self) -> list[tuple[str, Converter | None]]:
        """The parameters in their order, each with what converts its value."""
        binds = self._compiled.binds
        return [
            (name, binds[name].type.dialect_impl(_DIALECT).bind_processor(_DIALECT))
            for name in self._compiled.positiontup or ()
        ]

    @cached_property
    def _constants(self) -> Mapping[str, object]:
        """The parameters that have a value in the statement itself, such as the limit of a select."""
        binds = {name: self._compiled.binds[name] for name, _ in self._parameters}
        return {name: bind.value for name, bind in binds.items() if bind.value is not None}

    @cached_property
    def _columns(self) -> Sequence[sa.ColumnElement[Any]]:
        return list(self._statement.exported_columns)

    @cached_property
    def _metadata(self) -> SimpleResultMetaData:
        return SimpleResultMetaData([column.key or "" for column in self._columns])

    @cached_property
    def _results(self) -> list[tuple[int, Converter]]:
        """The columns whose values are converted."""
        found = [
            (index, column.type.dialect_impl(_DIALECT).result_processor(_DIALECT, None))
            for index, column in enumerate(self._columns)
        ]
        return [(index, convert) for index, convert in found if convert is not None]


MAX_PREPARED_IDS = 256
"""Longer lists are rare: pages have at most 100 rows."""


class PreparedListing:
    """A select of the rows that have one of some ids in a column."""

    def __init__(self, rows: sa.Select[Any], column: sa.ColumnElement[Any]) -> None:
        """`rows` selects all, in their order, without parameters."""
        self._rows = rows
        self._column = column
        self._prepared: dict[int, PreparedStatement] = {}

    def records(self, conn: sa.Connection, make: Callable[[Any], T], ids: Collection[str]) -> list[T]:
        """What `make` makes of each row, given its values in the order of the columns."""
        if not ids:
            return []
        if conn.dialect.name != "sqlite" or len(ids) > MAX_PREPARED_IDS:
            return list(map(make, conn.execute(self._any_number, {"ids": list(ids)})))
        size = 1 << (len(ids) - 1).bit_length()
        given = [*ids]
        given += given[-1:] * (size - len(given))
        return self._of(size).records(conn, make, dict(zip(_names(size), given, strict=True)))

    def _of(self, size: int) -> PreparedStatement:
        if (found := self._prepared.get(size)) is None:
            wanted: list[sa.BindParameter[str]] = [sa.bindparam(name) for name in _names(size)]
            found = self._prepared[size] = PreparedStatement(self._rows.where(self._column.in_(wanted)))
        return found

    @cached_property
    def _any_number(self) -> sa.Select[Any]:
        return self._rows.where(self._column.in_(sa.bindparam("ids", expanding=True)))


@cache
def _names(size: int) -> Sequence[str]:
    """The names of that many parameters."""
    return [f"id_{number}" for number in range(size)]
