"""The control API under `/v1/stream/__ds/`: subscriptions, their workers' calls, and the webhook keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Final
from urllib.parse import quote

import msgspec

from millstream.errors import InvalidRequest, NotFound, Unauthorized
from millstream.pending import Pending
from millstream.protocol.keys import decode_segment
from millstream.server.api.background import in_background
from millstream.server.api.responses import as_json, no_content
from millstream.server.api.webhook_delivery import WebhookDelivery
from millstream.server.http.error_map import problem
from millstream.server.http.messages import Answer, Request, Response, parse_query
from millstream.shard.shard import Shard
from millstream.shard.subscription_quotas import SubscriptionSettings
from millstream.shard.wakes import Wakes
from millstream.streams.records import Wake
from millstream.streams.subscriptions import Subscription, checked_paths, parse_config

CONTROL_ROOT: Final = "/v1/stream/__ds"
ID_BYTES_MAX: Final = 256
LINKS_PAGE_MAX: Final = 1_000

Handler = Callable[[Request, str], Answer]


class SubscriptionApi:
    def __init__(self, shard: Shard, settings: SubscriptionSettings) -> None:
        self._delivery = WebhookDelivery(settings.private_targets)
        self.wakes = Wakes(shard, self._deliver, settings)
        self._clock = shard.clock
        self._routes: dict[str, dict[str, Handler]] = {
            "": {"PUT": self._put, "GET": self._get, "DELETE": self._delete},
            "streams": {"POST": self._link},
            "callback": {"POST": partial(self._acknowledge, by_webhook=True)},
            "claim": {"POST": self._claim},
            "ack": {"POST": partial(self._acknowledge, by_webhook=False)},
            "release": {"POST": self._release},
        }

    async def stop(self) -> None:
        self.wakes.stop()
        await self._delivery.stop()

    def handle(self, request: Request) -> Answer:
        rest = request.path.removeprefix(CONTROL_ROOT.encode()).lstrip(b"/")
        if rest == b"jwks.json":
            return self._allow({"GET": self._jwks, "HEAD": self._jwks}, request)
        kind, _, tail = rest.partition(b"/")
        raw_id, _, action = tail.partition(b"/")
        subscription_id = decode_segment(raw_id)
        if kind != b"subscriptions" or not subscription_id:
            raise NotFound("there is no such control route", code="NOT_FOUND")
        if len(subscription_id.encode()) > ID_BYTES_MAX:
            raise InvalidRequest(f"a subscription id has at most {ID_BYTES_MAX} bytes", code="INVALID_REQUEST")
        if action.startswith(b"streams/"):
            path = decode_segment(action.removeprefix(b"streams/")).strip("/")
            return self._allow({"DELETE": lambda: self.wakes.unlink(subscription_id, path).then(no_content)}, request)
        methods = self._routes.get(action.decode("latin-1"))
        if methods is None:
            raise NotFound("there is no such control route", code="NOT_FOUND")
        handlers = {method: partial(handler, request, subscription_id) for method, handler in methods.items()}
        return self._allow(handlers, request)

    @staticmethod
    def _allow(handlers: Mapping[str, Callable[[], Answer]], request: Request) -> Answer:
        handler = handlers.get(request.method)
        if handler is None:
            allow = b"allow: %b, OPTIONS\r\n" % ", ".join(handlers).encode()
            return problem(405, "METHOD_NOT_ALLOWED", f"{request.method} is not possible here", fields=allow)
        return handler()

    # -- the resource --------------------------------------------------------------------------------------

    def _put(self, request: Request, subscription_id: str) -> Answer:
        config = parse_config(json_body(request))

        def created(outcome: tuple[Subscription, bool]) -> Pending[Response]:
            subscription, is_new = outcome
            return self._describe(subscription, 201 if is_new else 200)

        owner = request.principal.key if request.principal is not None else ""
        return self.wakes.create(subscription_id, config, request.base_url, owner=owner).then(created)

    def _get(self, request: Request, subscription_id: str) -> Answer:
        query = parse_query(request.query)
        limit = parse_limit(query.get("limit"))
        return self._describe(self.wakes.get(subscription_id), 200, query.get("after", ""), limit)

    def _delete(self, request: Request, subscription_id: str) -> Answer:
        return self.wakes.delete(subscription_id).then(no_content)

    def _link(self, request: Request, subscription_id: str) -> Answer:
        paths = checked_paths(object_body(request).get("streams"))
        return self.wakes.link(subscription_id, paths).then(no_content)

    def _describe(
        self, subscription: Subscription, status: int, after: str = "", limit: int = LINKS_PAGE_MAX
    ) -> Pending[Response]:
        def render(infos: list[dict[str, object]]) -> Response:
            described = self._description(subscription)
            described["streams"] = infos[:limit]
            if len(infos) > limit:
                described["next_cursor"] = infos[limit - 1]["path"]
            return as_json(described, status)

        return in_background(self.wakes.link_infos(subscription, after, limit + 1)).then(render)

    def _description(self, subscription: Subscription) -> dict[str, object]:
        config, wake = subscription.config, subscription.wake
        described: dict[str, object] = {
            "id": subscription.id,
            "subscription_id": subscription.id,
            "type": config.type,
            "pattern": config.pattern,
            "stream_count": len(subscription.links),
            "pending_count": len(subscription.pending),
            "is_full": subscription.is_full or None,
            "wake_stream": config.wake_stream,
            "lease_ttl_ms": config.lease_ttl_ms,
            "created_at": _iso(subscription.created_at_ms),
            "status": "failed" if subscription.next_attempt_ms is not None else "active",
            "description": config.description,
            "generation": subscription.generation,
            "holder": wake.holder if wake is not None else None,
            "lease_until": _iso(wake.lease_until_ms) if wake is not None and wake.lease_until_ms else None,
            "last_error": subscription.last_error,
            "retry_count": subscription.retry_count or None,
            "next_attempt_at": _iso(subscription.next_attempt_ms) if subscription.next_attempt_ms is not None else None,
        }
        if config.webhook_url is not None:
            described["webhook"] = {
                "url": config.webhook_url,
                "signing": {
                    "alg": "ed25519",
                    "kid": self.wakes.signer.key_id,
                    "jwks_url": f"{subscription.base_url}{CONTROL_ROOT}/jwks.json",
                },
            }
        return {name: value for name, value in described.items() if value is not None}

    def _jwks(self) -> Response:
        fields = b"content-type: application/jwk-set+json\r\ncache-control: public, max-age=300\r\n"
        return Response(200, fields, msgspec.json.encode({"keys": [self.wakes.signer.jwk]}))

    # -- workers -------------------------------------------------------------------------------------------

    def _claim(self, request: Request, subscription_id: str) -> Answer:
        worker = object_body(request).get("worker")
        if not isinstance(worker, str) or not 0 < len(worker) <= ID_BYTES_MAX:
            raise InvalidRequest(f"worker must be a string of 1 to {ID_BYTES_MAX} characters", code="INVALID_REQUEST")

        def render(outcome: tuple[Subscription, Wake, str]) -> Response:
            subscription, wake, token = outcome
            claimed = {
                "wake_id": wake.wake_id,
                "generation": subscription.generation,
                "token": token,
                "streams": self.wakes.hand_out(subscription, wake),
                "pending_count": len(subscription.pending),
                "lease_ttl_ms": subscription.config.lease_ttl_ms,
            }
            return as_json(claimed)

        return self.wakes.claim(subscription_id, worker).then(render)

    def _acknowledge(self, request: Request, subscription_id: str, *, by_webhook: bool) -> Answer:
        token, body = _bearer_token(request), object_body(request)
        acknowledged = self.wakes.acknowledge(subscription_id, token, body, by_webhook=by_webhook)
        return acknowledged.then(lambda next_wake: as_json({"ok": True, "next_wake": next_wake}))

    def _release(self, request: Request, subscription_id: str) -> Answer:
        released = self.wakes.release(subscription_id, _bearer_token(request), object_body(request))
        return released.then(no_content)

    # -- webhooks ------------------------------------------------------------------------------------------

    def _deliver(self, subscription: Subscription, wake: Wake) -> None:
        assert subscription.config.webhook_url is not None
        body = msgspec.json.encode(
            {
                "subscription_id": subscription.id,
                "wake_id": wake.wake_id,
                "generation": subscription.generation,
                "streams": self.wakes.hand_out(subscription, wake),
                "pending_count": len(subscription.pending),
                "callback_url": _action_url(subscription, "callback"),
                "callback_token": self.wakes.token(subscription),
            }
        )
        signature = self.wakes.signer.signature_header(self._clock.now_ms() // 1000, body)
        self._delivery.post(
            subscription.config.webhook_url,
            body,
            signature,
            succeeded=lambda answer: self.wakes.delivered(subscription.id, wake.wake_id, is_done=_says_done(answer)),
            failed=lambda reason: self.wakes.delivery_failed(subscription.id, wake.wake_id, reason),
        )


def _action_url(subscription: Subscription, action: str) -> str:
    return f"{subscription.base_url}{CONTROL_ROOT}/subscriptions/{quote(subscription.id, safe='')}/{action}"


def parse_limit(value: str | None) -> int:
    """How many links one answer lists."""
    if value is None:
        return LINKS_PAGE_MAX
    if not value.isascii() or not value.isdigit() or not 0 < int(value[:9]) <= LINKS_PAGE_MAX:
        raise InvalidRequest(f"limit must be a number from 1 to {LINKS_PAGE_MAX}", code="INVALID_REQUEST")
    return int(value)


def _says_done(answer: bytes) -> bool:
    try:
        decoded = msgspec.json.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(decoded, dict) and decoded.get("done") is True


def json_body(request: Request) -> object:
    try:
        return msgspec.json.decode(request.body) if request.body else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest("the body is not valid JSON", code="INVALID_REQUEST") from None


def object_body(request: Request) -> dict[str, object]:
    body = json_body(request)
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object", code="INVALID_REQUEST")
    return body


def _bearer_token(request: Request) -> str:
    scheme, _, token = (request.header(b"authorization") or "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Unauthorized("Authorization: Bearer with the wake's token is required", code="TOKEN_INVALID")
    return token.strip()


def _iso(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
