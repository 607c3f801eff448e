"""Base class and shared value types of the schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """Section of the configuration: frozen and strict, without unknown keys or defaults.

    Defaults are in the base YAML only.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


def _one_or_many(value: Any) -> Any:
    """Accept `logger=console` for `logger=[console]` and convert lists to (frozen) tuples."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _number_as_text(value: Any) -> Any:
    """Accept `experiment_name=7`, which YAML reads as a number, as text."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _all_or_some(value: int) -> int:
    """Refuse counts other than -1 (all) and positive ones."""
    if value == 0 or value < -1:
        raise ValueError("should be -1 or at least 1")
    return value


Text = Annotated[str, BeforeValidator(_number_as_text), Field(min_length=1)]
OneOrMany = BeforeValidator(_one_or_many)
Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], OneOrMany]
Floats = Annotated[tuple[float, ...], BeforeValidator(_as_tuple)]
Pair = Annotated[tuple[float, float], BeforeValidator(_as_tuple)]

Decay = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Decay, Decay], BeforeValidator(_as_tuple)]

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
CountOrAll = Annotated[
    int, AfterValidator(_all_or_some), Field(json_schema_extra={"bounds": "-1 or ≥ 1"})
]
Counts = Annotated[tuple[Count, ...], BeforeValidator(_as_tuple)]
NonNegativeInts = Annotated[tuple[NonNegativeInt, ...], BeforeValidator(_as_tuple)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]

LossAggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
]
