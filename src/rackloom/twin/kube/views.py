"""How a reader wants to see objects: as they are, or as the rows of a table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rackloom.claim.kube.api import Kind, Object
from rackloom.twin.kube.pages import Page
from rackloom.twin.kube.printing import printed, wants_table

_BARE = ("apiVersion", "kind")


@dataclass(frozen=True, slots=True)
class View:
    """What one request asked for. `now`: seconds since 1970. `included`: of an object, beside its row."""

    kind: Kind
    is_table: bool
    included: str
    now: Callable[[], float]

    def one(self, obj: Object) -> Object:
        """One object: the answer to a read, and what an event of a watch tells."""
        if not self.is_table:
            return obj
        return self._table((obj,), {"resourceVersion": obj["metadata"]["resourceVersion"]})

    def page(self, page: Page) -> Object:
        """A list, or a chunk of one."""
        if self.is_table:
            return self._table(page.items, page.metadata)
        items = [{key: item[key] for key in item if key not in _BARE} for item in page.items]
        kind, version = f"{self.kind.kind}List", self.kind.api_version
        return {"kind": kind, "apiVersion": version, "metadata": page.metadata, "items": items}

    def _table(self, items: tuple[Object, ...], metadata: Object) -> Object:
        return printed(self.kind, items, metadata, self.now(), self.included)


def view(kind: Kind, accept: str, params: Mapping[str, str], now: Callable[[], float]) -> View:
    """What a request for objects of a kind wants to see."""
    return View(kind, wants_table(accept), params.get("includeObject", "Metadata"), now)
