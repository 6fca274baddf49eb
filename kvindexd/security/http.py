"""Credentials on the metrics port: a bearer token, a browser's password, or a certificate."""

from __future__ import annotations

import base64
import binascii
import ssl
from collections.abc import Callable, Mapping
from typing import Any

from kvindexd.security.certificates import names_of_ssl
from kvindexd.security.credentials import Access
from kvindexd.security.roles import METRICS, UI
from kvindexd.telemetry.http import Request, Response, text

_CHALLENGE = 'Basic realm="kvindexd: any user name, a token as the password", charset="UTF-8"'
"""Makes a browser ask; programs send a bearer token unasked."""


class HttpProtection:
    """What the metrics port asks of its callers. `context`: for TLS, None = none."""

    def __init__(
        self,
        context: ssl.SSLContext | None,
        access: Access | None,
        failed: Callable[[str], None],
    ) -> None:
        """`failed`: told the reason of each refusal."""
        self.context = context
        self._access = access
        self._failed = failed

    def refusal(self, request: Request, peer: Mapping[str, Any] | None) -> Response | None:
        """Why the caller may not see a page, None where it may."""
        if self._access is None:
            return None
        method = METRICS if request.path == "/metrics" else UI
        sent = request.headers.get("authorization")
        refused = self._access.judge(
            method, [_as_bearer(sent)] if sent is not None else [], lambda: names_of_ssl(peer)
        )
        if refused is None:
            return None
        self._failed(refused.reason)
        if refused.known:
            return text(403, refused.text)
        return text(401, refused.text, **{"WWW-Authenticate": _CHALLENGE})


def _as_bearer(sent: str) -> str:
    """A password as the bearer token that it is; anything else as it came."""
    scheme, _, value = sent.partition(" ")
    if scheme.lower() != "basic":
        return sent
    try:
        _, _, password = base64.b64decode(value.strip(), validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return sent
    return f"Bearer {password}"
