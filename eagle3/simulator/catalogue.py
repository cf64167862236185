"""Bodies of the read-only endpoints: models, endpoints, key, credits and generation. Pure builders."""

import math
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from eagle3.simulator.account import PER_MTOK, Account
from eagle3.simulator.scenario import Model, Provider, Scenario
from eagle3.simulator.state import Generation

Json = dict[str, Any]

_CREATED = 1730419200
"""Publication date of every model of the catalogue (2024-11-01); nothing depends on it."""


def _per_token(usd_per_mtok: Decimal) -> str:
    return f"{(usd_per_mtok / PER_MTOK).normalize():f}"


def _pricing(provider: Provider) -> Json:
    return {
        "prompt": _per_token(provider.prompt_usd_per_mtok),
        "completion": _per_token(provider.completion_usd_per_mtok),
        "request": "0",
        "image": "0",
        "discount": 0,
    }


def _architecture() -> Json:
    return {
        "tokenizer": "Other",
        "instruct_type": None,
        "modality": "text->text",
        "input_modalities": ["text"],
        "output_modalities": ["text"],
    }


def models(scenario: Scenario) -> Json:
    """`GET /models`."""
    listed: list[Json] = []
    for model in scenario.models:
        endpoints = scenario.endpoints(model)
        cheapest = min(endpoints, key=lambda p: p.completion_usd_per_mtok, default=None)
        listed.append(
            {
                "id": model.id,
                "canonical_slug": model.permanent_id,
                "name": model.name or model.id,
                "created": _CREATED,
                "description": "",
                "context_length": model.context_length,
                "architecture": _architecture(),
                "pricing": _pricing(cheapest) if cheapest else {"prompt": "0", "completion": "0"},
                "top_provider": {
                    "context_length": cheapest.context_length if cheapest else None,
                    "max_completion_tokens": cheapest.max_completion_tokens if cheapest else None,
                    "is_moderated": False,
                },
                "per_request_limits": None,
                "supported_parameters": sorted({name for p in endpoints for name in p.supported_parameters}),
                "supported_voices": None,
                "default_parameters": None,
                "links": {"details": f"/api/v1/models/{model.permanent_id}/endpoints"},
            }
        )
    return {"data": listed}


def _percentiles(p50: float, sigma: float) -> Json:
    # Standard normal quantiles of 75, 90 and 99 %.
    return {"p50": p50, **{f"p{q}": p50 * math.exp(sigma * z) for q, z in ((75, 0.674), (90, 1.282), (99, 2.326))}}


def endpoints(scenario: Scenario, model: Model) -> Json:
    """`GET /models/{author}/{slug}/endpoints`."""
    listed = [_endpoint(model, provider) for provider in scenario.endpoints(model)]
    return {
        "data": {
            "id": model.id,
            "name": model.name or model.id,
            "created": _CREATED,
            "description": "",
            "architecture": _architecture(),
            "endpoints": listed,
        }
    }


def _endpoint(model: Model, provider: Provider) -> Json:
    tools = "tools" in provider.supported_parameters
    return {
        "name": f"{provider.name} | {model.permanent_id}",
        "model_id": model.id,
        "model_name": model.name or model.id,
        "context_length": provider.context_length,
        "pricing": _pricing(provider),
        "provider_name": provider.name,
        "tag": provider.tag,
        "quantization": provider.quantization,
        "max_completion_tokens": provider.max_completion_tokens,
        "max_prompt_tokens": None,
        "supported_parameters": list(provider.supported_parameters),
        "supports_tool_choice": {"none": tools, "auto": tools, "required": False, "function": False},
        "supports_implicit_caching": False,
        "supports_diarization": False,
        "native_tools": {},
        "service_tier": None,
        "status": provider.status,
        "uptime_last_5m": None,
        "uptime_last_30m": 100.0 if provider.status == 0 else 0.0,
        "uptime_last_1d": None,
        "latency_last_30m": _percentiles(provider.latency.median_s * 1000, provider.latency.sigma),
        "throughput_last_30m": None,
    }


def key(account: Account) -> Json:
    """`GET /key`. The account balance is not in it, as at the real service."""
    usage = float(account.usage_usd)
    limit, left = account.key_limit_usd, account.key_remaining_usd
    budget = None
    if limit is not None and left is not None:
        budget = {
            "scope": "key_limit",
            "budget_id": None,
            "guardrail_id": None,
            "include_byok": False,
            "reset_interval": None,
            "limit_usd": float(limit),
            "spend_usd": usage,
            "remaining_usd": float(left),
            "resets_at": None,
        }
    return {
        "data": {
            "label": "sk-or-v1-sim...ulator",
            "usage": usage,
            "usage_daily": usage,
            "usage_weekly": usage,
            "usage_monthly": usage,
            "byok_usage": 0,
            "byok_usage_daily": 0,
            "byok_usage_weekly": 0,
            "byok_usage_monthly": 0,
            "limit": None if limit is None else float(limit),
            "limit_remaining": None if left is None else float(left),
            "limit_reset": None,
            "include_byok_in_limit": False,
            "is_free_tier": False,
            "is_management_key": False,
            "is_provisioning_key": False,
            "effective_budget": budget,
            "budgets": [] if budget is None else [budget],
            "allowed_data_regions": ["global"],
            "creator_user_id": None,
            "organization_id": None,
            "workspace_id": None,
            "expires_at": None,
            "free_model_daily_requests": {"limit": 0, "used": 0, "remaining": 0},
            "rate_limit": {"requests": -1, "interval": "10s", "note": "This field is deprecated."},
        }
    }


def credits_of(account: Account) -> Json:
    """`GET /credits`."""
    return {"data": {"total_credits": float(account.credits_usd), "total_usage": float(account.usage_usd)}}


def generation(record: Generation) -> Json:
    """`GET /generation?id=`: what one reply really used and cost."""
    cost = float(record.cost_usd)
    return {
        "data": {
            "id": record.id,
            "api_type": "completions",
            "model": record.model,
            "provider_name": record.provider,
            "created_at": datetime.fromtimestamp(record.created_s, UTC).isoformat(),
            "streamed": record.is_streamed,
            "cancelled": record.is_cancelled,
            "finish_reason": record.finish_reason,
            "native_finish_reason": record.finish_reason,
            "tokens_prompt": record.prompt_tokens,
            "tokens_completion": record.completion_tokens,
            "native_tokens_prompt": record.prompt_tokens,
            "native_tokens_completion": record.completion_tokens,
            "native_tokens_reasoning": record.reasoning_tokens,
            "native_tokens_cached": 0,
            "native_tokens_completion_images": None,
            "usage": cost,
            "total_cost": cost,
            "upstream_inference_cost": None,
            "cache_discount": None,
            "response_cache_source_id": record.cache_source_id,
            "latency": record.latency_s * 1000,
            "generation_time": record.latency_s * 1000,
            "moderation_latency": None,
            "provider_responses": [
                {"provider_name": record.provider, "status": 200, "latency": record.latency_s * 1000}
            ],
            "upstream_id": None,
            "request_id": None,
            "session_id": None,
            "app_id": None,
            "external_user": None,
            "http_referer": "",
            "user_agent": None,
            "origin": "",
            "is_byok": False,
            "data_region": "global",
            "service_tier": None,
            "preset_id": None,
            "router": None,
            "workspace_id": None,
            "web_search_engine": None,
            "num_fetches": None,
            "num_input_audio_prompt": None,
            "num_media_completion": None,
            "num_media_prompt": None,
            "num_search_results": None,
        }
    }
