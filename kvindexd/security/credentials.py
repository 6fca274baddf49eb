"""Bearer tokens and client certificates to roles, and the judgement of one call. Pure."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvindexd.security.roles import METRICS, Role, is_scoring, named, needed

MIN_TOKEN = 16
"""Characters that a token has at least: what is shorter can be guessed."""

KINDS = ("dns", "uri", "ip", "email", "cn")
"""Kinds of names in a certificate: the subject's alternative names, and its common name."""


class CredentialError(ValueError):
    """Credentials that cannot be used. The text never repeats a token."""


class Token(NamedTuple):
    """One bearer token. `name`: for the log; the token itself is in none."""

    role: Role
    digest: bytes
    name: str


def token(role: str, secret: str, name: str = "") -> Token:
    """A token of a role. Raises CredentialError."""
    if role not in tuple(Role):
        raise CredentialError(f"role {role!r}: expected one of {', '.join(Role)}")
    if len(secret) < MIN_TOKEN or not secret.isascii() or not secret.isprintable():
        raise CredentialError(
            f"a token of role {role}: expected at least {MIN_TOKEN} printable ASCII characters, "
            "such as from `openssl rand -hex 32`"
        )
    return Token(Role(role), _digest(secret), name or role)


def tokens_of(given: Mapping[str, Sequence[str]]) -> list[Token]:
    """Tokens from a map of role to tokens, as in `auth.tokens`. Raises CredentialError."""
    return [token(role, secret) for role, secrets in given.items() for secret in secrets]


def tokens_in(text: str) -> list[Token]:
    """Tokens of a file: a line is `role token [name]`; empty lines and `#` lines do not count.

    Raises CredentialError with the line's number.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) not in (2, 3):
            raise CredentialError(f"line {number}: expected `role token [name]`")
        try:
            found.append(token(*words))
        except CredentialError as e:
            raise CredentialError(f"line {number}: {e}") from None
    return found


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def match(tokens: Iterable[Token], secret: str) -> Token | None:
    """The token that `secret` is. Every token is compared, each in constant time, so that how
    long it takes says nothing about how close a guess came."""
    digest = _digest(secret)
    found = None
    for known in tokens:
        if hmac.compare_digest(known.digest, digest):
            found = known
    return found


class CertificateRoles:
    """Roles of client certificates, by patterns `kind:pattern`.

    `*` stands for any characters but dots and slashes, `**` for any at all.
    """

    def __init__(self, patterns: Mapping[str, str]) -> None:
        """`patterns`: pattern -> role. Raises CredentialError."""
        self._patterns = []
        for text, role in patterns.items():
            kind, colon, pattern = text.partition(":")
            if not colon or kind not in KINDS or not pattern:
                raise CredentialError(
                    f"{text!r}: expected kind:pattern with a kind of {', '.join(KINDS)}, such as "
                    "dns:*.gateways.example or uri:spiffe://example/ns/gateways/**"
                )
            if role not in tuple(Role):
                raise CredentialError(f"{text!r}: role {role!r}; expected {', '.join(Role)}")
            self._patterns.append((kind, _compiled(kind, pattern), Role(role)))

    def roles(self, names: Iterable[str]) -> frozenset[Role]:
        """The roles of a certificate with these names, each `kind:name`."""
        found = set()
        for text in names:
            kind, _, name = text.partition(":")
            name = name.lower() if kind == "dns" else name
            found |= {r for k, p, r in self._patterns if k == kind and p.fullmatch(name)}
        return frozenset(found)

    def __bool__(self) -> bool:
        return bool(self._patterns)


def _compiled(kind: str, pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*?)", pattern.lower() if kind == "dns" else pattern)
    wild = {"*": "[^./]+", "**": ".+"}
    return re.compile("".join(wild.get(p) or re.escape(p) for p in parts), re.DOTALL)


class Refusal(NamedTuple):
    """Why a call may not be made. `reason`: label of the counter. `known`: the caller is known, so
    that other credentials, not credentials at all, are missing."""

    reason: str
    known: bool
    text: str


class Access:
    """Decides who may make which call."""

    def __init__(
        self,
        tokens: Callable[[], Iterable[Token]],
        certificates: CertificateRoles,
        *,
        scoring_open: bool = False,
        metrics_open: bool = True,
    ) -> None:
        """`tokens`: those in force at the moment of a call."""
        self._tokens = tokens
        self._certificates = certificates
        self._scoring_open = scoring_open
        self._metrics_open = metrics_open

    def judge(
        self, method: str, authorization: Sequence[str], names: Callable[[], Iterable[str]]
    ) -> Refusal | None:
        """None where the call may be made. `authorization`: values of that header, at most one
        is expected. `names`: of the client's verified certificate, asked for only if needed."""
        roles = needed(method)
        if not roles or self._open(method):
            return None
        wants = f"{method} needs role {named(roles)}"
        held = self._certificates.roles(names()) if self._certificates else frozenset()
        if authorization:
            secret = _bearer(authorization)
            if secret is None:
                return Refusal(
                    "malformed", False, f"authorization: expected one `Bearer TOKEN`; {wants}"
                )
            found = match(self._tokens(), secret)
            if found is None:
                return Refusal(
                    "unknown_token", False, f"authorization: the token is not known here; {wants}"
                )
            held |= {found.role}
        if not held:
            return Refusal("missing", False, f"no credentials: {wants}; {self._how()}")
        if held.isdisjoint(roles):
            return Refusal("role", True, f"{wants}; the credentials have {named(held)}")
        return None

    def _open(self, method: str) -> bool:
        return (self._scoring_open and is_scoring(method)) or (
            self._metrics_open and method == METRICS
        )

    def _how(self) -> str:
        how = "send a token as `authorization: Bearer TOKEN`"
        return f"{how}, or use a client certificate that has it" if self._certificates else how


def _bearer(authorization: Sequence[str]) -> str | None:
    """The token of an `authorization` header, None where it is none."""
    words = authorization[0].split() if len(authorization) == 1 else []
    return words[1] if len(words) == 2 and words[0].lower() == "bearer" else None
