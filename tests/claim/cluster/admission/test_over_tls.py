"""The webhook as a server: real TLS on loopback, the certificate that a Job issues, and bad requests."""

import asyncio
import base64
import json
import random
import ssl
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from functools import partial

import httpx2
import pytest
from cryptography import x509

from rackloom.app.listeners import serve_http
from rackloom.app.twin.up import served_api
from rackloom.app.webhook import (
    MAX_BODY,
    ServingCertificate,
    WebhookMetrics,
    WebhookOptions,
    admission_app,
    webhook,
)
from rackloom.claim.cluster.admission.reviews import AdmissionMode
from rackloom.claim.cluster.admission.serving_certificate import (
    AUTHORITY_SECRET,
    SERVING_SECRET,
    WEBHOOK_NAME,
    CertificateIssuer,
    read_serving_identity,
)
from rackloom.claim.cluster.admission.webhook import AdmissionCache, AdmissionReviewer, AdmissionSettings
from rackloom.claim.cluster.certificates import AUTHORITY_DAYS, IDENTITY_DAYS
from rackloom.claim.kube.api import Conflict, KubeError
from rackloom.core.cluster.names import ImexIsolation
from rackloom.core.cluster.objects import MUTATING_WEBHOOK, SECRET, VALIDATING_WEBHOOK
from rackloom.core.cluster.pods import TEMPLATE_GATE
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube

DAY = 86_400.0
DRIVER = "rackloom-system"


async def installed(kube=None):
    """A fake API server with the objects of deploy/kubernetes/webhook."""
    kube = kube or FakeKube(namespaces=("team", DRIVER), now=time.time)
    api = DirectApi(kube, "admin")
    for name in (AUTHORITY_SECRET, SERVING_SECRET):
        await api.create(SECRET, {"metadata": {"name": name, "namespace": DRIVER}})
    for kind in (MUTATING_WEBHOOK, VALIDATING_WEBHOOK):
        hooks = [{"name": name, "clientConfig": {"service": {}}} for name in ("a.test", "b.test")]
        await api.create(kind, {"metadata": {"name": WEBHOOK_NAME}, "webhooks": hooks})
    return api


def issuer(api, wall=time.time):
    """The Job's program, for a webhook that is called on loopback."""
    return CertificateIssuer(api, DRIVER, ("localhost",), wall)


async def issued():
    """The same after the Job has run."""
    api = await installed()
    await issuer(api).run()
    return api


async def trusted(api):
    """The authorities that the API server trusts, the same for all webhooks."""
    bundles = {
        hook["clientConfig"].get("caBundle")
        for kind in (MUTATING_WEBHOOK, VALIDATING_WEBHOOK)
        for hook in (await api.get(kind, WEBHOOK_NAME))["webhooks"]
    }
    (bundle,) = bundles
    return base64.b64decode(bundle).decode() if bundle else None


def client(port, authority):
    context = ssl.create_default_context(cadata=authority)
    return httpx2.AsyncClient(base_url=f"https://localhost:{port}", verify=context, timeout=60)


