"""Roles, tokens and certificates: who may make which call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvindexd.config import ConfigError
from kvindexd.security.credentials import (
    Access,
    CertificateRoles,
    CredentialError,
    match,
    token,
    tokens_in,
    tokens_of,
)
from kvindexd.security.roles import METRICS, UI, Role, needed
from kvindexd.security.tokens import TokenSource
from kvindexd.v1 import index_pb2 as pb

INDEX, ADMIN = "kvindexd.v1.KVIndex", "kvindexd.v1.KVIndexAdmin"
A, S, R = (f"{role}-0123456789abcdef" for role in ("admin", "score", "read"))
READING = {
    "ListWorkers", "GetWorker", "GetBlock", "WalkChain", "IndexStats", "WatchWorkers", "Audit",
    "TailWorker",
}  # fmt: skip


def test_every_call_of_the_contract_has_the_roles_that_it_should() -> None:
    for method in pb.DESCRIPTOR.services_by_name["KVIndex"].methods:
        read = {Role.READ} if method.name == "Explain" else set()
        assert needed(f"{INDEX}/{method.name}") == {Role.SCORE, Role.ADMIN} | read
    for method in pb.DESCRIPTOR.services_by_name["KVIndexAdmin"].methods:
        wanted = {Role.ADMIN} | ({Role.READ} if method.name in READING else set())
        assert needed(f"{ADMIN}/{method.name}") == wanted, method.name
    assert needed("envoy.service.ext_proc.v3.ExternalProcessor/Process") == {"score", "admin"}
    assert needed("grpc.health.v1.Health/Check") == needed("grpc.health.v1.Health/Watch") == set()
    assert needed(METRICS) == needed(UI) == {"read", "admin"}


def test_a_call_that_nobody_has_thought_of_needs_admin() -> None:
    for method in (f"{ADMIN}/Later", "other.v1.Service/Do", "", "grpc.health.v1.HealthX/Check"):
        assert needed(method) == {Role.ADMIN}


def access(
    scoring_open: bool = False, clients: dict[str, str] | None = None, metrics_open: bool = True
) -> Access:
    tokens = tokens_of({"admin": [A], "score": [S], "read": [R]})
    roles = CertificateRoles(clients or {})
    return Access(lambda: tokens, roles, scoring_open=scoring_open, metrics_open=metrics_open)


def judge(method: str, sent: Sequence[str] = (), names: Sequence[str] = (), **how: Any) -> str:
    """The reason of the refusal, "" = none."""
    refusal = access(**how).judge(method, sent, lambda: names)
    if refusal is None:
        return ""
    assert not any(secret in refusal.text for secret in (A, S, R))
    assert "needs role" in refusal.text
    assert refusal.known is (refusal.reason == "role")
    return refusal.reason


@pytest.mark.parametrize(
    ("method", "admin", "score", "read"),
    [
        (f"{ADMIN}/RegisterWorker", "", "role", "role"),
        (f"{ADMIN}/ListWorkers", "", "role", ""),
        (f"{INDEX}/ScoreWorkers", "", "", "role"),
        (f"{INDEX}/Explain", "", "", ""),
        (UI, "", "role", ""),
    ],
)
def test_roles_of_tokens(method: str, admin: str, score: str, read: str) -> None:
    assert [judge(method, [f"Bearer {t}"]) for t in (A, S, R)] == [admin, score, read]
    assert judge(method) == "missing"


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        ([f"Bearer {A}x"], "unknown_token"),
        ([f"Bearer {A[:-1]}"], "unknown_token"),
        (["Bearer"], "malformed"),
        ([A], "malformed"),
        ([f"Basic {A}"], "malformed"),
        ([f"Bearer {A} {A}"], "malformed"),
        ([f"Bearer {A}", f"Bearer {A}"], "malformed"),
        ([""], "malformed"),
        ([f"bearer {A}"], ""),
    ],
)
def test_what_is_not_a_token(sent: list[str], reason: str) -> None:
    assert judge(f"{ADMIN}/RegisterWorker", sent) == reason


def test_scoring_and_metrics_may_be_open_and_the_rest_is_not() -> None:
    assert judge(f"{INDEX}/PickWorker", scoring_open=True) == ""
    assert judge("envoy.service.ext_proc.v3.ExternalProcessor/Process", scoring_open=True) == ""
    assert judge(f"{ADMIN}/ListWorkers", scoring_open=True) == "missing"
    assert [judge(METRICS), judge(METRICS, metrics_open=False)] == ["", "missing"]
    assert judge(UI) == "missing"


def test_roles_of_certificates() -> None:
    clients = {
        "dns:*.Gateways.example": "score",
        "uri:spiffe://example/ns/*/sa/ops": "admin",
        "uri:spiffe://example/prom/**": "read",
        "cn:ops-*": "admin",
    }
    roles = CertificateRoles(clients).roles
    assert roles(["dns:A.gateways.EXAMPLE"]) == {"score"}
    assert roles(["uri:spiffe://example/ns/x/sa/ops"]) == {"admin"}
    assert roles(["uri:spiffe://example/prom/a/b"]) == {"read"}
    assert roles(["cn:ops-1", "dns:b.gateways.example"]) == {"admin", "score"}
    for other in (
        "dns:gateways.example",
        "dns:a.b.gateways.example",
        "dns:a.gateways.example.evil.example",
        "dns:a-gateways.example",
        "dns:.gateways.example",
        "uri:spiffe://example/ns/x/y/sa/ops",
        "uri:SPIFFE://example/ns/x/sa/ops",
        "uri:spiffe://example/ns/x/sa/ops/more",
        "cn:xops-1",
        "dns:ops-1",
        "cn:a.gateways.example",
        "ops-1",
    ):
        assert roles([other]) == set(), other
    assert judge(f"{ADMIN}/RegisterWorker", names=["cn:ops-1"], clients=clients) == ""
    assert judge(f"{ADMIN}/RegisterWorker", names=["dns:a.gateways.example"], clients=clients) == (
        "role"
    )
    assert judge(f"{ADMIN}/RegisterWorker", names=["cn:x"], clients=clients) == "missing"
    # A wrong token is told, even where the certificate alone would do.
    wrong = judge(f"{ADMIN}/RegisterWorker", [f"Bearer {A}x"], ["cn:ops-1"], clients=clients)
    assert wrong == "unknown_token"


@pytest.mark.parametrize(
    ("pattern", "role"), [("ops", "admin"), ("host:x", "admin"), ("dns:", "read"), ("cn:x", "root")]
)
def test_patterns_that_are_none(pattern: str, role: str) -> None:
    with pytest.raises(CredentialError, match=r"expected"):
        CertificateRoles({pattern: role})


def test_several_tokens_of_a_role_and_names() -> None:
    text = f"# rotation\nadmin {A} ops-2026\n\nadmin {A}2\n  read {R}\n"
    tokens = tokens_in(text)
    assert [(t.role, t.name) for t in tokens] == [
        ("admin", "ops-2026"),
        ("admin", "admin"),
        ("read", "read"),
    ]
    assert match(tokens, A + "2") == tokens[1]
    assert match(tokens, A + "3") is None
    assert A not in repr(tokens)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("admin short", "line 1: a token of role admin: expected at least 16"),
        (f"#\nroot {A}", "line 2: role 'root'"),
        (f"{A}", "line 1: expected `role token"),
        (f"admin {A} a b", "line 1: expected `role token"),
        (f"admin {A}é", "printable ASCII"),
    ],
)
def test_token_files_that_cannot_be_used(text: str, said: str) -> None:
    with pytest.raises(CredentialError, match=said) as caught:
        tokens_in(text)
    assert A not in str(caught.value)


def test_a_token_file_is_followed_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    path, now, told = tmp_path / "tokens", [0.0], []
    path.write_text(f"admin {A}\n")
    fixed = [token("score", S)]
    source = TokenSource(fixed, str(path), told.append, lambda: now[0])

    def known() -> list[bool]:
        now[0] += 1.0
        return [match(source(), t) is not None for t in (S, A, A + "2")]

    assert known() == [True, True, False]
    path.write_text(f"admin {A}2\nadmin {A}\n")
    assert known() == [True, True, True]
    path.write_text(f"admin {A}2\n")
    assert [match(source(), A) is not None, *known()] == [True, True, False, True]
    path.write_text("admin\n")
    assert known() == [True, False, True]
    path.unlink()
    assert known() == known() == [True, False, True]
    path.write_text(f"admin {A}\n")
    assert known() == [True, True, False]
    assert told == [True, True, False, False, True]
    with pytest.raises(ConfigError, match=r"auth.tokens_file.*No such file"):
        TokenSource([], str(tmp_path / "none"))
    path.write_bytes(b"admin \xff" + A.encode())
    with pytest.raises(ConfigError, match="UTF-8") as caught:
        TokenSource([], str(path))
    assert A not in str(caught.value)
