"""Rewards by a judge: a language model that scores responses, on an OpenAI-compatible server.

Three plug-ins: one scores each response, one compares pairs of a prompt's responses, in both orders
(Zheng et al., arXiv 2306.05685, section 3.4), and one scores all of them together. A reply without
a verdict is a failed call.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from rlctl.data_prep.images import Image
from rlctl.plugins import Params, declare
from rlctl.plugins.objectives import judge_prompts as prompts
from rlctl.runtime.rewards.chat_client import client

T = TypeVar("T")


class JudgeParams(Params):
    """Server, model and messages of a judge."""

    base_url: str | None = Field(
        default=None,
        description="address of the server, such as https://api.openai.com/v1; null = the engine "
        "of reward.judge.model.path",
    )
    model: str = Field(default="judge", description="name of the model on the server")
    api_key_env: str | None = Field(
        default=None, description="environment variable with the API key; null = no key"
    )
    rubric: str = Field(default="", description="criteria, part of the message")
    template: str | None = Field(
        default=None,
        description="Jinja template of the message, or the path of a file *.jinja; null = the "
        "built-in one",
    )
    min_score: float = Field(default=0.0, description="lowest score that the judge gives")
    max_score: float = Field(default=10.0, description="highest score that the judge gives")
    structured: Literal["json_schema", "json_object", "none"] = Field(
        default="json_schema",
        description="response_format of the request, which some servers do not support; the run's "
        "engine gets none",
    )
    temperature: float | None = Field(default=0.0, description="null = the server's default")
    max_tokens: int = Field(default=1024, ge=1, description="tokens of a reply")
    max_images: int = Field(
        default=8,
        ge=0,
        description="images of a prompt that the judge gets, before the text; the run's engine "
        "gets none",
    )
    extra_body: dict[str, Any] = Field(
        default_factory=dict, description="further parameters of the request"
    )

    @field_validator("base_url")
    @classmethod
    def _is_address(cls, url: str | None) -> str | None:
        parts = urlsplit(url or "")
        if url is not None and not (parts.scheme in ("http", "https") and parts.hostname):
            raise ValueError(f"{url!r} is no address such as https://api.openai.com/v1")
        return url

    @model_validator(mode="after")
    def _has_range(self) -> Self:
        if self.min_score >= self.max_score:
            raise ValueError("min_score must be below max_score")
        return self


class PairParams(JudgeParams):
    """Settings of the comparison of pairs."""

    opponents: int | None = Field(
        default=None,
        ge=1,
        description="responses that each one is compared with as the first; null = all pairs",
    )
    swap: bool = Field(default=True, description="ask for both orders of a pair")


def _environment(params: JudgeParams) -> list[str]:
    return [params.api_key_env] if params.api_key_env else []


def _declared(params: type[JudgeParams], *, groups: bool) -> Callable[[T], T]:
    return declare(
        Params=params,
        environment=_environment,
        limits_requests=True,
        scores_groups=groups,
        compares=groups,
        uses_engine=lambda settings: settings.base_url is None,
    )


@_declared(JudgeParams, groups=False)
async def score_each(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    prompt: Sequence[Mapping[str, Any]],
    images: Sequence[Image] = (),
    **settings: Any,
) -> dict[str, float]:
    """Return the judge's score of a response, from 0 to 1."""
    params = JudgeParams(**settings)
    values = _values(params, data_source, ground_truth, extra_info, prompt)
    values["response"] = prompts.delimited(solution_str)
    question = prompts.pointwise(params.min_score, params.max_score)
    return _result(params, await _ask(params, question, values, images))


@_declared(JudgeParams, groups=True)
async def score_group(
    data_source: str,
    solution_strs: Sequence[str],
    ground_truth: Any,
    extra_infos: Sequence[dict[str, Any]],
    prompt: Sequence[Mapping[str, Any]],
    images: Sequence[Image] = (),
    **settings: Any,
) -> list[dict[str, float]]:
    """Return scores from 0 to 1 of the responses to a prompt, which the judge sees together.

    Their order in the message depends on their texts, so that it favours no position.
    """
    params = JudgeParams(**settings)
    order = list(range(len(solution_strs)))
    texts = "\0".join(sorted(solution_strs))
    order.sort(key=lambda i: solution_strs[i])
    random.Random(hashlib.sha256(texts.encode(errors="replace")).digest()).shuffle(order)
    values = _values(params, data_source, ground_truth, extra_infos[0], prompt)
    values["responses"] = [prompts.delimited(solution_strs[i]) for i in order]
    question = prompts.groupwise(len(order), params.min_score, params.max_score)
    found = await _ask(params, question, values, images)
    by_row = dict(zip(order, found, strict=True))
    return [_result(params, by_row[i]) for i in range(len(order))]


