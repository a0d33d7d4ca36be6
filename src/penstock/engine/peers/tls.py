"""TLS between peers, where the network is not to be trusted with what is read.

The secret of a run already keeps strangers out; TLS also keeps bytes from being read or changed on
the way. Both sides show a certificate of the same authority. Names in certificates are not looked
at: addresses of nodes come and go, and who a peer is, is proven by the hello inside. It has its
price: records of 16 KB pass through this process one by one, on loopback at 2.1 CPU seconds per GB
of both sides against 0.4 without (benchmarks/peer_reads.py --tls).
"""

from __future__ import annotations

import ssl

from penstock.engine.peers.settings import PeerSettings, peer_settings
from penstock.errors import OptionError


def server_context(settings: PeerSettings | None = None) -> ssl.SSLContext | None:
    """Return what a server needs to speak TLS; None where that is not set up."""
    return _context(settings or peer_settings(), ssl.PROTOCOL_TLS_SERVER)


def client_context(settings: PeerSettings | None = None) -> ssl.SSLContext | None:
    """Return what a client needs to speak TLS; None where that is not set up."""
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
