"""Statements that are compiled once and then handed to the driver of the database without a detour.

SQLAlchemy takes some 15 microseconds to execute a statement that it has compiled before, and SQLite 2 to run
one that finds a row by its key. With asyncpg SQLAlchemy takes half of the time that a statement costs this
process. A request runs a dozen of them. `PreparedStatement` keeps the text of its statement, the order of its
parameters, and how values of each type are converted; it is then run at the driver's own connection. Results
are rows of SQLAlchemy, like those of any other statement, or what the caller makes of the values (`records`):
a field of a named tuple is read in a tenth of the time.

`PreparedListing` selects by a list of ids. On PostgreSQL the list is one parameter. On SQLite the text of
such a statement depends on how many ids there are, so it is prepared for 1, 2, 4, 8 ... of them, and the last
id fills up what is left: `IN` asks for a set.

A statement that is completed for each execution, with defaults that SQLAlchemy fills in or with lists of
values, runs as any other statement does.

In a write transaction on PostgreSQL, changes without a result wait (`defer_changes`) and become one
statement: each round trip costs this process more than the server. They run before the next statement that
is not among them. Inside one statement no part sees what another writes, so a change of a table that waits
already comes after it.

Rows by the values of their columns: find, insert, update, delete.

Each statement is built once for its table and columns (`prepared`): to build one costs more than most of its
execution.
A wanted value must not be None, because NULL equals nothing, and updates and deletions need at least one:
none of them may touch a whole table by mistake. Queries that join tables stay with their callers.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import IteratorResult
from sqlalchemy.engine.interfaces import Dialect
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.util import await_only

from rackloom.carve.store.values import conflict, not_found

T = TypeVar("T")
Converter = Callable[[Any], Any]
Statement = sa.Select[Any] | sa.Insert | sa.Update | sa.Delete


class PreparedStatement:
    """A select of columns, or a change of rows, with parameters that have the same names each time.

    One with a parameter that stands for a list of values has another text each time, and is not prepared.
    """

    def __init__(self, statement: Statement, *values: str, is_apart: bool = False) -> None:
        """`values` are the columns that an insertion or a change writes.

        One that `is_apart` touches no row that another change of its transaction touches.
        """
        self._statement = statement
        self._is_apart = is_apart
        self._values = values
        self._texts: dict[str, _StatementText] = {}

    def one_or_none(self, conn: sa.Connection, parameters: Mapping[str, object]) -> sa.Row[Any] | None:
        """The only row, or None."""
        text = self._text_for(conn)
        if not text.is_constant:
            return conn.execute(self._statement, parameters).one_or_none()
        found = text.rows(conn, parameters)
        return text.result(found).one_or_none() if found else None

    def all(self, conn: sa.Connection, parameters: Mapping[str, object]) -> Sequence[sa.Row[Any]]:
        """All rows."""
        text = self._text_for(conn)
        if not text.is_constant:
            return conn.execute(self._statement, parameters).all()
        return text.result(text.rows(conn, parameters)).all()

    def records(
        self, conn: sa.Connection, make: Callable[[Any], T], parameters: Mapping[str, object]
    ) -> list[T]:
        """What `make` makes of each row; it is given the values in the order of the columns."""
        text = self._text_for(conn)
        if not text.is_constant:
            return list(map(make, conn.execute(self._statement, parameters)))
        return list(map(make, text.converted(text.rows(conn, parameters))))

    def change(self, conn: sa.Connection, parameters: Mapping[str, object]) -> int:
        """Insert, update or delete rows; returns how many."""
        text = self._text_for(conn)
        if not text.is_constant:
            return conn.execute(self._statement, parameters).rowcount
        return text.change(conn, parameters)

    def change_each(self, conn: sa.Connection, rows: Sequence[Mapping[str, object]]) -> None:
        """Insert, update or delete with each of `rows`, at least one, as parameters."""
        text = self._text_for(conn)
        if text.is_constant:
            text.change_each(conn, rows)
        else:
            conn.execute(self._statement, rows)

    def _text_for(self, conn: sa.Connection) -> "_StatementText":
        """Compiled for the database of `conn`, when that is first wanted."""
        name = conn.dialect.name
        if (found := self._texts.get(name)) is None:
            kind = _PostgresText if name == "postgresql" else _SqliteText
            found = self._texts[name] = kind(self._statement, self._values, conn.dialect)
            found.is_apart = self._is_apart
        return found


# The text of a statement, and the driver that runs it.


class _StatementText:
    """A statement as one kind of database gets it."""

    is_apart = False
    number_type: int | None = None
    """What the driver calls the type of doubles, if SQLAlchemy asks for that."""

    def __init__(self, statement: Statement, values: Sequence[str], dialect: Dialect) -> None:
        if isinstance(statement, sa.Insert):
            # Otherwise SQLAlchemy would ask for the key of the new row, which nobody reads.
            statement = statement.inline()
        made: Any = statement.compile(dialect=dialect, column_keys=list(values) or None)
        names = made.positiontup or ()
        self.is_constant = not (
            made.insert_prefetch or made.post_compile_params or made.literal_execute_params
        )
        self._dialect = dialect
        self.text: str = made.string
        self._parameters: list[tuple[str, Converter | None]] = [
            (name, made.binds[name].type.dialect_impl(dialect).bind_processor(dialect)) for name in names
        ]
        """The parameters in their order, each with what converts its value."""
        self._constants = {
            name: made.binds[name].value for name in names if made.binds[name].value is not None
        }
        """The parameters that have a value in the statement itself, such as the limit of a select."""
        self._columns: Sequence[sa.ColumnElement[Any]] = list(statement.exported_columns)

    def rows(self, conn: sa.Connection, parameters: Mapping[str, object]) -> Sequence[Any]:
        """The rows as the driver gives them."""
        # The driver's list, not its cursor: an open one would keep the statement in use.
        found: Sequence[Any] = self._execute(conn, parameters).fetchall()
        return found

    def change(self, conn: sa.Connection, parameters: Mapping[str, object]) -> int:
        """Change rows; returns how many."""
        changed: int = self._execute(conn, parameters).rowcount
        return changed

    def _execute(self, conn: sa.Connection, parameters: Mapping[str, object]) -> Any:
        """The driver's cursor after the statement has run."""
        raise NotImplementedError

    def change_each(self, conn: sa.Connection, rows: Iterable[Mapping[str, object]]) -> None:
        """Change rows with each of these parameters."""
        raise NotImplementedError

    def result(self, found: Iterable[Any]) -> IteratorResult[Any]:
        """Rows of SQLAlchemy."""
        return IteratorResult(self._metadata, map(tuple, self.converted(found)))

    def converted(self, found: Iterable[Any]) -> Iterable[Any]:
        """Rows of the driver with values as SQLAlchemy has them."""
        return map(self._converted, found) if self._results else found

    def _ordered(self, parameters: Mapping[str, object]) -> list[object]:
        """The parameters as the driver takes them."""
        if self._constants:
            parameters = {**self._constants, **parameters}
        return [
            parameters[name] if convert is None else convert(parameters[name])
            for name, convert in self._parameters
        ]

    def _converted(self, row: Iterable[Any]) -> list[Any]:
        changed = list(row)
        for index, convert in self._results:
            changed[index] = convert(changed[index])
        return changed

    @cached_property
    def _metadata(self) -> SimpleResultMetaData:
        return SimpleResultMetaData([column.key or "" for column in self._columns])

    @cached_property
    def _results(self) -> list[tuple[int, Converter]]:
        """The columns whose values are converted."""
        found = [(index, self._reader_of(column)) for index, column in enumerate(self._columns)]
        return [(index, convert) for index, convert in found if convert is not None]

    def _reader_of(self, column: sa.ColumnElement[Any]) -> Converter | None:
        kind = column.type.dialect_impl(self._dialect)
        return kind.result_processor(self._dialect, self.number_type)


