"""What partitions are called.

A name is the only thing that ties a partition on a switch to the records: the controller chooses the id
after the request, and a reply can be lost.
"""

RESERVED = "Default Partition"
"""NMX-C: no other partition may have the name of the factory default partition."""
MAX_LENGTH = 255
"""NMX-C: names have up to 255 ASCII characters."""


def partition_name(logical_partition: str) -> str:
    """Name of the physical partition of `logical_partition`, unique in a domain as there is one in each.

    Names are a domain's own: the same logical partition has the same name in every domain that it reaches.
    """
    return f"rl-{logical_partition}"


def flaw(name: str) -> str | None:
    """Why a controller would not take `name`, or None."""
    if not name or not name.isascii() or not name.isprintable() or len(name) > MAX_LENGTH:
        return f"a partition name has 1 to {MAX_LENGTH} printable ASCII characters"
    if name == RESERVED:
        return "the name is reserved for the factory default partition"
    return None
