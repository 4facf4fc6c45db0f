"""Start-up checks of a cluster node: settings that cannot work, and a data directory of another node."""

from __future__ import annotations

import msgspec

from millstream.config import Config
from millstream.errors import ConfigurationError


class Identity(msgspec.Struct):
    """The node that a data directory belongs to."""

    cluster: str
    node_id: int


def check_cluster(config: Config) -> None:
    """Refuse settings that cannot work, before anything is changed."""
    cluster, server = config.cluster, config.server
    if config.cold.backend in ("fs", "memory"):
        raise ConfigurationError(
            f"cold.backend is {config.cold.backend!r}, which the nodes of a cluster cannot share",
            hint="use s3, gcs or azure: every node must be able to read what another has flushed",
        )
    if server.read_only:
        raise ConfigurationError(
            "server.read_only is set, and a node of a cluster takes part in it by writing",
            hint="for a drill, run `millstream restore --read-only` into a data directory of its own, and start that",
        )
    if not cluster.nats_url and not cluster.secret:
        raise ConfigurationError(
            "cluster.secret is not set: the brokers would let anybody in",
            hint='set the same secret on every node, for instance secret = "$MILLSTREAM_SECRET"',
        )
    if not cluster.nats_url and cluster.replicas > len(cluster.routes) + 1:
        raise ConfigurationError(
            f"cluster.replicas is {cluster.replicas}, but cluster.routes names {len(cluster.routes)} other nodes",
            hint="list the other nodes' cluster.listen in cluster.routes, or lower cluster.replicas",
        )
    _check_routes(config)
    files = (cluster.tls_certificate, cluster.tls_key, cluster.tls_authority)
    if cluster.nats_url and bool(cluster.tls_certificate) != bool(cluster.tls_key):
        raise ConfigurationError("TLS with a certificate needs both cluster.tls_certificate and cluster.tls_key")
    if not cluster.nats_url and any(files) and not all(files):
        raise ConfigurationError(
            "TLS between brokers needs all of cluster.tls_certificate, cluster.tls_key and cluster.tls_authority"
        )
    if not server.advertise and server.listen[0] in ("0.0.0.0", "::"):
        raise ConfigurationError(
            f"server.listen is {server.listen[0]}:{server.listen[1]}, which is no address to send clients to",
            hint="set server.advertise to the HOST:PORT by which others reach this node",
        )


def _check_routes(config: Config) -> None:
    """Routes must name brokers. Some other servers expect HTTP addresses there, which is an easy mistake."""
    own = config.server.listen[1]
    mistaken = [f"{host}:{port}" for host, port in config.cluster.routes if port == own != config.cluster.listen[1]]
    if mistaken:
        raise ConfigurationError(
            f"cluster.routes names {', '.join(mistaken)}, and {own} is the port for HTTP",
            hint=f"write the other nodes' cluster.listen there: the brokers' port is {config.cluster.listen[1]} here",
        )


def check_directory(config: Config) -> None:
    """Refuse a data directory that belongs to another node or cluster."""
    directory = config.server.data_dir
    ours = _identity(config)
    if (directory / "log").exists():
        raise ConfigurationError(
            f"the data directory {directory} belongs to a server of its own",
            hint="start the cluster with an empty one",
        )
    try:
        found = msgspec.json.decode((directory / "node.json").read_bytes(), type=Identity)
    except FileNotFoundError:
        return
    if found != ours:
        raise ConfigurationError(
            f"the data directory {directory} belongs to node {found.node_id} of cluster {found.cluster!r}, not to"
            f" node {ours.node_id} of {ours.cluster!r}",
            hint="correct server.node_id or cluster.name, or use another data directory",
        )


def claim_directory(config: Config) -> None:
    """Record the node and cluster that the data directory belongs to, permanently."""
    check_directory(config)
    path = config.server.data_dir / "node.json"
    if not path.exists():
        path.write_bytes(msgspec.json.encode(_identity(config)))


def _identity(config: Config) -> Identity:
    return Identity(config.cluster.name, config.server.node_id)
