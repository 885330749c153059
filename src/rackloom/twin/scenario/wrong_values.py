"""What is wrong with a table of a file, in words, and what to write instead."""

import re
import types
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

import msgspec

_AT = re.compile(r" - at `\$\.([\w-]+)")
_PLAIN = {
    int: "a whole number, such as 1",
    float: "a number, such as 2.5",
    str: "a text in quotes",
    bool: "true or false",
}


def reason(error: msgspec.ValidationError) -> str:
    """What it says, as a reader of the file would."""
    told = str(error).replace("Object missing required field", "it lacks the key")
    told = told.replace("Object contains unknown field", "it has the unknown key")
    return told.replace(" - at `$.", " at `")


def fix(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> str:
    """What the key takes whose value is wrong; where keys are wrong, which there are."""
    found = _AT.search(str(error))
    fields = {one.encode_name: one for one in msgspec.structs.fields(kind)}
    if found and found[1] in fields:
        return f"{found[1]} is {_told(fields[found[1]].type)}"
    keys = (name if one.required else f"{name} (optional)" for name, one in fields.items())
    return f"its keys are {', '.join(keys)}"


def nearest(word: object, known: Iterable[str]) -> str:
    """The words that there are, before them the one that was perhaps meant."""
    words = sorted(known)
    close = get_close_matches(str(word), words, n=1)
    return f"{close[0]}, or one of {', '.join(words)}" if close else f"one of {', '.join(words)}"


def _told(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        first, *others = get_args(kind)
        size = "" if others == [Ellipsis] else f" of {1 + len(others)}"
        return f"a list{size}, each of it {_told(first)}"
    if get_origin(kind) is types.UnionType:
        return " or ".join(_told(one) for one in get_args(kind) if one is not types.NoneType)
    return _PLAIN[kind]
