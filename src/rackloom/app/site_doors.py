"""Where a site service is spoken to: REST with the rack map beside it, and the operators' gRPC."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from rackloom.app.config_sections import AdminConfig
from rackloom.app.listeners import listening
from rackloom.app.rack_map import SiteSource, with_map
from rackloom.app.secrets.values import Secret, SecretProvider
from rackloom.app.site_parts import Parts, new_id, new_status
from rackloom.carve.admin.deps import AdminDeps
from rackloom.carve.admin.identity import Identities
from rackloom.carve.admin.server import AdminServer, AdminTls
from rackloom.carve.api.app import ApiDeps, create_app
from rackloom.errors import Refused


def rest(parts: Parts, drawn: SiteSource) -> AbstractAsyncContextManager[int]:
    """REST, with the map of what is `drawn`; gives the port."""
    server = parts.config.server
    api = create_app(
        ApiDeps(
            store=parts.store,
            clock=parts.clock,
            ids=new_id,
            wake=parts.reconciler.wake,
            verifier=parts.issuers,
            auto_tenant=parts.config.auth.auto_tenant,
        )
    )
    page = with_map(api, drawn, parts.issuers, parts.clock)
    return listening(page, server.listen, cert=server.tls_cert, key=server.tls_key)


@asynccontextmanager
async def admin(parts: Parts) -> AsyncIterator[int | None]:
    """The operators' gRPC; gives the port, None without `[admin]`."""
    config = parts.config.admin
    if config is None:
        yield None
        return
    identities = Identities(frozenset(config.admin_names), frozenset(config.reader_names))
    async with AdminServer(_admin_deps(parts), identities, _admin_tls(config), config.listen) as server:
        yield server.port


def _admin_deps(parts: Parts) -> AdminDeps:
    return AdminDeps(
        store=parts.store,
        clock=parts.clock,
        ids=new_id,
        wake=parts.reconciler.wake,
        endpoints_changed=parts.reconciler.endpoints_changed,
        browse=parts.switches.browse,
        apply=parts.reconciler.apply,
        credentials=_Keeper(parts.secrets),
        check_endpoint=parts.switches.check,
        new_machine_status=new_status(parts.config),
        imports="import" in parts.config.site.machine_sources,
    )


def _admin_tls(config: AdminConfig) -> AdminTls:
    try:
        return AdminTls(
            certificate=config.tls_cert.read_bytes(),
            key=config.tls_key.read_bytes(),
            client_ca=config.client_ca.read_bytes(),
        )
    except OSError as error:
        raise Refused(
            f"[admin]: cannot read {error.filename}: {error.strerror}",
            nearest_fix="name files that are there and that this process may read",
        ) from error


class _Keeper:
    """Credentials in the site's secret provider."""

    def __init__(self, secrets: SecretProvider) -> None:
        self._secrets = secrets

    async def keep(self, path: str, fields: Mapping[str, str]) -> None:
        """Keep a credential."""
        await self._secrets.write(path, {name: Secret(value) for name, value in fields.items()})

    async def forget(self, path: str) -> None:
        """Remove a credential."""
        await self._secrets.delete(path)
