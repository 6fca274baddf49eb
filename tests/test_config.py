"""Settings: precedence, sources, and errors that say what to do."""

import json
from pathlib import Path

import msgspec
import pytest

from kvindexd.config import (
    SECTIONS,
    Config,
    ConfigError,
    RedisConfig,
    WorkerConfig,
    json_schema,
    load,
    parse_listen,
)
from kvindexd.v1 import index_pb2

WORKER = {
    "worker_id": "w0",
    "model": "m",
    "address": "127.0.0.1:8000",
    "kv_events_endpoint": "tcp://127.0.0.1:5557",
}


HEARTBEAT_SAID = (
    "ingest.heartbeat is 'soon' (env KVINDEXD_INGEST__HEARTBEAT); expected a number > 0"
)


def _workers(*changes: dict[str, object]) -> dict[str, str]:
    return {"KVINDEXD_WORKERS": json.dumps([WORKER | change for change in changes])}


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kvindexd.toml"
    path.write_text(text)
    return path


def test_defaults_of_the_contract() -> None:
    config = load(env={}).config
    assert config.server.listen == "127.0.0.1:50051"
    assert config.ext_proc.listen == "127.0.0.1:9002"
    assert config.metrics.listen == "127.0.0.1:9400"
    assert config.index.hybrid == "exact"
    assert config.redis.url == ""
    assert config.ingest.on_lost_events == "reset"
    assert config.limits.max_prompt_tokens == 1_048_576
    assert config.workers == []
    pick = config.pick
    assert (pick.overlap_weight, pick.host_weight, pick.storage_weight) == (1.0, 0.7, 0.3)
    assert (pick.prefill_weight, pick.decode_weight, pick.mixed_weight) == (20.0, 2.0, 1.0)
    assert (pick.prediction_ttl, pick.lease) == (2.0, 300.0)


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        """
        [server]
        listen = "127.0.0.1:0"
        [groups.treat_as]
        mamba = "ignored"
        [[workers]]
        worker_id = "w0"
        model = "m"
        address = "127.0.0.1:8000"
        kv_events_endpoint = "tcp://127.0.0.1:5557"
        role = "PREFILL"
        labels = {zone = "a"}
        """,
    )
    config = load(path, env={}).config
    assert config.server.listen == "127.0.0.1:0"
    assert config.groups.treat_as == {"mamba": "ignored"}
    assert config.workers[0].role == "PREFILL"
    assert config.workers[0].labels == {"zone": "a"}


def test_flags_beat_environment_beats_file(tmp_path: Path) -> None:
    path = _file(tmp_path, '[redis]\nurl = "redis://file"\ntimeout = 1\npool_size = 2\n')
    env = {"KVINDEXD_REDIS__URL": "redis://env", "KVINDEXD_REDIS__TIMEOUT": "3.5"}
    flags = {"redis.url": "redis://flag", "redis.shards": None}
    settings = load(path, env=env, flags=flags)
    redis = settings.config.redis
    assert (redis.url, redis.timeout, redis.pool_size, redis.shards) == ("redis://flag", 3.5, 2, 1)
    assert settings.source("redis.url") == "flag"
    assert settings.source("redis.timeout") == "env KVINDEXD_REDIS__TIMEOUT"
    assert settings.source("redis.pool_size") == f"file {path}"
    assert settings.source("redis.shards") == "default"


def test_file_from_the_environment_and_flag_over_it(tmp_path: Path) -> None:
    path = _file(tmp_path, '[log]\nlevel = "debug"\n')
    env = {"KVINDEXD_CONFIG": str(path)}
    assert load(env=env).config.log.level == "debug"
    other = tmp_path / "other.toml"
    other.write_text('[log]\nlevel = "error"\n')
    assert load(other, env=env).config.log.level == "error"


