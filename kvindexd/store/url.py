"""Store URLs: one server, Sentinel or a cluster, over TCP, TLS or a unix socket."""

from __future__ import annotations

import difflib
from typing import Literal, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlsplit, urlunsplit

Mode = Literal["single", "sentinel", "cluster"]

_MODES: dict[str, Mode] = {"": "single", "+sentinel": "sentinel", "+cluster": "cluster"}
_SCHEMES: dict[str, tuple[Mode, bool]] = {
    f"{base}{'s' if tls else ''}{suffix}": (mode, tls)
    for base in ("redis", "valkey")
    for tls in (False, True)
    for suffix, mode in _MODES.items()
}
_UNIX = ("unix", "redis+unix", "valkey+unix")
_PORTS = {"single": 6379, "cluster": 6379, "sentinel": 26379}
_OPTIONS = (
    "db",
    "sentinel_username",
    "sentinel_password",
    "ssl_ca_certs",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_cert_reqs",
    "ssl_check_hostname",
)


class Endpoint(NamedTuple):
    """One server: a host and port, or the path of a unix socket."""

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class StoreURL(NamedTuple):
    """A parsed store URL. `endpoints`: the server, the sentinels, or some nodes of the cluster.

    Its `str()` and `repr()` mask passwords; the fields do not.
    """

    scheme: str
    mode: Mode
    endpoints: tuple[Endpoint, ...]
    username: str | None = None
    password: str | None = None
    db: int = 0
    service: str = ""
    tls: bool = False
    options: tuple[tuple[str, str], ...] = ()

    def option(self, name: str) -> str | None:
        """One query option, or None."""
        return dict(self.options).get(name)

    def __str__(self) -> str:
        user = quote(self.username or "", safe="")
        if self.password is not None:
            user += ":***"
        auth = f"{user}@" if user else ""
        if self.mode == "single" and self.endpoints[0].path:
            text = f"{self.scheme}://{auth}{self.endpoints[0].path}"
        else:
            text = f"{self.scheme}://{auth}" + ",".join(map(str, self.endpoints))
        if self.service:
            text += f"/{quote(self.service)}"
        if self.db:
            text += f"/{self.db}"
        shown = [f"{k}={'***' if 'password' in k else v}" for k, v in self.options]
        return text + ("?" + "&".join(shown) if shown else "")

    def __repr__(self) -> str:
        return f"<StoreURL {self}>"


def parse_url(text: str) -> StoreURL:
    """Parse a store URL. Raises ValueError, saying what is wrong, without repeating secrets.

    Forms: redis://, rediss://, valkey://, valkeys:// [user:password@]host[:port][/db];
    unix://[user:password@]/path/to.sock[?db=n];
    redis+sentinel://[user:password@]host:port,host:port/service[/db];
    redis+cluster://[user:password@]host:port,host:port (both with rediss for TLS).
    """
    scheme, separator, _ = text.partition("://")
    scheme = scheme.lower()
    if not separator or (scheme not in _SCHEMES and scheme not in _UNIX):
        close = difflib.get_close_matches(scheme, [*_SCHEMES, "unix"], 1)
        hint = f"; did you mean {close[0]}://?" if close else ""
        known = "redis://, rediss://, valkey://, valkeys://, unix://, redis+sentinel:// or "
        raise ValueError(f"store URL: expected {known}redis+cluster://{hint}")
    try:
        parts = urlsplit(text)
        # A "#" in a password would silently become a fragment and leave the rest in the host.
        if parts.fragment:
            raise ValueError("unexpected '#' (write it as %23 in a password)")
        username, password, hosts = _split_auth(parts.netloc)
        options = _options(parts.query)
        if scheme in _UNIX:
            return _unix(scheme, parts.path, username, password, options)
        mode, tls = _SCHEMES[scheme]
        endpoints = tuple(_endpoint(h, _PORTS[mode]) for h in hosts.split(","))
        service, db = _path(mode, [unquote(p) for p in parts.path.split("/") if p], options)
        if mode == "single" and len(endpoints) > 1:
            raise ValueError("several hosts need redis+sentinel:// or redis+cluster://")
    except ValueError as e:
        raise ValueError(f"store URL ({scheme}://...): {e}") from None
    return StoreURL(
        scheme, mode, endpoints, username, password, db, service, tls, _without_db(options)
    )


def with_credentials(text: str, username: str, password: str) -> str:
    """A store URL with this user and password, where it names none itself; "" stays as it is."""
    parts = urlsplit(text)
    if not text or not (username or password) or "@" in parts.netloc:
        return text
    auth = f"{quote(username, '')}:{quote(password, '')}"
    return urlunsplit(parts._replace(netloc=f"{auth}@{parts.netloc}"))


def _without_db(options: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((k, v) for k, v in options.items() if k != "db")


def _split_auth(netloc: str) -> tuple[str | None, str | None, str]:
    auth, at, hosts = netloc.rpartition("@")
    if not at:
        return None, None, hosts
    user, colon, password = auth.partition(":")
    return unquote(user) or None, unquote(password) if colon else None, hosts


def _options(query: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options:
        if name not in _OPTIONS:
            close = difflib.get_close_matches(name, _OPTIONS, 1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(_OPTIONS)}"
            raise ValueError(f"unknown option {name!r}{hint}")
    reqs = options.get("ssl_cert_reqs", "required")
    if reqs not in ("none", "optional", "required"):
        raise ValueError(f"ssl_cert_reqs is {reqs!r}; expected none, optional or required")
    return options


def _unix(
    scheme: str, path: str, username: str | None, password: str | None, options: dict[str, str]
) -> StoreURL:
    if not path.startswith("/"):
        raise ValueError("expected the absolute path of a socket, as in unix:///run/redis.sock")
    endpoint = Endpoint("", 0, unquote(path))
    db = _db(options.get("db", "0"))
    rest = _without_db(options)
    return StoreURL(scheme, "single", (endpoint,), username, password, db, "", False, rest)


def _endpoint(text: str, default_port: int) -> Endpoint:
    host, port = text, ""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"host {text!r}: expected [address]:port")
        port = rest[1:]
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    elif ":" in text:
        raise ValueError(f"host {text!r}: write an IPv6 address in brackets")
    if not host:
        raise ValueError("a host is missing")
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"port {port!r} of {host}: expected 1..65535")
    return Endpoint(host, int(port) if port else default_port)


def _path(mode: Mode, path: list[str], options: dict[str, str]) -> tuple[str, int]:
    service = ""
    if mode == "sentinel":
        if not path:
            raise ValueError("expected the service name after the sentinels: .../mymaster")
        service = path.pop(0)
    if len(path) > 1:
        raise ValueError(f"unexpected path {'/'.join(path)!r}")
    db = _db(path[0] if path else options.get("db", "0"))
    if mode == "cluster" and db:
        raise ValueError("a cluster has database 0 only")
    return service, db


def _db(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"database {text!r}: expected a number")
    return int(text)
