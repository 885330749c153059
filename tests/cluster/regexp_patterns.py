"""Random patterns for comparing engines of regular expressions, and subjects for them to search."""

import random
from collections.abc import Iterator

_LETTERS = "abcxyzKksſµéßΣσ日ｱ0189_- \t\n.GPU"
_SPECIAL = r"()[]{}*+?|^$\.-:<>=!,PpQEiCU"
_ESCAPES = (
    *(r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"\b", r"\B", r"\A", r"\z", r"\Z", r"\n", r"\t"),
    *(r"\.", r"\-", r"\_", r"\\", r"\C", r"\E", r"\1", r"\8", r"\0", r"\07", r"\12", r"\123", r"\x41"),
    *(r"\x{e9}", r"\x{110000}", r"\x4", r"\x{}", r"\a", r"\v", r"\f", r"\r", r"\e", r"\G", r"\K"),
    *(r"\R", r"\X", r"\h", r"\é", r"\/", r"\ "),
)
_CLASS_NAMES = (
    *("L", "Lu", "Ll", "Lt", "Lm", "Lo", "M", "Mn", "N", "Nd", "Nl", "No", "P", "Pd", "S", "Sc"),
    *("Z", "Zs", "C", "Cc", "Cn", "LC", "Any", "ASCII", "Assigned", "Letter", "letter"),
    *("uppercase letter", "Decimal_Number", "digit", "punct", "cntrl", "Greek", "greek", "Latin"),
    *("Han", "Katakana", "Cyrillic", "Common", "Inherited", "Old_Italic", "SignWriting", "Garay"),
    *("Nope", "", "^", "^L", "^Greek", "^^L", "L&", "IsGreek", "é", "lu", "-L_u", "Sc ript"),
)
_POSIX = ("alpha", "^alpha", "digit", "word", "space", "punct", "upper", "^lower", "nope", "ascii", "")
_REPEATS = (
    *("*", "+", "?", "*?", "+?", "??", "{2}", "{0}", "{0,}", "{1,}", "{,3}", "{2,1}", "{1,3}?"),
    *("{3}{2}", "**", "a{", "{}", "{1000}", "{1001}", "{0,1000}", "{500,1000}", "{31}", "{32}"),
    *("{10}", "{99999999999}", "{1", "{1,", "{a}", "{01}", "+*"),
)
_NAMES = ("n", "name", "n1", "1n", "_", "é", "", "a b", "a-b", "N", "日")
_FLAGS = ("i", "s", "m", "U", "im", "i-s", "-i", "-", "i-", "x", "", "sU", "i-i", "--i", "^")


class PatternMaker:
    """Patterns from a grammar that is wider than that of the engines, and mutations of them."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def cases(self, count: int) -> Iterator[tuple[str, list[str]]]:
        """Patterns, each with subjects. A third of the patterns have random changes."""
        for _ in range(count):
            pattern = self._alternation(self._random.choice((1, 2, 2, 3)))
            if self._random.random() < 0.34:
                pattern = self._mutated(pattern)
            yield pattern, [self._subject(pattern) for _ in range(5)]

    def _alternation(self, depth: int) -> str:
        return "|".join(self._sequence(depth) for _ in range(self._random.choice((1, 1, 1, 2, 3))))

    def _sequence(self, depth: int) -> str:
        return "".join(self._repeated(depth) for _ in range(self._random.choice((0, 1, 1, 2, 3, 4))))

    def _repeated(self, depth: int) -> str:
        repeat = self._random.choice(_REPEATS) if self._random.random() < 0.3 else ""
        return self._atom(depth) + repeat

    def _atom(self, depth: int) -> str:
        pick = self._random.random()
        if depth and pick < 0.25:
            return self._group(depth - 1)
        if pick < 0.5:
            return self._literal()
        if pick < 0.6:
            return self._random.choice((".", "^", "$", r"\b", r"\B"))
        if pick < 0.7:
            return self._random.choice(_ESCAPES)
        if pick < 0.78:
            return self._unicode_class()
        if pick < 0.94:
            return self._character_set()
        return rf"\Q{self._text(4)}" + self._random.choice((r"\E", r"\E", r"\E", ""))

    def _group(self, depth: int) -> str:
        inner = self._alternation(depth)
        kind = self._random.randrange(7)
        if kind == 0:
            return f"(?{self._random.choice(('P', ''))}<{self._random.choice(_NAMES)}>{inner})"
        if kind == 1:
            return f"(?{self._random.choice(_FLAGS)}:{inner})"
        if kind == 2:
            return f"(?{self._random.choice(_FLAGS)}){inner}"
        if kind == 3:
            opening = self._random.choice(("?=", "?!", "?<=", "?>", "?#", "?P=n", "?P>n", "*", "?"))
            return f"({opening}{inner})" if self._random.random() < 0.2 else f"({inner})"
        return f"(?:{inner})" if kind == 4 else f"({inner})"

    def _literal(self) -> str:
        return self._random.choice(_LETTERS)

    def _text(self, longest: int) -> str:
        return "".join(self._random.choices(_LETTERS + _SPECIAL, k=self._random.randint(0, longest)))

    def _unicode_class(self) -> str:
        sign = self._random.choice("pP")
        name = self._random.choice(_CLASS_NAMES)
        braces = len(name) != 1 or self._random.random() < 0.5
        return rf"\{sign}{{{name}}}" if braces else rf"\{sign}{name}"

    def _character_set(self) -> str:
        items = "".join(self._set_item() for _ in range(self._random.randint(0, 4)))
        opening = self._random.choice(("[", "[", "[", "[^", "[]", "[^]", "[-", "[["))
        return opening + items + self._random.choice(("]",) * 9 + ("-]", ""))

    def _set_item(self) -> str:
        pick = self._random.random()
        if pick < 0.4:
            return self._literal()
        if pick < 0.6:
            return f"{self._literal()}-{self._literal()}"
        if pick < 0.72:
            return self._random.choice(_ESCAPES)
        if pick < 0.82:
            return self._unicode_class()
        if pick < 0.92:
            return f"[:{self._random.choice(_POSIX)}:]"
        return self._random.choice(_SPECIAL)

    def _mutated(self, pattern: str) -> str:
        for _ in range(self._random.randint(1, 3)):
            at = self._random.randint(0, len(pattern))
            change = self._random.randrange(4)
            if change == 0:
                pattern = pattern[:at] + pattern[at + 1 :]
            elif change == 1:
                pattern = pattern[:at] + self._random.choice(_SPECIAL + _LETTERS) + pattern[at:]
            elif change == 2:
                pattern = pattern[:at] + pattern[at : at + 1].swapcase() + pattern[at + 1 :]
            else:
                until = self._random.randint(at, min(len(pattern), at + 6))
                pattern = pattern[:until] + pattern[at:until] + pattern[until:]
        return pattern

    def _subject(self, pattern: str) -> str:
        """Text of the pattern's characters, and of others."""
        alphabet = _LETTERS + "".join(char for char in pattern if char.isalnum()) * 2
        return "".join(self._random.choices(alphabet, k=self._random.choice((0, 1, 2, 3, 5, 8, 13, 40))))
