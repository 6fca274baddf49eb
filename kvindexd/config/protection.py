"""What must hold between the settings of TLS, credentials and registration."""

from __future__ import annotations

from kvindexd.config.base import ConfigError
from kvindexd.config.protecting import AuthConfig, TlsConfig
from kvindexd.config.schema import Config
from kvindexd.security.credentials import CertificateRoles, CredentialError, tokens_of
from kvindexd.security.networks import parse_network


def check_protection(config: Config) -> None:
    """Raise ConfigError for settings that contradict each other or cannot be used."""
    _check_tls(config.tls, config.auth)
    try:
        tokens_of(config.auth.tokens)
    except CredentialError as e:
        raise ConfigError(f"auth.tokens: {e}") from None
    try:
        CertificateRoles(config.auth.clients)
    except CredentialError as e:
        raise ConfigError(f"auth.clients: {e}") from None
    for network in config.registration.allow_networks:
        try:
            parse_network(network)
        except ValueError as e:
            raise ConfigError(f"registration.allow_networks: {e}") from None


def _check_tls(tls: TlsConfig, auth: AuthConfig) -> None:
    if bool(tls.cert_file) != bool(tls.key_file):
        given, missing = ("cert_file", "key_file") if tls.cert_file else ("key_file", "cert_file")
        raise ConfigError(f"tls.{given} is set and tls.{missing} is not: TLS needs both")
    if tls.client_ca_file and not tls.cert_file:
        raise ConfigError(
            "tls.client_ca_file is set without tls.cert_file: client certificates need TLS"
        )
    if auth.clients and not tls.client_ca_file:
        raise ConfigError(
            "auth.clients is set without tls.client_ca_file: no client certificate would be "
            "asked for, let alone verified"
        )
