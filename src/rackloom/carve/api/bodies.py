"""Request bodies: shapes only. What the values mean is for the rules of the site to judge.

Fields of networks, operating systems and the like are kept as they came (`extra`), so that clients of the
wider API find them again; nothing here acts on them.
"""

from math import isfinite
from typing import Annotated, Any, Literal, Self
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StrictBool, StrictInt, StringConstraints
from pydantic import model_validator as validator
from pydantic.alias_generators import to_camel

from rackloom.carve.api.queries import CapabilityType
from rackloom.carve.site.naming import LONGEST, NAME, NAME_MEANING, SHORTEST
from rackloom.carve.site.values import InterfaceWish

NO_CONTROL = r"^[^\x00-\x1f\x7f]+$"
NO_NUL = r"^[^\x00]*$"
"""PostgreSQL keeps every character but this one."""
MEANING = {
    NO_CONTROL: "must hold no control characters",
    NO_NUL: "must not hold NUL",
    NAME: NAME_MEANING,
}
"""What a text lacks that does not match a pattern."""
Name = Annotated[str, StringConstraints(strict=True, min_length=SHORTEST, max_length=LONGEST, pattern=NAME)]
NamePrefix = Annotated[str, StringConstraints(strict=True, min_length=SHORTEST, max_length=240, pattern=NAME)]
Description = Annotated[str, StringConstraints(strict=True, max_length=1024, pattern=NO_NUL)]
Label = Annotated[str, StringConstraints(strict=True, max_length=256, pattern=NO_NUL)]
Labels = Annotated[dict[Label, Label], Field(max_length=10)]


class Body(BaseModel):
    """camelCase on the wire; unknown fields are ignored."""

    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_alias=True, validate_by_name=False, allow_inf_nan=False
    )


class OpenBody(Body):
    """Keeps unknown fields."""

    model_config = ConfigDict(extra="allow")

    __pydantic_extra__: dict[str, JsonValue] = Field(init=False)

    @validator(mode="before")
    @classmethod
    def _storable(cls, value: Any) -> Any:
        _check_storable(value)
        return value

    @property
    def extra(self) -> dict[str, Any]:
        """The fields that have no meaning here, as they came."""
        return dict(self.__pydantic_extra__)


def _check_storable(value: Any) -> None:
    """Refuse what no database or JSON writer takes: NUL, halves of surrogate pairs, infinite numbers."""
    match value:
        case float() if not isfinite(value):
            raise ValueError("numbers must be finite")
        case str():
            if "\x00" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
                raise ValueError("text may hold neither NUL nor unpaired surrogates")
        case dict():
            for key, inner in value.items():
                _check_storable(key)
                _check_storable(inner)
        case list():
            for inner in value:
                _check_storable(inner)


class LogicalPartitionCreate(Body):
    """A new NVLink logical partition."""

    name: Name
    site_id: UUID
    description: Description | None = None


class LogicalPartitionUpdate(Body):
    """Changes of an NVLink logical partition."""

    name: Name | None = None
    description: Description | None = None


class InterfaceBody(Body):
    """One GPU and the logical partition that it shall join.

    Published schemas and generated clients disagree on the case of one letter; both spellings are read.
    """

    nvlink_logical_partition_id: UUID = Field(alias="nvLinkLogicalPartitionId")
    device_instance: StrictInt

    @validator(mode="before")
    @classmethod
    def _either_spelling(cls, value: Any) -> Any:
        if not isinstance(value, dict) or "nvLinklogicalPartitionId" not in value:
            return value
        other = value["nvLinklogicalPartitionId"]
        if value.get("nvLinkLogicalPartitionId", other) != other:
            raise ValueError("nvLinkLogicalPartitionId and nvLinklogicalPartitionId differ")
        return {**value, "nvLinkLogicalPartitionId": other}

    @property
    def wish(self) -> InterfaceWish:
        """As the rules take it."""
        return InterfaceWish(str(self.nvlink_logical_partition_id), self.device_instance)


NVLinkInterfaces = Annotated[list[InterfaceBody], Field(max_length=1024)]


class VpcCreate(OpenBody):
    """A new VPC."""

    id: UUID | None = None
    name: Name
    site_id: UUID
    description: Description | None = None
    vni: Annotated[StrictInt, Field(ge=1, le=65535)] | None = None
    labels: Labels | None = None
    network_virtualization_type: Literal["ETHERNET_VIRTUALIZER", "FNN", "FLAT"] | None = None
    nvlink_logical_partition_id: UUID | None = Field(None, alias="nvLinkLogicalPartitionId")

    @property
    def kept(self) -> dict[str, Any]:
        """What is returned but not acted on."""
        ours = {"id", "name", "site_id", "description", "nvlink_logical_partition_id"}
        return self.model_dump(mode="json", by_alias=True, exclude=ours, exclude_none=True)


class VpcUpdate(OpenBody):
    """Changes of a VPC; an empty nvLinkLogicalPartitionId clears the default."""

    name: Name | None = None
    description: Description | None = None
    labels: Labels | None = None
    nvlink_logical_partition_id: UUID | Literal[""] | None = Field(None, alias="nvLinkLogicalPartitionId")

    @property
    def kept(self) -> dict[str, Any]:
        """What is returned but not acted on."""
        ours = {"name", "description", "nvlink_logical_partition_id"}
        return self.model_dump(mode="json", by_alias=True, exclude=ours, exclude_none=True)


