"""Reload on SIGHUP: applies the settings that can change while the server runs, and logs what was applied."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields
from typing import Final

from millstream.access.authenticator import auth_settings
from millstream.config import Config
from millstream.errors import MillstreamError
from millstream.server.api.front import Front
from millstream.server.api.gate import Gate
from millstream.server.http.limits import http_limits, read_limits
from millstream.server.http.native import NativeServer
from millstream.server.http.tls import reload_certificate
from millstream.server.node.logs import configure_logging

logger = logging.getLogger("millstream")

# Settings that take effect at once; the others need a restart.
RELOADED: Final = frozenset({"limits", "logging", "http", "read"})
RELOADED_KEYS: Final = frozenset(
    {
        *(f"auth.{name}" for name in ("tokens_file", "jwks_file", "jwt_issuer", "jwt_audience", "jwt_scope_claim")),
        "auth.jwt_leeway",
        "auth.open_metrics",
        "tls.cert",
        "tls.key",
    }
)


class Reloader:
    """`load` reads the configuration again; `open_gate` makes a gate, if there was none before."""

    def __init__(
        self,
        config: Config,
        load: Callable[[], Config],
        open_gate: Callable[[Config], Gate | None],
        app: Front,
        server: NativeServer,
    ) -> None:
        self._started = self._config = config
        self._load = load
        self._open_gate = open_gate
        self._app = app
        self._server = server

    def reload(self) -> None:
        """Take in what has changed. What cannot be used is left as it was, and said."""
        try:
            config = self._load()
        except MillstreamError as error:
            logger.error("SIGHUP: the configuration cannot be used, the former one stays: %s", error)
            return
        done: list[str] = []
        for name, step in (
            ("limits", self._limits),
            ("logging", self._logging),
            ("tls", self._tls),
            ("auth", self._auth),
        ):
            try:
                done += step(config)
            except MillstreamError as error:
                logger.error("SIGHUP: %s is left as it was: %s", name, error)
        self._config = config
        pending = _needing_restart(self._started, config)
        if self._server.tls is None and config.tls != self._started.tls:
            pending.append("tls")
        logger.info("SIGHUP: reloaded %s", ", ".join(done))
        if pending:
            logger.warning("SIGHUP: these changes need a restart: %s", ", ".join(pending))

    def _limits(self, config: Config) -> list[str]:
        self._server.set_limits(http_limits(config))
        self._app.set_read_limits(read_limits(config))
        if self._app.gate is None and not config.auth.enabled:
            self._app.gate = self._open_gate(config)
        elif self._app.gate is not None:
            if config.limits != self._config.limits:
                self._app.gate.set_limits(config.limits)
            self._app.gate.open_metrics = config.auth.open_metrics
        return ["limits"]

    def _logging(self, config: Config) -> list[str]:
        configure_logging(config.logging)
        self._app.logs_access = config.logging.access
        return [f"logging (level {config.logging.level})"]

    def _tls(self, config: Config) -> list[str]:
        if self._server.tls is None:
            return []
        reload_certificate(self._server.tls, config.tls)
        return ["the TLS certificate"]

    def _auth(self, config: Config) -> list[str]:
        gate = self._app.gate
        if gate is None or gate.authenticator is None:
            return []
        done = [gate.authenticator.reload(auth_settings(config))]
        ended = gate.tokens_changed()
        return [*done, f"ended {ended} live reads of revoked tokens"] if ended else done


def _needing_restart(old: Config, new: Config) -> list[str]:
    return [
        f"{section.name}.{setting.name}"
        for section in fields(Config)
        if section.name not in RELOADED
        for setting in fields(getattr(old, section.name))
        if getattr(getattr(old, section.name), setting.name) != getattr(getattr(new, section.name), setting.name)
        and f"{section.name}.{setting.name}" not in RELOADED_KEYS
    ]
