"""Names of a simulated site, drawn from its seed: the same home gives the same racks again."""

import hashlib
import uuid

import msgspec


class SeededNames(msgspec.Struct, frozen=True):
    """Names as a factory would give them: serials and uuids that say nothing of one another."""

    seed: str

    def site(self) -> str:
        """Name of the site."""
        return "twin"

    def rack(self, index: int) -> str:
        """Name of a rack."""
        return f"rack-{index + 1:02}"

    def chassis_serial(self, rack: int) -> str:
        """Serial of a rack's chassis."""
        return "SIM" + self._digest(f"chassis {rack}")[:10].upper()

    def domain_uuid(self, index: int) -> str:
        """UUID of an NVLink domain."""
        return str(uuid.UUID(self._digest(f"domain {index}")[:32], version=4))

    def _digest(self, what: str) -> str:
        return hashlib.blake2b(f"{self.seed} {what}".encode(), digest_size=32).hexdigest()