def test_every_key_has_an_environment_variable() -> None:
    samples = {bool: "true", int: "2048", float: "2.5"}
    parts = dict.fromkeys(("host_weight", "storage_weight", "drift_threshold", "ratio"), "0.5")
    parts |= {
        "endpoint": "http://h",
        "admin_listen": "127.0.0.1:1",
        "client_ca_file": "",
        "allow_networks": "[]",
        "forget_after": "600",
    }
    pair = {"cert_file": "KVINDEXD_TLS__KEY_FILE", "key_file": "KVINDEXD_TLS__CERT_FILE"}
    for name, section in SECTIONS.items():
        for key, value in msgspec.structs.asdict(section()).items():
            special = {"url": "redis://h", "treat_as": '{"mamba": "main"}'} | parts
            text = special.get(key, samples.get(type(value), str(value) or "x"))
            if isinstance(value, list):
                text = json.dumps(value)
            variable = f"KVINDEXD_{name}__{key}".upper()
            other = {pair[key]: "x"} if key in pair else {}
            settings = load(env={variable: text} | other)
            assert settings.source(f"{name}.{key}") == f"env {variable}"


def test_workers_from_the_environment_replace_those_of_the_file(tmp_path: Path) -> None:
    path = _file(tmp_path, "[[workers]]\n" + "\n".join(f'{k} = "{v}"' for k, v in WORKER.items()))
    assert [w.worker_id for w in load(path, env={}).config.workers] == ["w0"]
    env = _workers({"worker_id": "w1", "dp_size": 2})
    settings = load(path, env=env)
    assert [w.worker_id for w in settings.config.workers] == ["w1"]
    rows = {r.key: (r.value, r.source) for r in settings.effective()}
    assert rows["workers[0].dp_size"] == (2, "env KVINDEXD_WORKERS")
    assert "workers[0].role" not in rows


def test_bind_events_default_for_workers() -> None:
    env = _workers({}, {"worker_id": "w1", "bind_events": False})
    env["KVINDEXD_INGEST__BIND_EVENTS"] = "true"
    assert [w.bind_events for w in load(env=env).config.workers] == [True, False]


