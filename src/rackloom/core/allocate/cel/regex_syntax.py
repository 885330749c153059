"""RE2's regular expression syntax, parsed into a tree by recursive descent.

Kubernetes matches with RE2, whose syntax is smaller than Python's (no look-around, no back-references)
and differs in detail. Parsing it here gives a verdict on what is a pattern that does not depend on the
engine that runs it. Counted repetitions are limited to 1000, nested ones together, as in RE2.

Known differences from Go: the escape C and a stray escape E are accepted, and Unicode scripts are a
fixed selection that is recognised by the names of characters.
"""

import string
import unicodedata
from dataclasses import dataclass

# The tree of a pattern, and the character sets that RE2 names.


MAX_CODE = 0x10FFFF

CodeRange = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CharacterSet:
    """One character out of `ranges` or of the named `properties`."""

    ranges: tuple[CodeRange, ...]
    properties: tuple["UnicodeProperty", ...] = ()
    negated: bool = False
    fold: bool = False

    def accepts(self, char: str) -> bool:
        """Whether the character is one of these."""
        forms = {char, *_case_variants(char)} if self.fold else {char}
        return any(map(self._holds, forms)) is not self.negated

    def _holds(self, char: str) -> bool:
        code = ord(char)
        return any(low <= code <= high for low, high in self.ranges) or any(
            property_.holds(char) for property_ in self.properties
        )


@dataclass(frozen=True, slots=True)
class UnicodeProperty:
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
class PositionAssertion:
    """A condition on the place: `text_start`, `text_end`, `line_start`, `line_end`, `word`, `no_word`."""

    kind: str


