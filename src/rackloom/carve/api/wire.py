"""Base models of requests, queries and responses: camelCase names, field types, paging.

Names, descriptions, labels and reasons hold nothing that hides or reorders displayed text (`TEXT_PATTERN`).
Other values are limited to those that every database stores: no NUL, no unpaired surrogates, finite numbers.
`OpenBody` keeps unknown fields, so that clients of the wider API find their fields again. Nothing acts on
them.

A response model describes a response in /openapi.json, and `shape` builds the response from it. The
models validate nothing that is sent: responses are plain values.

Model names appear in /openapi.json: renaming one changes the generated clients.
"""

from collections.abc import Callable, Collection
from datetime import datetime
from functools import cache
from math import isfinite
from typing import Annotated, Any, Literal, Self
from uuid import UUID

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, StringConstraints
from pydantic import model_validator as validator
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from rackloom.carve.api import renames
from rackloom.carve.observation.latest import rfc3339
from rackloom.carve.store.values import (
    MAX_KEPT_BYTES,
    NAME_MAX_LENGTH,
    NAME_MIN_LENGTH,
    NAME_PATTERN,
    NAME_RULE,
    TEXT_PATTERN,
    TEXT_RULE,
    has_too_large_fields,
    invalid,
    is_visible,
)

# Requests.


NO_NUL = r"^[^\x00]*$"
"""PostgreSQL stores every character but NUL."""
PATTERN_RULES = {NO_NUL: "must not hold NUL", TEXT_PATTERN: TEXT_RULE, NAME_PATTERN: NAME_RULE}
"""Pattern -> the rule that a text breaks if it does not match."""


def _visible(name: str) -> str:
    if not is_visible(name):
        raise PydanticCustomError("name", NAME_RULE)
    return name


Name = Annotated[
    str,
    StringConstraints(
        strict=True, min_length=NAME_MIN_LENGTH, max_length=NAME_MAX_LENGTH, pattern=NAME_PATTERN
    ),
    AfterValidator(_visible),
]
NamePrefix = Annotated[
    str,
    StringConstraints(strict=True, min_length=NAME_MIN_LENGTH, max_length=240, pattern=NAME_PATTERN),
    AfterValidator(_visible),
]
Description = Annotated[str, StringConstraints(strict=True, max_length=1024, pattern=TEXT_PATTERN)]
Label = Annotated[str, StringConstraints(strict=True, max_length=256, pattern=TEXT_PATTERN)]
Labels = Annotated[dict[Label, Label], Field(max_length=10)]


class Body(BaseModel):
    """camelCase on the wire. Unknown fields are ignored, and old names of fields are read."""

    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_alias=True, validate_by_name=False, allow_inf_nan=False
    )

    @validator(mode="before")
    @classmethod
    def _with_new_names(cls, value: Any) -> Any:
        return renames.read_body(cls, value)


class OpenBody(Body):
    """Keeps unknown fields, up to `MAX_KEPT_BYTES` of them."""

    model_config = ConfigDict(extra="allow")

    __pydantic_extra__: dict[str, JsonValue] = Field(init=False)

    @validator(mode="before")
    @classmethod
    def _storable(cls, value: Any) -> Any:
        _check_storable(value)
        return value

    @validator(mode="after")
    def _kept_fields_are_small(self) -> Self:
        if has_too_large_fields(self.extra):
            raise ValueError(f"the fields that have no meaning here take more than {MAX_KEPT_BYTES} bytes")
        return self

    @property
    def extra(self) -> dict[str, Any]:
        """The fields that have no meaning here, as they came."""
        return dict(self.__pydantic_extra__)


def _check_storable(value: Any) -> None:
    """Refuse values that no database or JSON writer takes: NUL, unpaired surrogates, infinite numbers."""
    match value:
        case float() if not isfinite(value):
            raise ValueError("numbers must be finite")
        case str():
            if "\x00" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
                raise ValueError("text may hold neither NUL nor unpaired surrogates")
        case dict():
            for key, inner in value.items():
                _check_storable(key)
                _check_storable(inner)
        case list():
            for inner in value:
                _check_storable(inner)


# Requests of operators: each names its reason.


Reason = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=1024, pattern=TEXT_PATTERN)]


class Because(Body):
    """The reason of an operator's request."""

    reason: Reason


Url = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=1024)]


# Queries.


