"""RE2's regular expressions, read into a tree.

Kubernetes matches with RE2, whose syntax is smaller than Python's (no look-around, no back-references) and
differs in detail. Reading it ourselves gives RE2's own verdict on what is a pattern, whatever executes it.
"""

import string

from rackloom.claim.allocate.cel.regex_tree import (
    CATEGORIES,
    MAX_CODE,
    PERL,
    POSIX,
    SCRIPTS,
    Assertion,
    Chars,
    Choice,
    Property,
    Range,
    Repeat,
    Sequence,
    Tree,
    complement,
)

_MAX_REPEAT = 1000
"""RE2's bound on a counted repetition, also of nested ones together."""
_CONTROL = {"a": 7, "f": 12, "t": 9, "n": 10, "r": 13, "v": 11}
_ASSERTIONS = {"A": "text_start", "z": "text_end", "b": "word", "B": "no_word"}
_NAME = frozenset(string.ascii_letters + string.digits + "_")


def parse_regex(pattern: str) -> Tree:
    """The tree of a pattern. ValueError says what RE2 would not accept."""
    reader = _Reader(pattern)
    tree = reader.choice()
    if not reader.done():
        raise ValueError(f"unexpected ): `{pattern}`")
    _check_repeats(tree)
    return tree


def _check_repeats(tree: Tree, outer: int = 1) -> None:
    match tree:
        case Repeat():
            times = max(tree.low, tree.high or 0, 1)
            if times > 1 and outer * times > _MAX_REPEAT:
                raise ValueError("invalid repeat count")
            _check_repeats(tree.body, outer * times)
        case Sequence():
            for part in tree.parts:
                _check_repeats(part, outer)
        case Choice():
            for option in tree.options:
                _check_repeats(option, outer)


class _Reader:
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

    def choice(self) -> Tree:
        options = [self.sequence()]
        while self.accept("|"):
            options.append(self.sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def sequence(self) -> Tree:
        parts: list[Tree] = []
        while not self.done() and self.pattern[self.at] not in "|)":
            parts.extend(self.item())
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def item(self) -> list[Tree]:
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

    def repeated(self, atom: Tree) -> Tree:
        operators = 0
        while (bounds := self.bounds()) is not None:
            operators += 1
            if operators > 1:
                raise ValueError(f"invalid nested repetition operator: `{self.pattern}`")
            greedy = not self.accept("?")
            atom = Repeat(atom, *bounds, greedy is ("U" not in self.flags))
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

    def atom(self) -> Tree | None:
        char = self.take()
        match char:
            case "(":
                return self.group()
            case "[":
                return self.char_class()
            case ".":
                return Chars(((0, MAX_CODE),)) if "s" in self.flags else Chars(((10, 10),), negated=True)
            case "^":
                return Assertion("line_start" if "m" in self.flags else "text_start")
            case "$":
                return Assertion("line_end" if "m" in self.flags else "text_end")
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

    def literal(self, code: int) -> Chars:
        return Chars(((code, code),), fold="i" in self.flags)

    def group(self) -> Tree | None:
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
        return Sequence((inner,))

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

    def escape(self) -> Tree:
        char = self.take()
        if char in _ASSERTIONS:
            return Assertion(_ASSERTIONS[char])
        if char == "C":
            return Chars(((0, MAX_CODE),))
        found = self.escaped_class(char)
        return self.literal(self.escaped_char(char)) if found is None else found

    def escaped_class(self, char: str) -> Chars | None:
        if char.lower() in PERL:
            return Chars(PERL[char.lower()], negated=char.isupper(), fold="i" in self.flags)
        if char in "pP":
            return Chars((), (self.property(char),))
        return None

    def property(self, char: str) -> Property:
        name = self.until("}", "invalid character class range") if self.accept("{") else self.take()
        negated = (char == "P") is not name.startswith("^")
        name = name.removeprefix("^")
        if name not in CATEGORIES and name not in SCRIPTS:
            raise ValueError(f"invalid character class range: `{name}`")
        return Property(name, negated)

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

    def char_class(self) -> Chars:
        negated = self.accept("^")
        ranges: list[Range] = []
        properties: list[Property] = []
        first = True
        while first or not self.looking_at("]"):
            first = False
            if not self.class_member(ranges, properties):
                ranges.append(self.class_range())
        self.take()
        fold = "i" in self.flags
        return Chars(tuple(ranges), tuple(properties), negated, fold)

    def class_member(self, ranges: list[Range], properties: list[Property]) -> bool:
        """A named set inside brackets, if one is next."""
        if self.accept("[:"):
            name = self.until(":]", "invalid character class range")
            known = POSIX.get(name.removeprefix("^"))
            if known is None:
                raise ValueError(f"invalid character class range: `[:{name}:]`")
            ranges.extend(complement(known) if name.startswith("^") else known)
            return True
        if self.looking_at("\\") and self.pattern[self.at + 1 : self.at + 2] in tuple("dDwWsSpP"):
            self.at += 1
            char = self.take()
            if char in "pP":
                properties.append(self.property(char))
            else:
                known = PERL[char.lower()]
                ranges.extend(complement(known) if char.isupper() else known)
            return True
        return False

    def class_range(self) -> Range:
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
