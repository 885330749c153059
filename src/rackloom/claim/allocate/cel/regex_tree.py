"""The parts of a regular expression, and the character sets that RE2 has names for."""

import unicodedata
from dataclasses import dataclass

MAX_CODE = 0x10FFFF

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of `ranges` or of the named `properties`."""

    ranges: tuple[Range, ...]
    properties: tuple["Property", ...] = ()
    negated: bool = False
    fold: bool = False

    def accepts(self, char: str) -> bool:
        """Whether the character is one of these."""
        forms = {char, *_case_variants(char)} if self.fold else {char}
        return any(map(self._holds, forms)) is not self.negated

    def _holds(self, char: str) -> bool:
        code = ord(char)
        return any(low <= code <= high for low, high in self.ranges) or any(
            one.holds(char) for one in self.properties
        )


@dataclass(frozen=True, slots=True)
class Property:
    """A general category such as Lu, or a script by name."""

    name: str
    negated: bool

    def holds(self, char: str) -> bool:
        """Whether the character has the property."""
        if self.name == "Any":
            return not self.negated
        if len(self.name) <= 2:
            found = unicodedata.category(char).startswith(self.name)
        else:
            found = unicodedata.name(char, "").startswith(_SCRIPT_NAMES.get(self.name, self.name.upper()))
        return found is not self.negated


@dataclass(frozen=True, slots=True)
class Assertion:
    """A condition on the place: `text_start`, `text_end`, `line_start`, `line_end`, `word`, `no_word`."""

    kind: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """Parts one after the other; none of them is the empty match."""

    parts: tuple["Tree", ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """The first alternative that leads to a match."""

    options: tuple["Tree", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`body` from `low` to `high` times (None is without end), as many as possible if `greedy`."""

    body: "Tree"
    low: int
    high: int | None
    greedy: bool


Tree = Chars | Assertion | Sequence | Choice | Repeat

_SCRIPT_NAMES = {"Han": "CJK "}
CATEGORIES = frozenset(
    [
        "C",
        "Cc",
        "Cf",
        "Co",
        "Cs",
        "L",
        "Ll",
        "Lm",
        "Lo",
        "Lt",
        "Lu",
        "M",
        "Mc",
        "Me",
        "Mn",
        "N",
        "Nd",
        "Nl",
        "No",
        "P",
        "Pc",
        "Pd",
        "Pe",
        "Pf",
        "Pi",
        "Po",
        "Ps",
        "S",
        "Sc",
        "Sk",
        "Sm",
        "So",
        "Z",
        "Zl",
        "Zp",
        "Zs",
        "Any",
    ]
)
SCRIPTS = frozenset(
    [
        "Arabic",
        "Armenian",
        "Bengali",
        "Cyrillic",
        "Devanagari",
        "Georgian",
        "Greek",
        "Hangul",
        "Han",
        "Hebrew",
        "Hiragana",
        "Katakana",
        "Latin",
        "Thai",
    ]
)
_DIGITS: tuple[Range, ...] = ((48, 57),)
_WORD: tuple[Range, ...] = ((48, 57), (65, 90), (95, 95), (97, 122))
_BLANK: tuple[Range, ...] = ((9, 10), (12, 13), (32, 32))
PERL = {"d": _DIGITS, "w": _WORD, "s": _BLANK}
POSIX: dict[str, tuple[Range, ...]] = {
    "alnum": ((48, 57), (65, 90), (97, 122)),
    "alpha": ((65, 90), (97, 122)),
    "ascii": ((0, 127),),
    "blank": ((9, 9), (32, 32)),
    "cntrl": ((0, 31), (127, 127)),
    "digit": _DIGITS,
    "graph": ((33, 126),),
    "lower": ((97, 122),),
    "print": ((32, 126),),
    "punct": ((33, 47), (58, 64), (91, 96), (123, 126)),
    "space": ((9, 13), (32, 32)),
    "upper": ((65, 90),),
    "word": _WORD,
    "xdigit": ((48, 57), (65, 70), (97, 102)),
}


def _case_variants(char: str) -> set[str]:
    variants = {char.lower(), char.upper(), char.lower().upper(), char.upper().lower()}
    variants |= _FOLDED.get(char, set())
    return {one for one in variants if len(one) == 1}


_FOLDED = {"k": {"\u212a"}, "K": {"\u212a"}, "s": {"\u017f"}, "S": {"\u017f"}}


def complement(ranges: tuple[Range, ...]) -> list[Range]:
    """Every other character."""
    start = 0
    rest: list[Range] = []
    for low, high in sorted(ranges):
        if low > start:
            rest.append((start, low - 1))
        start = high + 1
    return [*rest, (start, MAX_CODE)]
