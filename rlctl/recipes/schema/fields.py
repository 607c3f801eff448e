"""What the sections of the schema are made of: a strict, frozen base class and the value types they share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """One section of the configuration: frozen, no unknown keys, no defaults (those stand in the base YAML), no guessing of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


def _one_or_many(value: Any) -> Any:
    """`logger=console` means `logger=[console]`; YAML's lists become tuples, so that a frozen section is frozen all through."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _number_as_text(value: Any) -> Any:
    """`experiment_name=7` is a name, although YAML reads a number."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _all_or_some(value: int) -> int:
    if value == 0 or value < -1:
        raise ValueError("should be -1 or at least 1")
    return value


Text = Annotated[str, BeforeValidator(_number_as_text), Field(min_length=1)]
Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_one_or_many)]
Floats = Annotated[tuple[float, ...], BeforeValidator(_as_tuple)]
Pair = Annotated[tuple[float, float], BeforeValidator(_as_tuple)]

Count = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
CountOrAll = Annotated[
    int, AfterValidator(_all_or_some), Field(json_schema_extra={"bounds": "-1 or ≥ 1"})
]
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
KLKind = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
]  # fmt: skip
