"""`rackloom webhook`: admission over HTTPS, and the gates of pods, as a process with replicas."""

import asyncio
import os
import random
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import structlog

from rackloom.app.listeners import listening
from rackloom.app.stopping import told_to_stop
from rackloom.app.webhook_metrics import WebhookMetrics
from rackloom.app.webhook_pages import application
from rackloom.claim.cluster.admission.desk import AdmissionSettings, Desk
from rackloom.claim.cluster.admission.gatekeeper import Gatekeeper
from rackloom.claim.cluster.admission.serving import NAME, Serving
from rackloom.claim.cluster.admission.surroundings import Known
from rackloom.claim.cluster.certificates import Identity, not_after
from rackloom.claim.kube.api import KubeApi, KubeError
from rackloom.claim.kube.connection import http_client
from rackloom.claim.kube.events import Recorder
from rackloom.claim.kube.leader import Election
from rackloom.claim.kube.lightkube_api import LightkubeApi
from rackloom.claim.kube.pace import Pace
from rackloom.http_server import Bounds

log = structlog.get_logger(__name__)

RENEWAL_CHECK = 60.0
"""Seconds between two looks at the certificate, and at the API server's trust in it."""
RETRY_SECONDS = 2.0
KEEP_ALIVE = 120
"""Seconds; longer than the 90 after which the API server lets an idle connection go. If both closed it at the
same moment, a question would be lost, and with it a pod refused."""
REQUESTS_PER_SECOND = 200.0
BURST = 1000


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How this process runs."""

    identity: str
    """Name of the pod; with a random part it is this process's alone."""
    listen: str
    """`host:port` of HTTPS."""
    dns_names: tuple[str, ...] = ()
    """By which the API server calls it; none: those of the service."""
    kubeconfig: Path | None = None


def run_webhook(settings: AdmissionSettings, options: Options, announce: Callable[[str], None]) -> None:
    """Answer reviews until SIGTERM or SIGINT."""
    asyncio.run(_run(settings, options, announce))


async def _run(settings: AdmissionSettings, options: Options, announce: Callable[[str], None]) -> None:
    stopped = told_to_stop()
    client = http_client(options.kubeconfig, None)
    client.headers["User-Agent"] = NAME
    api = LightkubeApi(client, Pace(REQUESTS_PER_SECOND, BURST))
    async with api, webhook(api, settings, options) as port:
        announce(f"rackloom: admission on port {port}")
        await stopped.wait()


@asynccontextmanager
async def webhook(api: KubeApi, settings: AdmissionSettings, options: Options) -> AsyncIterator[int]:
    """A webhook at work while the context is entered; gives the port.

    It listens from the start; it is ready once it has a certificate that the API server was told to trust and
    has seen the cluster.
    """
    identity = f"{options.identity}-{uuid.uuid4()}"
    rng = random.Random()  # noqa: S311
    known = Known(api, settings.isolation, rng)
    gatekeeper = Gatekeeper(api, known, Recorder(api, NAME, identity, time.time), rng)
    names = options.dns_names or (f"{NAME}.{settings.namespace}.svc",)
    certificate = Certificate(Serving(api, settings.namespace, names, time.time))
    election = Election(api, settings.namespace, NAME, identity, wall=time.time, rng=rng)
    metrics = WebhookMetrics(lambda: certificate.expires)
    app = application(Desk(known, settings), lambda: known.is_synced and certificate.is_held, metrics)
    async with listening(
        app,
        options.listen,
        tls=certificate.context,
        keep_alive=KEEP_ALIVE,
        bounds=Bounds(),
        ended=metrics.connection_ended,
    ) as port:
        informers = [one.run() for one in known.informers]
        async with _meanwhile([*informers, certificate.run(), election.run(gatekeeper.run)]):
            yield port


@asynccontextmanager
async def _meanwhile(work: Sequence[Awaitable[None]]) -> AsyncIterator[None]:
    """Let all of this go on while the context is entered. A defect in one of them ends it all."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_awaited(one)) for one in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def _awaited(one: Awaitable[None]) -> None:
    await one


class Certificate:
    """The TLS side of the server. A renewed certificate serves the next connection; none is cut."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._held: Identity | None = None
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2

    @property
    def is_held(self) -> bool:
        """Whether there is one."""
        return self._held is not None

    @property
    def expires(self) -> float:
        """When it ends, in seconds since 1970; 0 without one."""
        return 0.0 if self._held is None else not_after(self._held.certificate)

    async def run(self) -> None:
        """Keep it good until cancelled."""
        while True:
            try:
                await self.renew()
                pause = RENEWAL_CHECK
            except KubeError as error:
                log.warning("webhook.certificate", why=error.message)
                pause = RETRY_SECONDS
            await asyncio.sleep(pause)

    async def renew(self) -> None:
        """Take the identity that is good now. Raises KubeError."""
        identity = await self._serving.ensure()
        if identity != self._held:
            load_identity(self.context, identity)
            self._held = identity
            log.info("webhook.certificate_loaded")


def load_identity(context: ssl.SSLContext, identity: Identity) -> None:
    """Serve new connections with this. OpenSSL wants a file, and the key is to lie on no disk."""
    with os.fdopen(os.memfd_create("identity"), "wb") as file:
        file.write(identity.certificate + identity.key)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
