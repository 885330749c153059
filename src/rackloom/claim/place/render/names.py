"""Names that a gang gives to labels and objects: schedulers allow fewer characters than jobs use."""

import hashlib
import re

_LONGEST = 63
"""Characters of a label's value."""
_MARK = 8
"""Characters that tell apart names which begin alike."""
_UNNAMEABLE = re.compile(r"[^a-z0-9-]")
"""What a DNS-1123 label has not; names of objects may have dots too, but not in every place."""


def as_label(name: str) -> str:
    """The name of a gang as the value of a label, which has no slash and 63 characters at most."""
    value = name.replace("/", ".")
    return value if len(value) <= _LONGEST else _told_apart(value, name)


def as_object(name: str) -> str:
    """The name of a gang, without its namespace, as the name of an object that a label may hold."""
    own = _own(name)
    value = _nameable(own)
    return own if own and value == own and len(own) <= _LONGEST else _told_apart(value, own)


def as_object_of(name: str, group: str) -> str:
    """Likewise for one group of several: gang `run` with `a-b` and gang `run-a` with `b` are told apart."""
    own = _own(name)
    return _told_apart(_nameable(f"{own}-{group}"), f"{own}/{group}")


def _own(name: str) -> str:
    return name.rpartition("/")[2]


def _nameable(name: str) -> str:
    return _UNNAMEABLE.sub("-", name.lower()).strip("-")


def _told_apart(value: str, name: str) -> str:
    mark = hashlib.sha256(name.encode()).hexdigest()[:_MARK]
    kept = value[: _LONGEST - _MARK - 1].rstrip("-")
    return f"{kept}-{mark}" if kept else mark