class _SqliteText(_StatementText):
    """Run at a connection of sqlite3."""

    def change_each(self, conn: sa.Connection, rows: Iterable[Mapping[str, object]]) -> None:
        driver: Any = conn.connection.dbapi_connection
        driver.executemany(self.text, [self._ordered(row) for row in rows])

    def _execute(self, conn: sa.Connection, parameters: Mapping[str, object]) -> Any:
        driver: Any = conn.connection.dbapi_connection
        return driver.execute(self.text, self._ordered(parameters))


class _PostgresText(_StatementText):
    """Run by a cursor of SQLAlchemy's adapter of asyncpg, which prepares it once on each connection."""

    number_type = 701  # float8

    def __init__(self, statement: Statement, values: Sequence[str], dialect: Dialect) -> None:
        super().__init__(statement, values, dialect)

        self.size = len(self._parameters)
        self.written = getattr(statement, "table", None)
        self._is_insertion = isinstance(statement, sa.Insert)
        parts = sa.sql.visitors.iterate(statement)
        self._tables = {self.written, *(part for part in parts if isinstance(part, sa.Table))}

    def change_each(self, conn: sa.Connection, rows: Iterable[Mapping[str, object]]) -> None:
        given = [self._ordered(row) for row in rows]
        waiting: list[_Change] | None = conn.info.get(_WAITING_CHANGES)
        if waiting is not None and len(given) <= (MAX_MERGED_ROWS if self._is_insertion else 1):
            others = (other.written for other, _ in waiting if not other.is_apart)
            if not self.is_apart and not self._tables.isdisjoint(others):
                run_changes(conn)
            waiting.append((self, given))
        elif len(given) == 1:
            self._run(conn, lambda cursor: cursor.execute(self.text, given[0]))
        else:
            self._run(conn, lambda cursor: cursor.executemany(self.text, given))

    def _execute(self, conn: sa.Connection, parameters: Mapping[str, object]) -> Any:
        given = self._ordered(parameters)
        return self._run(conn, lambda cursor: cursor.execute(self.text, given))

    def _run(self, conn: sa.Connection, run: Callable[[Any], object]) -> Any:
        return _run_on_postgres(conn, self.text, run)


