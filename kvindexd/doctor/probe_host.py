"""Probes of this host, this installation, the tokenizers and the Envoy files."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import re
import socket
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from kvindexd._version import __version__
from kvindexd.config import Config
from kvindexd.doctor.envoy import ext_procs, is_dynamic, snake, whole
from kvindexd.doctor.facts import EnvoyFile, Host, Missing, Process, TokenizerTry
from kvindexd.tokens import NoTokens, Tokens, TokenSettings, parse
from kvindexd.tokens.engine import EngineTokenizer
from kvindexd.tokens.http import HttpClient
from kvindexd.tokens.local import TokenizerFailed

_OWNER = re.compile(r"(?P<host>.+):(?P<pid>\d+):[0-9a-f]+")
_LIMIT = re.compile(r"^Max open files\s+(\d+|unlimited)", re.MULTILINE)
_SAMPLE = "The quick brown fox jumps over the lazy dog; 1234 times, l'été: ÄÖÜ."
_UNLIMITED = 1 << 30
_DYNAMIC = (
    "its listeners come from a management server: save what http://ADMIN/config_dump?include_eds "
    "answers as a .json file, and give that"
)


def host(owners: Iterable[str]) -> Host:
    """This installation, and the ingesters among `owners` (of leases) that run on this host."""
    return Host(
        version=__version__,
        uvloop=importlib.util.find_spec("uvloop") is not None,
        native=importlib.util.find_spec("kvindexd._chain") is not None,
        processes=_processes(owners),
    )


def _processes(owners: Iterable[str]) -> list[Process] | Missing:
    here: Counter[int] = Counter()
    for owner in owners:
        found = _OWNER.fullmatch(owner)
        if found and found["host"] == socket.gethostname():
            here[int(found["pid"])] += 1
    processes = [p for pid, n in here.items() if (p := _process(pid, n)) is not None]
    if not processes:
        return Missing("no ingester of these ranks runs on this host, or not as this user")
    return processes


def _process(pid: int, ranks: int) -> Process | None:
    folder = Path("/proc") / str(pid)
    try:
        found = _LIMIT.search((folder / "limits").read_text())
        open_files = sum(1 for _ in (folder / "fd").iterdir())
    except OSError:
        return None
    if found is None:
        return None
    limit = _UNLIMITED if found[1] == "unlimited" else int(found[1])
    return Process(pid, limit, open_files, ranks)


async def tokenizers(
    config: Config, worker_of: Callable[[str], str | None], within: float
) -> list[TokenizerTry]:
    """Each configured tokenizer, tried on a sample text; local ones compared with an engine's."""
    settings = TokenSettings(config.tokens.models, {}, timeout=within)
    tokens, client = Tokens(settings, worker_of), HttpClient()
    try:
        return list(
            await asyncio.gather(
                *(
                    _try(tokens, client, model, setting, worker_of, within)
                    for model, setting in config.tokens.models.items()
                )
            )
        )
    finally:
        await tokens.close()
        await client.close()


async def _try(
    tokens: Tokens,
    client: HttpClient,
    model: str,
    setting: str,
    worker_of: Callable[[str], str | None],
    within: float,
) -> TokenizerTry:
    request = parse("/v1/completions", json.dumps({"model": model, "prompt": _SAMPLE}).encode())
    try:
        ours = await tokens.ids(model, request)
    except NoTokens as e:
        return TokenizerTry(model, setting, str(e))
    if setting == "engine":
        return TokenizerTry(model, setting)
    address = worker_of(model)
    if address is None:
        return TokenizerTry(model, setting, differs=Missing("no live worker to compare with"))
    engine = EngineTokenizer(client, lambda: f"http://{address}")
    try:
        async with asyncio.timeout(within):
            theirs = await engine.ids(request)
    except (TokenizerFailed, TimeoutError) as e:
        why = str(e) or f"{address} has no answer within {within:g} s"
        return TokenizerTry(model, setting, differs=Missing(why))
    return TokenizerTry(model, setting, differs=_difference(ours, theirs, address))


def _difference(ours: bytes, theirs: bytes, address: str) -> str:
    """ "" or in what two packed lists of ids differ; never the ids."""
    if ours == theirs:
        return ""
    a, b = array("I", ours), array("I", theirs)
    at = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    return f"{len(a)} ids here and {len(b)} at {address} for one text, different from id {at} on"


def envoy_file(path: Path) -> EnvoyFile | Missing:
    """Read an Envoy configuration; Missing where the YAML library is not installed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        return EnvoyFile(str(path), {}, f"cannot be read: {e}")
    try:
        root = json.loads(text) if path.suffix == ".json" else _yaml(text)
    except ImportError:
        return Missing("reading YAML needs PyYAML: pip install 'kvindexd[doctor]'")
    except ValueError as e:
        return EnvoyFile(str(path), {}, f"cannot be parsed: {' '.join(str(e).split())}")
    if not isinstance(root, Mapping):
        return EnvoyFile(str(path), {}, "is no mapping of settings")
    static = whole(snake(root))
    if is_dynamic(static) and not ext_procs(static):
        return EnvoyFile(str(path), {}, _DYNAMIC)
    return EnvoyFile(str(path), static)


def _yaml(text: str) -> Any:
    yaml = importlib.import_module("yaml")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise ValueError(str(e)) from None
