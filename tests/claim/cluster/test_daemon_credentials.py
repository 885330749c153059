"""Certificates of IMEX daemons: an authority per ComputeDomain, and an identity renewed in time."""

import base64

from cryptography import x509

from rackloom.claim.cluster.certificates import IDENTITY_DAYS
from rackloom.claim.cluster.credentials import Credentials
from rackloom.claim.domain import names
from rackloom.claim.kube.kinds import SECRET
from rackloom.twin.kube import DirectApi, FakeKube
from rackloom.twin.virtual import event_loop

DAY = 86_400.0
START = 1_767_225_600.0


class Seen:
    """Objects as they are on the server now."""

    def __init__(self, kube):
        self.kube = kube

    def at(self, kind, namespace, name):
        return self.kube.store.find(kind, (namespace, name))

    def by(self, kind, index, value):
        return []


def loaded(kube, name, field="tls.crt"):
    secret = kube.store.find(SECRET, ("rackloom-system", name))
    return x509.load_pem_x509_certificate(base64.b64decode(secret["data"][field]))


def test_issued_once_and_renewed_at_two_thirds_under_the_same_authority():
    async def story():
        kube, clock = FakeKube(), [START]
        api = DirectApi(kube, "controller")
        credentials = Credentials(api, Seen(kube), "rackloom-system", lambda: clock[0])
        assert len(await credentials.ensure("cd-1")) == 2
        first, authority = loaded(kube, names.imex_secret_name("cd-1")), names.imex_authority_name("cd-1")
        issuer = loaded(kube, authority)
        first.verify_directly_issued_by(issuer)
        assert loaded(kube, names.imex_secret_name("cd-1"), "ca.crt") == issuer
        alt = first.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert alt.get_values_for_type(x509.DNSName) == [names.imex_peer_name("cd-1")]

        clock[0] = START + (IDENTITY_DAYS * 2 / 3 - 1) * DAY
        assert await credentials.ensure("cd-1") == ()
        clock[0] = START + (IDENTITY_DAYS * 2 / 3 + 1) * DAY
        assert len(await credentials.ensure("cd-1")) == 1
        second = loaded(kube, names.imex_secret_name("cd-1"))
        assert second.serial_number != first.serial_number
        second.verify_directly_issued_by(issuer)
        assert loaded(kube, authority) == issuer

    event_loop.run(1, story)


def test_domains_do_not_trust_one_another():
    async def story():
        kube = FakeKube()
        api = DirectApi(kube, "controller")
        credentials = Credentials(api, Seen(kube), "rackloom-system", lambda: START)
        await credentials.ensure("cd-1")
        await credentials.ensure("cd-2")
        issuers = {
            loaded(kube, names.imex_secret_name(uid), "ca.crt").serial_number for uid in ("cd-1", "cd-2")
        }
        assert len(issuers) == 2
        secret = kube.store.find(SECRET, ("rackloom-system", names.imex_secret_name("cd-1")))
        assert names.FINALIZER in secret["metadata"]["finalizers"]
        assert secret["metadata"]["labels"][names.COMPUTE_DOMAIN_LABEL] == "cd-1"

    event_loop.run(1, story)
