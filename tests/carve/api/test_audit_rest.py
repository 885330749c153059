"""Each change over REST leaves an entry in the audit log, in its own transaction, and holds no secret."""

from typing import Any

import pytest
import sqlalchemy as sa
from tests.carve.api.described import operations

from rackloom.carve.api.auth import Role
from rackloom.carve.store.schema import audit_entry

PROVIDER = {"role": Role.PROVIDER_ADMIN}


def entries(api: Any, **wanted: Any) -> list[Any]:
    """The entries with these values, oldest first."""
    query = sa.select(audit_entry).order_by(audit_entry.c.id)
    for name, value in wanted.items():
        query = query.where(audit_entry.c[name] == value)
    return list(api.site.run(lambda conn: conn.execute(query).all()))


def test_a_change_says_who_what_and_how_it_ended(api: Any) -> None:
    body = {"name": "net", "siteId": api.site.site_id, "description": "a secret of ours"}
    made = api.post("vpc", body)
    (entry,) = entries(api, operation="create-vpc")
    assert made.status_code == entry.status == 201
    assert (entry.subject, entry.org, entry.tenant_org) == ("local@demo", "demo", "demo")
    assert (entry.object_kind, entry.object_id, entry.object_name) == ("vpc", made.json()["id"], "net")
    assert (entry.method, entry.path) == ("POST", "/v2/org/demo/nico/vpc")
    assert entry.fields == ["description", "name", "siteId"]
    assert entry.request_id == made.headers["x-request-id"]
    assert "secret" not in repr(entry)
