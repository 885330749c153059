"""Strict reading of a config: what is not understood is refused, with the place and what to change."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from rackloom.errors import Refused

T = TypeVar("T", bound=msgspec.Struct)


class ConfigValue(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True
):
    """Base of all config values."""


def read_strictly(parameters: Mapping[str, Any], shape: type[T], kind: str) -> T:
    """Read `parameters`, less `apiVersion` and `kind`, as a `shape`. Raises Refused."""
    fields = {name: value for name, value in parameters.items() if name not in ("apiVersion", "kind")}
    try:
        return msgspec.convert(fields, shape)
    except msgspec.ValidationError as error:
        known = ", ".join(shape.__struct_encode_fields__)
        raise Refused(f"{kind}: {error}", nearest_fix=f"its fields are {known}") from error


def refuse(kind: str, problems: tuple[str, ...], fix: str | None = None) -> None:
    """Raise Refused with all problems at once, so that one round of changes is enough."""
    if problems:
        raise Refused(f"{kind}: {'; '.join(problems)}", nearest_fix=fix)
