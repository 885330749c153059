"""The real application over the small site, with tokens of a test issuer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from rackloom.carve.api.app import create_app
from rackloom.carve.api.auth import LocalIssuer, Role
from rackloom.carve.api.routing import ApiDeps
from rackloom.carve.store.database import Store


class Api:
    """An HTTP client of the application that speaks for an org."""

    def __init__(
        self, client: TestClient, site: Any, issuer: LocalIssuer, woken: list[frozenset[str]]
    ) -> None:
        self.client = client
        self.site = site
        self.issuer = issuer
        self.woken = woken

    def token(self, org: str = "demo", role: Role = Role.TENANT_ADMIN, ttl: float = 3600.0) -> str:
        return self.issuer.mint(org, [role], self.site.now, ttl)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        org: str = "demo",
        role: Role = Role.TENANT_ADMIN,
        **options: Any,
    ) -> Any:
        headers = {"Authorization": f"Bearer {self.token(org, role)}"}
        if body is not None:
            options["json"] = body
        return self.client.request(method, f"/v2/org/{org}/nico/{path}", headers=headers, **options)

    def get(self, path: str, **options: Any) -> Any:
        return self.call("GET", path, **options)

    def post(self, path: str, body: Any, **options: Any) -> Any:
        return self.call("POST", path, body, **options)

    def patch(self, path: str, body: Any, **options: Any) -> Any:
        return self.call("PATCH", path, body, **options)

    def delete(self, path: str, **options: Any) -> Any:
        return self.call("DELETE", path, **options)

    def new(self, path: str, body: Any, **options: Any) -> Any:
        """Create something that must succeed."""
        answer = self.post(path, body, **options)
        assert answer.status_code == 201, answer.text
        return answer.json()

    def partition(self, name: str = "lp", **options: Any) -> str:
        made = self.new("nvlink-logical-partition", {"name": name, "siteId": self.site.site_id}, **options)
        return str(made["id"])

    def vpc(self, name: str = "net", partition: str | None = None, **options: Any) -> str:
        body = {"name": name, "siteId": self.site.site_id, "nvLinkLogicalPartitionId": partition}
        return str(self.new("vpc", body, **options)["id"])

    def instance(self, vpc: str, name: str = "one", **fields: Any) -> Any:
        return self.new(
            "instance", {"name": name, "vpcId": vpc, "instanceTypeId": self.site.type_id, **fields}
        )


class _Served:
    """One application for the whole session, over whichever small site is current."""

    def __init__(self, store: Store, home: Path) -> None:
        self.site: Any = None
        self.woken: list[frozenset[str]] = []
        self.issuer = LocalIssuer(home)
        deps = ApiDeps(
            store=store,
            clock=lambda: float(self.site.now),
            ids=lambda: str(self.site.ids()),
            wake=lambda domains, _org: self.woken.append(domains),
            verifier=self.issuer.verifier(lambda: float(self.site.now)),
            auto_tenant=True,
        )
        self.app = create_app(deps)


@pytest.fixture(scope="session")
def served(site_template: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    served = _Served(site_template.store, tmp_path_factory.mktemp("issuer"))
    client = TestClient(served.app)
    client.portal = site_template.runner.portal
    yield served, client
    client.close()


@pytest.fixture
def api(small_site: Any, served: Any) -> Api:
    application, client = served
    application.site = small_site
    application.woken.clear()
    application.app.state.tenants_seen.clear()
    application.app.state.directory.forget()
    return Api(client, small_site, application.issuer, application.woken)
