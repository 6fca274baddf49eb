"""What was gathered of a deployment: plain values, so that checks can be tested without one.

A part that could not be gathered is a Missing with the reason in words. Times are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvindexd.config import Config
from kvindexd.model import Profile
from kvindexd.v1 import index_pb2 as pb


class Missing(NamedTuple):
    """Stands where a fact should be. `why`: what kept it from being gathered."""

    why: str


class Dial(NamedTuple):
    """One attempt to connect by TCP. `problem`: "", "refused", "timeout", "unresolvable" or the
    system's text; `resolved`: the addresses that the name stands for, as ip:port."""

    target: str
    problem: str = ""
    resolved: tuple[str, ...] = ()


class Root(NamedTuple):
    """A prompt's first block as an engine named it: a digest of its content, and the hash."""

    content: str
    hash: str


@dataclass
class Heard:
    """What an own subscription to all topics of a rank's endpoint heard within `seconds`.

    `registered`: messages under the registered topic. `ranks`: data-parallel ranks that batches
    named. `skew`: median of host clock minus engine clock, None without a batch.
    """

    seconds: float
    messages: int = 0
    registered: int = 0
    topics: Mapping[str, int] = field(default_factory=dict)
    ranks: Sequence[int] = ()
    skew: float | None = None
    roots: Sequence[Root] = ()


@dataclass
class Replayed:
    """What the replay socket answered. `outcome`: complete, timeout or failed, with `detail`.

    The sequence numbers are of what came: `first` and `last` (-1 = nothing came), `holes` between
    them. `asked`: the request's start. `digest`: of the batch at `digest_seq`, the last one that
    the index had applied, None where it did not come.
    """

    outcome: str
    detail: str = ""
    asked: int = 0
    batches: int = 0
    first: int = -1
    last: int = -1
    holes: int = 0
    digest_seq: int = -1
    digest: int | None = None
    roots: Sequence[Root] = ()


@dataclass
class Engine:
    """What an engine says of itself over HTTP. `config`: labels of vllm:cache_config_info.
    `models`: ids of /v1/models; `adapters`: those among them that have a parent."""

    config: Mapping[str, str] | Missing
    models: Sequence[str] | Missing
    adapters: Sequence[str] = ()


@dataclass
class Stored:
    """A rank as the store has it. `last_digest`: of the batch at `last_seq`."""

    last_seq: int
    last_digest: int
    parked: int
    profile: Profile


@dataclass
class Rank:
    """One registered rank: two looks at it, `seconds` apart, and what probes found.

    `owners`: the distinct holders of its lease in between, in order of appearance.
    """

    before: pb.Worker
    after: pb.Worker
    owners: Sequence[str]
    events: Dial | Missing
    replay_dial: Dial | Missing
    address: Dial | Missing
    heard: Heard | Missing
    replay: Replayed | Missing
    engine: Engine | Missing
    stored: Stored | Missing

    @property
    def name(self) -> str:
        """As logs and metrics name it."""
        w = self.after
        return f"{w.namespace}/{w.worker_id}#{w.dp_rank}" if w.namespace else self.short

    @property
    def short(self) -> str:
        """Without the namespace."""
        return f"{self.after.worker_id}#{self.after.dp_rank}"

    def rise(self, *names: str) -> dict[str, int]:
        """What counters grew by between the two looks; a name that ends in ":" is a family."""
        out = {}
        for name, n in self.after.counters.items():
            family = name.partition(":")[0] + ":"
            more = n - self.before.counters.get(name, 0)
            if more > 0 and (name in names or family in names):
                out[name] = more
        return out

    def total(self, *names: str) -> dict[str, int]:
        """Counters by name or family, where they are not 0."""
        return {
            name: n
            for name, n in self.after.counters.items()
            if n and (name in names or name.partition(":")[0] + ":" in names)
        }

    @property
    def connected(self) -> bool:
        """Whether its ingester says that it is connected to the engine."""
        detail = self.after.detail.replace("never connected to", "")
        return self.after.state == pb.LIVE or "connected to" in detail

    def main_size(self) -> int:
        """Tokens per block of the lowest main group, 0 = none seen."""
        main = [g for g in self.after.groups if g.treated_as == "main" and g.block_size]
        return main[0].block_size if main else 0


