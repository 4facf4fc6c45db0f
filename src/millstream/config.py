"""Configuration: every setting with its default, its type and its meaning, in one place.

Precedence: defaults < TOML file < environment (`MILLSTREAM_SECTION_KEY`) < flags (`--set section.key=value`). A value
that starts with `$` names an environment variable. Anything unknown or malformed is refused with the key, the value and
what would be right. Environment variables are the exception: other programs set those too (Kubernetes makes
`MILLSTREAM_SERVER_PORT` for a Service called millstream-server), so an unknown one is only reported.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, NamedTuple

from millstream.errors import ConfigurationError
from millstream.protocol.webhook_targets import PrivateTargets
from millstream.suggestions import did_you_mean

VERSION: Final = 1

_SIZE_UNITS: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DURATION_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Kind(NamedTuple):
    """A type of value: how to parse it, and how to describe what is valid."""

    parse: Callable[[object], Any]
    expects: str


def _size(value: object) -> int:
    match = re.fullmatch(r"([0-9]+)\s*([KMGT]iB|B)?", str(value))
    if match is None or isinstance(value, bool):
        raise ValueError
    return int(match[1]) * _SIZE_UNITS[match[2] or "B"]


def _duration(value: object) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d)", str(value))
    if match is None:
        raise ValueError
    return float(match[1]) * _DURATION_UNITS[match[2]]


def _count(value: object) -> int:
    if isinstance(value, bool) or re.fullmatch(r"[0-9]+", str(value)) is None:
        raise ValueError
    return int(str(value))


def _address(value: object) -> tuple[str, int]:
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\s\[\]]+):([0-9]{1,5})", str(value))
    if match is None or int(match[2]) > 65535:
        raise ValueError
    return match[1].strip("[]"), int(match[2])


def _path(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError
    return Path(value).expanduser()


def _url(value: object) -> str | None:
    if value == "":
        return None
    if re.fullmatch(r"https?://[^\s/?#]+", str(value)) is None:
        raise ValueError
    return str(value)


def _flag(value: object) -> bool:
    if str(value).lower() not in ("true", "false"):
        raise ValueError
    return str(value).lower() == "true"


def _retention(value: object) -> float | None:
    return None if value == "forever" else _duration(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _backend(value: object) -> str:
    if value not in BACKENDS:
        raise ValueError
    return str(value)


def _addresses(value: object) -> tuple[tuple[str, int], ...]:
    parts = value if isinstance(value, list) else [part.strip() for part in str(value).split(",") if part.strip()]
    return tuple(_address(part) for part in parts)


def _private_targets(value: object) -> PrivateTargets | None:
    if value == "auto":
        return None
    parts = value if isinstance(value, list) else str(value).split(",")
    return PrivateTargets.parse([str(part).strip() for part in parts if str(part).strip()])


def _optional_address(value: object) -> tuple[str, int] | None:
    return _address(value) if value else None


def _cluster_name(value: object) -> str:
    if re.fullmatch(r"[a-z0-9-]{0,32}", str(value)) is None:
        raise ValueError
    return str(value)


def _optional_path(value: object) -> Path | None:
    return None if value == "" else _path(value)


def _one_of(*choices: str) -> Kind:
    def parse(value: object) -> str:
        if value not in choices:
            raise ValueError
        return str(value)

    return Kind(parse, f"one of {', '.join(choices)}")


def _optional_flag(value: object) -> bool | None:
    return None if value == "auto" else _flag(value)


BACKENDS: Final = ("fs", "s3", "gcs", "azure", "memory")

TEXT: Final = Kind(_text, "text")
PRIVATE_TARGETS: Final = Kind(_private_targets, "auto, or networks and host names such as 10.1.0.0/16, hooks.internal")
BACKEND: Final = Kind(_backend, f"one of {', '.join(BACKENDS)}")


def _at_least_one(parse: Callable[[object], Any]) -> Callable[[object], Any]:
    def checked(value: object) -> Any:
        parsed = parse(value)
        if parsed <= 0:
            raise ValueError
        return parsed

    return checked


SIZE: Final = Kind(_size, "a size such as 8MiB")
DURATION: Final = Kind(_duration, "a duration such as 500ms or 30s")
COUNT: Final = Kind(_count, "a whole number")
SOME_SIZE: Final = Kind(_at_least_one(_size), "a size such as 8MiB, above 0")
SOME_TIME: Final = Kind(_at_least_one(_duration), "a duration such as 500ms or 30s, above 0")
AT_LEAST_ONE: Final = Kind(_at_least_one(_count), "a whole number, 1 or more")
ADDRESS: Final = Kind(_address, "HOST:PORT such as 127.0.0.1:4437")
OPTIONAL_ADDRESS: Final = Kind(_optional_address, "HOST:PORT such as 10.0.0.1:6437, or nothing")
PATH: Final = Kind(_path, "a path")
ADDRESSES: Final = Kind(_addresses, 'addresses such as ["10.0.0.2:6437", "10.0.0.3:6437"]')
CLUSTER_NAME: Final = Kind(_cluster_name, "up to 32 of a-z, 0-9 and -")
FLAG: Final = Kind(_flag, "true or false")
OPTIONAL_FLAG: Final = Kind(_optional_flag, "auto, true or false")
RETENTION: Final = Kind(_retention, "forever, or a duration such as 30d")
OPTIONAL_PATH: Final = Kind(_optional_path, "a path, or nothing")
URL: Final = Kind(_url, "a URL without a path, such as https://streams.example.com")


def setting(default: str, kind: Kind, doc: str) -> Any:
    return field(default=kind.parse(default), metadata={"kind": kind, "default": default, "doc": doc})


@dataclass(frozen=True, slots=True)
class ServerSection:
    """Where the server listens and keeps its data."""

    listen: tuple[str, int] = setting("127.0.0.1:4437", ADDRESS, "Address to accept HTTP on; port 0 picks a free one.")
    data_dir: Path = setting("data", PATH, "Directory of the log and the catalog; one process at a time may use it.")
    public_url: str | None = setting(
        "", URL, "Base URL by which clients reach the server, if not by the Host they send (behind a proxy)."
    )
    stop_timeout: float = setting(
        "10s", DURATION, "How long a stop may take: requests finish, live reads end, messages move to the cold tier."
    )
    read_only: bool = setting(
        "false", FLAG, "Serve what the data directory holds, accept no writes, and change nothing in the object store."
    )
    insecure: bool = setting("false", FLAG, "Allow other addresses than loopback without [auth] and [tls].")
    trusted_proxies: str = setting(
        "", TEXT, "Addresses of proxies, separated by commas, whose X-Forwarded-For says who the client is."
    )
    node_id: int = setting("1", AT_LEAST_ONE, "This node's number in its cluster.")
    advertise: str = setting("", TEXT, "HOST:PORT or URL by which others reach this node; by default `listen`.")


@dataclass(frozen=True, slots=True)
class LogSection:
    """The durable log."""

    segment_bytes: int = setting("64MiB", SOME_SIZE, "Size at which a new log file is begun.")
    sync_on_loop_max: float = setting(
        "1ms",
        DURATION,
        "A lone append is synced without a change of thread while syncs take less than this on average; `0ms`: never.",
    )
    stuck_after: float = setting(
        "10s", SOME_TIME, "How long writes may wait to be stored before the server calls itself not ready."
    )


@dataclass(frozen=True, slots=True)
class HotSection:
    """Messages in memory."""

    bytes_max: int = setting(
        "1GiB",
        SOME_SIZE,
        "Memory for messages, the state of streams and what waits for a flush; beyond it writes get 503.",
    )
    keep_bytes: int = setting("128MiB", SIZE, "Messages kept in memory for readers although they are in the cold tier.")
    resident_streams_max: int = setting("100000", AT_LEAST_ONE, "Streams whose state is kept in memory.")


@dataclass(frozen=True, slots=True)
class ColdSection:
    """The cold tier: history as Parquet on an object store."""

    backend: str = setting("fs", BACKEND, "Where history is kept.")
    path: Path = setting(".", PATH, "Folder for fs (by default cold/ in the data directory), else a prefix.")
    flush_interval: float = setting("10s", SOME_TIME, "How old messages get before they are moved to the cold tier.")
    flush_bytes: int = setting("64MiB", SOME_SIZE, "How many bytes of messages gather before they are moved.")
    cache_bytes: int = setting("128MiB", SIZE, "Memory for row groups and footers that were read.")
    reclaim_grace: float = setting("1h", DURATION, "How long a segment that nothing refers to stays.")
    leftover_age: float = setting(
        "24h", DURATION, "How old an object that nothing names must be before it is deleted as left by a crash."
    )
    take_over: bool = setting(
        "false", FLAG, "Start although the store has another owner, or has gone on; what it holds is not deleted."
    )
    scrub_bytes_per_second: int = setting(
        "1MiB", SIZE, "How fast everything in the store is read and compared in the background; 0B for never."
    )
    scrub_interval: float = setting("7d", DURATION, "How long after a round of that the next one begins.")
    s3_bucket: str = setting("", TEXT, "S3 bucket.")
    s3_region: str = setting("", TEXT, "S3 region.")
    s3_endpoint: str = setting("", TEXT, "URL of an S3-compatible store.")
    s3_access_key_id: str = setting("", TEXT, "Credentials, if not from the environment; write $NAME.")
    s3_secret_access_key: str = setting("", TEXT, "The same.")
    s3_session_token: str = setting("", TEXT, "The same.")
    gcs_bucket: str = setting("", TEXT, "Google Cloud Storage bucket.")
    gcs_service_account: str = setting("", TEXT, "Path of a service account file.")
    azure_container: str = setting("", TEXT, "Azure Blob Storage container.")
    azure_account_name: str = setting("", TEXT, "Azure storage account.")
    azure_account_key: str = setting("", TEXT, "Its key; write $NAME.")


@dataclass(frozen=True, slots=True)
class HttpSection:
    """Limits of the HTTP server."""

    header_bytes_max: int = setting("32KiB", SOME_SIZE, "Request line and headers of one request; more is 431.")
    body_bytes_max: int = setting("8MiB", SOME_SIZE, "Body of one request; more is 413.")
    connections_max: int = setting("20000", AT_LEAST_ONE, "Open connections; one more gets 503.")
    pipelined_requests_max: int = setting(
        "64", AT_LEAST_ONE, "Requests of one connection that wait for an earlier one."
    )
    header_timeout: float = setting("10s", SOME_TIME, "Time for a request's headers to arrive; then 408.")
    body_timeout: float = setting("30s", SOME_TIME, "Longest pause inside a request's body; then 408.")
    body_bytes_per_second_min: int = setting(
        "1KiB", SIZE, "How fast a body must arrive on average, after body_timeout; slower is 408. 0 is any pace."
    )
    idle_timeout: float = setting("75s", SOME_TIME, "How long a connection may wait for its next request.")
    send_timeout: float = setting("30s", SOME_TIME, "How long a client may leave its answer unread.")
    write_buffer_bytes_max: int = setting("256KiB", SOME_SIZE, "Unsent bytes at which a connection pauses.")
    unsent_bytes_max: int = setting(
        "256MiB", SOME_SIZE, "Unsent bytes of all paused connections; beyond it those paused longest are cut off."
    )
    incoming_bytes_max: int = setting(
        "512MiB", SOME_SIZE, "Bodies of all connections that are incomplete, or wait for a request before; more is 503."
    )


@dataclass(frozen=True, slots=True)
class ReadSection:
    """How much and how long one read may take."""

    chunk_bytes_max: int = setting(
        "1MiB", SOME_SIZE, "Bytes in one response; a single larger message is still sent whole."
    )
    long_poll_timeout: float = setting("30s", SOME_TIME, "How long a long-poll waits for data.")
    sse_lifetime: float = setting(
        "60s", SOME_TIME, "After how long an SSE connection ends, so that caches can collapse."
    )
    sse_heartbeat: float = setting("15s", SOME_TIME, "How often a quiet SSE connection gets a comment.")
    live_readers_max: int = setting(
        "10000", AT_LEAST_ONE, "Long-polls and SSE connections at a time; one more gets 503."
    )
    live_readers_per_stream_max: int = setting("10000", AT_LEAST_ONE, "The same, for one stream.")
    snapshot_bytes_max: int = setting("128MiB", SOME_SIZE, "Size of one snapshot; more is 413.")


@dataclass(frozen=True, slots=True)
class StreamsSection:
    """What one stream, and one command on it, may be."""

    fork_depth_max: int = setting(
        "64", AT_LEAST_ONE, "How many forks of forks may rest on each other; one more is 409 `fork_too_deep`."
    )
    append_messages_max: int = setting(
        "131072", AT_LEAST_ONE, "Messages in the JSON array of one request; more is 413 `too_many_messages`."
    )
    producers_max: int = setting(
        "100000", AT_LEAST_ONE, "Producers of one stream; an append of one more is 409 `too_many_producers`."
    )
    producer_expiry: float | None = setting(
        "forever",
        RETENTION,
        "How long a producer that no longer writes is remembered; then it may begin anew at sequence 0.",
    )


@dataclass(frozen=True, slots=True)
class PipelineSection:
    """Jobs that the server starts by itself."""

    compact_every: float = setting("0s", DURATION, "How often segments are compacted; 0s for never. Needs Spark.")
    master: str = setting("local[1]", TEXT, "Where Spark runs for that.")


@dataclass(frozen=True, slots=True)
class YjsSection:
    """Yjs documents."""

    implicit_create: bool = setting(
        "true", FLAG, "Whether the first write makes a document; if not, PUT must, and all else is 404 before it."
    )
    compaction_threshold: int = setting(
        "1MiB", SOME_SIZE, "Bytes of updates since the last snapshot at which a new one is made."
    )
    retention: float | None = setting(
        "forever", RETENTION, "How old updates get that a snapshot stands for; older ones go when a new one is made."
    )
    merging_bytes_max: int = setting(
        "1GiB",
        SOME_SIZE,
        "Address space of the process that merges; a document that needs more gets no new snapshot.",
    )
    awareness_ttl: float = setting("1h", SOME_TIME, "How long an awareness stream stays that nobody uses.")
    long_poll_timeout: float = setting("60s", SOME_TIME, "How long a long-poll on a document waits for updates.")


@dataclass(frozen=True, slots=True)
class SubscriptionsSection:
    """Subscriptions: durable cursors over many streams that wake workers."""

    private_targets: PrivateTargets | None = setting(
        "auto",
        PRIVATE_TARGETS,
        "Private networks and hosts that webhooks may call; auto is loopback if only loopback reaches an open server.",
    )
    count_max: int = setting("10000", AT_LEAST_ONE, "Subscriptions of the server; one more is 409.")
    principal_count_max: int = setting("1000", AT_LEAST_ONE, "Subscriptions made by one principal; one more is 409.")
    links_max: int = setting("200000", AT_LEAST_ONE, "Streams of one subscription; to ask for more is 409.")
    links_total_max: int = setting("1000000", AT_LEAST_ONE, "Streams of all subscriptions, each counted for each.")
    explicit_links_max: int = setting("10000", AT_LEAST_ONE, "Streams linked to one subscription by name.")
    pattern_bytes_max: int = setting("256", AT_LEAST_ONE, "Length of a pattern; a longer one is 400.")
    pattern_wildcards_max: int = setting("8", AT_LEAST_ONE, "Segments * and ** of a pattern; more are 400.")
    page_streams_max: int = setting("1000", AT_LEAST_ONE, "Streams with work that one wake tells of.")


@dataclass(frozen=True, slots=True)
class AuthSection:
    """Who may do what."""

    enabled: bool = setting("false", FLAG, "Whether requests need a token that allows them.")
    tokens_file: Path | None = setting(
        "", OPTIONAL_PATH, "File of hashed tokens (by default tokens.json in the data directory)."
    )
    jwks_file: Path | None = setting("", OPTIONAL_PATH, "JWK set that verifies JWTs; without one none is accepted.")
    jwt_issuer: str = setting("", TEXT, "The `iss` a JWT must have, if any is demanded.")
    jwt_audience: str = setting("", TEXT, "The `aud` a JWT must have; without one a JWT must have none.")
    jwt_scope_claim: str = setting("scope", TEXT, "The claim of a JWT that lists its scopes, as read:BUCKET/PREFIX.")
    jwt_leeway: float = setting("5s", DURATION, "How far the issuer's clock may be off.")
    url_token_max: float = setting("1h", SOME_TIME, "How long a token that stands in a URL may be good.")
    open_metrics: bool = setting("false", FLAG, "Whether /metrics is readable without a token.")
    reload_interval: float = setting("2s", SOME_TIME, "How often the token and key files are looked at for changes.")


@dataclass(frozen=True, slots=True)
class LimitsSection:
    """What one principal (token or JWT subject) and one address may ask for; 0 is no limit. More is 429."""

    principal_requests_per_second: int = setting("20000", COUNT, "Requests of one principal.")
    principal_bytes_per_second: int = setting("512MiB", SIZE, "Bytes sent and received by one principal.")
    principal_live_max: int = setting("5000", COUNT, "Long-polls and SSE connections of one principal at a time.")
    address_requests_per_second: int = setting("5000", COUNT, "Requests from one address (IPv6: one /64 network).")
    address_bytes_per_second: int = setting("256MiB", SIZE, "Bytes sent to and received from one address.")
    address_live_max: int = setting("2000", COUNT, "Long-polls and SSE connections from one address at a time.")
    address_connections_max: int = setting("2000", COUNT, "Open connections from one address; proxies are not counted.")
    exempt_loopback: bool = setting(
        "true", FLAG, "Whether limits of addresses leave out this machine's own, unless they are trusted proxies."
    )
    burst: float = setting("2s", SOME_TIME, "How much of a rate may be used at once, as the time it takes to earn.")
    tracked_max: int = setting("100000", AT_LEAST_ONE, "Principals and addresses whose use is remembered, each.")


@dataclass(frozen=True, slots=True)
class TlsSection:
    """TLS in the server itself. Both files are read again on SIGHUP."""

    cert: Path | None = setting("", OPTIONAL_PATH, "Certificate chain, PEM.")
    key: Path | None = setting("", OPTIONAL_PATH, "Its private key, PEM.")


@dataclass(frozen=True, slots=True)
class ConsoleSection:
    """The console, a page for browsers; see console.md."""

    enabled: bool | None = setting(
        "auto", OPTIONAL_FLAG, "Whether /console/ is served; auto is if `server.listen` is loopback. Under ASGI set it."
    )


@dataclass(frozen=True, slots=True)
class LoggingSection:
    """What is logged, to standard error."""

    level: str = setting("info", _one_of("debug", "info", "warning", "error"), "The least severity that is logged.")
    format: str = setting("auto", _one_of("auto", "human", "json"), "auto is human on a terminal and JSON elsewhere.")
    access: bool = setting("false", FLAG, "Whether every request gets a line: method, path, status, time, who.")


@dataclass(frozen=True, slots=True)
class ClusterSection:
    """Several nodes as one server; see cluster.md."""

    name: str = setting("", CLUSTER_NAME, "The cluster this node belongs to; empty for a server of its own.")
    listen: tuple[str, int] = setting("127.0.0.1:6437", ADDRESS, "Where this node's broker accepts the others'.")
    advertise: tuple[str, int] | None = setting(
        "", OPTIONAL_ADDRESS, "Where the others' brokers reach this node's, if it is not `cluster.listen`."
    )
    routes: tuple[tuple[str, int], ...] = setting("", ADDRESSES, "The other nodes' `cluster.listen` or `advertise`.")
    bootstrap_node_id: int = setting("1", AT_LEAST_ONE, "The node that may begin the cluster; the others wait for it.")
    shards: int = setting("1", AT_LEAST_ONE, "Into how many parts buckets are divided; fixed once it has begun.")
    replicas: int = setting("3", AT_LEAST_ONE, "How many brokers hold each log; fixed once it has begun.")
    secret: str = setting("", TEXT, "What the brokers know each other by; write $NAME.")
    nats_url: str = setting(
        "", TEXT, "Brokers that exist already, instead of one of its own: nats:// or tls:// URLs, commas."
    )
    nats_user: str = setting("", TEXT, "User at those brokers.")
    nats_password: str = setting("", TEXT, "Its password; write $NAME.")
    tls_certificate: str = setting(
        "", TEXT, "Certificate file for the connections between brokers, or to those of `nats_url`."
    )
    tls_key: str = setting("", TEXT, "Its key file.")
    tls_authority: str = setting("", TEXT, "File with the authority that signs the brokers' certificates.")
    forward: bool = setting("false", FLAG, "Pass writes on to the leader instead of answering 307.")
    lease: float = setting("2500ms", SOME_TIME, "How long a leader that is gone is waited for.")
    window: int = setting("2", AT_LEAST_ONE, "Batches on their way to the log at a time.")
    keep_flushes: int = setting("8", COUNT, "Flushes whose log is kept for nodes that were away.")


@dataclass(frozen=True, slots=True)
class Config:
    server: ServerSection = field(default_factory=ServerSection)
    log: LogSection = field(default_factory=LogSection)
    hot: HotSection = field(default_factory=HotSection)
    cold: ColdSection = field(default_factory=ColdSection)
    http: HttpSection = field(default_factory=HttpSection)
    read: ReadSection = field(default_factory=ReadSection)
    streams: StreamsSection = field(default_factory=StreamsSection)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    yjs: YjsSection = field(default_factory=YjsSection)
    subscriptions: SubscriptionsSection = field(default_factory=SubscriptionsSection)
    auth: AuthSection = field(default_factory=AuthSection)
    limits: LimitsSection = field(default_factory=LimitsSection)
    tls: TlsSection = field(default_factory=TlsSection)
    console: ConsoleSection = field(default_factory=ConsoleSection)
    logging: LoggingSection = field(default_factory=LoggingSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)


_SECTIONS: Final[dict[str, type[Any]]] = {
    "server": ServerSection,
    "log": LogSection,
    "hot": HotSection,
    "cold": ColdSection,
    "http": HttpSection,
    "read": ReadSection,
    "streams": StreamsSection,
    "pipeline": PipelineSection,
    "yjs": YjsSection,
    "subscriptions": SubscriptionsSection,
    "auth": AuthSection,
    "limits": LimitsSection,
    "tls": TlsSection,
    "console": ConsoleSection,
    "logging": LoggingSection,
    "cluster": ClusterSection,
}


# Settings of other servers of the protocol (Ursula's, so far), and their equivalents here.
_ELSEWHERE: Final = {
    "server.hot_payload_backend": "leave it out: new messages are in memory and in the log of server.data_dir, which"
    " [hot] and [log] tune",
    "server.write_only_leader": "leave it out: every node answers reads, and writes go to the leader by a 307, or"
    " through this node with cluster.forward = true",
}
# Hints for wrong values: what the setting is commonly mistaken for.
_MISTAKEN: Final = {
    "cluster.routes": "routes are the other nodes' cluster.listen (the brokers' port, 6437 by default), not the"
    " addresses of their HTTP",
}
# Variables of the command line, which are not settings.
_OF_COMMANDS: Final = frozenset({"MILLSTREAM_URL", "MILLSTREAM_TOKEN", "MILLSTREAM_CACERT"})


def describe() -> Iterator[tuple[str, str, Kind, str]]:
    """Every key with its default, its type and its meaning, for the documentation."""
    for name, section in _SECTIONS.items():
        for one in fields(section):
            yield f"{name}.{one.name}", one.metadata["default"], one.metadata["kind"], one.metadata["doc"]


def load(file: Path | None, environment: Mapping[str, str], assignments: Sequence[str]) -> Config:
    """The configuration from all its sources; raises a ConfigurationError that names what is wrong."""
    values: dict[tuple[str, str], Any] = {}
    for origin, key, raw in [*_from_file(file), *_from_environment(environment), *_from_flags(assignments)]:
        section, name = _known(key, origin)
        values[section, name] = _parsed(key, name, section, raw, origin, environment)
    return Config(
        **{
            name: section(**{key: value for (owner, key), value in values.items() if owner == name})
            for name, section in _SECTIONS.items()
        }
    )


def _from_file(file: Path | None) -> Iterator[tuple[str, str, object]]:
    if file is None:
        return
    try:
        content = tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigurationError(f"the configuration file {file} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the configuration file {file} is not valid TOML: {error}") from None
    version = content.pop("version", None)
    if version != VERSION:
        raise ConfigurationError(f"{file}: version is {version!r}; write version = {VERSION} at its top")
    for section, entries in content.items():
        if not isinstance(entries, dict):
            raise ConfigurationError(f"{file}: {section!r} stands outside a section", hint=_sections_hint())
        for key, value in entries.items():
            yield str(file), f"{section}.{key}", value


def _variables() -> dict[str, str]:
    """The environment variable of each setting, with the setting's key."""
    return {
        f"MILLSTREAM_{name}_{one.name}".upper(): f"{name}.{one.name}"
        for name, section in _SECTIONS.items()
        for one in fields(section)
    }


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, str, object]]:
    for variable, key in _variables().items():
        if variable in environment:
            yield f"the environment variable {variable}", key, environment[variable]


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """A sentence for each environment variable that looks like a setting but is none; such variables have no effect."""
    known = _variables()
    found = []
    for variable, value in sorted(environment.items()):
        if not variable.startswith("MILLSTREAM_") or variable in known or variable in _OF_COMMANDS:
            continue
        section = variable.split("_")[1].lower()
        meant = did_you_mean(variable, known, cutoff=0.85)
        if section not in _SECTIONS and meant is None:
            continue  # the operator's own variable, such as one that a value names with $
        sentence = f"the environment variable {variable} is ignored: there is no such setting"
        if re.fullmatch(r"(tcp|udp)://\S+", value) or "_SERVICE_" in variable or "_PORT_" in variable:
            sentence += "; Kubernetes sets it for a Service of that name (enableServiceLinks: false stops that)"
        elif meant is not None:
            sentence += f"; {meant}"
        found.append(sentence)
    return found