def _run_on_postgres(conn: sa.Connection, text: str, run: Callable[[Any], T]) -> Any:
    """A cursor after `run`. Raises DBAPIError of SQLAlchemy, as any other statement."""
    run_changes(conn)
    driver: Any = conn.connection.dbapi_connection
    cursor = driver.cursor()
    try:
        run(cursor)
    except driver.dbapi.Error as error:
        if conn.dialect.is_disconnect(error, driver, cursor):
            # SQLAlchemy sees it too, and lets go of its other connections to that server.
            conn.exec_driver_sql("SELECT 1")
        raise sa.exc.DBAPIError.instance(
            text, None, error, driver.dbapi.Error, dialect=conn.dialect
        ) from error
    return cursor


class PreparedCommand:
    """Commands of PostgreSQL without parameters and without a result, in one round trip."""

    def __init__(self, text: str) -> None:
        self._text = text

    def run(self, conn: sa.Connection) -> str:
        """Run them; returns the server's name of the last one that it did."""
        done = [""]

        def run(cursor: Any) -> None:
            driver: Any = conn.connection.dbapi_connection
            try:
                done[0] = await_only(driver.driver_connection.execute(self._text))
            except Exception as error:
                driver._handle_exception(error)

        _run_on_postgres(conn, self._text, run)
        return done[0]


# Changes that wait, on PostgreSQL.


MAX_MERGED_ROWS = 4
"""Of one insertion: the text of a merged statement depends on how many there are."""
_WAITING_CHANGES = "waiting_changes"
_Change = tuple[_PostgresText, list[list[object]]]
_PARAMETER = re.compile(r"\$(\d+)")


def defer_changes(conn: sa.Connection) -> None:
    """From now on changes without a result wait, and none waits now."""
    conn.info[_WAITING_CHANGES] = []


def run_changes(conn: sa.Connection) -> None:
    """Run the changes that wait, as one statement."""
    if not (waiting := conn.info.get(_WAITING_CHANGES)):
        return
    changes: list[_Change] = waiting[:]
    waiting.clear()
    text = _merged(tuple((change.text, change.size, len(rows)) for change, rows in changes))
    given = [value for _, rows in changes for row in rows for value in row]
    _run_on_postgres(conn, text, lambda cursor: cursor.execute(text, given))


