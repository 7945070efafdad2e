"""The cluster's authority and its nodes' certificates, as pvecm makes them, with smaller keys."""

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAY = timedelta(days=1)


@dataclass(frozen=True)
class Authority:
    """A key that signs, and the certificate that says so."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)


def make_authority(cluster: str) -> Authority:
    """An authority of its own, good for ten years."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("Proxmox Virtual Environment", cluster, "PVE Cluster Manager CA")
    builder = _builder(name, name, key, 3650)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    # No key usage: `openssl req -new -x509`, which pvecm calls, gives none.
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return Authority(key, builder.sign(key, hashes.SHA256()))


def make_node(authority: Authority, node: str) -> tuple[bytes, bytes]:
    """A node's certificate and key, as PEM: for its name, its full name and its addresses, good for two years."""
    key = ec.generate_private_key(ec.SECP256R1())
    names = [x509.DNSName(name) for name in ("localhost", node, f"{node}.sandbox.test")]
    addresses = [x509.IPAddress(ipaddress.ip_address(address)) for address in ("127.0.0.1", "::1")]
    builder = _builder(_name("PVE Cluster Node", f"{node}.sandbox.test"), authority.certificate.subject, key, 730)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.SubjectAlternativeName([*addresses, *names]), critical=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = builder.add_extension(issuer, critical=False)
    certificate = builder.sign(authority.key, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + days * _DAY)
    )


def _name(unit: str, common: str, organization: str = "Proxmox Virtual Environment") -> x509.Name:
    parts = [(NameOID.ORGANIZATION_NAME, organization), (NameOID.ORGANIZATIONAL_UNIT_NAME, unit)]
    return x509.Name([x509.NameAttribute(oid, text) for oid, text in [*parts, (NameOID.COMMON_NAME, common)]])
