"""Names that Kubernetes and the driver use on simulated trays: nothing of them is in the site's records.

A node is named by whoever installed it, and a GPU's UUID is burnt in; neither says where the tray sits. What
the layers share is only the join key: chassis serial, slot and module id, and the fabric GUID.
"""

import hashlib
import uuid

import msgspec


class TrayNames(msgspec.Struct, frozen=True):
    """Names drawn from the seed of a site: the same home gives the same again."""

    seed: str

    def node(self, chassis_serial: str, slot: int) -> str:
        """Name of the node that a tray is."""
        return f"node-{self._digest(f'node {chassis_serial} {slot}')[:8]}"

    def gpu_uuid(self, fabric_guid: int) -> str:
        """UUID of a GPU: another one where the tray was swapped, since then the GUID is another."""
        return f"GPU-{uuid.UUID(self._digest(f'gpu {fabric_guid}')[:32], version=4)}"

    def _digest(self, what: str) -> str:
        return hashlib.blake2b(f"{self.seed} kubernetes {what}".encode(), digest_size=32).hexdigest()
