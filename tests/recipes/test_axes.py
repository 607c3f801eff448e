from __future__ import annotations

import pytest

from rlctl.errors import ConfigError
from rlctl.recipes.axes import Interval, axes_of, split_axes


def test_split_separates_axes_from_single_values() -> None:
    fixed, axes = split_axes(
        ["trainer.seed=5", "a.b=1e-6,1e-5", "x=[1,2]", "y='a,b'", "broken=("], "ppo"
    )
    assert fixed == ["trainer.seed=5", "x=[1,2]", "y='a,b'", "broken=("]
    assert [(axis.key, axis.values) for axis in axes] == [("a.b", ("1e-06", "1e-05"))]


@pytest.mark.parametrize(
    ("text", "values", "interval"),
    [
        ("a=choice(x,y)", ("x", "y"), None),
        ("a=[1,2],[3]", ("[1,2]", "[3]"), None),
        ("a=range(1,8,3)", ("1", "4", "7"), Interval(1, 7, False, 3)),
        ("a=interval(0,2)", (), Interval(0.0, 2.0, False)),
        ("a=int(interval(1,10))", (), Interval(1, 10, False)),
        ("a=tag(log,interval(1e-4,1))", (), Interval(1e-4, 1.0, True)),
        ("optim@critic.optim=glob(*)", ("adamw",), None),
        ("optim@critic.optim=glob(*,exclude=b*)", ("adamw",), None),
    ],
)
def test_grammar(text: str, values: tuple[str, ...], interval: Interval | None) -> None:
    _, (axis,) = split_axes([text], "ppo")
    assert (axis.values, axis.interval) == (values, interval)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=interval(1,0)", "smaller to a larger"),
        ("a=tag(log,interval(0,1))", "logarithmic"),
        ("a=shuffle(range(1,4))", "no seed"),
        ("optim@critic.optim=glob(z*)", "no values"),
    ],
)
def test_invalid_axes_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_axes([text], "ppo")


def test_axes_of_sweep_params() -> None:
    axes = axes_of({"a.b": [0.5, None, True, [1, 2]], "c": "tag(log,interval(1e-7,1e-5))"}, "ppo")
    assert axes[0].values == ("0.5", "null", "True", "[1,2]")
    assert axes[1].interval == Interval(1e-7, 1e-5, True)
    with pytest.raises(ConfigError, match="is not an axis"):
        axes_of({"a.b": 3}, "ppo")
