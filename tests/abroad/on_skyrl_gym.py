"""Environments of SkyRL-Gym, with rows and settings as SkyRL's examples have them."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from rlctl.data_prep.arithmetic import train_and_validation
from tests.abroad.training import AGENT, NUM_EPISODES, train, write_rows
from tests.e2e.command import rlctl

SKYRL = f"{AGENT}.environment=skyrl"
QUERY = "SELECT name FROM city WHERE population > 5"


def problems(num_rows: int, **columns: Any) -> list[dict[str, Any]]:
    """Return rows as SkyRL's scripts for data sets write them."""
    rows, _ = train_and_validation(num_rows, 1, seed=0, level=1, careless=0.0)
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": list(row.prompt),
            "reward_spec": {"method": "rule", "ground_truth": row.ground_truth},
            "extra_info": {"split": "train", "index": i},
            **columns,
        }
        for i, row in enumerate(rows)
    ]


def test_gsm8k(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.parquet", problems(16, env_class="gsm8k"))
    found = train(
        tmp_path,
        *(SKYRL, f"data.train_files={rows}", "data.train_batch_size=8"),
        "actor_rollout_ref.model.path=quickstart",
    )
    assert len(found.episodes) == 2 * NUM_EPISODES
    assert {row["agent/outcome/done"] for row in found.rows} == {1.0}
    assert max(row["critic/score/max"] for row in found.rows) == 1.0


def test_multi_turn_gsm8k(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.parquet", problems(16, env_class="gsm8k_multi_turn"))
    found = train(
        tmp_path,
        *(SKYRL, f"{AGENT}.params.max_turns=3", f"data.train_files={rows}"),
        *("data.train_batch_size=8", "data.max_response_length=400"),
    )
    said = set(found.replies("user"))
    assert {text[:24] for text in said} == {"Please provide your step", "Now provide only the fin"}
    assert max(row["agent/turns/max"] for row in found.rows) == 3


def test_aime(tmp_path: Path) -> None:
    rows = [
        {**row, "reward_model": row.pop("reward_spec")} for row in problems(4, env_class="aime")
    ]
    found = train(
        tmp_path, SKYRL, f"data.train_files={write_rows(tmp_path / 'rows.parquet', rows)}"
    )
    assert {row["critic/score/max"] for row in found.rows} <= {-1.0, 0.0, 1.0}
    assert {row["agent/outcome/done"] for row in found.rows} == {1.0}


def test_sql_runs_the_query_of_the_policy(tmp_path: Path) -> None:
    """The policy learns by SFT to write a query, which text2sql executes."""
    folder = tmp_path / "sql/spider/database/towns"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "towns.sqlite") as database:
        database.execute("CREATE TABLE city (name TEXT, population INT)")
        database.execute("INSERT INTO city VALUES ('Ulm', 9), ('Zug', 3)")
    rows = [
        {
            **row,
            "data_source": "synsql",
            "db_id": "towns",
            "data": "spider",
            "reward_spec": {"method": "rule", "ground_truth": QUERY},
        }
        for row in problems(64, env_class="text2sql")
    ]
    file = write_rows(tmp_path / "rows.parquet", rows)
    taught = [{**row, "extra_info": {"answer": f"<sql>{QUERY}</sql>"}} for row in rows]
    rlctl(
        *("train", "sft", "--inline", "--name", "taught"),
        f"data.train_files={write_rows(tmp_path / 'taught.parquet', taught)}",
        *("data.val_files=null", "actor_rollout_ref.model.path=quickstart-agent"),
        "actor_rollout_ref.actor.optim.lr=3e-3",
        *("trainer.total_training_steps=40", "data.train_batch_size=16", "trainer.test_freq=-1"),
        *("trainer.save_freq=40", "trainer.num_threads=1", "data.max_response_length=96"),
        cwd=tmp_path,
    )
    found = train(
        tmp_path,
        *(SKYRL, f"data.train_files={file}", "actor_rollout_ref.model.path=taught"),
        f"{AGENT}.params.env_config={{text2sql: {{db_path: {tmp_path / 'sql'}}}}}",
        *(f"{AGENT}.params.max_turns=2", "data.max_response_length=400"),
        "actor_rollout_ref.rollout.temperature=0.5",
    )
    said = list(found.replies("user"))
    assert sum("Ulm" in text and "Zug" not in text for text in said) > NUM_EPISODES / 2
