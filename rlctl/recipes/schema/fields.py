"""Base class, conditions and shared types of the schema."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
)


class Section(BaseModel):
    """Section of the configuration: frozen and strict, without unknown keys or defaults.

    Defaults are in the base YAML only.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, defer_build=True, protected_namespaces=()
    )

    @field_validator("*")
    @classmethod
    def _fits(cls, value: Any) -> Any:
        """Refuse whole numbers that no array holds."""
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError("more than 64 bits")
        return value

    def replaced(self, key: str, value: Any) -> Self:
        """Return a copy with another value at a dotted key."""
        name, _, rest = key.partition(".")
        inner = getattr(self, name).replaced(rest, value) if rest else value
        return self.model_copy(update={name: inner})


class Not(tuple[Any, ...]):
    """Any value except these."""

    def __new__(cls, *values: Any) -> Not:
        return super().__new__(cls, values)


@dataclass(frozen=True, eq=False)
class UnusedIf:
    """Values of other keys with which a key, or every key of a section, has no effect.

    `.name` is a key of the same section. The keys of each of `alike` must also have equal values.
    """

    values: dict[str, Any]
    alike: tuple[tuple[str, ...], ...] = ()

    def below(self, prefix: str) -> UnusedIf:
        """Return the condition with the full names of keys, for a section `prefix`."""
        names = {name: prefix + name[1:] if name[0] == "." else name for name in self.values}
        return replace(self, values={names[name]: value for name, value in self.values.items()})

    @property
    def causes(self) -> tuple[str, ...]:
        """Keys whose values decide."""
        return (*self.values, *chain.from_iterable(self.alike))

    def holds(self, lookup: Callable[[str], Any]) -> bool:
        """Return True if the keys have these values."""
        return all(
            lookup(key) not in value if isinstance(value, Not) else lookup(key) == value
            for key, value in self.values.items()
        ) and all(len({lookup(key) for key in keys}) == 1 for keys in self.alike)


NO_VALIDATION = UnusedIf({"data.val_files": None})
NO_ENGINE_POOL = UnusedIf({"trainer.placement.rollout": None})
NO_REWARD_MODEL = UnusedIf({"reward.reward_model.enable": False})


def _one_or_many(value: Any) -> Any:
    """Accept `logger=console` for `logger=[console]` and convert lists to (frozen) tuples."""
    if isinstance(value, str):
        return (value,)
    return _as_tuple(value)


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


def _duration(value: str) -> str:
    """Refuse text that is no duration."""
    from rlctl.recipes.durations import HINT, parse_duration

    if parse_duration(value) is None:
        raise ValueError(f"should be a duration: {HINT}")
    return value


Text = Annotated[str, BeforeValidator(_number_as_text), Field(min_length=1)]
Duration = Annotated[str, AfterValidator(_duration)]
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


class ProcessLimits(Section):
    """Limits of each process that runs rewards, tools or environments."""

    memory_gb: PositiveFloat | None = Field(
        description="memory in GiB; null = the machine's memory / their number"
    )
    file_gb: PositiveFloat = Field(description="size of a file that it writes, in GiB")
    open_files: Annotated[int, Field(ge=16)] = Field(description="open files and sockets")
