"""Who is calling: the class of a client by the names in its verified certificate.

The TLS layer has already refused whoever shows no certificate of the operator's authority. What a
certificate may do is decided here, by its common name or one of its alternative names.
"""

from collections.abc import Collection, Mapping
from enum import StrEnum

import msgspec


class Access(StrEnum):
    """Classes of clients; an admin may read as well."""

    ADMIN = "admin"
    READER = "reader"


class Identities(msgspec.Struct, frozen=True):
    """Which certificate names are of which class."""

    admins: frozenset[str]
    readers: frozenset[str]

    def name(self, auth_context: Mapping[str, Collection[bytes]]) -> str:
        """What to call the client in the log."""
        return next(iter(_names(auth_context)), "unnamed")

    def allows(self, auth_context: Mapping[str, Collection[bytes]], needed: Access) -> bool:
        """Whether a client with this certificate may do what needs `needed`."""
        names = set(_names(auth_context))
        if names & self.admins:
            return True
        return needed is Access.READER and bool(names & self.readers)


def _names(auth_context: Mapping[str, Collection[bytes]]) -> list[str]:
    keys = ("x509_common_name", "x509_subject_alternative_name")
    return [value.decode(errors="replace") for key in keys for value in auth_context.get(key, ())]
