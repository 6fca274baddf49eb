"""Whether a configuration lets strangers in. Pure."""

from __future__ import annotations

import ipaddress

from kvindexd.config import Config, ConfigError, parse_listen


def is_loopback(listen: str) -> bool:
    """Whether `host:port` can be reached from this machine only."""
    host, _ = parse_listen(listen)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def has_credentials(config: Config) -> bool:
    """Whether anything is configured by which callers are told apart."""
    auth = config.auth
    return bool(auth.tokens or auth.tokens_file or auth.clients)


def check_exposure(config: Config) -> None:
    """Raise ConfigError where administration would be open beyond this machine to anybody."""
    if config.auth.insecure or has_credentials(config):
        return
    name, listen = "server", config.server.listen
    if config.server.admin_listen:
        name, listen = "admin", config.server.admin_listen
    if is_loopback(listen) or requires_certificate(config, name):
        return
    key = "server.admin_listen" if name == "admin" else "server.listen"
    raise ConfigError(
        f"{key} is {listen}: anybody who reaches it could register and remove workers. Set "
        "auth.tokens_file (or auth.tokens), or tls.client_ca_file so that only holders of a "
        "certificate connect; or put administration on a loopback server.admin_listen; or, where "
        "the network itself keeps strangers out, auth.insecure = true"
    )


def requires_certificate(config: Config, listener: str) -> bool:
    """Whether a listener takes connections with a client certificate only."""
    tls = config.tls
    return bool(
        tls.cert_file
        and tls.client_ca_file
        and listener in tls.listeners
        and listener in tls.client_certs
    )


def in_clear(config: Config) -> list[str]:
    """Settings of the listeners beyond loopback over which tokens would travel unencrypted."""
    if not (config.auth.tokens or config.auth.tokens_file):
        return []
    listeners = {
        "server": config.server.listen,
        "admin": config.server.admin_listen,
        "ext_proc": config.ext_proc.listen,
        "metrics": config.metrics.listen,
    }
    encrypted = config.tls.listeners if config.tls.cert_file else []
    return [
        name
        for name, listen in listeners.items()
        if listen and not is_loopback(listen) and name not in encrypted
    ]
