r"""Regular expressions as Go's `regexp` reads and runs them, on google-re2.

Kubernetes matches with Go's `regexp`. RE2 is its C++ twin: same syntax, leftmost-first match, time linear in
the text, Unicode case folding. Patterns are rewritten before RE2 sees them if the two differ:

- RE2 has `\C`, one byte. Go does not have it.
- RE2 takes a repetition for text if its count overflows. Go refuses it.
- RE2 allows any Unicode letter in the name of a group. Go allows ASCII letters, digits and `_`.
- Go (1.25 and later) ignores case, spaces, `_` and `-` in the name of a Unicode class, knows aliases such
  as `\p{Letter}`, and adds Any, ASCII, Assigned, Cn and LC. Its category C includes unassigned code points.
  For the same reason it knows no script with a name of two words.
- RE2 runs on bytes, so that an empty `\B` can match inside a character. Such a match is skipped.

Some differences stay: RE2 has Unicode 15.1 (627 more characters), no limit on nesting (Go's is 1000), another
limit on the compiled size, and folds case in a negated ASCII or LC inside a set. The names that Go added in
1.25 are accepted here, and refused by Kubernetes 1.34, which is built with Go 1.24.
`tests/cluster/test_go_regexp.py` compares both engines on random patterns.

The module is loaded only when an expression has a pattern.
"""

import functools
import re
from collections.abc import Iterator

import re2

_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
_OPTIONS.max_mem = 1 << 28
r"""Bytes, taken as needed. The default of 8 MiB refuses `\pL{1000}`, which Go accepts."""

_GO_MESSAGES = {
    "missing ]": "missing closing ]",
    "missing )": "missing closing )",
    "trailing \\": "trailing backslash at end of expression",
    "no argument for repetition operator": "missing argument to repetition operator",
    "invalid repetition size": "invalid repeat count",
    "bad repetition operator": "invalid nested repetition operator",
    "invalid perl operator": "invalid or unsupported Perl syntax",
    "invalid named capture group": "invalid named capture",
}


class Regex:
    """A compiled pattern. Raises ValueError with Go's message if Go refuses it."""

    __slots__ = ("_compiled",)

    def __init__(self, pattern: str) -> None:
        # Patterns that both refuse stay as they are. Only tokens that differ are rewritten. A set is one
        # token, because groups and quotes inside it are plain characters.
        rewritten = _TOKEN.sub(_rewritten, pattern)
        try:
            self._compiled = re2.compile(rewritten, _OPTIONS)
        except re2.error as error:
            code, _, part = error.args[0].decode().partition(": ")
            raise ValueError(f"{_GO_MESSAGES.get(code, code)}: `{part}`") from None

    def search(self, text: str) -> bool:
        """Whether the pattern matches anywhere."""
        return self._first(text.encode(), 0) is not None

    def find_all(self, text: str) -> Iterator[str]:
        """Leftmost matches that do not overlap."""
        encoded = text.encode()
        return (encoded[start:end].decode() for start, end in self.spans(encoded))

    def spans(self, text: bytes) -> Iterator[tuple[int, int]]:
        """Matches as start and end. An empty one that touches the match before it does not count."""
        at, last_end = 0, -1
        while at <= len(text) and (span := self._first(text, at)) is not None:
            start, end = span
            if end > at or start != last_end:
                yield span
            at = end if end > at else _next_character(text, at)
            last_end = end

    def _first(self, text: bytes, at: int) -> tuple[int, int] | None:
        while (match := self._compiled.search(text, at)) is not None:
            start, end = match.span()
            # A continuation byte of UTF-8 has the bits 10 in front. No match of characters starts there.
            if start == len(text) or text[start] & 0xC0 != 0x80:
                return start, end
            at = _next_character(text, start)
        return None


@functools.lru_cache(maxsize=1024)
def compiled_regex(pattern: str) -> Regex:
    """The pattern, ready to run. Raises ValueError if Go would refuse it."""
    return Regex(pattern)


def _next_character(text: bytes, at: int) -> int:
    at += 1
    while at < len(text) and text[at] & 0xC0 == 0x80:
        at += 1
    return at


# From Go's syntax to RE2's.


