"""Certificates of IMEX daemons: an authority per ComputeDomain, and an identity renewed in time."""

import base64

from cryptography import x509

from rackloom.claim.cluster.certificates import CHECK_INTERVAL_SECONDS, IDENTITY_DAYS, DaemonCertificates
from rackloom.core.cluster import names
from rackloom.core.cluster.objects import SECRET
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.faults import ApiCall
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.virtual import event_loop

DAY = 86_400.0
START = 1_767_225_600.0


NAMESPACE = "rackloom-imex"
READ = ApiCall("controller", "get", "secrets")


def loaded(kube, name, field="tls.crt"):
    secret = kube.store.find(SECRET, (NAMESPACE, name))
    return x509.load_pem_x509_certificate(base64.b64decode(secret["data"][field]))


async def writes(kube, credentials):
    """The number of writes until the Secrets of a ComputeDomain are as they should be."""
    before = kube.writes("controller")
    await credentials.ensure("cd-1", NAMESPACE)
    return kube.writes("controller") - before


def test_issued_once_and_renewed_at_two_thirds_under_the_same_authority():
    async def story():
        kube, clock = FakeKube(), [START]
        api = DirectApi(kube, "controller")
        credentials = DaemonCertificates(api, lambda: clock[0])
        assert await writes(kube, credentials) == 2
        first, authority = loaded(kube, names.imex_secret_name("cd-1")), names.imex_authority_name("cd-1")
        issuer = loaded(kube, authority)
        first.verify_directly_issued_by(issuer)
        assert loaded(kube, names.imex_secret_name("cd-1"), "ca.crt") == issuer
        alt = first.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert alt.get_values_for_type(x509.DNSName) == [names.imex_peer_name("cd-1")]

        clock[0] = START + (IDENTITY_DAYS * 2 / 3 - 1) * DAY
        assert await writes(kube, credentials) == 0
        clock[0] = START + (IDENTITY_DAYS * 2 / 3 + 1) * DAY
        assert await writes(kube, credentials) == 1
        second = loaded(kube, names.imex_secret_name("cd-1"))
        assert second.serial_number != first.serial_number
        second.verify_directly_issued_by(issuer)
        assert loaded(kube, authority) == issuer

    event_loop.run_simulation(1, story)


def test_domains_do_not_trust_one_another():
    async def story():
        kube = FakeKube()
        api = DirectApi(kube, "controller")
        credentials = DaemonCertificates(api, lambda: START)
        await credentials.ensure("cd-1", NAMESPACE)
        await credentials.ensure("cd-2", NAMESPACE)
        issuers = {
            loaded(kube, names.imex_secret_name(uid), "ca.crt").serial_number for uid in ("cd-1", "cd-2")
        }
        assert len(issuers) == 2
        secret = kube.store.find(SECRET, (NAMESPACE, names.imex_secret_name("cd-1")))
        assert names.FINALIZER in secret["metadata"]["finalizers"]
        assert secret["metadata"]["labels"][names.COMPUTE_DOMAIN_LABEL] == "cd-1"

    event_loop.run_simulation(1, story)


def test_secrets_are_read_by_name_and_not_at_every_look():
    """A list of Secrets reads all of a namespace, so the controller's role allows only get."""

    async def story():
        kube, clock = FakeKube(), [START]
        credentials = DaemonCertificates(DirectApi(kube, "controller"), lambda: clock[0])
        for _ in range(3):
            await credentials.ensure("cd-1", NAMESPACE)
        assert {call.verb for call in kube.calls} == {"get", "create"}
        assert kube.calls[READ] == 2
        await DirectApi(kube, "somebody").patch(
            SECRET, names.imex_secret_name("cd-1"), NAMESPACE, {"data": {"tls.crt": "bm9uZQ=="}}
        )
        clock[0] += CHECK_INTERVAL_SECONDS
        assert await writes(kube, credentials) == 1, "what somebody spoiled is found at the next look"
        clock[0] = START - DAY
        assert await writes(kube, credentials) == 0
        assert kube.calls[READ] == 6, "a clock that was set back does not hide them"

    event_loop.run_simulation(1, story)


def test_secrets_of_another_domain_are_not_its_own():
    """A user who labels a template with `authority-UID` leads to a name of another domain."""

    async def story():
        kube = FakeKube()
        credentials = DaemonCertificates(DirectApi(kube, "controller"), lambda: START)
        await credentials.ensure("cd-1", NAMESPACE)
        held = await credentials.held("cd-1", (NAMESPACE,))
        assert {secret.name for secret in held} == {
            names.imex_secret_name("cd-1"),
            names.imex_authority_name("cd-1"),
        }
        assert await credentials.held("authority-cd-1", (NAMESPACE,)) == ()

    event_loop.run_simulation(1, story)