def test_kubernetes_service_variables_are_not_ours() -> None:
    load(
        env={
            "KVINDEXD_SERVICE_HOST": "10.0.0.1",
            "KVINDEXD_SERVICE_PORT": "50051",
            "KVINDEXD_SERVICE_PORT_GRPC": "50051",
            "KVINDEXD_PORT": "tcp://10.0.0.1:50051",
            "KVINDEXD_PORT_50051_TCP": "tcp://10.0.0.1:50051",
            "KVINDEXD_PORT_50051_TCP_ADDR": "10.0.0.1",
            "KVINDEXD_SCORER_SERVICE_HOST": "10.0.0.2",
            "KVINDEXD_SERVER": "127.0.0.1:50051",
        }
    )


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"KVINDEXD_REDIS_URL": "x"}, "did you mean KVINDEXD_REDIS__URL?"),
        ({"KVINDEXD_REDIS__URI": "x"}, "unknown setting redis.uri (env KVINDEXD_REDIS__URI); "),
        ({"KVINDEXD_INGEST__DATA_DIR": "x"}, "did you mean index.data_dir?"),
        ({"KVINDEXD_INGEST__HEARTBEAT": "soon"}, HEARTBEAT_SAID),
        ({"KVINDEXD_REDIS__SHARDS": "0"}, "expected a whole number >= 1 and <= 16384"),
        ({"KVINDEXD_REDIS__SHARDS": "1.5"}, "redis.shards is '1.5'"),
        ({"KVINDEXD_LOG__FORMAT": "xml"}, 'expected one of "json", "console"'),
        ({"KVINDEXD_GROUPS__TREAT_AS": '{"mamba": "man"}'}, '"main", "auxiliary", "ignored"'),
        ({"KVINDEXD_GROUPS__TREAT_AS": "mamba"}, "expected JSON"),
        ({"KVINDEXD_SERVER__LISTEN": "50051"}, "expected host:port"),
        ({"KVINDEXD_SERVER__LISTEN": ""}, "expected host:port"),
        ({"KVINDEXD_METRICS__LISTEN": "h:99999"}, 'or "" for off'),
        ({"KVINDEXD_INGEST__LEASE_TTL": "1"}, "ingest.heartbeat (2 s) must be shorter"),
        ({"KVINDEXD_WORKERS": "{}"}, "expected a list of tables"),
        ({"KVINDEXD_WORKERS": '[{"worker_id": "w"}]'}, "workers[0].model is missing"),
        (_workers({"modle": "x"}), "did you mean workers[0].model?"),
        (_workers({}, {}), "give each rank one entry"),
        (_workers({"role": "prefill"}), 'expected one of "MIXED"'),
        (_workers({"replay_endpoint": "h:1"}), "no ZMQ endpoint"),
        (_workers({"dp_size": 2, "dp_rank": 2}), "is outside dp_size 2"),
        (_workers({"model": ""}), "a string that is not empty"),
    ],
)
def test_errors_from_the_environment(env: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(env=env)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[serve]\nlisten = 'x:1'", "did you mean server?"),
        ("[server]\nlissten = 'x:1'", "did you mean server.listen?"),
        ("server = 1", "expected a section: [server] with keys under it"),
        ("[redis]\ntimeout = '2'", "redis.timeout is '2' (file "),
        ("[redis]\npool_size = true", "expected a whole number >= 1"),
        ("[workers]\nworker_id = 'w'", "expected a list of tables: [[workers]]"),
        ("[redis", "is not valid TOML"),
    ],
)
def test_errors_from_the_file(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(_file(tmp_path, text), env={})
    assert said in str(caught.value)


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        load(tmp_path / "none.toml", env={})


def test_unknown_flag() -> None:
    with pytest.raises(ConfigError, match=r"did you mean server\.listen\?"):
        load(env={}, flags={"server.listn": "x"})


def test_secrets_are_masked_in_rows_and_errors() -> None:
    rows = load(env={"KVINDEXD_REDIS__URL": "redis://u:s3cret@h:1/0"}).effective()
    assert {r.key: r.value for r in rows}["redis.url"] == "redis://u:***@h:1/0"
    with pytest.raises(ConfigError) as caught:
        load(env={"KVINDEXD_REDIS__URL": "u:s3cret@h:1"})
    assert "s3cret" not in str(caught.value)


def test_rows_cover_every_key_in_order() -> None:
    keys = [r.key for r in load(env={}).effective()]
    assert keys[0] == "server.listen"
    assert keys == [f"{n}.{k}" for n, s in SECTIONS.items() for k in s.__struct_fields__]


def test_password_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("s3cret\n")
    assert RedisConfig(password_file=str(path)).password() == "s3cret"
    assert RedisConfig().password() == ""
    with pytest.raises(ConfigError, match=r"redis\.password_file: cannot read"):
        RedisConfig(password_file=str(tmp_path / "none")).password()


def test_worker_settings_are_the_input_fields_of_the_message() -> None:
    fields = index_pb2.Worker.DESCRIPTOR.fields
    assert {f.name for f in fields if f.number < 30} == set(WorkerConfig.__struct_fields__)


def test_worker_settings_become_a_registration() -> None:
    worker = load(env=_workers({"aliases": ["a"], "role": "DECODE"})).config.workers[0]
    registration = worker.registration()
    assert (registration.role, registration.aliases) == ("DECODE", ("a",))
    assert set(registration.__struct_fields__) == {*WorkerConfig.__struct_fields__, "source"}


def test_schema_describes_every_key() -> None:
    definitions = json_schema()["$defs"]
    for name, section in SECTIONS.items():
        properties = definitions[section.__name__]["properties"]
        assert set(properties) == set(section.__struct_fields__), name
        assert all("description" in p for p in properties.values()), name
    assert definitions["WorkerConfig"]["required"] == list(WORKER)
    assert set(definitions["Config"]["properties"]) == set(Config.__struct_fields__)
    assert definitions["Config"]["additionalProperties"] is False


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("127.0.0.1:1", ("127.0.0.1", 1)),
        ("[::1]:2", ("::1", 2)),
        (":3", ("127.0.0.1", 3)),
        ("host.name:0", ("host.name", 0)),
    ],
)
def test_listen_addresses(text: str, parsed: tuple[str, int]) -> None:
    assert parse_listen(text) == parsed


@pytest.mark.parametrize("text", ["", "h", "h:", "h:x", "h:70000", "::1:5", "h:-1"])
def test_bad_listen_addresses(text: str) -> None:
    with pytest.raises(ValueError, match="expected host:port"):
        parse_listen(text)