_UNICODE_CLASS = r"\\(?P<sign>[pP])(?:\{(?P<name>[^}]*)\}|(?P<letter>.))"
_ESCAPE = re.compile(rf"{_UNICODE_CLASS}|\\.", re.DOTALL)
_TOKEN = re.compile(
    r"\\Q.*?(?:\\E|\Z)"  # Quoted text: nothing in it is special.
    r"|(?P<set>\[\^?\]?(?>\\[pP]\{[^}]*\}|\\.|\[:.*?:\]|[^\]\\])*+\]?)"
    r"|\(\?P?<(?P<group>[^>=!]*)>"
    r"|(?P<count>\{(?=[^}]*\d{10})(?:0|[1-9]\d*)(?:,(?:0|[1-9]\d*)?)?\})"
    rf"|(?P<byte>\\C)|{_ESCAPE.pattern}",
    re.DOTALL,
)

_ALIASES = dict(
    line.split()
    for line in """
        Casedletter Lc|Closepunctuation Pe|Cntrl Cc|Combiningmark M|Connectorpunctuation Pc|Control Cc
        Currencysymbol Sc|Dashpunctuation Pd|Decimalnumber Nd|Digit Nd|Enclosingmark Me|Finalpunctuation Pf
        Format Cf|Initialpunctuation Pi|Letter L|Letternumber Nl|Lineseparator Zl|Lowercaseletter Ll|Mark M
        Mathsymbol Sm|Modifierletter Lm|Modifiersymbol Sk|Nonspacingmark Mn|Number N|Openpunctuation Ps
        Other C|Otherletter Lo|Othernumber No|Otherpunctuation Po|Othersymbol So|Paragraphseparator Zp
        Privateuse Co|Punct P|Punctuation P|Separator Z|Spaceseparator Zs|Spacingmark Mc|Surrogate Cs
        Symbol S|Titlecaseletter Lt|Unassigned Cn|Uppercaseletter Lu
    """.strip()
    .replace("\n", "|")
    .split("|")
)
_ASSIGNED = r"\pL\pM\pN\pP\pS\pZ\p{Cc}\p{Cf}\p{Co}\p{Cs}"
_COMPOUND_CLASSES = {
    "Ascii": ("", r"\x00-\x7f"),
    "Assigned": ("", _ASSIGNED),
    "C": ("^", r"\pL\pM\pN\pP\pS\pZ"),
    "Cn": ("^", _ASSIGNED),
    "Lc": ("", r"\p{Lu}\p{Ll}\p{Lt}"),
}
"""Classes of Go that RE2 lacks, as sign and content of a set."""


def _rewritten(token: re.Match[str]) -> str:
    if token["byte"]:
        raise ValueError(r"invalid escape sequence: `\C`")
    if token["count"]:
        raise ValueError(f"invalid repeat count: `{token[0]}`")
    if token["group"] is not None and not re.fullmatch(r"\w+", token["group"], re.ASCII):
        raise ValueError(f"invalid named capture: `{token[0]}`")
    if token["set"]:
        return _ESCAPE.sub(lambda escape: _unicode_class(escape, in_set=True), token[0])
    return _unicode_class(token, in_set=False) if token["sign"] else token[0]


def _unicode_class(token: re.Match[str], *, in_set: bool) -> str:
    if not token["sign"] or not token[0].isascii():
        return token[0]
    name = token["letter"] if token["name"] is None else token["name"]
    negated = (token["sign"] == "P") is not name.startswith("^")
    # Go's canonical form: no separators, one capital.
    name = re.sub("[ _-]", "", name.removeprefix("^")).capitalize()
    name = _ALIASES.get(name, name)
    if name not in _COMPOUND_CLASSES:
        return rf"\{'P' if negated else 'p'}{{{name}}}"
    sign, content = _COMPOUND_CLASSES[name]
    ranges = _ranges(f"[{'^' if negated is not bool(sign) else ''}{content}]")
    # Go folds no case in the complement of a class, but RE2 would fold these ranges.
    return ranges if in_set else f"(?-i:[{ranges}])" if negated else f"[{ranges}]"


@functools.cache
def _ranges(charset: str) -> str:
    """The characters of a set one by one, because RE2 cannot nest one set in another."""
    characters = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x110000)))).encode()
    runs = (match.group().decode() for match in re2.finditer(f"{charset}+", characters))
    return "".join(f"\\x{{{ord(run[0]):x}}}-\\x{{{ord(run[-1]):x}}}" for run in runs)