@lru_cache(maxsize=1024)
def _merged(changes: Sequence[tuple[str, int, int]]) -> str:
    """One statement of several: the text of each, how many parameters it has, and for how many rows it is."""
    merged, first = [], 0

    def numbered(text: str) -> str:
        return _PARAMETER.sub(lambda found: f"${int(found[1]) + first}", text)

    for text, size, rows in changes:
        head, values, row = text.rpartition(" VALUES ") if rows > 1 else ("", "", text)
        shown = []
        for _ in range(rows):
            shown.append(numbered(row))
            first += size
        merged.append(f"{head}{values}{', '.join(shown)}")
    *others, last = merged
    before = ", ".join(f"change_{number} AS ({text})" for number, text in enumerate(others))
    return f"WITH {before} {last}" if others else last


# Listings by ids.


MAX_PREPARED_IDS = 256
"""On SQLite. Longer lists are rare: pages have at most 100 rows."""


class PreparedListing:
    """A select of the rows that have one of some ids in a column."""

    def __init__(
        self,
        rows: sa.Select[Any] | Callable[[sa.ColumnElement[bool]], sa.Select[Any]],
        column: sa.ColumnElement[Any],
    ) -> None:
        """`rows` selects all, in their order, without parameters; or those with a condition of `column`."""
        self._rows_with = rows.where if isinstance(rows, sa.Select) else rows
        self._column = column
        self._prepared: dict[int, PreparedStatement] = {}

    def records(self, conn: sa.Connection, make: Callable[[Any], T], ids: Collection[str]) -> list[T]:
        """What `make` makes of each row, given its values in the order of the columns."""
        if not ids:
            return []
        if conn.dialect.name == "postgresql":
            return self._any_of_array.records(conn, make, {"ids": list(ids)})
        if len(ids) > MAX_PREPARED_IDS:
            return list(map(make, conn.execute(self._any_number, {"ids": list(ids)})))
        size = 1 << (len(ids) - 1).bit_length()
        given = [*ids]
        given += given[-1:] * (size - len(given))
        return self._of(size).records(conn, make, dict(zip(_names(size), given, strict=True)))

    def _of(self, size: int) -> PreparedStatement:
        if (found := self._prepared.get(size)) is None:
            wanted: list[sa.BindParameter[str]] = [sa.bindparam(name) for name in _names(size)]
            found = self._prepared[size] = PreparedStatement(self._rows_with(self._column.in_(wanted)))
        return found

    @cached_property
    def _any_number(self) -> sa.Select[Any]:
        return self._rows_with(self._column.in_(sa.bindparam("ids", expanding=True)))

    @cached_property
    def _any_of_array(self) -> PreparedStatement:
        wanted = sa.any_(sa.bindparam("ids", type_=sa.ARRAY(sa.String)))
        return PreparedStatement(self._rows_with(self._column == wanted))


@cache
def _names(size: int) -> Sequence[str]:
    """The names of that many parameters."""
    return [f"id_{number}" for number in range(size)]


# Rows by the values of their columns.


def require(row: T | None, message: str) -> T:
    """`row`. Refused as not found if there is none."""
    if row is None:
        raise not_found(message)
    return row


def require_unused(existing: Any | None, message: str) -> None:
    """Refuse a name or id that an object has: `existing` is its row or its id."""
    if existing is not None:
        raise conflict(message, id=getattr(existing, "id", existing))


def find_row(conn: sa.Connection, table: sa.Table, **wanted: object) -> sa.Row[Any] | None:
    """The only row with these values, or None."""
    return _select(table, *wanted).one_or_none(conn, _parameters(wanted))


def has_row(conn: sa.Connection, table: sa.Table, **wanted: object) -> bool:
    """Whether any row has these values."""
    return _select_first(table, *wanted).one_or_none(conn, _parameters(wanted)) is not None


def count_rows(conn: sa.Connection, table: sa.Table, **wanted: object) -> int:
    """How many rows have these values."""
    (counted,) = _count(table, *wanted).all(conn, _parameters(wanted))
    return int(counted[0])