def _from_flags(assignments: Sequence[str]) -> Iterator[tuple[str, str, object]]:
    for assignment in assignments:
        key, separator, value = assignment.partition("=")
        if not separator:
            raise ConfigurationError(f"--set {assignment!r} has no value", hint="write --set section.key=value")
        yield "the command line", key.strip(), value.strip()


def _known(key: str, origin: str) -> tuple[str, str]:
    section, _, name = key.partition(".")
    if key in _ELSEWHERE:
        raise ConfigurationError(f"{origin}: {key} is a setting of another server", hint=_ELSEWHERE[key])
    every = [known for known, *_ in describe()]
    if key in every:
        return section, name
    meant = did_you_mean(key, every)
    if section not in _SECTIONS:
        hint = f"{meant}; {_sections_hint()}" if meant else _sections_hint()
        raise ConfigurationError(f"{origin}: there is no section {section!r} (in {key!r})", hint=hint)
    names = f"[{section}] has {', '.join(one.name for one in fields(_SECTIONS[section]))}"
    raise ConfigurationError(f"{origin}: there is no setting {key!r}", hint=f"{meant} {names}" if meant else names)


def _sections_hint() -> str:
    return f"the sections are {', '.join(_SECTIONS)}"


def _parsed(key: str, name: str, section: str, raw: object, origin: str, environment: Mapping[str, str]) -> Any:
    if isinstance(raw, str) and raw.startswith("$"):
        variable = raw[1:]
        if variable not in environment:
            raise ConfigurationError(
                f"{origin}: {key} refers to the environment variable {variable!r}, which is not set"
            )
        raw = environment[variable]
    declared: Field[Any] = next(one for one in fields(_SECTIONS[section]) if one.name == name)
    kind: Kind = declared.metadata["kind"]
    try:
        return kind.parse(raw)
    except ValueError:
        raise ConfigurationError(f"{origin}: {key} = {raw!r} is not {kind.expects}", hint=_MISTAKEN.get(key)) from None
