"""TLS for https: certificates in memory become what Python's ssl wants."""

import ssl
import tempfile
from pathlib import Path

from rackloom.carve.fabric.tls import TlsMaterial
from rackloom.errors import Refused


def client_context(material: TlsMaterial) -> ssl.SSLContext:
    """A context that trusts `material.ca` (else the system) and shows its client certificate, if it has one.

    Reads and writes files. Raises Refused for PEM that is none.
    """
    try:
        context = ssl.create_default_context(cadata=material.ca.decode() if material.ca else None)
        if material.certificate is not None and material.key is not None:
            _show(context, material.certificate, material.key)
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise Refused(
            f"the TLS material is not usable: {error}", nearest_fix="give a CA, certificate and key as PEM"
        ) from error
    return context


def _show(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    # OpenSSL takes a key only from a file; this one is readable for nobody else, and gone at once.
    with tempfile.TemporaryDirectory() as directory:
        pem = Path(directory) / "client.pem"
        pem.touch(mode=0o600)
        pem.write_bytes(certificate + b"\n" + key)
        context.load_cert_chain(pem)