@_declared(PairParams, groups=True)
async def score_pairs(
    data_source: str,
    solution_strs: Sequence[str],
    ground_truth: Any,
    extra_infos: Sequence[dict[str, Any]],
    prompt: Sequence[Mapping[str, Any]],
    images: Sequence[Image] = (),
    **settings: Any,
) -> list[dict[str, float] | Exception]:
    """Return the share of comparisons that each response to a prompt wins; a tie is half a win.

    A response fails if all of its comparisons do.
    """
    params = PairParams(**settings)
    count = len(solution_strs)
    if count < 2:
        raise ValueError("a single response to a prompt has no other to be compared with")
    values = _values(params, data_source, ground_truth, extra_infos[0], prompt)
    reach = min(params.opponents or count - 1, count - 1)
    pairs = {
        (min(i, j), max(i, j))
        for i in range(count)
        for j in ((i + k) % count for k in range(1, reach + 1))
    }
    orders = sorted(pairs)
    if params.swap:
        orders += [(j, i) for i, j in orders]

    async def compare(first: int, second: int) -> float:
        both = [prompts.delimited(solution_strs[i]) for i in (first, second)]
        return await _ask(params, prompts.pairwise(), {**values, "responses": both}, images)

    results = await asyncio.gather(*(compare(*order) for order in orders), return_exceptions=True)
    return _wins(count, dict(zip(orders, results, strict=True)))


def _wins(
    count: int, results: Mapping[tuple[int, int], float | BaseException]
) -> list[dict[str, float] | Exception]:
    """Return the result of each of `count` responses, from the results of ordered pairs."""
    won: list[list[float]] = [[] for _ in range(count)]
    agreed: list[list[float]] = [[] for _ in range(count)]
    first_error: list[Exception | None] = [None] * count
    for (i, j), value in results.items():
        if isinstance(value, Exception):
            first_error[i] = first_error[i] or value
            first_error[j] = first_error[j] or value
            continue
        if isinstance(value, BaseException):
            raise value
        won[i].append(value)
        won[j].append(1 - value)
        other = results.get((j, i))
        if i < j and isinstance(other, float):
            for k in (i, j):
                agreed[k].append(float(value == 1 - other))
    found: list[dict[str, float] | Exception] = []
    for values, same, error in zip(won, agreed, first_error, strict=True):
        if not values:
            found.append(error or ValueError("no comparison"))
            continue
        part = {"judge_agreement": sum(same) / len(same)} if same else {}
        found.append({"score": sum(values) / len(values), **part})
    return found


def _values(
    params: JudgeParams,
    data_source: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    prompt: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the variables of a template, without responses."""
    return {
        "rubric": params.rubric,
        "min_score": f"{params.min_score:g}",
        "max_score": f"{params.max_score:g}",
        "conversation": prompts.conversation(prompt),
        "messages": list(prompt),
        "question": prompts.neutral(str(prompt[-1].get("content"))) if prompt else "",
        "data_source": data_source,
        "ground_truth": ground_truth,
        "extra_info": dict(extra_info),
    }


async def _ask(
    params: JudgeParams,
    question: prompts.Question,
    values: Mapping[str, Any],
    images: Sequence[Image],
) -> Any:
    """Send one message to the judge and return its verdict."""
    body: dict[str, Any] = {"max_tokens": params.max_tokens}
    shown = images[: params.max_images] if params.base_url is not None else ()
    if params.base_url is not None:  # the run's engine decodes greedily, and any text
        if params.structured == "json_schema":
            described = {"name": "verdict", "strict": True, "schema": question.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": described}
        elif params.structured == "json_object":
            body["response_format"] = {"type": "json_object"}
        if params.temperature is not None:
            body["temperature"] = params.temperature
    return await client().complete(
        prompts.render(params.template or question.template, values, shown),
        question.read,
        base_url=params.base_url,
        model=params.model,
        api_key_env=params.api_key_env,
        **{**body, **params.extra_body},
    )


def _result(params: JudgeParams, score: float) -> dict[str, float]:
    normalized = (score - params.min_score) / (params.max_score - params.min_score)
    return {"score": normalized, "judge_score": score}
