"""The home directory of an embedded site: paths, and tokens signed with its key.

A home holds the store, the private key of the local token issuer, the logs, and the state of the simulated
switches. All of it is readable by its owner only: the directories are 0700, and a process that is
a site's own makes its files private too (`process.keep_files_private`).

`mint_token` signs a token for an organisation. It works whether or not the site runs, because the service
verifies with the key in the same home. It refuses a home without a site, a name that cannot be part of a
URL path, and a lifetime beyond 366 days.

While a site runs, `address` holds the URL of its REST service.
"""

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rackloom.errors import Refused


class Home(msgspec.Struct, frozen=True):
    """Paths below one home directory, which only its owner can read."""

    path: Path

    @property
    def keys(self) -> Path:
        """Private key of the local token issuer."""
        return self.path / "keys"

    @property
    def database(self) -> Path:
        """The site's records, without PostgreSQL."""
        return self.path / "site.db"

    @property
    def log(self) -> Path:
        """JSON lines."""
        return self.path / "logs" / "rackloom.log"

    @property
    def address(self) -> Path:
        """The URL of the REST service, while it runs."""
        return self.path / "address"

    @property
    def twin(self) -> Path:
        """State of the simulated switch controllers that survives a restart."""
        return self.path / "twin"

    @property
    def map_history(self) -> Path:
        """The rack map's history of the last day."""
        return self.path / "map-history.db"

    def create(self) -> None:
        """Create the directories, which only their owner can open. Raises Refused."""
        try:
            for directory in (self.path, self.keys, self.log.parent, self.twin):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise Refused(
                f"cannot make the directory {error.filename}: {error.strerror}",
                nearest_fix="give another one with --home",
            ) from error


def existing_database(home: Path) -> Path:
    """The site's database in `home`. Raises Refused if there is none."""
    file = Home(home).database
    if not file.is_file():
        raise Refused(f"there is no site in {home}", nearest_fix="name the home of `rackloom up` with --home")
    return file


def default_home() -> Path:
    """$RACKLOOM_HOME, or `rackloom` under the XDG data directory if it is not set."""
    if named := os.environ.get("RACKLOOM_HOME"):
        return Path(named)
    data = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(data) / "rackloom"


_ORG_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def mint_token(home: Home, *, org: str, roles: Sequence[str], hours: float) -> str:
    """A bearer token for `org`. Refused when no site lives in `home`."""
    if not home.keys.is_dir():
        raise Refused(
            f"no site lives in {home.path}",
            nearest_fix=f"start one with: rackloom up --home {home.path}",
        )
    # Imported on use: most of those who have a home sign nothing.
    from rackloom.carve.api.auth import LOCAL_LIFETIME, LocalIssuer

    _check_token_request(org, hours, int(LOCAL_LIFETIME / 3600))
    return LocalIssuer(home.keys).mint(org, tuple(dict.fromkeys(roles)), now=time.time(), ttl=hours * 3600)


def _check_token_request(org: str, hours: float, most_hours: int) -> None:
    if not _ORG_NAME.fullmatch(org):
        raise Refused(
            f"{org!r} cannot be an organisation: it is part of a path",
            nearest_fix="use letters, digits, dots, dashes and underscores, 63 at most",
        )
    if not 0 < hours <= most_hours:
        raise Refused(f"a token cannot be valid for {hours} hours", nearest_fix=f"use up to {most_hours}")
