import ssl

import pytest
from cryptography import x509

from rackloom.claim.cluster.certificates import (
    IDENTITY_DAYS,
    CertifiedKey,
    is_issued_by,
    is_renewal_due,
    issue_certificate,
    new_authority,
)

NOW = 1_800_000_000.0
DAY = 86_400.0
AUTHORITY = new_authority("domain-a", NOW)


def test_an_identity_serves_and_connects_under_its_authority(tmp_path):
    identity = issue_certificate(AUTHORITY, ("imex-a", "imex-a.svc"), NOW)
    assert is_issued_by(identity.certificate, AUTHORITY)
    (tmp_path / "key").write_bytes(identity.key)
    (tmp_path / "crt").write_bytes(identity.certificate)
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        ssl.SSLContext(protocol).load_cert_chain(tmp_path / "crt", tmp_path / "key")
    names = x509.load_pem_x509_certificate(identity.certificate).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert names.value.get_values_for_type(x509.DNSName) == ["imex-a", "imex-a.svc"]


def test_another_authority_of_the_same_name_did_not_issue_it():
    identity = issue_certificate(AUTHORITY, ("imex-a",), NOW)
    assert not is_issued_by(identity.certificate, new_authority("domain-a", NOW))


@pytest.mark.parametrize("damaged", [b"", b"-----BEGIN CERTIFICATE-----\n", b"\xff"])
def test_a_damaged_certificate_is_renewed(damaged):
    assert is_renewal_due(damaged, NOW)
    assert not is_issued_by(damaged, AUTHORITY)


def test_renewal_is_due_after_two_thirds():
    identity = issue_certificate(AUTHORITY, ("imex-a",), NOW)
    assert not is_renewal_due(identity.certificate, NOW + (IDENTITY_DAYS * 2 / 3 - 1) * DAY)
    assert is_renewal_due(identity.certificate, NOW + (IDENTITY_DAYS * 2 / 3 + 1) * DAY)


def test_a_key_is_not_printed():
    assert "PRIVATE" not in repr(CertifiedKey(b"-----BEGIN PRIVATE KEY-----", b""))


def test_names_longer_than_a_common_name_are_kept_whole():
    long = "imex-" + "a" * 58
    identity = issue_certificate(AUTHORITY, (long + ".example",), NOW)
    assert is_issued_by(identity.certificate, AUTHORITY)