def review(resource, obj, **more):
    group = "resource.k8s.io" if resource.startswith("resource") else ""
    request = {
        "uid": "u1",
        "operation": "CREATE",
        "resource": {"group": group, "version": "v1", "resource": resource},
        "namespace": "team",
        "object": obj,
        **more,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


@asynccontextmanager
async def serving(mode=AdmissionMode.WARN):
    """A client of a webhook that is ready."""
    api = await issued()
    options = WebhookOptions(identity="w", listen="127.0.0.1:0")
    authority = await trusted(api)
    async with webhook(api, AdmissionSettings(mode=mode), options) as port, client(port, authority) as http:
        async with asyncio.timeout(60):
            while not await answers(http):
                await asyncio.sleep(0.01)
        yield http


async def answers(http):
    try:
        return (await http.get("/readyz")).status_code == 200
    except httpx2.ConnectError:
        # The certificate is loaded a moment after the port is opened.
        return False


def test_reviews_are_answered():
    async def run():
        async with serving(AdmissionMode.ENFORCE) as http:
            opaque = {"driver": "dra.net", "parameters": {"interface": {"mtu": 1}}}
            claim = {"spec": {"devices": {"config": [{"opaque": opaque}]}}}
            path = "/validate-resource-claim-parameters"
            response = (await http.post(path, json=review("resourceclaims", claim))).json()["response"]
            assert (response["uid"], response["allowed"]) == ("u1", False)
            assert "spec.devices.config[0].opaque.parameters" in response["status"]["message"]
            claims = [{"name": "c", "resourceClaimTemplateName": "none"}]
            spec = {"containers": [{"name": "m"}], "resourceClaims": claims}
            asked = review("pods", {"metadata": {"name": "p"}, "spec": spec})
            response = (await http.post("/mutate-pods", json=asked)).json()["response"]
            patch = json.loads(base64.b64decode(response["patch"]))
            assert {"op": "add", "path": "/spec/schedulingGates", "value": [{"name": TEMPLATE_GATE}]} in patch
            response = (await http.post("/validate-pods", json=asked)).json()["response"]
            assert not response["allowed"]

    asyncio.run(run())


def test_questions_decisions_and_the_end_of_the_certificate_are_counted():
    async def run():
        async with serving(AdmissionMode.WARN) as http:
            claims = [{"name": "c", "resourceClaimTemplateName": "none"}]
            spec = {"containers": [{"name": "m"}], "resourceClaims": claims}
            asked = review("pods", {"metadata": {"name": "p"}, "spec": spec})
            for path in ("/mutate-pods", "/validate-pods", "/validate-pods"):
                await http.post(path, json=asked)
            opaque = {"driver": "dra.net", "parameters": {"interface": {"mtu": 1}}}
            claim = {"spec": {"devices": {"config": [{"opaque": opaque}]}}}
            await http.post("/validate-resource-claim-parameters", json=review("resourceclaims", claim))
            await http.post("/validate-pods", json={})
            return (await http.get("/metrics")).text

    lines = asyncio.run(run()).splitlines()
    for wanted in (
        'rackloom_admission_requests_total{answer="allowed",page="mutate-pods"} 1.0',
        'rackloom_admission_requests_total{answer="allowed",page="validate-pods"} 2.0',
        'rackloom_admission_requests_total{answer="invalid",page="validate-pods"} 1.0',
        'rackloom_admission_decisions_total{decision="changed",rule="gate"} 1.0',
        'rackloom_admission_decisions_total{decision="warned",rule="idle-claim"} 2.0',
        'rackloom_admission_decisions_total{decision="warned",rule="device-config"} 1.0',
        'rackloom_admission_seconds_count{page="validate-pods"} 2.0',
    ):
        assert wanted in lines
    (expiry,) = (line for line in lines if line.startswith("rackloom_webhook_certificate_expiry"))
    left = float(expiry.split()[1]) - time.time()
    assert (IDENTITY_DAYS - 1) * DAY < left < (IDENTITY_DAYS + 1) * DAY


KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "one",
    "contexts": [{"name": "one", "context": {"cluster": "one", "user": "one"}}],
    "clusters": [{"name": "one", "cluster": {"server": "http://127.0.0.1:9"}}],
    "users": [{"name": "one", "user": {}}],
}


