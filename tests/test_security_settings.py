"""Settings of TLS, credentials and listeners: what contradicts, what lets strangers in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvindexd.cli.main import app
from kvindexd.config import ConfigError, load
from kvindexd.security.exposure import check_exposure, in_clear, is_loopback

A, R = "admin-0123456789abcdef", "read-0123456789abcdef"


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        ("127.0.0.1:1", True), ("127.9.9.9:1", True), ("[::1]:1", True), ("localhost:1", True),
        (":1", True), ("0.0.0.0:1", False), ("[::]:1", False), ("10.0.0.1:1", False),
        ("host.test:1", False),
    ],
)  # fmt: skip
def test_loopback(listen: str, expected: bool) -> None:
    assert is_loopback(listen) is expected


TLS = {"KVINDEXD_TLS__CERT_FILE": "c", "KVINDEXD_TLS__KEY_FILE": "k"}
CLIENT_CA = {"KVINDEXD_TLS__CLIENT_CA_FILE": "ca"}
OUTSIDE = {"KVINDEXD_SERVER__LISTEN": "0.0.0.0:50051"}


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({}, ""),
        (OUTSIDE, "server.listen is 0.0.0.0:50051: anybody"),
        (OUTSIDE | TLS, "server.listen is"),
        (OUTSIDE | {"KVINDEXD_AUTH__INSECURE": "true"}, ""),
        (OUTSIDE | {"KVINDEXD_AUTH__TOKENS_FILE": "x"}, ""),
        (OUTSIDE | {"KVINDEXD_AUTH__TOKENS": f'{{"read": ["{R}"]}}'}, ""),
        (OUTSIDE | {"KVINDEXD_SERVER__ADMIN_LISTEN": "127.0.0.1:1"}, ""),
        ({"KVINDEXD_SERVER__ADMIN_LISTEN": "10.0.0.1:1"}, "server.admin_listen is 10.0.0.1:1"),
        (OUTSIDE | TLS | CLIENT_CA, ""),
        (OUTSIDE | TLS | CLIENT_CA | {"KVINDEXD_TLS__CLIENT_CERTS": "[]"}, "server.listen is"),
    ],
)  # fmt: skip
def test_administration_is_not_open_beyond_this_machine(env: dict[str, str], said: str) -> None:
    config = load(env=env).config
    if said:
        with pytest.raises(ConfigError, match=said):
            check_exposure(config)
    else:
        check_exposure(config)


def test_the_daemon_refuses_to_start_open(tmp_path: Path) -> None:
    arguments = ["serve", "--listen", "0.0.0.0:0", "--data-dir", str(tmp_path)]
    ran = CliRunner().invoke(app, arguments, env={"KVINDEXD_METRICS__LISTEN": ""})
    assert ran.exit_code == 2
    assert "server.listen is 0.0.0.0:0" in ran.output
    assert "auth.insecure" in ran.output
    assert os.listdir(tmp_path) == []


def test_tokens_in_clear_are_noticed() -> None:
    tokens = OUTSIDE | {"KVINDEXD_AUTH__TOKENS_FILE": "x"}
    assert in_clear(load(env=tokens).config) == ["server"]
    assert in_clear(load(env=tokens | TLS).config) == []
    assert in_clear(load(env=OUTSIDE).config) == []
    only = {"KVINDEXD_TLS__LISTENERS": '["admin"]'}
    assert in_clear(load(env=tokens | TLS | only).config) == ["server"]


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"TLS__CERT_FILE": "c"}, "tls.cert_file is set and tls.key_file is not"),
        ({"TLS__KEY_FILE": "c"}, "tls.key_file is set and tls.cert_file is not"),
        ({"TLS__CLIENT_CA_FILE": "c"}, "tls.client_ca_file is set without tls.cert_file"),
        ({"AUTH__CLIENTS": '{"cn:a": "read"}'}, "auth.clients is set without tls.client_ca_file"),
        ({"AUTH__TOKENS": f'{{"root": ["{A}"]}}'}, "auth.tokens: role 'root'"),
        ({"AUTH__TOKENS": '{"admin": ["short-secret"]}'}, "auth.tokens: a token of role admin"),
        ({"AUTH__TOKENS": "short-secret"}, "auth.tokens is "),
        ({"AUTH__TOKENS": '["short-secret"]'}, "auth.tokens is "),
        ({"REGISTRATION__ALLOW_NETWORKS": '["10.0.0.1/8"]'}, "allow_networks: '10.0.0.1/8'"),
        ({"SERVER__ADMIN_LISTEN": "x"}, "server.admin_listen is 'x'"),
    ],
)
def test_settings_that_contradict_each_other(env: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(env={f"KVINDEXD_{k}": v for k, v in env.items()})
    assert said in str(caught.value)
    assert "short-secret" not in str(caught.value)


def test_tokens_are_not_shown() -> None:
    settings = load(env={"KVINDEXD_AUTH__TOKENS": f'{{"admin": ["{A}"]}}', "KVINDEXD_TOKEN": A})
    assert settings.config.auth.tokens == {"admin": [A]}
    assert {r.key: r.value for r in settings.effective()}["auth.tokens"] == "***"
    assert A not in str(settings.effective())
