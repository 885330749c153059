"""Failures of the database itself: their names, and the remedy for each.

The backends pass each error of a driver to `sqlite_fault` or `postgres_fault`. A fault becomes a
`StoreUnavailable`, which is a `Retry`: nothing was changed, so REST answers 503 and a reconciler goes on
later. Any other error is a defect of this program, and stays as it is.

`StoreUnavailable` has two texts. `reason` is for anyone: it names no path, host or code of an error.
`detail` is the driver's report, for the log and for the operator who starts the service.
`log_store_failure` is the only place that logs these failures. Callers that carry on need not do so.

Writing in a read transaction is a defect and no fault, though SQLite and PostgreSQL report it as they
report a database that is read-only. So that fault exists for writes alone.
"""

from enum import StrEnum
from typing import Any

import sqlalchemy as sa
import structlog

from rackloom.errors import Retry

log = structlog.get_logger(__name__)

RETRY_SECONDS = 5.0


class StoreFault(StrEnum):
    """The reason why a database does not serve."""

    FULL = "full"
    READ_ONLY = "read-only"
    LOCKED = "locked"
    DISK = "disk"
    BUSY = "busy"
    UNREACHABLE = "unreachable"


_PROBLEMS = {
    StoreFault.FULL: "the site's database has no room",
    StoreFault.READ_ONLY: "the site's database is read-only",
    StoreFault.LOCKED: "another program has locked the site's database",
    StoreFault.DISK: "the disk of the site's database fails",
    StoreFault.BUSY: "the site's database has too much to do",
    StoreFault.UNREACHABLE: "the site's database cannot be reached",
}
_FIXES = {
    StoreFault.FULL: "make room on the disk of the database",
    StoreFault.READ_ONLY: "make the database writable, or name the one that is",
    StoreFault.LOCKED: "end the program that holds the lock",
    StoreFault.DISK: "check that disk",
    StoreFault.BUSY: "find out what keeps the database busy",
    StoreFault.UNREACHABLE: "start the database, or correct its address and credentials",
}


class StoreUnavailable(Retry):
    """The database did not do it, for a cause outside of this program. Nothing was changed."""

    def __init__(self, fault: StoreFault, detail: object) -> None:
        self.fault = fault
        self.detail = str(detail) or type(detail).__name__
        """The driver's report, for operators."""
        self.problem = _PROBLEMS[fault]
        self.fix = _FIXES[fault]
        super().__init__(
            f"{self.problem}, and nothing was changed: try again; if it lasts, the operator of the site"
            f" must {self.fix}",
            after=RETRY_SECONDS,
        )


def log_store_failure(failure: StoreUnavailable) -> None:
    """Log it. Every caller of a database that fails gets here, so repetitions are expected."""
    log.error("store.unavailable", reason=failure.problem, detail=failure.detail, fix=failure.fix)


# Classification by the codes of the drivers.


# Primary result codes of SQLite, https://www.sqlite.org/rescode.html
_SQLITE_FAULTS = {
    5: StoreFault.LOCKED,  # SQLITE_BUSY
    8: StoreFault.READ_ONLY,  # SQLITE_READONLY
    10: StoreFault.DISK,  # SQLITE_IOERR
    13: StoreFault.FULL,  # SQLITE_FULL
    14: StoreFault.DISK,  # SQLITE_CANTOPEN
}
_PRIMARY = 0xFF


def sqlite_fault(error: BaseException, *, write: bool) -> StoreUnavailable | None:
    """The fault behind an error of SQLite, or None if it is no fault of the database."""
    cause: Any = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    code = getattr(cause, "sqlite_errorcode", None)
    return _unavailable(None if code is None else _SQLITE_FAULTS.get(code & _PRIMARY), cause, write)


# SQLSTATE, https://www.postgresql.org/docs/current/errcodes-appendix.html
_POSTGRES_FAULTS = {
    "28000": StoreFault.UNREACHABLE,  # invalid_authorization_specification
    "28P01": StoreFault.UNREACHABLE,  # invalid_password
    "3D000": StoreFault.UNREACHABLE,  # invalid_catalog_name
    "25006": StoreFault.READ_ONLY,  # read_only_sql_transaction
    "53100": StoreFault.FULL,  # disk_full
    "58030": StoreFault.DISK,  # io_error
}


def postgres_fault(error: BaseException, *, write: bool) -> StoreUnavailable | None:
    """The fault behind an error of PostgreSQL that no repetition removes."""
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    return _unavailable(_POSTGRES_FAULTS.get(str(getattr(cause, "sqlstate", None))), cause, write)


def _unavailable(fault: StoreFault | None, cause: object, write: bool) -> StoreUnavailable | None:
    if fault is None or (fault is StoreFault.READ_ONLY and not write):
        return None
    return StoreUnavailable(fault, cause)