@pytest.mark.slow
def test_the_process_listens_without_an_api_server_and_ends_when_told(tmp_path):
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(json.dumps(KUBECONFIG))
    words = ["webhook", "--listen", "127.0.0.1:0", "--kubeconfig", str(kubeconfig)]
    command = [sys.executable, "-m", "rackloom.cli.main", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            lines = iter(process.stdout)
            assert any("admission on port" in line for line in lines)
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_bad_requests_are_told_what_is_wrong():
    async def run():
        async with serving() as http:
            page = "/mutate-pods"
            wrong_type = await http.post(page, content=b"{}", headers={"Content-Type": "text/plain"})
            assert wrong_type.status_code == 415
            for body in ({}, review("pods", {"spec": 7}), review("secrets", {})):
                bad = await http.post(page, json=body)
                assert bad.status_code == 400, body
                assert bad.text
            large = await http.post(
                page, content=b" " * (MAX_BODY + 1), headers={"Content-Type": "application/json"}
            )
            assert large.status_code == 413
            assert (await http.get(page)).status_code == 405

    asyncio.run(run())


class Clock:
    """Seconds since 1970, as far as certificates are concerned."""

    def __init__(self):
        self.ahead = -AUTHORITY_DAYS * DAY / 2

    def __call__(self):
        return time.time() + self.ahead


def test_a_renewal_cuts_no_connection_and_changes_nobodys_trust():
    async def run():
        api, clock = await installed(), Clock()
        # Issued so long ago that it is due, and still valid.
        clock.ahead = -IDENTITY_DAYS * DAY * 0.9
        await issuer(api, clock).run()
        certificate = serving_certificate(api)
        await certificate.renew()
        known = AdmissionCache(api, ImexIsolation.DOMAIN, random.Random(1))
        app = admission_app(
            AdmissionReviewer(known, AdmissionSettings()), lambda: True, WebhookMetrics(lambda: 0.0)
        )
        async with serve_http(app, "127.0.0.1:0", tls=certificate.context) as port:
            authority = await trusted(api)
            first = await served(port, authority)
            async with client(port, authority) as kept:
                assert (await kept.get("/readyz")).status_code == 200
                clock.ahead = 0.0
                await issuer(api, clock).run()
                await certificate.renew()
                assert (await kept.get("/readyz")).status_code == 200
            assert await trusted(api) == authority
            assert await served(port, authority) != first

    asyncio.run(run())


def serving_certificate(api):
    return ServingCertificate(partial(read_serving_identity, api, DRIVER))


def test_an_unusable_secret_leaves_the_certificate_that_serves():
    """A key of another certificate is refused before it reaches the context of the server."""

    async def run():
        api = await issued()
        certificate = serving_certificate(api)
        await certificate.renew()
        other = base64.b64encode((await issued_elsewhere()).key).decode()
        await api.patch(SECRET, SERVING_SECRET, DRIVER, {"data": {"tls.key": other}})
        with pytest.raises(ssl.SSLError):
            await certificate.renew()
        app = admission_app(
            AdmissionReviewer(
                AdmissionCache(api, ImexIsolation.DOMAIN, random.Random(1)), AdmissionSettings()
            ),
            lambda: True,
            WebhookMetrics(lambda: 0.0),
        )
        async with serve_http(app, "127.0.0.1:0", tls=certificate.context) as port:
            assert await served(port, await trusted(api))

    asyncio.run(run())


async def issued_elsewhere():
    return await read_serving_identity(await issued(), DRIVER)


def test_an_empty_secret_is_no_certificate():
    async def run():
        certificate = serving_certificate(await installed())
        await certificate.renew()
        assert not certificate.is_held

    asyncio.run(run())


async def served(port, authority):
    """The serial number of the certificate that a new connection gets, verified against `authority`."""
    context = ssl.create_default_context(cadata=authority)
    _, writer = await asyncio.open_connection("localhost", port, ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return x509.load_der_x509_certificate(shown).serial_number


async def before_the_authority_is_due(api):
    """Do a pass on the day before the authority is renewed. Returns the time of that pass."""
    begin = time.time() - AUTHORITY_DAYS * DAY
    await issuer(api, lambda: begin).run()
    now = begin + (AUTHORITY_DAYS * 2 / 3 - 1) * DAY
    await issuer(api, lambda: now).run()
    return now


def test_a_new_authority_is_trusted_beside_the_old_one_before_it_issues():
    async def run():
        api = await installed()
        now = await before_the_authority_is_due(api)
        before, old = await trusted(api), await read_serving_identity(api, DRIVER)
        watched = Watched(api)
        await issuer(watched, lambda: now + 2 * DAY).run()
        assert watched.patched == [AUTHORITY_SECRET, WEBHOOK_NAME, WEBHOOK_NAME]
        after = x509.load_pem_x509_certificates((await trusted(api)).encode())
        assert x509.load_pem_x509_certificate(before.encode()) in after
        assert [vouches(authority, old) for authority in after] == [False, True]
        assert await read_serving_identity(api, DRIVER) == old, "API servers may not know of the new one yet"
        await issuer(watched, lambda: now + 2 * DAY + 600).run()
        new = await read_serving_identity(api, DRIVER)
        assert [vouches(authority, new) for authority in after] == [True, False]
        assert watched.patched[3:] == [SERVING_SECRET]
        await issuer(watched, lambda: now + 2 * DAY + 1200).run()
        assert len(watched.patched) == 4, "a pass that finds nothing due writes nothing"

    asyncio.run(run())


@pytest.mark.parametrize("why", ["it has expired", "its authority is lost", "it is damaged"])
def test_a_certificate_that_is_accepted_nowhere_is_replaced_in_the_same_pass(why):
    async def run():
        api = await installed()
        now = await before_the_authority_is_due(api)
        old = await read_serving_identity(api, DRIVER)
        if why == "its authority is lost":
            nothing = {"tls.key": None, "tls.crt": None, "ca.crt": None}
            await api.patch(SECRET, AUTHORITY_SECRET, DRIVER, {"data": nothing})
        elif why == "it is damaged":
            await api.patch(SECRET, SERVING_SECRET, DRIVER, {"data": {"tls.crt": "b29wcw=="}})
        later = now + (IDENTITY_DAYS + 1 if why == "it has expired" else 2) * DAY
        await issuer(api, lambda: later).run()
        new = await read_serving_identity(api, DRIVER)
        assert new.key != old.key
        newest, *_ = x509.load_pem_x509_certificates((await trusted(api)).encode())
        assert vouches(newest, new)

    asyncio.run(run())


def vouches(authority, identity):
    try:
        x509.load_pem_x509_certificate(identity.certificate).verify_directly_issued_by(authority)
    except Exception:
        return False
    return True


class Watched:
    """An API that records the order of its writes."""

    def __init__(self, api):
        self.api = api
        self.get = api.get
        self.patched = []

    async def patch(self, kind, name, *rest):
        self.patched.append(name)
        return await self.api.patch(kind, name, *rest)


def test_two_passes_at_once_end_with_one_identity():
    async def run():
        api = await installed()

        async def repeated():
            """A container that failed is started again."""
            while True:
                try:
                    return await issuer(api).run()
                except Conflict:
                    await asyncio.sleep(0)

        await asyncio.gather(repeated(), repeated())
        first = await read_serving_identity(api, DRIVER)
        await issuer(api).run()
        assert await read_serving_identity(api, DRIVER) == first
        (authority,) = x509.load_pem_x509_certificates((await trusted(api)).encode())
        assert vouches(authority, first)

    asyncio.run(run())


def test_what_is_not_installed_is_an_error_and_nothing_is_created():
    async def run():
        api = DirectApi(FakeKube(), "webhook")
        with pytest.raises(KubeError, match=AUTHORITY_SECRET):
            await issuer(api).run()

    asyncio.run(run())


def test_trust_that_somebody_took_away_is_given_again():
    async def run():
        api = await issued()
        given, serving = await trusted(api), await read_serving_identity(api, DRIVER)
        for kind in (MUTATING_WEBHOOK, VALIDATING_WEBHOOK):
            hooks = [{"name": name, "clientConfig": {"service": {}}} for name in ("a.test", "b.test")]
            await api.patch(kind, WEBHOOK_NAME, None, {"webhooks": hooks})
        assert await trusted(api) is None
        await issuer(api).run()
        assert await trusted(api) == given
        assert await read_serving_identity(api, DRIVER) == serving

    asyncio.run(run())


def test_the_webhook_itself_only_reads():
    """Its account has no right to write a Secret or a configuration."""

    async def run():
        api = await issued()
        readonly = ReadOnly(api)
        certificate = ServingCertificate(partial(read_serving_identity, readonly, DRIVER))
        await certificate.renew()
        assert certificate.is_held
        assert readonly.read == [(SECRET, SERVING_SECRET)]

    asyncio.run(run())


class ReadOnly:
    """An API that records each read, and has no other method."""

    def __init__(self, api):
        self.api = api
        self.read = []

    async def get(self, kind, name, namespace=None):
        self.read.append((kind, name))
        return await self.api.get(kind, name, namespace)


@pytest.mark.slow
def test_the_job_issues_once_and_says_why_it_cannot(tmp_path):
    """The command as the Job runs it, first with an API server that has nothing installed."""
    kubeconfig = tmp_path / "config"
    command = [sys.executable, "-m", "rackloom.cli.main", "webhook-certificates", "--dns-name", "localhost"]

    async def run_command():
        words = (*command, "--kubeconfig", str(kubeconfig))
        process = await asyncio.create_subprocess_exec(*words, stderr=subprocess.PIPE)
        _, complaint = await process.communicate()
        return process.returncode, complaint.decode()

    async def run():
        kube = FakeKube(namespaces=(DRIVER,))
        async with served_api(kube, "admin", kubeconfig):
            code, complaint = await run_command()
            assert code == 1
            assert complaint.startswith("rackloom: the webhook's certificate was not issued: ")
            assert AUTHORITY_SECRET in complaint
            assert len(complaint.splitlines()) == 1
            api = await installed(kube)
            assert await run_command() == (0, "")
            first = await read_serving_identity(api, DRIVER)
            assert await run_command() == (0, "")
            assert await read_serving_identity(api, DRIVER) == first
        (authority,) = x509.load_pem_x509_certificates((await trusted(api)).encode())
        assert vouches(authority, first)

    asyncio.run(run())