@dataclass(frozen=True, slots=True)
class Concatenation:
    """Parts one after the other; none of them is the empty match."""

    parts: tuple["RegexTree", ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    """The first alternative that leads to a match."""

    options: tuple["RegexTree", ...]


@dataclass(frozen=True, slots=True)
class Repetition:
    """`body` from `low` to `high` times (None is without end), as many as possible if `greedy`."""

    body: "RegexTree"
    low: int
    high: int | None
    greedy: bool


RegexTree = CharacterSet | PositionAssertion | Concatenation | Alternation | Repetition

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
_DIGITS: tuple[CodeRange, ...] = ((48, 57),)
_WORD: tuple[CodeRange, ...] = ((48, 57), (65, 90), (95, 95), (97, 122))
_BLANK: tuple[CodeRange, ...] = ((9, 10), (12, 13), (32, 32))
PERL = {"d": _DIGITS, "w": _WORD, "s": _BLANK}
POSIX: dict[str, tuple[CodeRange, ...]] = {
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
    return {variant for variant in variants if len(variant) == 1}


_FOLDED = {"k": {"\u212a"}, "K": {"\u212a"}, "s": {"\u017f"}, "S": {"\u017f"}}


def complement_ranges(ranges: tuple[CodeRange, ...]) -> list[CodeRange]:
    """Every other character."""
    start = 0
    rest: list[CodeRange] = []
    for low, high in sorted(ranges):
        if low > start:
            rest.append((start, low - 1))
        start = high + 1
    return [*rest, (start, MAX_CODE)]


# The parser.


_MAX_REPEAT = 1000
"""RE2's bound on a counted repetition, also of nested ones together."""
_CONTROL = {"a": 7, "f": 12, "t": 9, "n": 10, "r": 13, "v": 11}
_ASSERTIONS = {"A": "text_start", "z": "text_end", "b": "word", "B": "no_word"}
_NAME = frozenset(string.ascii_letters + string.digits + "_")


def parse_regex(pattern: str) -> RegexTree:
    """The tree of a pattern. ValueError says what RE2 would not accept."""
    reader = _RegexParser(pattern)
    tree = reader.choice()
    if not reader.done():
        raise ValueError(f"unexpected ): `{pattern}`")
    _check_repeats(tree)
    return tree


def _check_repeats(tree: RegexTree, outer: int = 1) -> None:
    match tree:
        case Repetition():
            times = max(tree.low, tree.high or 0, 1)
            if times > 1 and outer * times > _MAX_REPEAT:
                raise ValueError("invalid repeat count")
            _check_repeats(tree.body, outer * times)
        case Concatenation():
            for part in tree.parts:
                _check_repeats(part, outer)
        case Alternation():
            for option in tree.options:
                _check_repeats(option, outer)


class _RegexParser:
    """A recursive-descent reader over one pattern, with the flags in force."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0
        self.flags = frozenset[str]()
        self.names: set[str] = set()

    def done(self) -> bool:
        return self.at >= len(self.pattern)

    def looking_at(self, text: str) -> bool:
        return self.pattern.startswith(text, self.at)

    def take(self) -> str:
        if self.done():
            raise ValueError(f"pattern ends too early: `{self.pattern}`")
        self.at += 1
        return self.pattern[self.at - 1]

    def accept(self, text: str) -> bool:
        if self.looking_at(text):
            self.at += len(text)
            return True
        return False

    def until(self, end: str, what: str) -> str:
        stop = self.pattern.find(end, self.at)
        if stop < 0:
            raise ValueError(f"{what}: `{self.pattern}`")
        found, self.at = self.pattern[self.at : stop], stop + len(end)
        return found

    def choice(self) -> RegexTree:
        options = [self.sequence()]
        while self.accept("|"):
            options.append(self.sequence())
        return options[0] if len(options) == 1 else Alternation(tuple(options))

    def sequence(self) -> RegexTree:
        parts: list[RegexTree] = []
        while not self.done() and self.pattern[self.at] not in "|)":
            parts.extend(self.item())
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def item(self) -> list[RegexTree]:
        """The next atom with its repetitions; several for a quoted text, none for a flag setting."""
        if self.accept(r"\Q"):
            stop = self.pattern.find(r"\E", self.at)
            text = self.pattern[self.at :] if stop < 0 else self.pattern[self.at : stop]
            self.at = len(self.pattern) if stop < 0 else stop + 2
            atoms = [self.literal(ord(char)) for char in text]
            return [*atoms[:-1], self.repeated(atoms[-1])] if atoms else []
        if self.accept(r"\E"):
            return []
        atom = self.atom()
        return [] if atom is None else [self.repeated(atom)]

    def repeated(self, atom: RegexTree) -> RegexTree:
        operators = 0
        while (bounds := self.bounds()) is not None:
            operators += 1
            if operators > 1:
                raise ValueError(f"invalid nested repetition operator: `{self.pattern}`")
            greedy = not self.accept("?")
            atom = Repetition(atom, *bounds, greedy is ("U" not in self.flags))
        return atom

    def bounds(self) -> tuple[int, int | None] | None:
        for operator, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.accept(operator):
                return bounds
        return self.counted() if self.looking_at("{") else None

    def counted(self) -> tuple[int, int | None] | None:
        """`{n}`, `{n,}`, `{n,m}`; anything else after a brace is just a brace."""
        end = self.pattern.find("}", self.at)
        low, comma, high = self.pattern[self.at + 1 : end].partition(",")
        numbers = (_is_count(low), not high or _is_count(high))
        if end < 0 or not all(numbers):
            return None
        self.at = end + 1
        least = int(low)
        most = least if not comma else int(high) if high else None
        if least > _MAX_REPEAT or (most or 0) > _MAX_REPEAT or (most is not None and most < least):
            raise ValueError(f"invalid repeat count: `{self.pattern}`")
        return least, most

    def atom(self) -> RegexTree | None:
        char = self.take()
        match char:
            case "(":
                return self.group()
            case "[":
                return self.char_class()
            case ".":
                return (
                    CharacterSet(((0, MAX_CODE),))
                    if "s" in self.flags
                    else CharacterSet(((10, 10),), negated=True)
                )
            case "^":
                return PositionAssertion("line_start" if "m" in self.flags else "text_start")
            case "$":
                return PositionAssertion("line_end" if "m" in self.flags else "text_end")
            case "\\":
                return self.escape()
            case "*" | "+" | "?":
                raise ValueError(f"missing argument to repetition operator: `{char}`")
            case "{":
                self.at -= 1
                if self.counted() is not None:
                    raise ValueError("missing argument to repetition operator")
                self.at += 1
        return self.literal(ord(char))

    def literal(self, code: int) -> CharacterSet:
        return CharacterSet(((code, code),), fold="i" in self.flags)

    def group(self) -> RegexTree | None:
        before = self.flags
        if self.accept("?P<") or self.accept("?<"):
            name = self.until(">", "invalid named capture")
            if not name or not set(name) <= _NAME or name in self.names:
                raise ValueError(f"invalid named capture: `{name}`")
            self.names.add(name)
        elif self.accept("?") and self.set_flags():
            return None
        inner = self.choice()
        if not self.accept(")"):
            raise ValueError(f"missing closing ): `{self.pattern}`")
        self.flags = before
        return Concatenation((inner,))

    def set_flags(self) -> bool:
        """Read `i-s:` or `i)`; the second form sets the flags for what follows and is no group."""
        on, off, sign, seen = set(self.flags), set[str](), True, False
        while True:
            char = self.take()
            if char in "imsU":
                on, off = (on | {char}, off) if sign else (on - {char}, off)
                seen = True
            elif char == "-" and sign:
                sign, seen = False, False
            elif char in ":)" and (sign or seen):
                self.flags = frozenset(on)
                return char == ")"
            else:
                raise ValueError(f"invalid or unsupported Perl syntax: `{self.pattern}`")

    def escape(self) -> RegexTree:
        char = self.take()
        if char in _ASSERTIONS:
            return PositionAssertion(_ASSERTIONS[char])
        if char == "C":
            return CharacterSet(((0, MAX_CODE),))
        found = self.escaped_class(char)
        return self.literal(self.escaped_char(char)) if found is None else found

    def escaped_class(self, char: str) -> CharacterSet | None:
        if char.lower() in PERL:
            return CharacterSet(PERL[char.lower()], negated=char.isupper(), fold="i" in self.flags)
        if char in "pP":
            return CharacterSet((), (self.property(char),))
        return None

    def property(self, char: str) -> UnicodeProperty:
        name = self.until("}", "invalid character class range") if self.accept("{") else self.take()
        negated = (char == "P") is not name.startswith("^")
        name = name.removeprefix("^")
        if name not in CATEGORIES and name not in SCRIPTS:
            raise ValueError(f"invalid character class range: `{name}`")
        return UnicodeProperty(name, negated)

    def escaped_char(self, char: str) -> int:
        if char in _CONTROL:
            return _CONTROL[char]
        if char == "x":
            return self.hexadecimal()
        if char in "01234567":
            return self.octal(char)
        if char in string.punctuation:
            return ord(char)
        raise ValueError(f"invalid escape sequence: `\\{char}`")

    def hexadecimal(self) -> int:
        digits = self.until("}", "invalid escape sequence") if self.accept("{") else self.take() + self.take()
        if not digits or not set(digits) <= set(string.hexdigits) or int(digits, 16) > MAX_CODE:
            raise ValueError(f"invalid escape sequence: `\\x{digits}`")
        return int(digits, 16)

    def octal(self, first: str) -> int:
        if first != "0" and not (not self.done() and self.pattern[self.at] in "01234567"):
            raise ValueError(f"invalid escape sequence: `\\{first}`")
        digits = first
        while len(digits) < 3 and not self.done() and self.pattern[self.at] in "01234567":
            digits += self.take()
        return int(digits, 8)

    def char_class(self) -> CharacterSet:
        negated = self.accept("^")
        ranges: list[CodeRange] = []
        properties: list[UnicodeProperty] = []
        first = True
        while first or not self.looking_at("]"):
            first = False
            if not self.class_member(ranges, properties):
                ranges.append(self.class_range())
        self.take()
        fold = "i" in self.flags
        return CharacterSet(tuple(ranges), tuple(properties), negated, fold)

    def class_member(self, ranges: list[CodeRange], properties: list[UnicodeProperty]) -> bool:
        """A named set inside brackets, if one is next."""
        if self.accept("[:"):
            name = self.until(":]", "invalid character class range")
            known = POSIX.get(name.removeprefix("^"))
            if known is None:
                raise ValueError(f"invalid character class range: `[:{name}:]`")
            ranges.extend(complement_ranges(known) if name.startswith("^") else known)
            return True
        if self.looking_at("\\") and self.pattern[self.at + 1 : self.at + 2] in tuple("dDwWsSpP"):
            self.at += 1
            char = self.take()
            if char in "pP":
                properties.append(self.property(char))
            else:
                known = PERL[char.lower()]
                ranges.extend(complement_ranges(known) if char.isupper() else known)
            return True
        return False

    def class_range(self) -> CodeRange:
        low = self.class_char()
        if self.looking_at("-") and not self.looking_at("-]"):
            self.take()
            high = self.class_char()
            if high < low:
                raise ValueError(f"invalid character class range: `{self.pattern}`")
            return low, high
        return low, low

    def class_char(self) -> int:
        if self.done():
            raise ValueError(f"missing closing ]: `{self.pattern}`")
        char = self.take()
        return self.escaped_char(self.take()) if char == "\\" else ord(char)


def _is_count(text: str) -> bool:
    return text.isdigit() and text.isascii() and (text == "0" or text[0] != "0")
