"""Kubernetes' own functions: quantities, semantic versions, named formats, and the authorizer.

Quantity arithmetic returns a `DerivedQuantity`, because upstream cannot compare one that stands right
of `==`. The numbers of a version are returned as signed integers, as upstream reinterprets them.

A `NamedFormat` checks a string: DNS labels and subdomains, label values, qualified names, URIs, UUIDs,
base64, dates. `validate` returns the problems, or an empty optional.

The authorizer's functions exist for the type checker only: a selector has no authorizer to call them
on.
"""

import datetime as dt
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rackloom.core.allocate.cel.library.networks import parse_url
from rackloom.core.allocate.cel.library.strings import format_string
from rackloom.core.allocate.cel.types import accepts, as_error, cel_function, declare_functions, unavailable
from rackloom.core.allocate.cel.values import (
    NONE,
    TYPE_NAMES,
    DerivedQuantity,
    OptionalValue,
    SemanticVersion,
    compare_strictly,
    present_optional,
)
from rackloom.core.allocate.quantity import DECIMAL_EXPONENT, Quantity

# Quantities, semantic versions and the authorizer.


@cel_function("string_to_quantity", "quantity(string) -> quantity")
def _quantity(text: str) -> Quantity:
    try:
        return Quantity.parse(text)
    except ValueError as error:
        raise as_error(error) from None


declare_functions(
    ("is_quantity_string", "isQuantity(string) -> bool", accepts(Quantity.parse)),
    ("quantity_sign", "sign(quantity) -> int", Quantity.sign),
    ("quantity_get_float", "quantity.asApproximateFloat() -> double", Quantity.as_float),
    ("quantity_is_integer", "quantity.isInteger() -> bool", Quantity.is_integer),
    (
        "semver_is_greater_than",
        "semver.isGreaterThan(semver) -> bool",
        lambda first, second: first.compare(second) > 0,
    ),
    (
        "quantity_is_greater_than",
        "quantity.isGreaterThan(quantity) -> bool",
        lambda first, second: first.compare(second) > 0,
    ),
    (
        "semver_is_less_than",
        "semver.isLessThan(semver) -> bool",
        lambda first, second: first.compare(second) < 0,
    ),
    (
        "quantity_is_less_than",
        "quantity.isLessThan(quantity) -> bool",
        lambda first, second: first.compare(second) < 0,
    ),
    ("semver_compare_to", "semver.compareTo(semver) -> int", SemanticVersion.compare),
    ("quantity_compare_to", "quantity.compareTo(quantity) -> int", Quantity.compare),
)


@cel_function("quantity_get_int", "quantity.asInteger() -> int")
def _as_integer(quantity: Quantity) -> int:
    try:
        return quantity.as_integer()
    except ValueError as error:
        raise as_error(error) from None


def _derived(quantity: Quantity) -> DerivedQuantity:
    return DerivedQuantity(quantity.unscaled, quantity.scale, quantity.format, quantity.unbounded)


def _amount(number: int) -> Quantity:
    return Quantity(number, 0, DECIMAL_EXPONENT)


declare_functions(
    ("quantity_add", "quantity.add(quantity) -> quantity", lambda first, second: _derived(first + second)),
    ("quantity_add_int", "quantity.add(int) -> quantity", lambda q, number: _derived(q + _amount(number))),
    ("quantity_sub", "quantity.sub(quantity) -> quantity", lambda first, second: _derived(first - second)),
    ("quantity_sub_int", "quantity.sub(int) -> quantity", lambda q, number: _derived(q - _amount(number))),
)


@cel_function("string_to_semver", "semver(string) -> semver")
@cel_function("string_bool_to_semver", "semver(string, bool) -> semver")
def _semver_normalised(text: str, normalise: bool = False) -> SemanticVersion:
    try:
        return SemanticVersion.normalise(text) if normalise else SemanticVersion.parse(text)
    except ValueError as error:
        raise as_error(error) from None


declare_functions(
    ("is_semver_string", "isSemver(string) -> bool", accepts(SemanticVersion.parse)),
    ("is_semver_string_bool", "isSemver(string, bool) -> bool", accepts(_semver_normalised)),
    ("semver_major", "semver.major() -> int", lambda version: _signed(version.major)),
    ("semver_minor", "semver.minor() -> int", lambda version: _signed(version.minor)),
    ("semver_patch", "semver.patch() -> int", lambda version: _signed(version.patch)),
)


def _signed(number: int) -> int:
    """Upstream reinterprets the unsigned number as a signed one."""
    return number - 2**64 if number >= 2**63 else number


for _id, _signature in (
    ("authorizer_path", "authorizer.path(string) -> path_check"),
    ("pathcheck_check", "path_check.check(string) -> decision"),
    ("authorizer_group", "authorizer.group(string) -> group_check"),
    ("authorizer_serviceaccount", "authorizer.serviceAccount(string, string) -> authorizer"),
    ("groupcheck_resource", "group_check.resource(string) -> resource_check"),
    ("resourcecheck_subresource", "resource_check.subresource(string) -> resource_check"),
    ("resourcecheck_namespace", "resource_check.namespace(string) -> resource_check"),
    ("resourcecheck_name", "resource_check.name(string) -> resource_check"),
    ("resourcecheck_check", "resource_check.check(string) -> decision"),
    ("authorizer_fieldselector", "resource_check.fieldSelector(string) -> resource_check"),
    ("authorizer_labelselector", "resource_check.labelSelector(string) -> resource_check"),
    ("decision_allowed", "decision.allowed() -> bool"),
    ("decision_reason", "decision.reason() -> string"),
    ("decision_error", "decision.error() -> string"),
    ("decision_errored", "decision.errored() -> bool"),
):
    cel_function(_id, _signature)(unavailable)


