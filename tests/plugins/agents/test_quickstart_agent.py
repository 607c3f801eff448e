"""The bundled model for episodes: its template, and a step of each of its recipes."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rlctl.plugins.agents.chat_bridge import ChatBridge
from rlctl.plugins.agents.environments.calculator import calculator
from rlctl.plugins.agents.environments.function_tools import schema_of
from rlctl.plugins.agents.parsers.json_calls import HermesParser
from rlctl.plugins.agents.template_check import TOOL, USER, check_chat_template
from rlctl.quickstart import AGENT, real_path
from tests.e2e.command import metrics, train
from tests.settings import given
from tools.make_agent_model import CALCULATOR

FOLDER = Path(real_path(AGENT))


def test_template_of_the_model_keeps_earlier_turns() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    bridge = ChatBridge(tokenizer, [tokenizer.eos_token_id])
    check_chat_template(bridge, [TOOL, USER])
    asked = [{"role": "user", "content": "Tom has 4817 apples. He finds 29 more."}]
    schema = schema_of(calculator)
    # The conversations of the training have a shorter schema; the template shows the same of both.
    assert bridge.prompt_ids(asked, [schema]) == bridge.prompt_ids(asked, [CALCULATOR])
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "(48 + 29) * 5"}}'
    ids = tokenizer.encode(f"{call}</tool_call>")
    assert len(ids) < 30
    turn = HermesParser().parse(tokenizer.decode(ids), [schema])
    assert [each.arguments for each in turn.calls] == [{"expression": "(48 + 29) * 5"}]


def test_the_model_is_small() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 5e6


@pytest.mark.parametrize("recipe", ["tools", "gridworld"])
def test_a_step_of_the_recipes(recipe: str, tmp_path: Path) -> None:
    settings = given(threads=1, steps=1, batch=4, mini_batch=4, validate=-1, save=-1)
    settings += ["trainer.val_before_train=false", "actor_rollout_ref.rollout.agent.num_workers=1"]
    words = ("--recipe", recipe, "--inline", *settings)
    [step] = metrics(train("grpo", recipe, *words, cwd=tmp_path))
    assert step["agent/retokenized_tokens"] == 0
    assert step["agent/num_failed"] == 0
    assert 0 < step["critic/score/mean"] < 0.6  # there is something to learn
    if recipe == "tools":
        assert 0 < step["tool/calculator/calls"] < 16  # of 32 episodes
        assert step["tool/calculator/errors"] <= 5
        assert step["agent/turns/max"] >= 2
    else:
        assert step["agent/turns/min"] >= 4
        assert step["agent/turns/max"] <= 8
