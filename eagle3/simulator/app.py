"""Paths, keys and the admin endpoints: everything of the simulated service except the chat endpoint itself."""

import hmac
import json
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, cast
from urllib.parse import parse_qs, unquote

from eagle3.simulator import bodies, catalogue
from eagle3.simulator.answers import Answers
from eagle3.simulator.chat import ChatService, LiveModel
from eagle3.simulator.scenario import Scenario
from eagle3.simulator.state import State, topup
from eagle3.simulator.wire import Clock, Reply

API = "/api/v1"
ADMIN = "/_admin"

Json = dict[str, Any]


class App:
    """The simulated service, free of sockets."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        answers: Answers,
        state: State,
        clock: Clock,
        admin_token: str,
        live: LiveModel | None = None,
    ) -> None:
        """Serve `scenario`; the arguments are those of `ChatService`, and the bearer token of the admin endpoints."""
        self.state = state
        self._scenario = scenario
        self._clock = clock
        self._admin_token = admin_token
        self._chat = ChatService(scenario, answers=answers, state=state, clock=clock, live=live)

    def handle(self, method: str, target: str, headers: Mapping[str, str], body: bytes, reply: Reply) -> None:
        """Answer one request.

        Args:
            method: Upper case.
            target: Path and query as in the request line.
            headers: Names in lower case.
            body: Whole.
            reply: Where the answer goes, now or later.
        """
        path, _, query = target.partition("?")
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        if path.startswith(ADMIN + "/"):
            self._admin(method, path.removeprefix(ADMIN), key, body, reply)
            return
        account = self._scenario.account
        is_manager = account.management_key is not None and key == account.management_key
        if path != f"{API}/models" and not (is_manager or (key and account.key in (None, key))):
            _send(reply, 401, bodies.error(401, "No auth credentials found" if not key else "User not found."))
            return
        if (method, path) == ("POST", f"{API}/chat/completions"):
            if is_manager:
                _send(reply, 403, bodies.error(403, "Management keys cannot be used for inference"))
            else:
                self._chat.handle(key, headers, body, reply)
            return
        if method != "GET":
            _send(reply, 404, bodies.error(404, f"No such endpoint: {method} {path}"))
            return
        status, document = self._read(path, query, is_manager=is_manager)
        _send(reply, status, document)

    def _read(self, path: str, query: str, *, is_manager: bool) -> tuple[int, Json]:
        match path.removeprefix(API).strip("/").split("/"):
            case ["models"]:
                return 200, catalogue.models(self._scenario)
            case ["models", author, slug, "endpoints"]:
                return self._read_endpoints(unquote(f"{author}/{slug}"))
            case ["key"]:
                return 200, catalogue.key(self.state.account)
            case ["credits"] if is_manager:
                return 200, catalogue.credits_of(self.state.account)
            case ["credits"]:
                return 403, bodies.error(403, "Only management keys can perform this operation")
            case ["generation"]:
                return self._read_generation(parse_qs(query).get("id", [""])[0])
            case _:
                return 404, bodies.error(404, f"No such endpoint: GET {path}")

    def _read_endpoints(self, model_id: str) -> tuple[int, Json]:
        model = self._scenario.model(model_id)
        if model is None:
            return 404, bodies.error(404, f"Model {model_id} not found")
        return 200, catalogue.endpoints(self._scenario, model)

    def _read_generation(self, generation_id: str) -> tuple[int, Json]:
        record = self.state.generations.get(generation_id)
        if record is None or record.ready_s > self._clock.now_s():
            return 404, bodies.error(404, f"Generation {generation_id} not found")
        return 200, catalogue.generation(record)

    def _admin(self, method: str, path: str, key: str, body: bytes, reply: Reply) -> None:
        if not hmac.compare_digest(key.encode("utf-8", "surrogatepass"), self._admin_token.encode()):
            _send(reply, 401, {"error": {"message": "the admin token is in the simulator's ready line", "code": 401}})
            return
        try:
            status, document = self._administer(method, path, body)
        except (ValueError, TypeError, InvalidOperation) as exc:
            status, document = 400, {"error": {"message": str(exc), "code": 400}}
        _send(reply, status, document)

    def _administer(self, method: str, path: str, body: bytes) -> tuple[int, Json]:
        state = self.state
        match method, path:
            case "GET", "/stats":
                return 200, state.stats()
            case "GET", "/truth":
                return 200, {"generations": {g.id: g.to_json() for g in state.generations.values()}}
            case "POST", "/topup":
                topup(state, _usd(body))
                return 200, state.stats()
            case "POST", "/key_limit":
                state.set_account(key_limit_usd=_usd_or_none(body))
                return 200, state.stats()
            case "POST", "/reset":
                state.reset()
                return 200, state.stats()
            case _:
                return 404, {"error": {"message": f"no admin endpoint {method} {path}", "code": 404}}


def _usd_or_none(body: bytes) -> Decimal | None:
    document: Any = json.loads(body, parse_float=Decimal)
    if not isinstance(document, dict) or "usd" not in document:
        raise ValueError('expected {"usd": amount}')
    value: Any = cast("Json", document)["usd"]
    if value is None:
        return None
    amount = Decimal(value)
    if not amount.is_finite() or amount < 0:
        raise ValueError(f"usd must be a non-negative amount, got {value!r}")
    return amount


def _usd(body: bytes) -> Decimal:
    amount = _usd_or_none(body)
    if amount is None:
        raise ValueError("usd must be an amount, got null")
    return amount


def _send(reply: Reply, status: int, document: Json) -> None:
    reply.send(status, bodies.encode(document), {})