# Named formats.


_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DNS_LABEL = re.compile(_LABEL)
_SUBDOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_DNS1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_QUALIFIED = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_UUID = re.compile(r"[0-9A-Fa-f]{8}-?([0-9A-Fa-f]{4}-?){3}[0-9A-Fa-f]{12}")
_BASE64 = re.compile(r"(?=.)(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_TIME = re.compile(r"([0-9]{2}):([0-9]{2}):([0-9]{2})(.[0-9]+)?(z|[+-][0-9]{2}:[0-9]{2})")
_LABEL_LENGTH, _SUBDOMAIN_LENGTH = 63, 253

Problems = list[str]


@dataclass(frozen=True, slots=True)
class NamedFormat:
    """A named format, which returns the problems of a string, if any."""

    name: str
    problems: Callable[[str], Problems]
    max_regex_size: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedFormat) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


TYPE_NAMES[NamedFormat] = "kubernetes.NamedFormat"
compare_strictly(NamedFormat)


def _length_and_shape(
    shape: re.Pattern[str], length: int, what: str, *, prefix: bool
) -> Callable[[str], Problems]:
    """A check of length and characters. A prefix may end in a dash after any character."""

    def problems(text: str) -> Problems:
        whole = text[:-2] + "a" if prefix and len(text) > 1 and text.endswith("-") else text
        found = [] if len(whole.encode()) <= length else [f"must be no more than {length} bytes"]
        return found if shape.fullmatch(whole) else [*found, f"not {what}"]

    return problems


def _qualified_name(text: str) -> Problems:
    parts = text.split("/")
    if len(parts) > 2:
        return ["a qualified name is a name with an optional DNS subdomain prefix and '/'"]
    found: Problems = []
    if len(parts) == 2:
        found += ["prefix part must be non-empty"] if not parts[0] else _subdomain(parts[0])
    name = parts[-1]
    if not name:
        found.append("name part must be non-empty")
    elif len(name.encode()) > _LABEL_LENGTH:
        found.append(f"name part must be no more than {_LABEL_LENGTH} bytes")
    return found if _QUALIFIED.fullmatch(name) else [*found, "name part has characters that are not allowed"]


_subdomain = _length_and_shape(_SUBDOMAIN, _SUBDOMAIN_LENGTH, "a lowercase RFC 1123 subdomain", prefix=False)
_label_value = _length_and_shape(
    re.compile(f"({_QUALIFIED.pattern})?"), _LABEL_LENGTH, "a valid label", prefix=False
)


def _uri(text: str) -> Problems:
    try:
        parse_url(text)
    except ValueError as error:
        return [str(error)]
    return []


def _shape_only(shape: re.Pattern[str], problem: str) -> Callable[[str], Problems]:
    return lambda text: [] if shape.fullmatch(text) else [problem]


def _is_date(text: str) -> bool:
    if not _DATE.fullmatch(text):
        return False
    try:
        dt.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def _date(text: str) -> Problems:
    return [] if _is_date(text) else ["invalid date"]


def _datetime(text: str) -> Problems:
    day, _, clock = text.lower().partition("t")
    parts = _TIME.fullmatch(clock)
    valid = (
        _is_date(day)
        and parts is not None
        and int(parts[1]) < 24
        and int(parts[2]) < 60
        and int(parts[3]) < 60
    )
    return [] if valid else ["invalid datetime"]


def _shaped(name: str, shape: re.Pattern[str], length: int, what: str, size: int) -> tuple[NamedFormat, ...]:
    """A format, and the same for prefixes."""
    return tuple(
        NamedFormat(name + ending, _length_and_shape(shape, length, what, prefix=bool(ending)), size)
        for ending in ("", "Prefix")
    )


_FORMATS_BY_NAME: dict[str, NamedFormat] = {
    named.name: named
    for named in (
        *_shaped("dns1123Label", _DNS_LABEL, _LABEL_LENGTH, "a lowercase RFC 1123 label", 30),
        *_shaped("dns1123Subdomain", _SUBDOMAIN, _SUBDOMAIN_LENGTH, "a lowercase RFC 1123 subdomain", 60),
        *_shaped("dns1035Label", _DNS1035, _LABEL_LENGTH, "a DNS-1035 label", 30),
        NamedFormat("qualifiedName", _qualified_name, 60),
        NamedFormat("labelValue", _label_value, 40),
        NamedFormat("uri", _uri, 1103),
        NamedFormat("uuid", _shape_only(_UUID, "does not match the UUID format"), 71),
        NamedFormat("byte", _shape_only(_BASE64, "invalid base64"), 84),
        NamedFormat("date", _date, 71),
        NamedFormat("datetime", _datetime, 71),
    )
}


declare_functions(
    *(
        (f"format.{name}", f"format.{name}() -> named_format", partial(_FORMATS_BY_NAME.__getitem__, name))
        for name in _FORMATS_BY_NAME
    )
)


@cel_function("format-named", "format.named(string) -> optional<named_format>")
def _by_name(name: str) -> OptionalValue:
    return present_optional(_FORMATS_BY_NAME[name]) if name in _FORMATS_BY_NAME else NONE


@cel_function("format-validate", "named_format.validate(string) -> optional<list<string>>")
def _validate_format(format_: NamedFormat, text: str) -> OptionalValue:
    problems = format_.problems(text)
    return present_optional(problems) if problems else NONE


cel_function("string_format", "string.format(list<dyn>) -> string")(format_string)
