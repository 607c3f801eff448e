"""Tests of loading reward functions and of their return values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch

from rlctl.errors import ConfigError
from rlctl.plugins import declare
from rlctl.recipes.compose import compose
from rlctl.runtime.rewards import gsm8k
from rlctl.runtime.rewards.functions import (
    Call,
    CallResult,
    LoadedReward,
    RewardFunction,
    RewardSpec,
    Traits,
    call_reward,
)
from rlctl.runtime.rewards.loading import load_reward
from rlctl.runtime.rewards.reward_pool import RewardPool
from rlctl.runtime.rewards.specs import reward_specs

CALL = Call("source", "text", "truth", {"index": 3})


def call(function: RewardFunction, kwargs: dict[str, object]) -> CallResult:
    return call_reward(LoadedReward(function, kwargs, Traits.of(function)), [CALL])[0]


def load(
    path: Path,
    source: str,
    name: str = "compute_score",
    kwargs: Mapping[str, object] | None = None,
) -> RewardFunction:
    path.write_text(source, encoding="utf-8")
    return load_reward(RewardSpec(f"{path}:{name}", 1.0, kwargs or {})).function


def test_function_is_found_by_name_and_by_module() -> None:
    kwargs = {"method": "strict"}
    for name in ("gsm8k", "rlctl.runtime.rewards.gsm8k:score"):
        assert load_reward(RewardSpec(name, 1.0, kwargs)) == (gsm8k.score, kwargs, Traits())
    with RewardPool([RewardSpec("gsm8k", 1.0, kwargs)], timeout_s=1) as pool:
        assert not pool.has_workers


def test_function_of_a_file_is_called_with_verls_signature(tmp_path: Path) -> None:
    function = load(
        tmp_path / "mine.py",
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):\n"
        "    assert (data_source, solution_str, ground_truth) == ('source', 'text', 'truth')\n"
        "    return {'score': extra_info['index'] + bonus, 'acc': True, 'pred': 'words',\n"
        "            'ratio': 0.25, 'broken': float('nan')}\n",
        kwargs={"bonus": 0.5},
    )
    assert call(function, {"bonus": 0.5}) == (
        3.5,
        {"acc": 1.0, "ratio": 0.25},
        None,
        False,
        "words",
    )


def test_extracted_answer_is_a_text_and_no_component() -> None:
    def returns(value: object) -> RewardFunction:
        return lambda **_: {"score": 1, "pred": value}

    for value, pred in ((18, "18"), ("x", "x"), (None, None)):
        result = call(returns(value), {})
        assert (result.pred, result.components) == (pred, {})
    assert call(lambda **_: 1, {}).pred is None


def test_numbers_of_numpy_and_torch_are_components() -> None:
    parts = {
        "score": np.float32(0.5),
        "acc": np.bool_(True),
        "ratio": np.array([0.25]),
        "scalar": torch.tensor(2.0),
        "decimal": Decimal("0.5"),
        "text": np.str_("3"),
        "list": [1],
        "vector": np.zeros(2),
        "large": 10**400,
        "infinite_in_float32": 1e300,
    }
    expected = {"acc": 1.0, "ratio": 0.25, "scalar": 2.0, "decimal": 0.5}
    assert call(lambda **_: parts, {}) == (0.5, expected, None, False, None)


def test_a_number_too_large_fails_its_response_alone() -> None:
    @declare(scores_groups=True)
    def score(data_source, solution_strs, ground_truth, extra_infos):  # type: ignore[no-untyped-def]
        return [1.0, 10**400]

    first, second = call_reward(LoadedReward(score, {}, Traits.of(score)), [CALL, CALL])
    assert (first.score, first.error) == (1.0, None)
    assert (second.error or "").startswith("OverflowError")


def test_a_file_may_import_files_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "reward_constants.py").write_text("SCORE = 0.75\n")
    function = load(
        tmp_path / "mine.py",
        "from reward_constants import SCORE\ndef compute_score(**kwargs): return SCORE\n",
    )
    assert call(function, {}).score == 0.75


@pytest.mark.parametrize(
    ("source", "line", "message"),
    [
        (
            "x = 1\nimport no_such_package\n",
            2,
            "ModuleNotFoundError: No module named 'no_such_package'",
        ),
        ("x = 1\n\ndef broken(:\n", 3, "SyntaxError"),
        ("def f():\n    return 1 / 0\n\nf()\n", 2, "ZeroDivisionError"),
        ("import sys\nsys.exit(1)\n", 2, "SystemExit"),
    ],
)
def test_file_that_does_not_import_raises_with_the_line(
    tmp_path: Path, source: str, line: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path / "mine.py", source)
    assert caught.value.problems[0].where == f"{tmp_path / 'mine.py'}:{line}"


def test_missing_function_or_file_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no 'compute_scores'") as caught:
        load(
            tmp_path / "mine.py",
            "from math import floor\ndef compute_score(**kwargs): return 1\n",
            "compute_scores",
        )
    assert caught.value.problems[0].hint == "did you mean 'compute_score'? known: compute_score"
    with pytest.raises(ConfigError, match="does not exist"):
        load_reward(RewardSpec(f"{tmp_path}/none.py:f", 1.0))
    with pytest.raises(ConfigError, match="without the name of a function") as caught:
        load_reward(RewardSpec("mine.py", 1.0))
    assert caught.value.problems[0].hint == "mine.py:compute_score"


@pytest.mark.parametrize(
    ("source", "kwargs", "message"),
    [
        (
            "def compute_score(question, answer): return 1\n",
            {},
            "missing a required argument: 'question'",
        ),
        (
            "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1\n",
            {"bonus": 1},
            "unexpected keyword argument 'bonus'",
        ),
        ("compute_score = 3\n", {}, "is of type int, not a function"),
    ],
)
def test_function_that_cannot_be_called_raises(
    tmp_path: Path, source: str, kwargs: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "mine.py", source, kwargs=kwargs)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "returned None"),
        ("0.5", "returned '0.5'"),
        ([1.0], "returned [1.0]"),
        (float("nan"), "returned nan"),
        (float("inf"), "returned inf"),
        ({"acc": 1.0}, "a dict without 'score': ['acc']"),
        ({"score": None}, "returned None"),
        (1j, "TypeError"),
    ],
)
def test_wrong_return_value_scores_zero_with_an_error(result: object, message: str) -> None:
    returned = call(lambda **_: result, {})
    assert returned.score == 0.0
    assert message in str(returned.error)


def test_numbers_of_other_libraries_are_accepted() -> None:
    import numpy as np
    import torch

    for result in (np.float32(0.5), torch.tensor(0.5), 0.5):
        assert call(lambda value=result, **_: value, {}) == CallResult(0.5, {})
    assert call(lambda **_: True, {}).score == 1.0


def test_error_contains_the_line_that_raised(tmp_path: Path) -> None:
    function = load(
        tmp_path / "mine.py",
        "def inner():\n    raise KeyError('x')\ndef compute_score(**kwargs):\n    return inner()\n",
    )
    assert call(function, {}).error == f"KeyError: 'x' ({tmp_path}/mine.py:2)"


def test_error_in_a_library_contains_the_line_of_the_function(tmp_path: Path) -> None:
    source = "import os\ndef compute_score(**kwargs):\n    return os.environ['NOT_THERE']\n"
    function = load(tmp_path / "mine.py", source)
    assert call(function, {}).error == f"KeyError: 'NOT_THERE' ({tmp_path}/mine.py:3)"


def test_settings_of_a_reward_are_validated_by_its_params() -> None:
    base = ["data.train_files=[t.parquet]", "actor_rollout_ref.model.path=m"]

    def kwargs(*settings: str) -> list[dict[str, object]]:
        reward = compose("ppo_trainer", [*base, *settings]).config.reward
        return [load_reward(each).kwargs for each in reward_specs(reward, ["openai/gsm8k"])]

    assert kwargs() == [{"method": "strict"}]
    flexible = [{"method": "flexible"}]
    assert kwargs("reward.params.gsm8k.method=flexible") == flexible
    assert kwargs("reward.params.gsm8k={method: flexible}") == flexible
    with pytest.raises(ConfigError, match="method of gsm8k should be") as caught:
        kwargs("reward.params.gsm8k={method: loose}")
    assert "reward.params.gsm8k" in str(caught.value.problems[0].where)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "my_trl_rewards",
            "def reward(prompts, completions, answer, index, **kwargs):\n"
            "    assert prompts == [[{'role': 'user', 'content': 'why?'}]] * 2\n"
            "    assert index == [3, 3]\n"
            "    return [float(c[0]['content'] == a) for c, a in zip(completions, answer)]\n",
        ),
        (
            "my_openrlhf_rewards",
            "import torch\n"
            "def reward_func(queries, prompts, labels, **kwargs):\n"
            "    right = [q == p + l for q, p, l in zip(queries, prompts, labels)]\n"
            "    return {'rewards': torch.tensor(right).float(), 'scores': None}\n",
        ),
    ],
)
def test_documented_wrapper_of_a_function_of_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, source: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{module}.py").write_text(source)
    text = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    (code,) = [
        each for each in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if module in each
    ]
    function = load(tmp_path / "reward.py", code)
    prompt = [{"role": "user", "content": "why?"}]
    calls = [CALL._replace(prompt=prompt, solution_str=each) for each in ("truth", "lie")]
    found = call_reward(LoadedReward(function, {}, Traits.of(function)), calls)
    assert found == [CallResult(1.0, {}), CallResult(0.0, {})]
