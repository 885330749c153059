"""The port for power and firmware of NVLink domains, and the requests that it takes.

This service has no program that switches power or installs firmware. An embedder passes one as
`ApiDeps.domain_operations`. Without one, every such request is refused.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, Protocol, Self
from uuid import UUID

from pydantic import Field, StrictBool, StringConstraints
from pydantic import model_validator as validator

from rackloom.carve.api.wire import NO_NUL, Body

# Requests.


DomainName = Annotated[
    str, StringConstraints(strict=True, min_length=1, max_length=256, pattern=r"^[^\x00]*\S[^\x00]*$")
]


class Operation(Body):
    """The fields of an operation on domains, without the domains."""

    site_id: UUID
    rule_id: UUID | None = None
    override_readiness_check: StrictBool = False


class PowerState(Operation):
    """The power of all trays of a domain."""

    state: Literal["on", "off", "cycle", "forceoff", "forcecycle", "acpowercycle"]


class FirmwareUpdate(Operation):
    """The firmware of all components of a domain. Without a version, each gets its default."""

    version: Annotated[str, StringConstraints(strict=True, max_length=256, pattern=NO_NUL)] | None = None
    override_version_check: StrictBool = False


class _SeveralDomains(Body):
    domain_ids: Annotated[list[DomainName], Field(min_length=1, max_length=100)]

    @validator(mode="after")
    def _each_once(self) -> Self:
        if len(set(self.domain_ids)) < len(self.domain_ids):
            raise ValueError("domainIds must name each domain once")
        return self


class BatchPowerState(PowerState, _SeveralDomains):
    """The power of several domains."""


class BatchFirmwareUpdate(FirmwareUpdate, _SeveralDomains):
    """The firmware of several domains."""


# The port.


class DomainOperations(Protocol):
    """A program that switches power and installs firmware. Each call returns the ids of its tasks.

    Raises `Retry` or `Unknown` if the program cannot be reached. The service does not try again.
    """

    async def set_power(self, domains: Sequence[str], wanted: PowerState) -> Sequence[UUID]:
        """Begin to switch the power of domains."""
        ...

    async def update_firmware(self, domains: Sequence[str], wanted: FirmwareUpdate) -> Sequence[UUID]:
        """Begin to install firmware in domains."""
        ...
