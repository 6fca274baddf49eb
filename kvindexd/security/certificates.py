"""Certificates from files, read again when they change; a pair that does not fit changes nothing.

A renewal replaces certificate and key one after the other: in between they do not belong together,
and the old ones go on being used until they do. Connections that are open are not touched.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import structlog

from kvindexd.config import ConfigError
from kvindexd.config.protecting import Listener, TlsConfig
from kvindexd.security.tokens import Signature, signature

log = structlog.get_logger(__name__)


class Material(NamedTuple):
    """PEM text of one state of the files. `client_ca`: b"" = no client certificates."""

    cert: bytes
    key: bytes
    client_ca: bytes


class Certificates:
    """The files of `[tls]`. Safe to ask from any thread: gRPC asks from its own."""

    def __init__(self, tls: TlsConfig, on_reload: Callable[[bool], None] = lambda _: None) -> None:
        """`on_reload`: told whether changed files could be used. Raises ConfigError for files that
        cannot be used at the start."""
        self._tls = tls
        self._on_reload = on_reload
        self._lock = threading.Lock()
        self.generation = 0
        """Rises with every change."""
        try:
            self._seen = self._signatures()
            self.material = self._read()
        except (OSError, ValueError) as e:
            raise ConfigError(f"tls: {_said(e)}") from None

    def refresh(self) -> int:
        """Look at the files, and use them if they changed and fit; the generation in use."""
        with self._lock:
            try:
                found = self._signatures()
                if found == self._seen:
                    return self.generation
                self._seen = found
                self.material = self._read()
            except (OSError, ValueError) as e:
                self._failed(e)
                return self.generation
            self.generation += 1
        log.info("certificates_reloaded", path=self._tls.cert_file)
        self._on_reload(True)
        return self.generation

    def _failed(self, error: Exception) -> None:
        if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
            if self._seen == ():
                return  # said already
            self._seen = ()
        log.warning(
            "certificates_not_reloaded",
            error=_said(error),
            cost="new connections go on with the certificate read before",
        )
        self._on_reload(False)

    def _signatures(self) -> tuple[Signature, ...]:
        return tuple(signature(path) for path in self._paths())

    def _paths(self) -> Iterator[Path]:
        tls = self._tls
        return (Path(p) for p in (tls.cert_file, tls.key_file, tls.client_ca_file) if p)

    def _read(self) -> Material:
        """Raises OSError, or ValueError when the files do not fit together."""
        self._context(False)
        material = Material(*(p.read_bytes() for p in self._paths()), *self._no_ca())
        if self._signatures() != self._seen:
            raise ValueError("the files change while they are read")
        return material

    def _no_ca(self) -> tuple[bytes, ...]:
        return () if self._tls.client_ca_file else (b"",)

    def _context(self, client_cert: bool) -> ssl.SSLContext:
        """An SSL context of the files. Raises OSError (ssl.SSLError among them)."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        # A resumed session would go on with what an older certificate authority vouched for.
        made.options |= ssl.OP_NO_TICKET
        made.num_tickets = 0
        try:
            made.load_cert_chain(self._tls.cert_file, self._tls.key_file, _no_passphrase)
        except ssl.SSLError as e:
            raise ValueError(
                f"{self._tls.cert_file} and {self._tls.key_file} are no certificate with its "
                f"private key (without a passphrase): {e.reason or e}"
            ) from None
        if self._tls.client_ca_file:
            try:
                made.load_verify_locations(self._tls.client_ca_file)
            except ssl.SSLError as e:
                raise ValueError(
                    f"{self._tls.client_ca_file} holds no certificate: {e.reason or e}"
                ) from None
        if client_cert:
            made.verify_mode = ssl.CERT_REQUIRED
        return made

    # -- listeners ----------------------------------------------------------------------------

    def speaks_tls(self, listener: Listener) -> bool:
        """Whether a listener is to speak TLS."""
        return listener in self._tls.listeners

    def _asks(self, listener: Listener) -> bool:
        return bool(self._tls.client_ca_file) and listener in self._tls.client_certs

    def grpc_credentials(self, listener: Listener) -> grpc.ServerCredentials:
        """Credentials of a gRPC port, which follow the files."""
        asks = self._asks(listener)
        served = self.refresh()

        def changed() -> Any:  # a configuration, or None for no change, which no type says
            nonlocal served
            generation = self.refresh()
            if generation == served:
                return None
            served = generation
            return _grpc_configuration(self.material, asks)

        return grpc.dynamic_ssl_server_credentials(
            _grpc_configuration(self.material, asks), changed, asks
        )

    def http_context(self, listener: Listener) -> ssl.SSLContext:
        """The SSL context of a port served by asyncio, which follows the files."""
        asks = self._asks(listener)
        served = self.refresh()
        current = first = self._context(asks)

        def changed(connection: ssl.SSLObject, _name: str | None, _: ssl.SSLContext) -> None:
            nonlocal served, current
            generation = self.refresh()
            if generation != served:
                try:
                    current = self._context(asks)
                    served = generation
                except (OSError, ValueError):
                    pass  # they changed again just now; the next connection looks again
            connection.context = current

        first.sni_callback = changed
        return first


def _grpc_configuration(material: Material, asks: bool) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(material.key, material.cert)], material.client_ca if asks else None
    )


def names_of_grpc(context: Mapping[str, Iterable[bytes]]) -> list[str]:
    """Names `kind:name` of a client's certificate, from a call's auth context."""
    kinds = {
        "peer_dns": "dns",
        "peer_uri": "uri",
        "peer_ip": "ip",
        "peer_email": "email",
        "x509_common_name": "cn",
    }
    return [
        f"{kind}:{value.decode('utf-8', 'replace')}"
        for key, kind in kinds.items()
        for value in context.get(key, ())
    ]


def names_of_ssl(certificate: Mapping[str, Any] | None) -> list[str]:
    """The same, from what Python's ssl module says of a peer's certificate."""
    if not certificate:
        return []
    kinds = {"DNS": "dns", "URI": "uri", "IP Address": "ip", "email": "email"}
    names = [
        f"{kinds[kind]}:{name}"
        for kind, name in certificate.get("subjectAltName", ())
        if kind in kinds
    ]
    return names + [
        f"cn:{value}"
        for part in certificate.get("subject", ())
        for key, value in part
        if key == "commonName"
    ]


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"cannot read {error.filename}: {error.strerror}"
    return str(error)


def _no_passphrase() -> str:
    """Without this, OpenSSL asks the terminal, and waits."""
    return ""