def insert_row(conn: sa.Connection, table: sa.Table, **values: object) -> None:
    """Insert one row."""
    _insert(table, *values).change_each(conn, [values])


def update_rows(conn: sa.Connection, table: sa.Table, wanted: Mapping[str, object], **values: object) -> None:
    """Write `values` into the rows with the values `wanted`."""
    update = _update(table, tuple(wanted), tuple(values))
    update.change_each(conn, [{**_parameters(wanted), **values}])


def update_and_count(
    conn: sa.Connection, table: sa.Table, wanted: Mapping[str, object], **values: object
) -> int:
    """As `update_rows`; returns how many rows there are."""
    return _update(table, tuple(wanted), tuple(values)).change(conn, {**_parameters(wanted), **values})


def delete_rows(conn: sa.Connection, table: sa.Table, **wanted: object) -> None:
    """Delete the rows with these values."""
    _delete(table, *wanted).change_each(conn, [_parameters(wanted)])


def delete_and_count(conn: sa.Connection, table: sa.Table, **wanted: object) -> int:
    """As `delete_rows`; returns how many rows there were."""
    return _delete(table, *wanted).change(conn, _parameters(wanted))


def _parameters(wanted: Mapping[str, object]) -> dict[str, object]:
    if None in wanted.values():
        raise ValueError(f"NULL equals nothing: {dict(wanted)}")
    # Prefixed: SQLAlchemy takes a parameter with the name of a column as a value to write.
    return {f"wanted_{name}": value for name, value in wanted.items()}


def _conditions(table: sa.Table, names: tuple[str, ...]) -> list[sa.ColumnElement[bool]]:
    return [table.c[name] == sa.bindparam(f"wanted_{name}") for name in names]


def _require_condition(table: sa.Table, names: tuple[str, ...]) -> None:
    if not names:
        raise ValueError(f"no condition: this would change every row of {table.name}")


# Rows of a tenant.


def owned_by(owner: sa.Column[str], tenant: str | sa.BindParameter[str]) -> sa.ColumnElement[bool]:
    """Whether a row belongs to a tenant, by the column that names its owner."""
    return _Owned(owner == tenant)


class _Owned(sa.sql.functions.FunctionElement[bool]):
    """A condition that is marked as rare for SQLite.

    SQLite supposes that all tenants have the same number of rows, as many as at the last ANALYZE. Beside a
    large tenant it would choose an index of all tenants, or the whole table, for the list of a small one.
    """

    type = sa.Boolean()
    inherit_cache = True

    def self_group(self, against: Any = None) -> "_Owned":
        """As it is. SQLAlchemy would compare it with 1, and no index answers that."""
        return self


@compiles(_Owned)
def _compile_owned(owned: _Owned, compiler: Any, **options: Any) -> str:
    condition = compiler.process(owned.clauses, **options)
    return f"likelihood({condition}, 0.000001)" if compiler.dialect.name == "sqlite" else condition


def _rows(table: sa.Table, names: tuple[str, ...]) -> sa.Select[Any]:
    return sa.select(table).where(*_conditions(table, names))


@cache
def _select(table: sa.Table, *names: str) -> PreparedStatement:
    return PreparedStatement(_rows(table, names))


@cache
def _select_first(table: sa.Table, *names: str) -> PreparedStatement:
    return PreparedStatement(_rows(table, names).limit(1))


@cache
def _count(table: sa.Table, *names: str) -> PreparedStatement:
    counted = _rows(table, names).with_only_columns(sa.func.count(), maintain_column_froms=True)
    return PreparedStatement(counted)


@cache
def _insert(table: sa.Table, *names: str) -> PreparedStatement:
    return PreparedStatement(sa.insert(table), *names)


@cache
def _update(table: sa.Table, names: tuple[str, ...], values: tuple[str, ...]) -> PreparedStatement:
    _require_condition(table, names)
    return PreparedStatement(sa.update(table).where(*_conditions(table, names)), *values)


@cache
def _delete(table: sa.Table, *names: str) -> PreparedStatement:
    _require_condition(table, names)
    return PreparedStatement(sa.delete(table).where(*_conditions(table, names)))
