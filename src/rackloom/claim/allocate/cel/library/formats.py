"""Named formats of Kubernetes, and string.format."""

import datetime as dt
import re
from collections.abc import Callable
from dataclasses import dataclass

from rackloom.claim.allocate.cel.library.formatting import format_string
from rackloom.claim.allocate.cel.library.urls import parse_url
from rackloom.claim.allocate.cel.overloads import Library
from rackloom.claim.allocate.cel.values import NONE, TYPE_NAMES, OptionalValue, compare_strictly, some

FORMATS = Library()
_add = FORMATS.add

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
class Format:
    """A named format: what is wrong with a string under it, if anything."""

    name: str
    problems: Callable[[str], Problems]
    max_regex_size: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Format) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


TYPE_NAMES[Format] = "kubernetes.NamedFormat"
compare_strictly(Format)


def _shaped(shape: re.Pattern[str], length: int, what: str, *, prefix: bool) -> Callable[[str], Problems]:
    """A check of length and characters; a prefix may end in a dash and whatever comes before that."""

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


_subdomain = _shaped(_SUBDOMAIN, _SUBDOMAIN_LENGTH, "a lowercase RFC 1123 subdomain", prefix=False)
_label_value = _shaped(re.compile(f"({_QUALIFIED.pattern})?"), _LABEL_LENGTH, "a valid label", prefix=False)


def _uri(text: str) -> Problems:
    try:
        parse_url(text)
    except ValueError as error:
        return [str(error)]
    return []


def _matching(shape: re.Pattern[str], problem: str) -> Callable[[str], Problems]:
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


def _named(name: str, problems: Callable[[str], Problems], size: int) -> Format:
    return Format(name, problems, size)


_KNOWN: dict[str, Format] = {
    one.name: one
    for one in (
        _named(
            "dns1123Label", _shaped(_DNS_LABEL, _LABEL_LENGTH, "a lowercase RFC 1123 label", prefix=False), 30
        ),
        _named(
            "dns1123LabelPrefix",
            _shaped(_DNS_LABEL, _LABEL_LENGTH, "a lowercase RFC 1123 label", prefix=True),
            30,
        ),
        _named("dns1123Subdomain", _subdomain, 60),
        _named(
            "dns1123SubdomainPrefix",
            _shaped(_SUBDOMAIN, _SUBDOMAIN_LENGTH, "a lowercase RFC 1123 subdomain", prefix=True),
            60,
        ),
        _named("dns1035Label", _shaped(_DNS1035, _LABEL_LENGTH, "a DNS-1035 label", prefix=False), 30),
        _named("dns1035LabelPrefix", _shaped(_DNS1035, _LABEL_LENGTH, "a DNS-1035 label", prefix=True), 30),
        _named("qualifiedName", _qualified_name, 60),
        _named("labelValue", _label_value, 40),
        _named("uri", _uri, 1103),
        _named("uuid", _matching(_UUID, "does not match the UUID format"), 71),
        _named("byte", _matching(_BASE64, "invalid base64"), 84),
        _named("date", _date, 71),
        _named("datetime", _datetime, 71),
    )
}


def _constant(name: str) -> None:
    _add(f"format.{name}", f"format.{name}() -> named_format")(lambda: _KNOWN[name])


for _name in _KNOWN:
    _constant(_name)


@_add("format-named", "format.named(string) -> optional<named_format>")
def _by_name(name: str) -> OptionalValue:
    return some(_KNOWN[name]) if name in _KNOWN else NONE


@_add("format-validate", "named_format.validate(string) -> optional<list<string>>")
def _validate(format_: Format, text: str) -> OptionalValue:
    problems = format_.problems(text)
    return some(problems) if problems else NONE


_add("string_format", "string.format(list<dyn>) -> string")(format_string)