@dataclass
class Reach:
    """Whether somebody answered at all. `problem`: "" if so."""

    target: str
    problem: str = ""


@dataclass
class Server:
    """kvindexd as its gRPC tells: `health` is the name of a ServingStatus, or what went wrong.
    `lags`: feed entries that its replica had yet to apply, at each look in order."""

    address: str
    health: str
    version: str
    lags: Sequence[int] = ()
    audit: Sequence[pb.WorkerAudit] | Missing = ()


def host_of(owner: str) -> str:
    """The host that a lease's owner (host:pid:nonce) runs on."""
    return owner.rsplit(":", 2)[0]


def is_local(endpoint: str) -> bool:
    """Whether an address or ZMQ endpoint means something else on each host: loopback, ipc."""
    if endpoint.startswith(("ipc://", "inproc://")):
        return True
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return host == "localhost" or host == "::1" or host.startswith("127.")


Samples = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]
"""(metric name, sorted labels) -> value."""


@dataclass
class Pages:
    """The metrics page, twice. `ready`: "" or what /readyz complained of at both looks."""

    before: Samples
    after: Samples
    ready: str = ""

    def total(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that have these labels."""
        return _sum(self.after, name, labels)

    def rise(self, name: str, **labels: str) -> float:
        """What it grew by between the two looks."""
        return _sum(self.after, name, labels) - _sum(self.before, name, labels)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by the values of one label."""
        out: dict[str, float] = {}
        for (found, labels), value in self.after.items():
            key = dict(labels).get(label)
            if found == name and key is not None:
                out[key] = out.get(key, 0.0) + value
        return out


def _sum(samples: Samples, name: str, wanted: Mapping[str, str]) -> float:
    return sum(
        value
        for (found, labels), value in samples.items()
        if found == name and all(dict(labels).get(k) == v for k, v in wanted.items())
    )


@dataclass
class RedisServer:
    """One server of the store. `info`: of INFO. `latency`: median of PINGs. `skew`: its clock
    minus ours, certain to `skew_error`. `denied`: commands refused by its ACL, with its words.
    `schema`: of kvx:meta where it is on this server, "" = kvindexd never wrote here."""

    where: str
    info: Mapping[str, str]
    latency: float
    skew: float
    skew_error: float
    denied: Mapping[str, str] | Missing
    schema: str = ""


@dataclass
class Redis:
    """The store. `ranks`: store names of the ranks registered in it."""

    url: str
    servers: Sequence[RedisServer]
    ranks: frozenset[str] | Missing


@dataclass
class Process:
    """A kvindexd process on this host. `ranks`: how many leases it holds."""

    pid: int
    nofile: int
    open_files: int
    ranks: int


@dataclass
class Host:
    """This host and this installation. `processes`: ingesters that run here."""

    version: str
    uvloop: bool
    native: bool
    processes: Sequence[Process] | Missing


@dataclass
class TokenizerTry:
    """One configured tokenizer, tried. `problem`: "" or why it does not work. `differs`: "" or how
    its ids for a sample text differ from the engine's own; Missing where nobody was asked."""

    model: str
    setting: str
    problem: str = ""
    differs: str | Missing = ""


@dataclass
class EnvoyFile:
    """A parsed Envoy configuration, keys in snake_case; or `problem`, why it is none."""

    path: str
    root: Mapping[str, Any]
    problem: str = ""


@dataclass
class Facts:
    """Everything. `wait`: seconds between the two looks. `outage`: longest restart of kvindexd
    that replay should bridge. `candidates`: names that gateways use for workers."""

    wait: float
    outage: float
    reach: Reach
    config: Config | Missing
    host: Host | Missing
    server: Server | Missing
    metrics_reach: Reach | Missing
    metrics: Pages | Missing
    ranks: Sequence[Rank] | Missing
    redis_reach: Reach | Missing
    redis: Redis | Missing
    tokenizers: Sequence[TokenizerTry] | Missing
    envoy: Sequence[EnvoyFile] | Missing
    candidates: Sequence[str] | Missing
    config_problem: str = ""
