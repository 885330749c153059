"""Lists in chunks: what is left of one is kept as it was at the first chunk's resourceVersion."""

import itertools
from dataclasses import dataclass
from typing import Any

from rackloom.claim.kube.api import Listed, Object
from rackloom.twin.kube import answers
from rackloom.twin.kube.store import Store

_PLACE = "continue-"


@dataclass(frozen=True, slots=True)
class Page:
    """One chunk, and the metadata of the list."""

    items: tuple[Object, ...]
    metadata: dict[str, Any]


class Pages:
    """The continuations that were handed out."""

    def __init__(self) -> None:
        self._left: dict[str, Listed] = {}
        self._tokens = itertools.count(1)

    def first(self, listed: Listed, limit: int) -> Page:
        """The first `limit` items (0: all of them)."""
        if not limit or len(listed.items) <= limit:
            return Page(listed.items, {"resourceVersion": listed.resource_version})
        token = f"{_PLACE}{next(self._tokens)}"
        self._left[token] = Listed(listed.items[limit:], listed.resource_version)
        left = len(listed.items) - limit
        metadata = {
            "resourceVersion": listed.resource_version,
            "continue": token,
            "remainingItemCount": left,
        }
        return Page(listed.items[:limit], metadata)

    def rest(self, token: str, store: Store, limit: int) -> Page:
        """The next chunk. Raises `Expired` when the server no longer knows the version of the first."""
        left = self._left.get(token)
        if left is None and not token.startswith(_PLACE):
            raise answers.bad_request(f"invalid continue token: continue key is not valid: {token!r}")
        if left is None or int(left.resource_version) < store.compacted:
            raise answers.continuation_expired()
        return self.first(left, limit)
