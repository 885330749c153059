"""The objects that tenants have at a site, as the tenant's commands see them.

`SiteAccess` names the site and the organisation. The site is that of `rackloom up` in a home directory, for
which a token is made, or any service with a token. `ObjectKind` describes how objects of one kind are listed,
read and deleted, and how they look in a table. Everything else is the same for all kinds:

- `find` takes an id or a name. It refuses a name that several objects have, and lists their ids. For an
  unknown name it gives the nearest names.
- `show` prints a table, JSON, YAML or names. It reports an empty list on standard error with the name of the
  organisation, because a misspelt organisation would look like an empty one.
- `watch` prints the list, then each object that changed, until Ctrl-C. It polls every `WATCH_SECONDS`.
- `wait` polls until every object has a status, and shows the count on standard error.
"""

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar
from uuid import UUID

import msgspec
from cyclopts import UNSET, Parameter

from rackloom.cli.common import OUTPUT, columns, emit, note, progress_text
from rackloom.client.call import Call, PagedCall
from rackloom.client.errors import Missing
from rackloom.errors import Misuse, Refused, Retry

if TYPE_CHECKING:
    from rackloom.client import Client, Connection

T = TypeVar("T")
ObjectFormat = Literal["table", "json", "yaml", "name"]
ObjectOutput = Annotated[ObjectFormat, OUTPUT]
WATCH_SECONDS = 1.0
COMPLETION_SECONDS = 2.0
"""The timeout for names that a shell offers, because a user does not wait longer."""

# The site, and the organisation that a command acts for.


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SiteAccess:
    """The site to call, and the organisation."""

    org: Annotated[str, Parameter(env_var="RACKLOOM_ORG")] = "demo"
    "Organisation that you act for."
    url: Annotated[str | None, Parameter(env_var="RACKLOOM_URL")] = None
    "Address of the service, such as https://site.example. Default: the site of `rackloom up` in HOME."
    token_file: Annotated[Path | None, Parameter(env_var="RACKLOOM_TOKEN_FILE")] = None
    "File with the bearer token, for a site with a --url."
    ca: Annotated[Path | None, Parameter(env_var="RACKLOOM_CA")] = None
    "Certificate authority of the service (PEM). Default: the system's trusted authorities."
    home: Annotated[Path | None, Parameter(env_var="RACKLOOM_HOME")] = None
    "Home of the `rackloom up`. Default: the one that `rackloom up` uses."

    def client(self, timeout: float | None = None) -> "Client":
        """A client. With a `timeout` in seconds, it tries each request once."""
        connection = self._connection()
        # The HTTP library takes longer to import than everything else. Help and refusals do not need it.
        import httpx2

        from rackloom.client import Client, RetryPolicy

        if timeout is None:
            return Client(connection)
        return Client(connection, retries=RetryPolicy(attempts=1), timeout=httpx2.Timeout(timeout))

    def advise(self, command: str) -> None:
        """Print the next command to try on standard error, with the options for this site."""
        options = {
            "--org": None if self.org == type(self).org else self.org,
            "--url": self.url,
            "--token-file": self.token_file,
            "--ca": self.ca,
            "--home": self.home,
        }
        given = [f"{name} {shlex.quote(str(value))}" for name, value in options.items() if value is not None]
        note(" ".join(["next: rackloom", command, *given]))

    def _connection(self) -> "Connection":
        if self.url is None:
            from rackloom.app.home import Home, default_home
            from rackloom.app.home_connection import home_connection

            return home_connection(Home(self.home or default_home()), org=self.org, roles=["TENANT_ADMIN"])
        if self.token_file is None:
            raise Misuse(
                f"{self.url} wants a token",
                nearest_fix="name its file with --token-file or RACKLOOM_TOKEN_FILE",
            )
        from rackloom.client import Connection

        return Connection(url=self.url, org=self.org, token=self.token_file, ca=self.ca)


def _access_of(context: Any) -> SiteAccess:
    """The site of a command line that is being completed. `context` is cyclopts' CompletionContext."""
    given = {field.name: context[field.name].value for field in fields(SiteAccess)}
    return SiteAccess(**{name: value for name, value in given.items() if value is not UNSET})


# A kind of objects.


Row = tuple[object, ...]


