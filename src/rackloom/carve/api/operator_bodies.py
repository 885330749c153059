"""Request bodies of operators' steps. Each names its reason: it is kept, and shown to whom it concerns."""

from typing import Annotated
from uuid import UUID

from pydantic import Field, StringConstraints

from rackloom.carve.api.bodies import Body

Reason = Annotated[
    str, StringConstraints(strict=True, min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f\x7f]+$")
]
Url = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=1024)]


class Because(Body):
    """Why it is done."""

    reason: Reason


class EndpointCreate(Because):
    """The switch controller of a chassis."""

    chassis_serial: Annotated[str, StringConstraints(strict=True, min_length=1, max_length=256)]
    endpoint: Url
    reason: Reason = "registered over REST"


class EndpointUpdate(Because):
    """Another URL for a chassis."""

    endpoint: Url
    reason: Reason = "changed over REST"


class FoundPartition(Because):
    """A partition that was found on a switch, by its name."""

    nvlink_domain_id: Annotated[str, StringConstraints(min_length=1, max_length=256)] = Field(
        alias="nvLinkDomainId"
    )
    name: Annotated[str, StringConstraints(strict=True, min_length=1, max_length=255)]


class Adoption(FoundPartition):
    """A found partition, and the logical partition that it shall serve."""

    nvlink_logical_partition_id: UUID = Field(alias="nvLinkLogicalPartitionId")