PartitionStatus = Literal["Pending", "Provisioning", "Configuring", "Ready", "Deleting", "Error"]
InterfaceStatus = Literal["Pending", "Provisioning", "Ready", "Deleting", "Error"]


SiteStatus = Literal["Pending", "Registered", "Deleting", "Error"]


Text = Annotated[str, Field(max_length=256, pattern=r"^[^\x00]*$")]
UuidFilter = Annotated[list[UUID], Field(max_length=100)]
TextFilter = Annotated[list[Text], Field(max_length=100)]


class Query(BaseModel):
    """camelCase on the wire. Unknown parameters are ignored, except those that `access` refuses."""

    model_config = ConfigDict(alias_generator=to_camel)

    @validator(mode="after")
    def _with_new_names(self) -> Self:
        renames.read_query(self)
        return self


class RelationQuery(Query):
    """The related objects to include. Only operations that include some take it."""

    include_relation: list[str] = []

    def relations(self, *known: str) -> Collection[str]:
        """The related objects to include, when each is one of `known`."""
        for name in self.include_relation:
            if name not in known:
                raise invalid(f"Invalid includeRelation value in query: {name}")
        return frozenset(self.include_relation)


class PageQuery(Query):
    """A page of a listing."""

    page_number: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    page_size: Annotated[int, Field(ge=1, le=100)] = 20
    order_by: Annotated[str, Field(pattern=r"^[A-Z0-9_]+_(ASC|DESC)$")] | None = None
    """`FIELD_ASC` or `FIELD_DESC`. The default is oldest first."""


# Responses.


class Answer(BaseModel):
    """camelCase on the wire."""

    model_config = ConfigDict(alias_generator=to_camel)


class Timed(Answer):
    """An object with its times of creation and last change."""

    created: datetime
    updated: datetime


class Problem(Answer):
    """The body of every error."""

    source: Literal["nico"]
    message: str
    data: dict[str, Any] | None


class StatusDetail(Timed):
    """One entry of a status history."""

    status: str
    message: str | None


class Summary(Answer):
    """An object in one line."""

    id: UUID
    name: str
    site_id: UUID
    status: str


class SiteSummary(Answer):
    """A site in one line."""

    id: UUID
    name: str
    infrastructure_provider_id: UUID
    status: str


class Message(Answer):
    """The outcome of a request that has no other answer."""

    message: str


class Org(Timed):
    """A tenant or provider."""

    id: UUID
    org: str


# From rows to responses.


Json = dict[str, Any]


def shape(model: type[Answer], row: Any, **computed: object) -> Json:
    """The response `model` of a row: its columns under their names on the wire, and the fields `computed`.

    A field that the model does not require is left out unless it is computed. Times are seconds since the
    epoch in `row` and `computed`, and RFC 3339 on the wire. A renamed field has both names.
    """
    return _conversion(model, tuple(computed))(row, computed)


@cache
def _conversion(model: type[Answer], computed: tuple[str, ...]) -> Callable[[Any, dict[str, Any]], Json]:
    """The function that builds the response `model` from a row and these computed fields.

    A page may have hundreds of rows. So this is an expression that Python compiles once, as it compiles the
    constructor of a data class: `{"siteId": row.site_id, "created": time(row.created), ...}`.
    """
    if unknown := set(computed) - model.model_fields.keys():
        raise TypeError(f"{model.__name__} has no field {', '.join(sorted(unknown))}")
    shown = {
        name: field for name, field in model.model_fields.items() if field.is_required() or name in computed
    }
    # The times of creation and change are inherited, and come last on the wire.
    ordered = sorted(shown, key=lambda name: name in Timed.model_fields)
    values = {str(shown[name].alias): _value_of(name, shown[name], name in computed) for name in ordered}
    values |= {rename.old: values[rename.new] for rename in renames.renames_of(model, "answers")}
    items = ", ".join(f"{key!r}: {value}" for key, value in values.items())
    # Made of the names in our models only.
    made: Callable[[Any, dict[str, Any]], Json] = eval(  # noqa: S307
        f"lambda row, computed: {{{items}}}", {"time": _time}
    )
    return made


def _value_of(name: str, field: FieldInfo, is_computed: bool) -> str:
    """The expression for the value of a field."""
    value = f"computed[{name!r}]" if is_computed else f"row.{name}"
    return f"time({value})" if field.annotation in (datetime, datetime | None) else value


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else rfc3339(seconds)
