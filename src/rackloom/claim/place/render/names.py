"""Names that a gang gives to labels and objects: schedulers allow fewer characters than jobs use."""

import hashlib
import re

_LONGEST = 63
"""Characters of a label's value."""
_MARK = 8
"""Characters that tell apart names which begin alike."""
_UNNAMEABLE = re.compile(r"[^a-z0-9.-]")
"""What the name of an object has not; the value of a label may."""


def as_label(name: str) -> str:
    """The name of a gang as the value of a label, which has no slash and 63 characters at most."""
    value = name.replace("/", ".")
    return value if len(value) <= _LONGEST else _told_apart(value, name)


def as_object(name: str) -> str:
    """The name of a gang, without its namespace, as the name of an object that a label may hold."""
    own = name.rpartition("/")[2]
    value = _UNNAMEABLE.sub("-", own.lower()).strip(".-")
    return own if value == own and len(own) <= _LONGEST else _told_apart(value, own)


def _told_apart(value: str, name: str) -> str:
    mark = hashlib.sha256(name.encode()).hexdigest()[:_MARK]
    kept = value[: _LONGEST - _MARK - 1]
    return f"{kept}-{mark}"
