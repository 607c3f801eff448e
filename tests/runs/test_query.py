"""Expressions of `--where`: values and error messages."""

from types import SimpleNamespace
from typing import cast

import pytest

from rlctl.errors import UsageError
from rlctl.runs.listing import value_of
from rlctl.runs.query import Query, Term
from rlctl.runs.run import Run
from rlctl.tracking.summary import MetricsSummary

VALUES = {
    Term("state"): "finished",
    Term("val-core/gsm8k/acc/mean@1"): 0.9,
    Term("val-core/gsm8k/acc/mean@1", "best"): 0.95,
    Term("data.train_batch_size"): 128,
    Term("actor.optim.lr"): 1e-6,
    Term("tags"): ["baseline", "b"],
    Term("note"): None,
    Term("odd/name with=signs"): 3,
    Term("name"): "ppo-проба",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('state == "finished" and val-core/gsm8k/acc/mean@1 > 0.8', True),
        ("val-core/gsm8k/acc/mean@1<0.9 or best(val-core/gsm8k/acc/mean@1)>0.9", True),
        ("data.train_batch_size in [64, 128]", True),
        ("not data.train_batch_size in (64, 128)", False),
        ("1e-7 < actor.optim.lr <= 1e-6", True),
        ('"baseline" in tags and "c" not in tags', True),
        ("note == null", True),
        ("note > 3 or note <= 3", False),  # ordering comparisons with null are false
        ('"x" in note', False),
        ("`odd/name with=signs` == 3", True),
        ('like(name, "ppo-*")', True),
        ("name == 'ppo-проба' and state != 'проба'", True),
        ("true and not false", True),
        ("(state == 'failed' or state == 'finished') and not note", True),
        ("(state ==\n'finished')", True),
        ("name == 'ppo-проба' and data.train_batch_size == 128", True),
    ],
)
def test_value_of_an_expression(text, expected):
    assert bool(Query(text).evaluate(VALUES.__getitem__)) is expected


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ('state = "x"', 6, "compares"),
        ('состояние == "я" and (x', 21, "never closed"),
        ("a b", 2, "invalid syntax"),
        ("", 0, "the expression is empty"),
        ("step >", 6, "invalid syntax"),
        ("__import__('os').system('true')", 0, "not part of the language"),
        ("{state} == 1", 0, "not part of the language"),
        ("state == 'a' and name.upper() == 'B'", 17, "not part of the language"),
        ("best(state) > 1", 5, "expects a metric"),
        ("x == 1 and lambda: state", 17, "invalid syntax"),
        ("(" * 500 + "step" + ")" * 500, 0, "too"),
        ("not " * 200 + "state", 0, "too deeply nested"),
        ("state == 'a' 'b'", 9, "not part of the language"),
    ],
)
def test_syntax_error_points_at_its_position(text, column, message):
    with pytest.raises(UsageError, match=message) as caught:
        Query(text)
    (problem,) = caught.value.problems
    shown, caret = (problem.where or "").split("\n")
    assert shown == text
    if len(text) < 100:
        assert caret == " " * (6 + column) + "^"


def test_invalid_comparison_is_an_error():
    with pytest.raises(UsageError, match="'finished' > 3 cannot be compared"):
        Query("state > 3").evaluate(VALUES.__getitem__)


def test_a_negative_is_that_of_a_number():
    missing, text = Query("-step < 0"), Query("-state == 1")
    assert missing.evaluate(lambda _: None) is False
    assert missing.evaluate(lambda _: 3) is True
    with pytest.raises(UsageError, match="'failed' has no negative"):
        text.evaluate(lambda _: "failed")


def test_a_column_is_one_value():
    assert Query("best(train/loss)").term() == Term("train/loss", "best")
    for text in ("a and b", "3", "a < b"):
        with pytest.raises(UsageError, match="expected one name"):
            Query(text).term()


def test_the_best_loss_is_the_smallest_and_the_best_score_the_largest() -> None:
    summary = MetricsSummary()
    summary.add([{"step": step, "actor/pg_loss": step, "val/acc": step} for step in (2, 1, 3)])
    run = cast(Run, SimpleNamespace(metrics=summary))
    assert value_of(run, Term("actor/pg_loss", "best")) == 1
    assert value_of(run, Term("val/acc", "best")) == 3
    assert value_of(run, Term("val/acc", "last")) == 3


def test_a_call_that_is_no_aspect_is_no_order() -> None:
    with pytest.raises(UsageError, match="expected one name, or an aspect"):
        Query('like(name, "a*")').term()
