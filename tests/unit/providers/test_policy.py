"""Which endpoints may answer, and what is reserved for them."""

from decimal import Decimal

import pytest

from eagle3.errors import RunRejectedError
from eagle3.providers.base import Endpoint
from eagle3.providers.policy import select
from eagle3.recipe import Routing

MICRO = Decimal("1e-6")


def endpoint(tag: str = "good/int4", **changes: object) -> Endpoint:
    fields: dict[str, object] = {
        "provider": tag.partition("/")[0].title(),
        "tag": tag,
        "quantization": "int4",
        "prompt_usd": MICRO,
        "completion_usd": 3 * MICRO,
        "context_length": 8192,
        "supported_parameters": ("max_tokens", "tools"),
    }
    return Endpoint(**{**fields, **changes})  # type: ignore[arg-type]


REFUSED = [
    ("quantization", endpoint("bad/fp4", quantization="fp4"), Routing()),
    ("unknown precision", endpoint("bad/x", quantization=None), Routing()),
    ("status", endpoint("bad/x", status=-2), Routing()),
    ("answer length", endpoint("bad/x", max_completion_tokens=100), Routing()),
    ("context", endpoint("bad/x", context_length=100), Routing()),
    ("parameters", endpoint("bad/x", supported_parameters=("temperature",)), Routing()),
    ("tools", endpoint("bad/x", supported_parameters=("max_tokens",)), Routing()),
    ("uptime", endpoint("bad/x", uptime_30m=80.0), Routing()),
    ("ignored", endpoint("bad/x"), Routing(ignore=("bad",))),
    ("not among the only ones", endpoint("bad/x"), Routing(only=("good",))),
    ("prompt price", endpoint("bad/x", prompt_usd=9 * MICRO), Routing(max_prompt_price_usd_per_mtok=Decimal(2))),
    (
        "answer price",
        endpoint("bad/x", completion_usd=9 * MICRO),
        Routing(max_completion_price_usd_per_mtok=Decimal(4)),
    ),
]


@pytest.mark.parametrize(("bad", "routing"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_each_filter_refuses(bad: Endpoint, routing: Routing):
    chosen = select([endpoint(), bad], routing, model="m", max_tokens=1000, needs_tools=True)
    assert [entry.tag for entry in chosen.eligible] == ["good/int4"]
    assert [entry.tag for entry, _ in chosen.refused] == [bad.tag]
    with pytest.raises(RunRejectedError, match=bad.tag):
        select([bad], routing, model="m", max_tokens=1000, needs_tools=True)


def test_native_int4_is_allowed_and_unknown_only_by_name():
    assert select([endpoint()], Routing(), model="m", max_tokens=10).eligible
    unknown = endpoint("u/x", quantization=None)
    assert select([unknown], Routing(quantizations=("unknown",)), model="m", max_tokens=10).eligible


def test_an_empty_list_is_refused():
    with pytest.raises(RunRejectedError, match="the list is empty"):
        select([], Routing(), model="m", max_tokens=10)


def test_the_cap_is_the_dearest_price_of_each_kind():
    mixed = [endpoint("a/x", prompt_usd=5 * MICRO), endpoint("b/x", completion_usd=7 * MICRO)]
    cap = select(mixed, Routing(), model="m", max_tokens=10).cap
    assert (cap.prompt_usd, cap.completion_usd) == (5 * MICRO, 7 * MICRO)
    assert cap.worst_usd(100, 10) == 100 * 5 * MICRO + 10 * 7 * MICRO


def test_the_expected_cost_lies_between_cheapest_and_dearest():
    chosen = select([endpoint("a/x"), endpoint("b/x", completion_usd=9 * MICRO)], Routing(), model="m", max_tokens=10)
    cheap, dear = 100 * MICRO + 10 * 3 * MICRO, 100 * MICRO + 10 * 9 * MICRO
    assert cheap < chosen.expected_usd(100, 10) < (cheap + dear) / 2
