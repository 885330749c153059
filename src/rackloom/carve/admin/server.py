"""The admin gRPC server: mutual TLS, then the class of the certificate, then the RPC."""

from collections.abc import Mapping
from typing import Any

import grpc
import grpc.aio
import msgspec
import structlog

from rackloom.carve.admin import errors
from rackloom.carve.admin.deps import AdminDeps
from rackloom.carve.admin.identity import Access, Identities
from rackloom.carve.admin.rpcs import RPCS, Rpc
from rackloom.errors import Refused

log = structlog.get_logger(__name__)

_OPTIONS = (("grpc.so_reuseport", 0),)
GRACE_SECONDS = 2.0


class AdminTls(msgspec.Struct, frozen=True, kw_only=True):
    """PEM contents, all needed: there is no admin interface without mutual TLS."""

    certificate: bytes
    key: bytes
    client_ca: bytes


class AdminServer:
    """Serves the admin RPCs on `listen` (`host:port`, port 0 for a free one) while the context is entered."""

    def __init__(self, deps: AdminDeps, identities: Identities, tls: AdminTls, listen: str) -> None:
        self._deps = deps
        self._identities = identities
        self._tls = tls
        self._listen = listen
        self._server: grpc.aio.Server | None = None
        self.port = 0

    async def __aenter__(self) -> "AdminServer":
        """Begin to listen. Raises Refused when the address or the material cannot be used."""
        server = grpc.aio.server(options=_OPTIONS)
        for service, rpcs in RPCS.items():
            server.add_generic_rpc_handlers((self._handlers(service, rpcs),))
        try:
            credentials = grpc.ssl_server_credentials(
                [(self._tls.key, self._tls.certificate)], self._tls.client_ca, require_client_auth=True
            )
            self.port = server.add_secure_port(self._listen, credentials)
        except (RuntimeError, ValueError) as error:
            raise Refused(
                f"the admin interface cannot listen on {self._listen}",
                nearest_fix="check [admin]: is the address in use, does the key fit the certificate?",
            ) from error
        await server.start()
        self._server = server
        return self

    async def __aexit__(self, *_: object) -> None:
        """Finish the calls under way, and stop."""
        if self._server is not None:
            await self._server.stop(GRACE_SECONDS)

    def _handlers(self, service: str, rpcs: Mapping[str, Rpc]) -> grpc.GenericRpcHandler:
        methods = {name: self._method(name, rpc) for name, rpc in rpcs.items()}
        return grpc.method_handlers_generic_handler(service, methods)

    def _method(self, name: str, rpc: Rpc) -> grpc.RpcMethodHandler:
        async def answer(request: Any, context: Any) -> Any:
            return await self._answer(name, rpc, request, context)

        return grpc.unary_unary_rpc_method_handler(
            answer,
            request_deserializer=rpc.request.FromString,
            response_serializer=lambda reply: reply.SerializeToString(),
        )

    async def _answer(self, name: str, rpc: Rpc, request: Any, context: Any) -> Any:
        certificate = context.auth_context()
        caller = self._identities.name(certificate)
        if not self._identities.allows(certificate, rpc.access):
            log.warning("admin.denied", rpc=name, caller=caller)
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED, f"certificate {caller} may not call {name}"
            )
        if rpc.access is Access.ADMIN:
            log.info("admin.call", rpc=name, caller=caller)
        try:
            return await rpc.answer(msgspec.structs.replace(self._deps, caller=caller), request)
        except errors.EXPECTED as error:
            await context.abort(errors.code_of(error), errors.reason_of(error), errors.fix_of(error))
        except Exception:
            log.exception("admin.failed", rpc=name, caller=caller)
            await context.abort(grpc.StatusCode.INTERNAL, "internal error: see the log of the service")
