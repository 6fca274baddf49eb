"""Merges defaults, file, environment and flags into one Config, remembering where each came from.

Every value is checked on its own, so that an error names the key, where the value was set, what
it was and what was expected.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from kvindexd.config.discovering import check_discovery
from kvindexd.config.protection import check_protection
from kvindexd.config.schema import (
    SECTIONS,
    Config,
    ConfigError,
    Section,
    WorkerConfig,
    parse_listen,
)
from kvindexd.registration import InvalidRegistration
from kvindexd.telemetry import mask_secrets

PREFIX = "KVINDEXD_"
_NOT_SETTINGS = frozenset(
    f"KVINDEXD_{name}" for name in ("CONFIG", "SERVER", "TOKEN", "CA", "CERT", "KEY")
)
_SECRETS = frozenset({"auth.tokens"})
"""Settings whose values are never shown."""
# Kubernetes puts these in every pod of a namespace that has a Service named kvindexd or kvindexd-x.
_KUBERNETES = re.compile(
    r"KVINDEXD_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)"
)


class Row(NamedTuple):
    """One effective setting: dotted key, value with secrets masked, where it was set."""

    key: str
    value: object
    source: str


class Settings(NamedTuple):
    """A loaded configuration. `sources` maps a dotted key to where its value was set."""

    config: Config
    sources: Mapping[str, str]

    def effective(self) -> list[Row]:
        """Every setting, in the schema's order; of workers only what differs from the defaults."""
        rows = [
            Row(
                f"{name}.{key}",
                _shown(f"{name}.{key}", getattr(section, key)),
                self.source(f"{name}.{key}"),
            )
            for name in SECTIONS
            for section in [getattr(self.config, name)]
            for key in section.__struct_fields__
        ]
        source = self.source("workers")
        for i, worker in enumerate(self.config.workers):
            given = msgspec.structs.asdict(worker)
            default = {f.name: _default(f) for f in msgspec.structs.fields(worker)}
            rows += [
                Row(f"workers[{i}].{key}", _masked(value), source)
                for key, value in given.items()
                if value != default[key]
            ]
        return rows

    def source(self, key: str) -> str:
        """Where a dotted key was set: "file PATH", "env NAME", "flag" or "default"."""
        return self.sources.get(key, "default")


