"""URLs as Kubernetes reads them: absolute, or a path from the root."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from rackloom.claim.allocate.cel.errors import EvaluationError
from rackloom.claim.allocate.cel.overloads import Library
from rackloom.claim.allocate.cel.values import TYPE_NAMES, compare_strictly

URLS = Library()
_add = URLS.add

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_USER = re.compile(r"[A-Za-z0-9\-._:~!$&'()*+,;=%@]*")
_HOST = re.compile(r"[^\x00-\x20\\^`{|}/?#@%]*")
_BRACKETED = re.compile(r"\[[^\]]*\]")
_PORT = re.compile(r"(?::[0-9]*)?")
_VALID_PATH = re.compile(r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/\[\]]|%[0-9A-Fa-f]{2})*")
_PLAIN_IN_PATH = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.~$&+,/:;=@")


@dataclass(frozen=True, slots=True)
class Url:
    """The parts of a URL; `path` is still escaped."""

    text: str
    scheme: str
    host: str
    path: str
    query: str


TYPE_NAMES[Url] = "kubernetes.URL"
compare_strictly(Url)


def parse_url(text: str) -> Url:
    """Read an absolute URL or path. ValueError says why it is neither."""
    _parse(text, fragment=False)
    return _parse(text, fragment=True)


def _parse(text: str, *, fragment: bool) -> Url:
    """One reading: as a request, without fragment, or as a reference, which may begin with //."""
    if not text:
        raise ValueError("empty url")
    if _CONTROL.search(text):
        raise ValueError("net/url: invalid control character in URL")
    if text == "*":
        return Url(text, "", "", "*", "")
    whole, _, tail = text.partition("#") if fragment else (text, "", "")
    if _BAD_ESCAPE.search(tail):
        raise ValueError(f"invalid URL escape in {tail!r}")
    scheme, rest = _scheme(whole)
    rest, _, query = rest.partition("?")
    if not rest.startswith("/"):
        if scheme or (fragment and not rest):
            return Url(text, scheme, "", "", query)
        raise ValueError("invalid URI for request")
    host = ""
    if rest.startswith("//") and (scheme or (fragment and not rest.startswith("///"))):
        authority, slash, path = rest[2:].partition("/")
        host, rest = _authority(authority), slash + path
    if _BAD_ESCAPE.search(rest):
        raise ValueError(f"invalid URL escape in {rest!r}")
    return Url(text, scheme, host, _escaped(rest), query)


def _scheme(text: str) -> tuple[str, str]:
    found = _SCHEME.match(text)
    if found is not None:
        return found[1].lower(), text[found.end() :]
    if text.startswith(":"):
        raise ValueError("missing protocol scheme")
    return "", text


def _authority(authority: str) -> str:
    user, at, host = authority.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise ValueError("net/url: invalid userinfo")
    if at and _BAD_ESCAPE.search(user):
        raise ValueError("invalid URL escape in user")
    bracketed = _BRACKETED.match(host)
    if host.startswith("["):
        if bracketed is None or not _PORT.fullmatch(host[bracketed.end() :]):
            raise ValueError("missing ']' in host or invalid port")
        return host
    name, colon, port = host.partition(":")
    if colon and not _PORT.fullmatch(":" + port):
        raise ValueError(f"invalid port {':' + port!r} after host")
    return _host(name) + colon + port


def _host(name: str) -> str:
    """A host name, unescaped; only bytes outside ASCII may be escaped in it."""
    if _BAD_ESCAPE.search(name) or re.search(r"%[0-7]", name):
        raise ValueError(f"invalid URL escape in {name!r}")
    if not _HOST.fullmatch(re.sub("%..", "", name)):
        raise ValueError(f"invalid character in host name {name!r}")
    return unquote_to_bytes(name).decode(errors="replace")


def _escaped(path: str) -> str:
    """The path if it is properly escaped already, otherwise with everything escaped that needs it."""
    if _VALID_PATH.fullmatch(path):
        return path
    raw = unquote_to_bytes(path)
    return "".join(chr(byte) if byte in _PLAIN_IN_PATH else f"%{byte:02X}" for byte in raw)


@_add("string_to_url", "url(string) -> url")
def _url(text: str) -> Url:
    try:
        return parse_url(text)
    except ValueError as error:
        raise EvaluationError(f"URL parse error during conversion from string: {error}") from None


@_add("is_url_string", "isURL(string) -> bool")
def _is_url(text: str) -> bool:
    try:
        parse_url(text)
    except ValueError:
        return False
    return True


@_add("url_get_scheme", "url.getScheme() -> string")
def _get_scheme(one: Url) -> str:
    return one.scheme


@_add("url_get_host", "url.getHost() -> string")
def _get_host(one: Url) -> str:
    return one.host


@_add("url_get_hostname", "url.getHostname() -> string")
def _get_hostname(one: Url) -> str:
    if one.host.startswith("["):
        return one.host[1 : one.host.index("]")]
    return one.host.rpartition(":")[0] if ":" in one.host else one.host


@_add("url_get_port", "url.getPort() -> string")
def _get_port(one: Url) -> str:
    after = one.host.rpartition("]")[2]
    return after.rpartition(":")[2] if ":" in after else ""


@_add("url_get_escaped_path", "url.getEscapedPath() -> string")
def _get_path(one: Url) -> str:
    return one.path


@_add("url_get_query", "url.getQuery() -> map<string, list<string>>")
def _get_query(one: Url) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, value in _pairs(one.query):
        found.setdefault(key, []).append(value)
    return found


def _pairs(query: str) -> Iterator[tuple[str, str]]:
    """Key and value of each part of a query; parts that are malformed are left out."""
    for part in query.split("&"):
        if not part or ";" in part or _BAD_ESCAPE.search(part):
            continue
        key, _, value = part.partition("=")
        yield _unescaped(key), _unescaped(value)


def _unescaped(text: str) -> str:
    return unquote_to_bytes(text.replace("+", " ")).decode(errors="replace")
