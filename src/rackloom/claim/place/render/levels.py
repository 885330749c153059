"""The levels of a fabric, as the Topology that Kueue and KAI read."""

from rackloom.claim.place.labels import Labels
from rackloom.claim.place.render.edit import Object


def topology(version: str, labels: Labels) -> Object:
    """A Topology of cliques and the trays in them, of the API version of a scheduler."""
    return {
        "apiVersion": version,
        "kind": "Topology",
        "metadata": {"name": labels.topology},
        "spec": {"levels": [{"nodeLabel": labels.clique}, {"nodeLabel": labels.host}]},
    }
