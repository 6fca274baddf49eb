"""Real certificates for tests: authorities, servers, clients, and files that are replaced."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import NamedTuple

import grpc
import trustme

HOST = "127.0.0.1"


class Pair(NamedTuple):
    """A certificate with its chain and its key, PEM."""

    cert: bytes
    key: bytes


def issue(ca: trustme.CA, *names: str, expired: bool = False, cn: str | None = None) -> Pair:
    """A certificate of an authority for some names."""
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    leaf = ca.issue_cert(
        *names,
        common_name=cn,
        not_before=now - 3 * day,
        not_after=now - day if expired else now + day,
    )
    return Pair(b"".join(pem.bytes() for pem in leaf.cert_chain_pems), leaf.private_key_pem.bytes())


class Files:
    """Certificate, key and client authority as a daemon reads them."""

    def __init__(self, folder: Path) -> None:
        self.cert, self.key, self.ca = (folder / f for f in ("tls.crt", "tls.key", "ca.crt"))

    def write(self, pair: Pair, ca: trustme.CA) -> None:
        """Replace all, each by a rename, as a renewal does."""
        replace(self.cert, pair.cert)
        replace(self.key, pair.key)
        replace(self.ca, ca.cert_pem.bytes())

    def settings(self) -> dict[str, str]:
        """Of the daemon."""
        return {
            "tls.cert_file": str(self.cert),
            "tls.key_file": str(self.key),
            "tls.client_ca_file": str(self.ca),
        }


def replace(path: Path, content: bytes) -> None:
    """Put new content in a file's place in one step."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(content)
    os.replace(fresh, path)


def channel(address: str, ca: trustme.CA, client: Pair | None = None) -> grpc.Channel:
    """A TLS connection of its own, not one that gRPC shares between channels."""
    credentials = grpc.ssl_channel_credentials(
        ca.cert_pem.bytes(),
        client.key if client is not None else None,
        client.cert if client is not None else None,
    )
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    return grpc.secure_channel(address, credentials, options=options)
