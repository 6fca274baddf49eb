"""Store URLs: every form, every mistake, and no secret in anything shown."""

from __future__ import annotations

import pytest

from kvindexd.store import Store, parse_url
from kvindexd.store.url import Endpoint


@pytest.mark.parametrize(
    ("text", "mode", "endpoints", "tls", "db"),
    [
        ("redis://h", "single", [("h", 6379)], False, 0),
        ("redis://h:1/5", "single", [("h", 1)], False, 5),
        ("redis://h:1?db=5", "single", [("h", 1)], False, 5),
        ("rediss://h:1", "single", [("h", 1)], True, 0),
        ("valkey://h:1", "single", [("h", 1)], False, 0),
        ("valkeys://h", "single", [("h", 6379)], True, 0),
        ("REDIS://h:1", "single", [("h", 1)], False, 0),
        ("redis://[::1]:7/1", "single", [("::1", 7)], False, 1),
        ("redis://[::1]", "single", [("::1", 6379)], False, 0),
        ("redis+cluster://a:1,b:2,c", "cluster", [("a", 1), ("b", 2), ("c", 6379)], False, 0),
        ("rediss+cluster://a:1", "cluster", [("a", 1)], True, 0),
        ("valkey+cluster://a:1/0", "cluster", [("a", 1)], False, 0),
    ],
)
def test_forms(text: str, mode: str, endpoints: list[tuple[str, int]], tls: bool, db: int) -> None:
    url = parse_url(text)
    assert (url.mode, url.tls, url.db) == (mode, tls, db)
    assert [(e.host, e.port) for e in url.endpoints] == endpoints


def test_a_sentinel_url_names_its_service() -> None:
    url = parse_url(
        "redis+sentinel://u:p@h1:1,h2,h3:3/my%20master/2?sentinel_password=sp&sentinel_username=su"
    )
    assert (url.mode, url.service, url.db) == ("sentinel", "my master", 2)
    assert url.endpoints == (Endpoint("h1", 1), Endpoint("h2", 26379), Endpoint("h3", 3))
    assert (url.username, url.password) == ("u", "p")
    assert (url.option("sentinel_username"), url.option("sentinel_password")) == ("su", "sp")
    assert parse_url("rediss+sentinel://h/m").tls


@pytest.mark.parametrize("scheme", ["unix", "redis+unix", "valkey+unix"])
def test_a_unix_socket(scheme: str) -> None:
    url = parse_url(f"{scheme}://u:p%40@/run/a%20b/x.sock?db=3")
    assert url.endpoints == (Endpoint("", 0, "/run/a b/x.sock"),)
    assert (url.username, url.password, url.db) == ("u", "p@", 3)


def test_credentials_are_unquoted() -> None:
    url = parse_url("redis://user%3A:p%40ss%2F%23@h")
    assert (url.username, url.password) == ("user:", "p@ss/#")
    assert parse_url("redis://:secret@h").username is None
    assert parse_url("redis://:p@ss@h").password == "p@ss"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected redis://"),
        ("localhost:6379", "expected redis://"),
        ("rediss", "expected redis://"),
        ("redsi://h", "did you mean redis://"),
        ("redis+sentinal://h/m", "did you mean redis+sentinel://"),
        ("http://h", "expected redis://"),
        ("redis://", "a host is missing"),
        ("redis://:6379", "a host is missing"),
        ("redis://h:x", "port 'x'"),
        ("redis://h:0", "port '0'"),
        ("redis://h:65536", "port '65536'"),
        ("redis://h/x", "database 'x'"),
        ("redis://h/1/2", "unexpected path"),
        ("redis://h?tmeout=1", "unknown option 'tmeout'"),
        ("redis://h?ssl_ca_cert=/x", "did you mean 'ssl_ca_certs'"),
        ("rediss://h?ssl_cert_reqs=maybe", "expected none, optional or required"),
        ("redis://a:1,b:2", "redis+sentinel:// or redis+cluster://"),
        ("redis+sentinel://h:1", "service name"),
        ("redis+cluster://h:1/2", "database 0 only"),
        ("redis+cluster://h:1,,h:2", "a host is missing"),
        ("redis://::1", "brackets"),
        ("redis://[::1", "store URL"),
        ("unix://relative.sock", "absolute path"),
        ("redis://:pa#ss@h:1", "%23"),
    ],
)
def test_mistakes_are_named(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"store URL") as e:
        parse_url(text)
    assert says in str(e.value)


SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "text",
    [
        f"redis://:{SECRET}@h:1",
        f"redis://user:{SECRET}@h:1/2",
        f"unix://:{SECRET}@/run/x.sock",
        f"redis+sentinel://u:{SECRET}@h:1/m?sentinel_password={SECRET}",
        f"rediss+cluster://u:{SECRET}@a:1,b:2",
    ],
)
def test_secrets_are_never_shown(text: str) -> None:
    url = parse_url(text)
    assert SECRET not in str(url)
    assert SECRET not in repr(url)
    assert SECRET not in f"{url!s} {url}"
    assert "***" in str(url)
    assert str(Store(text).url) == str(url)


@pytest.mark.parametrize(
    "text",
    [
        f"redis://:{SECRET}#x@h:1",
        f"redis://u:{SECRET}@h:bad",
        f"redis://u:{SECRET}@h:1/x",
        f"resid://u:{SECRET}@h",
        f"redis://u:{SECRET}@h?sentinel_password={SECRET}&x=1",
        f"redis://u:{SECRET}@[::1",
    ],
)
def test_errors_do_not_repeat_secrets(text: str) -> None:
    with pytest.raises(ValueError) as e:  # noqa: PT011
        parse_url(text)
    assert SECRET not in str(e.value)


def test_what_is_shown_parses_to_the_same_place() -> None:
    for text in ("redis://h:1/2", "redis+sentinel://h:1,g:2/m/3", "unix:///run/x.sock"):
        assert str(parse_url(text)) == text