class VpcVirtualization(Body):
    """The network virtualization that a VPC is to have; kept, and not acted on."""

    network_virtualization_type: Literal["FNN"]


class _InstanceBase(OpenBody):
    vpc_id: UUID
    instance_type_id: UUID | None = None
    description: Description | None = None
    nvlink_interfaces: NVLinkInterfaces | None = Field(None, alias="nvLinkInterfaces")
    allow_unhealthy_machine: StrictBool = False
    require_same_domain: StrictBool = False

    @property
    def wishes(self) -> tuple[InterfaceWish, ...] | None:
        """The interfaces asked for; None when the VPC's default decides."""
        return None if self.nvlink_interfaces is None else tuple(one.wish for one in self.nvlink_interfaces)


class InstanceCreate(_InstanceBase):
    """A new instance, of a type or on a chosen machine."""

    name: Name
    machine_id: Annotated[str, StringConstraints(strict=True, min_length=1)] | None = None

    @validator(mode="after")
    def _one_choice(self) -> Self:
        if (self.instance_type_id is None) == (self.machine_id is None):
            raise ValueError("exactly one of instanceTypeId and machineId must be specified")
        return self


class InstanceBatchCreate(_InstanceBase):
    """Several instances at once: all or none."""

    instance_type_id: UUID
    name_prefix: NamePrefix
    count: StrictInt
    topology_optimized: StrictBool = True


class InstanceUpdate(OpenBody):
    """Changes of an instance; a list of interfaces replaces the present one."""

    name: Name | None = None
    description: Description | None = None
    nvlink_interfaces: NVLinkInterfaces | None = Field(None, alias="nvLinkInterfaces")

    @property
    def wishes(self) -> tuple[InterfaceWish, ...] | None:
        """The interfaces asked for; None leaves them."""
        return None if self.nvlink_interfaces is None else tuple(one.wish for one in self.nvlink_interfaces)


class SiteCapabilities(Body):
    """Capabilities to switch; one that is not named stays."""

    native_networking: StrictBool | None = None
    network_security_group: StrictBool | None = None
    nvlink_partition: StrictBool | None = Field(None, alias="nvLinkPartition")
    flow: StrictBool | None = None
    image_based_operating_system: StrictBool | None = None


class SiteLocation(Body):
    """Where a site is."""

    city: Label | None = None
    state: Label | None = None
    country: Label | None = None


class SiteContact(Body):
    """Who answers for a site."""

    email: Label | None = None


Seconds = Annotated[StrictInt, Field(ge=0, le=1_000_000_000)]


class SiteUpdate(Body):
    """Changes of a site; what is not named stays. The serial console is kept, and not acted on."""

    name: Name | None = None
    description: Description | None = None
    capabilities: SiteCapabilities | None = None
    location: SiteLocation | None = None
    contact: SiteContact | None = None
    serial_console_hostname: Label | None = None
    is_serial_console_enabled: StrictBool | None = None
    serial_console_idle_timeout: Seconds | None = None
    serial_console_max_session_length: Seconds | None = None
    is_serial_console_ssh_keys_enabled: StrictBool | None = Field(None, alias="isSerialConsoleSSHKeysEnabled")
    renew_registration_token: StrictBool = False

    @validator(mode="after")
    def _no_registration(self) -> Self:
        if self.renew_registration_token:
            raise ValueError("renewRegistrationToken must be false: sites register with no token here")
        return self

    @property
    def kept(self) -> dict[str, Any]:
        """What is returned but not acted on."""
        ours = {"name", "description", "capabilities", "renew_registration_token"}
        return self.model_dump(mode="json", by_alias=True, exclude=ours, exclude_none=True)


class MachineCapability(OpenBody):
    """What a machine of a type has."""

    type: CapabilityType
    name: Name
    count: Annotated[StrictInt, Field(ge=0, le=1024)] | None = None
    device_type: str | None = None


class InstanceTypeCreate(Body):
    """A new instance type."""

    name: Name
    site_id: UUID
    description: Description | None = None
    labels: Labels = {}
    machine_capabilities: Annotated[list[MachineCapability], Field(max_length=64)] = []


class InstanceTypeUpdate(Body):
    """Changes of an instance type."""

    name: Name | None = None
    description: Description | None = None
    labels: Labels | None = None
    machine_capabilities: Annotated[list[MachineCapability], Field(max_length=64)] | None = None


class MachineAssociation(Body):
    """Machines that shall be of an instance type."""

    machine_ids: Annotated[list[str], Field(min_length=1, max_length=1024)]


class AllocationConstraint(Body):
    """So many machines of a type."""

    resource_type: Literal["InstanceType"]
    resource_type_id: UUID
    constraint_type: Literal["Reserved"]
    constraint_value: Annotated[StrictInt, Field(ge=1, le=1_000_000)]


class AllocationCreate(Body):
    """What a tenant may use of a site."""

    name: Name
    description: Description | None = None
    tenant_id: UUID
    site_id: UUID
    allocation_constraints: Annotated[list[AllocationConstraint], Field(max_length=256)] = []


class AllocationUpdate(Body):
    """Changes of an allocation."""

    name: Name | None = None
    description: Description | None = None


class AllocationConstraintUpdate(Body):
    """Another number of machines."""

    constraint_value: Annotated[StrictInt, Field(ge=1, le=1_000_000)]
