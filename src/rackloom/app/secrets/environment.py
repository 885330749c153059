"""Secrets as environment variables.

`nmxm/default/auth`, field `password`, is `RACKLOOM_SECRET_NMXM_DEFAULT_AUTH__PASSWORD`.
"""

import re
from collections.abc import Mapping

from rackloom.app.secrets.values import Secret, parts, read_only

PREFIX = "RACKLOOM_SECRET_"


class EnvironmentSecrets:
    """The environment that the process was started with."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    async def read(self, path: str) -> Mapping[str, Secret] | None:
        """Every variable of `path`, by the lower-case name of its field."""
        prefix = variable(path)
        found = {
            name.removeprefix(prefix).lower(): Secret(value)
            for name, value in self._environment.items()
            if name.startswith(prefix) and len(name) > len(prefix)
        }
        return found or None

    async def write(self, path: str, fields: Mapping[str, Secret]) -> None:
        """Refused: a process cannot change what it will be started with."""
        raise read_only("the environment")

    async def delete(self, path: str) -> None:
        """Refused, as `write`."""
        raise read_only("the environment")


def variable(path: str) -> str:
    """What the variables of `path` begin with."""
    return PREFIX + re.sub(r"[^A-Z0-9]", "_", "_".join(parts(path)).upper()) + "__"
