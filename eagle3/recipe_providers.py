"""The provider sections of a recipe: where answers come from."""

from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from eagle3.recipe_base import OPERATIONAL, Section


class Routing(Section):
    """Which endpoints of OpenRouter may answer."""

    quantizations: tuple[str, ...] = ("int4", "int8", "fp8", "fp16", "bf16", "fp32")
    """Allowed precisions. `unknown` must be named to be allowed; formats that differ from the served weights (fp4,
    nvfp4, mxfp4, fp6) teach the draft another model's habits."""
    only: tuple[str, ...] = ()
    """Provider slugs to use exclusively; empty means all that pass the other filters."""
    ignore: tuple[str, ...] = ()
    """Provider slugs never to use."""
    max_prompt_price_usd_per_mtok: Decimal | None = Field(default=None, gt=0)
    max_completion_price_usd_per_mtok: Decimal | None = Field(default=None, gt=0)
    sort: Literal["price", "throughput", "latency", "balanced"] = "balanced"
    """`balanced` lets the router spread requests; the others send everything to one endpoint first."""


class OpenRouter(Section):
    """Answers from OpenRouter."""

    kind: Literal["openrouter"] = "openrouter"
    base_url: Annotated[str, OPERATIONAL] = "https://openrouter.ai/api/v1"
    api_key_env: Annotated[str, OPERATIONAL] = "OPENROUTER_API_KEY"
    """Name of the environment variable that holds the key; the key itself never appears in a recipe."""
    model: str
    """Model slug, for example `moonshotai/kimi-k2.5`."""
    routing: Routing = Routing()
    response_cache: Annotated[bool, OPERATIONAL] = True
    """Ask OpenRouter to keep replies for a day, so that a reply lost on the way is not paid for twice."""
    stream: Annotated[bool, OPERATIONAL] = False
    """Receive answers as server-sent events. An aborted stream stops the bill at many providers; an answer counts only
    with finish reason, usage and end mark."""


class Simulator(Section):
    """Answers from the OpenRouter look-alike, started for this run on this machine: rehearsals cost nothing."""

    kind: Literal["simulator"] = "simulator"
    model: str
    scenario: Annotated[Path, OPERATIONAL]
    """Providers, prices, habits and faults. Relative to the recipe file."""
    answers: Annotated[tuple[Path, ...], OPERATIONAL]
    """Recorded answers to serve. Relative to the recipe file."""
    routing: Routing = Routing()
    response_cache: Annotated[bool, OPERATIONAL] = True
    stream: Annotated[bool, OPERATIONAL] = False


class OpenAICompatible(Section):
    """Answers from a server that speaks the OpenAI protocol: SGLang, vLLM and others."""

    kind: Literal["openai"] = "openai"
    base_url: Annotated[str, OPERATIONAL]
    api_key_env: Annotated[str | None, OPERATIONAL] = None
    model: str
    return_token_ids: bool = True
    """Ask for native ids (SGLang and vLLM give them)."""
    prompt_price_usd_per_mtok: Annotated[Decimal, OPERATIONAL] = Decimal(0)
    completion_price_usd_per_mtok: Annotated[Decimal, OPERATIONAL] = Decimal(0)
    stream: Annotated[bool, OPERATIONAL] = False
    """Receive answers as server-sent events. SGLang gives no native ids then: set `return_token_ids: false`."""


class SGLang(Section):
    """Answers from SGLang's own `/generate`: our rendered ids go in, the model's ids come out, exact as they are."""

    kind: Literal["sglang"] = "sglang"
    base_url: Annotated[str, OPERATIONAL]
    """Root of the server, without `/v1`."""
    api_key_env: Annotated[str | None, OPERATIONAL] = None
    model: str
    """For people; the server has one model."""
    prompt_price_usd_per_mtok: Annotated[Decimal, OPERATIONAL] = Decimal(0)
    completion_price_usd_per_mtok: Annotated[Decimal, OPERATIONAL] = Decimal(0)


Provider: TypeAlias = Annotated[OpenRouter | Simulator | OpenAICompatible | SGLang, Field(discriminator="kind")]
