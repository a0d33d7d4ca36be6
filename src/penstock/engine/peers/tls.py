"""TLS between peers, for networks where others could read or change the bytes.

The secret of a run already keeps strangers out; TLS also protects the bytes on the way. Both sides
show a certificate of the same authority. Names in certificates are not checked: addresses of nodes
come and go, and the handshake inside the connection proves who a peer is. TLS is slow, because
records of 16 KB pass through this process one by one: on loopback 2.1 CPU seconds per GB, both
sides together, against 0.4 without TLS (benchmarks/peer_reads.py --tls).
"""

from __future__ import annotations

import ssl

from penstock.engine.peers.settings import PeerSettings, peer_settings
from penstock.errors import OptionError


def server_context(settings: PeerSettings | None = None) -> ssl.SSLContext | None:
    """Return the TLS context of a server; None if TLS is not set up."""
    return _context(settings or peer_settings(), ssl.PROTOCOL_TLS_SERVER)


def client_context(settings: PeerSettings | None = None) -> ssl.SSLContext | None:
    """Return the TLS context of a client; None if TLS is not set up."""
    return _context(settings or peer_settings(), ssl.PROTOCOL_TLS_CLIENT)


def _context(settings: PeerSettings, protocol: int) -> ssl.SSLContext | None:
    given = {
        "tls_cert": settings.tls_cert,
        "tls_key": settings.tls_key,
        "tls_ca": settings.tls_ca,
    }
    missing = [name for name, value in given.items() if not value]
    if len(missing) == len(given):
        return None
    if missing:
        raise OptionError(
            f"TLS between peers needs tls_cert, tls_key and tls_ca; {', '.join(missing)} is not set"
        )
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
        context.load_verify_locations(settings.tls_ca)
    except OSError as error:
        paths = ", ".join(f"{name} {value}" for name, value in given.items())
        raise OptionError(f"TLS between peers cannot be set up with {paths}: {error}") from None
    return context
