"""The Python API: the blocks of docs/python.md run quietly, and `import rlctl` is light."""

import linecache
import re
from pathlib import Path

import pytest

import rlctl
from rlctl import api, errors, workers

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
STEPS = '"trainer.total_training_steps=2"'
SMALL = f"""{STEPS}, "data.train_batch_size=8", "data.val_max_samples=4", "trainer.num_threads=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8", "data.max_response_length=8\""""
RATE = '"actor_rollout_ref.actor.optim.lr": 1e-4,'
SMALL_BATCH = f"""{RATE} "data.train_batch_size": 8, "data.max_response_length": 8,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 8, "trainer.num_threads": 1,"""


@pytest.mark.plugin("console")
def test_documented_blocks_run(here, monkeypatch, capfd):
    page = PAGE.read_text(encoding="utf-8")
    assert (page.count(STEPS), page.count(RATE)) == (2, 1)
    page = page.replace(RATE, SMALL_BATCH)
    blocks = re.findall(r"```python\n(.*?)```", page.replace(STEPS, SMALL), re.DOTALL)
    assert len(blocks) >= 6
    scope: dict[str, object] = {"print": lambda *_: None, "__name__": "__main__"}
    for number, block in enumerate(blocks):
        name = f"<block {number}>"
        linecache.cache[name] = (len(block), None, block.splitlines(keepends=True), name)
        exec(compile(block, name, "exec"), scope)
    assert capfd.readouterr().out == ""
    assert (here / "runs" / "quickstart" / "first" / "run.json").is_file()


@pytest.mark.parametrize("name", rlctl.__all__)
def test_public_names_are_documented(name):
    found = getattr(rlctl, name)
    assert found is getattr(errors if name.endswith("Error") else api, name)
    assert found.__doc__
    assert name in dir(rlctl)


@pytest.mark.parametrize("name", workers.__all__)
def test_public_names_of_workers_are_documented(name):
    assert getattr(workers, name).__doc__
    assert name in dir(workers)


def test_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        rlctl.no_such_name  # noqa: B018
    with pytest.raises(AttributeError, match="no_such_name"):
        workers.no_such_name  # noqa: B018


def test_run_or_sweep_that_does_not_exist_is_not_found(tmp_path):
    with pytest.raises(rlctl.NotFoundError):
        api.find_run_or_sweep("ppo-a", tmp_path)