def load(
    path: str | Path | None = None,
    *,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Settings:
    """Load the settings: flags beat environment beats file beats defaults.

    `path`: TOML file; None = `KVINDEXD_CONFIG`, or no file. `env`: None = the process's own.
    `flags`: dotted key (`server.listen`) -> value; None values were not given. Raises ConfigError.
    """
    environ = os.environ if env is None else env
    merged = _Merged()
    file = path or environ.get("KVINDEXD_CONFIG")
    if file:
        merged.add_file(Path(file))
    merged.add_environment(environ)
    for key, value in (flags or {}).items():
        if value is not None:
            merged.add_flag(key, value)
    return merged.build()


def json_schema() -> dict[str, Any]:
    """A JSON Schema of the TOML file."""
    return msgspec.json.schema(Config)


class _Merged:
    """What has been set so far, later layers over earlier ones."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, object]] = {name: {} for name in SECTIONS}
        self._workers: list[Any] = []
        self._sources: dict[str, str] = {}

    def add_file(self, path: Path) -> None:
        source = f"file {path}"
        for name, content in _read_toml(path).items():
            if name == "workers":
                self._set_workers(content, source)
            elif name not in SECTIONS:
                raise _unknown(name, source, [*SECTIONS, "workers"])
            elif not isinstance(content, dict):
                raise _wrong(name, content, source, f"a section: [{name}] with keys under it")
            else:
                for key, value in content.items():
                    self._set(name, key, value, source, strict=True)

    def add_environment(self, environ: Mapping[str, str]) -> None:
        for variable in sorted(environ):
            if not variable.startswith(PREFIX) or variable in _NOT_SETTINGS:
                continue
            source = f"env {variable}"
            if variable == "KVINDEXD_WORKERS":
                self._set_workers(_from_json("workers", environ[variable], source), source)
                continue
            section, _, key = variable.removeprefix(PREFIX).lower().partition("__")
            if section in SECTIONS and key:
                self._set(section, key, environ[variable], source, strict=False)
            elif not _KUBERNETES.fullmatch(variable):
                raise _unknown(variable, "the environment", _variables())

    def add_flag(self, dotted: str, value: object) -> None:
        section, _, key = dotted.partition(".")
        if section not in SECTIONS:
            raise _unknown(dotted, "flag", _dotted())
        self._set(section, key, value, "flag", strict=False)

    def _set(self, section: str, key: str, value: object, source: str, *, strict: bool) -> None:
        dotted = f"{section}.{key}"
        types = _types(SECTIONS[section])
        if key not in types:
            raise _unknown(dotted, source, _dotted(), prefer=[f"{section}.{k}" for k in types])
        self._values[section][key] = _convert(dotted, value, types[key], source, strict=strict)
        self._sources[dotted] = source

    def _set_workers(self, content: object, source: str) -> None:
        if not isinstance(content, list) or not all(isinstance(w, dict) for w in content):
            raise _wrong("workers", content, source, "a list of tables: [[workers]]")
        self._workers, self._sources["workers"] = content, source

    def build(self) -> Settings:
        sections: dict[str, Any] = {n: SECTIONS[n](**v) for n, v in self._values.items()}
        bind = sections["ingest"].bind_events
        source = self._sources.get("workers", "default")
        workers = [_worker(i, w, source, bind) for i, w in enumerate(self._workers)]
        settings = Settings(Config(**sections, workers=workers), self._sources)
        _check(settings)
        return settings


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _worker(index: int, given: dict[str, Any], source: str, bind_events: bool) -> WorkerConfig:
    types, where = _types(WorkerConfig), f"workers[{index}]"
    for key in given:
        if key not in types:
            raise _unknown(f"{where}.{key}", source, [f"{where}.{k}" for k in types])
    for field in msgspec.structs.fields(WorkerConfig):
        if field.required and field.name not in given:
            raise ConfigError(f"{where}.{field.name} is missing ({source}): every worker needs one")
    values = {
        k: _convert(f"{where}.{k}", v, types[k], source, strict=True) for k, v in given.items()
    }
    return WorkerConfig(**{"bind_events": bind_events, **values})


def _convert(key: str, value: object, kind: Any, source: str, *, strict: bool) -> Any:
    if not strict and isinstance(value, str) and _base(kind) in (dict, list):
        value, strict = _from_json(key, value, source), True
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        inside = f" ({error})" if _is_nested(kind) else ""
        raise _wrong(key, value, source, _expected(kind) + inside) from None


def _from_json(key: str, text: str, source: str) -> object:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise _wrong(key, text, source, f"JSON ({error})") from None


def _types(section: type[Section]) -> dict[str, Any]:
    return get_type_hints(section, include_extras=True)


def _plain(kind: Any) -> Any:
    return kind.__origin__ if hasattr(kind, "__metadata__") else kind


def _base(kind: Any) -> Any:
    return get_origin(_plain(kind)) or _plain(kind)


def _is_nested(kind: Any) -> bool:
    plain = _plain(kind)
    parts = get_args(plain) or (plain,)
    return any(isinstance(p, type) and issubclass(p, msgspec.Struct) for p in parts)


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


def _expected(kind: Any) -> str:
    plain = _plain(kind)
    if get_origin(plain) is Literal:
        return "one of " + ", ".join(f'"{v}"' for v in get_args(plain))
    if get_origin(plain) is dict:
        return f"a table whose values are each {_expected(get_args(plain)[1])}"
    if get_origin(plain) is list:
        return f"a list, each of it {_expected(get_args(plain)[0])}"
    if _is_nested(plain):
        return "a table with " + ", ".join(plain.__struct_fields__)
    bounds = [_bounds(meta) for meta in getattr(kind, "__metadata__", ())]
    return " ".join([_WORDS[plain], *filter(None, bounds)])


def _bounds(meta: msgspec.Meta) -> str:
    if meta.min_length:
        return "that is not empty"
    signs = ((">", meta.gt), (">=", meta.ge), ("<=", meta.le))
    return " and ".join(f"{sign} {limit:g}" for sign, limit in signs if limit is not None)


def _check(settings: Settings) -> None:
    config = settings.config
    for key, may_be_off in (
        ("server.listen", False),
        ("server.admin_listen", True),
        ("ext_proc.listen", True),
        ("metrics.listen", True),
    ):
        _check_listen(settings, key, may_be_off)
    check_protection(config)
    if config.ingest.heartbeat >= config.ingest.lease_ttl:
        raise ConfigError(
            f"ingest.heartbeat ({config.ingest.heartbeat:g} s) must be shorter than "
            f"ingest.lease_ttl ({config.ingest.lease_ttl:g} s); a third of it is usual"
        )
    if config.redis.url and "://" not in config.redis.url:
        source = settings.source("redis.url")
        raise _wrong("redis.url", config.redis.url, source, 'a URL like "redis://host:6379/0"')
    endpoint = config.tracing.endpoint
    if endpoint and not endpoint.startswith(("http://", "https://")):
        source = settings.source("tracing.endpoint")
        raise _wrong("tracing.endpoint", endpoint, source, 'a URL like "http://collector:4317"')
    _check_workers(config.workers, settings.source("workers"))
    check_discovery(config.discovery, config.ingest.lease_ttl)


def read_workers(content: object, source: str, bind_events: bool = False) -> list[WorkerConfig]:
    """Workers as in `[[workers]]`, from tables; `source`: named in errors. Raises ConfigError."""
    if not isinstance(content, list) or not all(isinstance(w, dict) for w in content):
        raise _wrong("workers", content, source, "a list of tables")
    workers = [_worker(i, w, source, bind_events) for i, w in enumerate(content)]
    _check_workers(workers, source)
    return workers


def _check_workers(workers: Iterable[WorkerConfig], source: str) -> None:
    seen: dict[tuple[str, str, int], int] = {}
    for i, worker in enumerate(workers):
        try:
            worker.registration().check()
        except InvalidRegistration as error:
            raise ConfigError(f"workers[{i}].{error} ({source})") from None
        first = seen.setdefault((worker.namespace, worker.worker_id, worker.dp_rank), i)
        if first != i:
            raise ConfigError(
                f"workers[{i}] has the worker_id {worker.worker_id!r} and dp_rank "
                f"{worker.dp_rank} of workers[{first}] ({source}): give each rank one entry"
            )


def _check_listen(settings: Settings, key: str, may_be_off: bool) -> None:
    section, _, name = key.partition(".")
    listen = getattr(getattr(settings.config, section), name)
    if not listen and may_be_off:
        return
    try:
        parse_listen(listen)
    except ValueError:
        hint = ' or "" for off' if may_be_off else ""
        source = settings.source(key)
        raise _wrong(key, listen, source, f'host:port like "127.0.0.1:9000"{hint}') from None


def _dotted() -> list[str]:
    return [f"{name}.{key}" for name, kind in SECTIONS.items() for key in _types(kind)]


def _variables() -> list[str]:
    names = [PREFIX + dotted.upper().replace(".", "__") for dotted in _dotted()]
    return [*names, *_NOT_SETTINGS, "KVINDEXD_WORKERS"]


def _unknown(
    key: str, source: str, known: Iterable[str], prefer: Iterable[str] = ()
) -> ConfigError:
    near = difflib.get_close_matches(
        key, list(prefer), 1, cutoff=0.75
    ) or difflib.get_close_matches(key, list(known), 1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else "all of them: kvindexd config schema"
    return ConfigError(f"unknown setting {key} ({source}); {hint}")


def _wrong(key: str, value: object, source: str, expected: str) -> ConfigError:
    got = "***" if key in _SECRETS else mask_secrets(repr(value))
    if key in ("redis.url", "tracing.endpoint") and "://" not in got:
        got = repr("***@" + got.strip("'").rpartition("@")[2]) if "@" in got else got
    if len(got) > 200:
        got = got[:200] + "..."
    return ConfigError(f"{key} is {got} ({source}); expected {expected}")


def _shown(key: str, value: object) -> object:
    return "***" if key in _SECRETS and value else _masked(value)


def _masked(value: object) -> object:
    return mask_secrets(value) if isinstance(value, str) else msgspec.to_builtins(value)


def _default(field: msgspec.structs.FieldInfo) -> object:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default
