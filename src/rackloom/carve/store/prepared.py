"""Statements that are compiled once and then handed to SQLite's driver without a detour.

SQLAlchemy takes some 15 microseconds to execute a statement that it has compiled before, and SQLite 2 to run
one that finds a row by its key. A request runs a dozen of them. `PreparedStatement` keeps the text of its
statement, the order of its parameters, and how values of each type are converted; a connection to SQLite then
runs it in a third of the time. Results are rows of SQLAlchemy, like those of any other statement.

On PostgreSQL, where a statement waits for the network, it runs as any other statement does. So does one whose
columns have defaults that SQLAlchemy fills in.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.engine import IteratorResult
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.sql.compiler import SQLCompiler

Converter = Callable[[Any], Any]
_DIALECT = SQLiteDialect_pysqlite()


class PreparedStatement:
    """A select of columns, or a change of rows, with parameters that have the same names each time.

    None of its parameters stands for a list of values: such a statement has another text each time.
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
        return conn.dialect.name == "sqlite" and not self._compiled.insert_prefetch

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
