"""Rights: the interfaces, the steps of a site's setup, and the roles of each operation of REST.

The tables of operations come from the OpenAPI document. The service enforces the same declarations.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from docs.site.reference import rest
from docs.site.reference.markdown import made_from, table

from rackloom.carve.api.access import BASE, MEMBER, ROLES_KEY
from rackloom.carve.api.auth import Role

INTERFACES = (
    (
        "tenant",
        "REST `/v2/org/{org}/nico`",
        "bearer token with `TENANT_ADMIN` in the organisation",
        "use the allocations of the organisation",
    ),
    (
        "program",
        "the same REST",
        "key of a service account ([identity](../docs/identity.md))",
        "act within the roles of the account",
    ),
    (
        "provider",
        "the same REST",
        "bearer token with `PROVIDER_ADMIN` (`PROVIDER_VIEWER` reads)",
        "allocate to tenants, and take every operator step",
    ),
    (
        "operator",
        "admin gRPC, `rackloom admin`",
        "certificate of the operators' CA, by name: admin or reader",
        "everything below REST",
    ),
    (
        "administrator of the process",
        "`site.toml`, secrets, the database",
        "access to the machine",
        "configure the interfaces and grant access to them",
    ),
)
STEPS = (
    (
        "site name, database, certificates, token issuers, default partition policy",
        "administrator",
        "`site.toml`",
    ),
    (
        "`[nvlink_config]`: read-only mode, intervals, TLS for switch controllers",
        "administrator",
        "`site.toml`",
    ),
    ("TLS material of one controller", "administrator", "secret `nmxc/<chassis serial>/tls`"),
    (
        "the controller of each chassis",
        "operator, provider",
        "`rackloom admin endpoint`, admin gRPC `CreateNvlinkNmxcEndpoint`, REST",
    ),
    ("credential of NMX-M", "operator", "`rackloom admin credential add nmx-m`, `delete nmx-m`"),
    (
        "machines",
        "none (read from the controllers) or operator",
        "`rackloom admin machine import FILE`",
    ),
    (
        "GPU mapping of a machine",
        "none (read from the controllers)",
        "`rackloom admin machine nvlink-info populate --update-db` repairs it",
    ),
    ("a site of NICo: plan, import, roll back", "operator", "`rackloom admin import nico`"),
    (
        "foreign partitions: adopt or release",
        "operator, provider",
        "`rackloom admin partition adopt`, `release`, REST",
    ),
    ("instance types and their machines, allocations", "provider", "REST"),
    (
        "trays that are reserved for an organisation until a time",
        "operator, provider",
        "`rackloom admin reservation`, REST `/tray-reservation`",
    ),
    ("the number of trays that may be reserved", "provider", "REST `/tenant/{tenantId}/quota`"),
    ("NVLink enabled for a site", "provider", "REST `PATCH /site/{id}`"),
    (
        "logical partitions, VPCs and their default, instances and their interfaces",
        "tenant",
        "REST, upstream's `nicocli` and SDK",
    ),
    (
        "pause of a domain, cordon and drain of a tray, force-delete",
        "operator, provider",
        "`rackloom admin domain`, `tray`, `machine force-delete`, REST",
    ),
    ("plans as files: show and execute", "operator", "`rackloom admin plan`, `apply`"),
)
"""Steps in the order in which a site is set up, with their actor and their interface."""
RULES = """\
- A tenant names its logical partitions and the GPUs of its instances. It can neither name nor read physical
  partitions, machines of other tenants, racks or switches.
- The record of an operator's step has the name in the certificate, the reason and the time. A step through
  REST is recorded with the subject of the token.
- A reader's certificate cannot change anything. Each RPC declares the access class that it needs, and an RPC
  without one is not served.
- The record of every operation has the return code of the fabric and the first observation afterwards.
"""
OPERATIONS = """\
Each operation declares its roles, and `/openapi.json` shows them as `x-rackloom-roles`. The service
enforces the same declaration. One of the roles is enough. `MEMBER` stands for every member of the
organisation. Paths are below `/v2/org/{org}/nico`. An operation with roles also has a permission,
`x-rackloom-permission`, from which an organisation makes custom roles.
"""
PARAMETERS = """\
These parameters need other roles than their operation. Callers without these roles may send only the value
`false`.
"""


def page() -> str:
    """The interfaces, the steps, the rules, and the tables of operations and parameters."""
    paths = rest.document()["paths"]
    parts = [
        "# Roles",
        made_from("the OpenAPI document and the texts of `docs/site/reference/roles.py`"),
        "Each interface grants access by proof of identity, never by the address of a request.",
        table(("actor", "interface", "proof of identity", "may"), INTERFACES),
        "## Steps of a setup",
        table(("step", "actor", "interface"), STEPS),
        "## Rules of all interfaces",
        RULES,
        "## Operations of REST",
        OPERATIONS,
        table(("path", "method: roles"), operation_rows(paths)),
        PARAMETERS,
        table(("parameter", "role"), parameter_rows(paths)),
    ]
    return "\n\n".join(parts) + "\n"


def operation_rows(paths: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """A row for each path. Methods with the same roles stand together."""
    for path, methods in paths.items():
        by_roles: dict[str, list[str]] = {}
        for method, operation in methods.items():
            by_roles.setdefault(_alternatives(operation[ROLES_KEY]), []).append(method.upper())
        roles = "; ".join(f"{', '.join(names)}: {roles}" for roles, names in by_roles.items())
        yield f"`{path.removeprefix(BASE)}`", roles


def parameter_rows(paths: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """A row for each parameter that needs other roles than its operation."""
    for path, methods in paths.items():
        for method, operation in methods.items():
            for parameter in operation["parameters"]:
                if ROLES_KEY in parameter["schema"]:
                    name = f"`{parameter['name']}` of {method.upper()} `{path.removeprefix(BASE)}`"
                    yield name, _alternatives(parameter["schema"][ROLES_KEY])


def _alternatives(roles: Iterable[str]) -> str:
    """The roles in the order of their declaration in the code."""
    return " or ".join(f"`{role}`" for role in (MEMBER, *Role) if role in set(roles))
