"""For whom a caller reads the inventory: as a provider, as a tenant, or as both."""

from typing import Any, TypeAlias

import sqlalchemy as sa

from rackloom.carve.api.auth import Caller, Role
from rackloom.carve.site import tenants

Select: TypeAlias = sa.Select[Any]


def party(conn: sa.Connection, caller: Caller) -> tuple[str, str]:
    """The provider id and tenant id that the caller speaks for, as far as its roles go.

    Empty where it speaks for none: no record has an empty id, whereas None would match columns that are null.
    """
    provider = tenants.find_provider(conn, caller.org)
    tenant = tenants.find(conn, caller.org)
    provides = not caller.roles.isdisjoint((Role.PROVIDER_ADMIN, Role.PROVIDER_VIEWER))
    return (
        provider.id if provider and provides else "",
        tenant.id if tenant and Role.TENANT_ADMIN in caller.roles else "",
    )