class ObjectKind(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """One kind of a tenant's objects."""

    noun: str
    plural: str
    headers: tuple[str, ...]
    listed: Callable[[], PagedCall[T]]
    read: Callable[[str], Call[T]]
    name: Callable[[T], str]
    row: Callable[[T, "Names"], Row]
    """An object's cells in a table, in the order of `headers`, without the id, which comes last."""
    delete: Callable[[str], Call[Any]] | None = None

    def find(self, client: "Client", wanted: str) -> T:
        """The object with this id or name. Raises Refused if there is none, or more than one."""
        if _is_id(wanted):
            return client.call(self.read(wanted))
        every = list(client.items(self.listed()))
        found = [each for each in every if self.name(each) == wanted]
        if len(found) > 1:
            ids = ", ".join(_id(each) for each in found)
            raise Refused(
                f"{len(found)} {self.plural} are called {wanted!r}", nearest_fix=f"give an id: {ids}"
            )
        if not found:
            near = get_close_matches(wanted, [self.name(each) for each in every])
            fix = f"did you mean {' or '.join(near)}?" if near else f"see: rackloom {self.noun} list"
            raise Refused(f"there is no {self.noun} {wanted!r}", nearest_fix=fix)
        return found[0]

    def complete(self, context: Any) -> list[str]:
        """The names that a shell offers for a word. cyclopts turns an error into an empty list."""
        with _access_of(context).client(timeout=COMPLETION_SECONDS) as client:
            return [self.name(each) for each in client.items(self.listed())]


class Names:
    """The names of objects by id, read once for each kind that a table refers to."""

    def __init__(self, client: "Client") -> None:
        self._client = client
        self._known: dict[str, Mapping[str, str]] = {}

    def of(self, kind: ObjectKind[Any], object_id: str | None) -> str:
        """The name of an object, its id if it is not listed, or `-` for None."""
        if object_id is None:
            return "-"
        if kind.noun not in self._known:
            listed = self._client.items(kind.listed())
            self._known[kind.noun] = {_id(each): kind.name(each) for each in listed}
        return self._known[kind.noun].get(object_id, object_id)


def _id(found: Any) -> str:
    return str(found.id)


def _is_id(wanted: str) -> bool:
    try:
        UUID(wanted)
    except ValueError:
        return False
    return True


# Printing.


def show(
    client: "Client", kind: ObjectKind[T], objects: Sequence[T], output: ObjectFormat, *, single: bool = False
) -> None:
    """Print objects. With `single`, JSON and YAML are one object instead of a list of one."""
    if output == "name":
        for each in objects:
            print(kind.name(each))
        return
    value = objects[0] if single else objects
    emit(value, output, lambda: _table(kind, objects, Names(client)))


def _table(kind: ObjectKind[T], objects: Sequence[T], names: Names) -> str:
    return columns((*kind.headers, "ID"), (_cells(kind, each, names) for each in objects))


def _cells(kind: ObjectKind[T], found: T, names: Names) -> Row:
    return (*("-" if cell is None else cell for cell in kind.row(found, names)), _id(found))


def status_of(found: Any) -> str:
    """The status, or "unknown since" a time if the fabric has not confirmed it."""
    since: datetime | None = getattr(found, "unknown_since", None)
    return str(found.status) if since is None else f"unknown since {since:%H:%M:%S} UTC"


def age(created: datetime) -> str:
    """The time since `created`, in the largest unit that has a whole number."""
    seconds = max(0, int((datetime.now(UTC) - created).total_seconds()))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


# Watching and waiting.


def watch(client: "Client", kind: ObjectKind[T], sleep: Callable[[float], None] = time.sleep) -> None:
    """Print the list, then new, changed or deleted objects, until Ctrl-C. A lost request is repeated."""
    shown: dict[str, Row] = {}
    print(columns((*kind.headers, "ID"), ()), flush=True)
    for rows in _readings(client, kind, sleep):
        for object_id, row in rows.items():
            if _without_age(kind, shown.get(object_id)) != _without_age(kind, row):
                print("  ".join(map(str, row)), flush=True)
        for object_id in shown.keys() - rows.keys():
            print(f"{shown[object_id][0]}  deleted  {object_id}", flush=True)
        shown = rows


def _readings(
    client: "Client", kind: ObjectKind[T], sleep: Callable[[float], None]
) -> Iterator[dict[str, Row]]:
    """Yield the row of each object by id, once per poll."""
    while True:
        try:
            names = Names(client)
            yield {_id(each): _cells(kind, each, names) for each in client.items(kind.listed())}
        except Retry as trouble:
            note(f"rackloom: {trouble.reason}; asking again")
        sleep(WATCH_SECONDS)


def _without_age(kind: ObjectKind[Any], row: Row | None) -> Row | None:
    return row and tuple(cell for header, cell in zip(kind.headers, row, strict=False) if header != "AGE")


def wait(
    client: "Client",
    kind: ObjectKind[T],
    ids: Sequence[str],
    status: str,
    seconds: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Sequence[T]:
    """The objects, once all have `status`. Raises Retry after `seconds`, and Refused if one is in Error."""
    objects: list[Any] = []

    def done() -> int:
        objects[:] = [client.call(kind.read(object_id)) for object_id in ids]
        if failed := [kind.name(each) for each in objects if each.status == "Error"]:
            fix = f"see: rackloom {kind.noun} get {failed[0]}"
            raise Refused(f"{', '.join(failed)}: Error", nearest_fix=fix)
        return sum(each.status == status and getattr(each, "unknown_since", None) is None for each in objects)

    _until_all(done, len(ids), status, seconds, sleep, clock)
    return objects


def wait_until_gone(
    client: "Client",
    kind: ObjectKind[Any],
    ids: Sequence[str],
    seconds: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Return once none of the objects exists. Raises Retry after `seconds`."""

    def gone() -> int:
        return sum(_is_gone(client, kind, object_id) for object_id in ids)

    _until_all(gone, len(ids), "deleted", seconds, sleep, clock)


def _until_all(
    count: Callable[[], int],
    total: int,
    what: str,
    seconds: float,
    sleep: Callable[[float], None],
    clock: Callable[[], float],
) -> None:
    """Return once `count` gives `total`, and print each change of the count."""
    begun, before = clock(), -1
    while (done := count()) < total:
        if done != before:
            note(progress_text(done, total, what, clock() - begun))
        if clock() > begun + seconds:
            raise Retry(f"{done} of {total} are {what} after {seconds:.0f} s", after=seconds)
        before = done
        sleep(WATCH_SECONDS / 4)
    note(f"{total} of {total} {what}")


def _is_gone(client: "Client", kind: ObjectKind[Any], object_id: str) -> bool:
    try:
        client.call(kind.read(object_id))
    except Missing:
        return True
    return False
