"""Everything of this package that one process needs, built from its settings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import structlog
from prometheus_client import Counter

from kvindexd.config import Config
from kvindexd.config.protecting import Listener
from kvindexd.registering import Registrar, Registry, Sizes
from kvindexd.security.certificates import Certificates
from kvindexd.security.credentials import Access, CertificateRoles, tokens_of
from kvindexd.security.exposure import has_credentials, in_clear
from kvindexd.security.gate import Gate
from kvindexd.security.http import HttpProtection
from kvindexd.security.networks import NetworkPolicy
from kvindexd.security.tokens import TokenSource
from kvindexd.telemetry import Metrics

log = structlog.get_logger(__name__)


class Protection:
    """`certificates`: None = no TLS. `access`: None = anybody may do anything."""

    def __init__(self, config: Config, metrics: Metrics) -> None:
        """Raises ConfigError for files that cannot be used."""
        self._auth_failures = _counter(
            metrics, "auth_failures", "Calls refused for the caller's credentials", "reason"
        )
        self._refused = _counter(
            metrics, "requests_refused", "Requests over a limit, or not allowed", "reason"
        )
        reloads = _counter(
            metrics, "credential_reloads", "Changed credential files", "what", "outcome"
        )

        def reloaded(what: str, used: bool) -> None:
            reloads.labels(what, "used" if used else "unusable").inc()

        self.certificates: Certificates | None = None
        if config.tls.cert_file:
            self.certificates = Certificates(config.tls, partial(reloaded, "certificates"))
        self.access = _access(config, partial(reloaded, "tokens"))
        limits = config.limits
        self._sizes = Sizes(limits.max_workers, limits.max_labels, limits.max_name_bytes)
        r = config.registration
        self.gate = Gate(
            NetworkPolicy(r.allow_networks, allow_ipc=r.allow_ipc),
            timeout=r.resolve_timeout,
            refused=lambda what: self.refused(f"forbidden_{what}"),
        )
        for name in in_clear(config):
            log.warning(
                "tokens_in_clear",
                listener=name,
                cost="whoever listens on the network can take them; set tls.cert_file",
            )

    def http(self, listener: Listener) -> HttpProtection:
        """Of a port served by asyncio."""
        certificates = self.certificates
        context = None
        if certificates is not None and certificates.speaks_tls(listener):
            context = certificates.http_context(listener)
        return HttpProtection(context, self.access, self.auth_failed)

    def registrar(self, store: Registry) -> Registrar:
        """Registers what administration and configuration want."""
        return Registrar(store, self.gate, self._sizes, refused=self.refused)

    def auth_failed(self, reason: str) -> None:
        """Count a caller who may not make a call."""
        self._auth_failures.labels(reason).inc()

    def refused(self, reason: str) -> None:
        """Count a request over a limit."""
        self._refused.labels(reason).inc()


def _access(config: Config, reloaded: Callable[[bool], None]) -> Access | None:
    if not has_credentials(config):
        return None
    auth = config.auth
    return Access(
        TokenSource(tokens_of(auth.tokens), auth.tokens_file, reloaded),
        CertificateRoles(auth.clients),
        scoring_open=auth.scoring == "open",
        metrics_open=auth.metrics == "open",
    )


def _counter(metrics: Metrics, name: str, text: str, *labels: str) -> Counter:
    return Counter(name, text, labels, namespace="kvindexd", registry=metrics.registry)
