"""What settings are written as: durations, addresses, and tables in which no unknown key is let through."""

import re
from datetime import timedelta
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")


def _duration(value: object) -> object:
    """`60s`, `1h`, `1h 30m`; anything else is left for pydantic to refuse."""
    if not isinstance(value, str):
        return value
    parts = _DURATION.findall(value)
    if not parts or _DURATION.sub("", value).strip():
        raise ValueError('write a duration like "60s", "10m", "1h" or "7d"')
    return timedelta(seconds=sum(float(number) * _UNITS[unit] for number, unit in parts))


Duration = Annotated[timedelta, BeforeValidator(_duration), Field(gt=timedelta(0))]
Listen = Annotated[str, Field(pattern=r"^(\[[0-9a-fA-F:]+\]|[^:\s]+):\d{1,5}$")]
"""`host:port`."""


def split_listen(listen: str) -> tuple[str, int]:
    """Host and port of a checked `host:port`."""
    host, _, port = listen.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(listen: str) -> bool:
    """Whether only this machine can connect."""
    return split_listen(listen)[0] in ("127.0.0.1", "::1", "localhost")


class Section(BaseModel):
    """A part of the file in which no unknown key is let through."""

    model_config = ConfigDict(extra="forbid", frozen=True)
