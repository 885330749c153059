"""The worth of a packing, by which packings are compared."""

from collections.abc import Sequence

from rackloom.core.place.search.packing import PackingAssignment, PackingClique, PackingItem


def packing_score(
    cliques: Sequence[PackingClique], items: Sequence[PackingItem], assignment: PackingAssignment
) -> int:
    """The worth of the placed items, less the cliques that are opened for them."""
    worth = sum(item.worth for item, where in zip(items, assignment, strict=True) if where is not None)
    opened = {clique for where in assignment if where is not None for clique in where}
    return worth - sum(not cliques[clique].in_use for clique in opened)
