"""Preference pairs from the usual formats, and from arithmetic problems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.data_prep.chat_records import FORMS
from rlctl.data_prep.preferences import PreferencesParams, pair_of, preferences
from rlctl.data_prep.rows import read_rows, write_rows
from rlctl.errors import ConfigError, NotFoundError, ResourceError
from rlctl.runtime.rewards.gsm8k import score

ASK = {"role": "user", "content": "2 + 2?"}
AGAIN = {"role": "user", "content": "2 + 2 = ?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


FOUR, FIVE = [says("4")], [says("5")]
FORMATS: list[tuple[dict[str, Any], list[dict[str, str]]]] = [
    ({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, [ASK]),
    ({"prompt": [SYSTEM, ASK], "chosen": FOUR, "rejected": FIVE}, [SYSTEM, ASK]),
    ({"chosen": [ASK, *FOUR], "rejected": [ASK, *FIVE]}, [ASK]),
    (  # UltraFeedback: the prompt and both conversations
        {"prompt": "2 + 2?", "chosen": [ASK, *FOUR], "rejected": [ASK, *FIVE]},
        [ASK],
    ),
    (  # a prompt, then a common start that continues it
        {
            "prompt": [ASK],
            "chosen": [says("?"), AGAIN, *FOUR],
            "rejected": [says("?"), AGAIN, *FIVE],
        },
        [ASK, says("?"), AGAIN],
    ),
    (  # HH-RLHF
        {
            "chosen": "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: 2 + 2?\n\nAssistant: 4",
            "rejected": "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: 2 + 2?\n\nAssistant: 5",
        },
        [{"role": "user", "content": "Hi"}, says("Yes?"), ASK],
    ),
    ({"prompt": "\n\nHuman: 2 + 2?\n\nAssistant:", "chosen": "4", "rejected": "5"}, [ASK]),
]


@pytest.mark.parametrize(("record", "prompt"), FORMATS)
def test_formats(record: dict[str, Any], prompt: list[dict[str, str]]) -> None:
    assert pair_of(record, PreferencesParams(source="x")) == (prompt, "4", "5")


def test_bad_records_are_reported_or_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5", "score_chosen": 9, "margin": None}
    records = [
        good | {"score_rejected": 6.5},
        good | {"rejected": "4"},
        {"chosen": "4", "rejected": "5"},
        good | {"chosen": 4},
        {"prompt": "2 + 2?", "chosen": "4"},
        {"chosen": [ASK, *FOUR, ASK, *FOUR], "rejected": [ASK, *FIVE, ASK, *FOUR]},
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    with pytest.raises(ConfigError) as caught:
        preferences(PreferencesParams(source=str(file)))
    assert [each.message for each in caught.value.problems] == [
        "both responses are the same",
        "no prompt: no key 'prompt', and no common start (chosen, rejected)",
        f"'chosen' is 4, expected a non-empty text or {FORMS}",
        "no key 'rejected'; keys: prompt, chosen",
        "the conversations differ in more than the assistant's last message",
    ]
    assert caught.value.problems[0].where == f"{file}:2"
    rows = preferences(PreferencesParams(source=str(file), skip_invalid=True))["train"]
    assert "leaving out 5 of 6 records: both responses are the same (" in caplog.text
    write_rows(tmp_path / "train.parquet", rows)
    (row,) = read_rows(tmp_path / "train.parquet")
    assert (row.data_source, row.prompt, row.style) == ("pairs", [ASK], "model")
    assert row.extra_info == {
        "index": 0,
        "chosen": "4",
        "rejected": "5",
        "margin": 2.5,
        "split": "train",
    }


def test_arithmetic_pairs_are_a_right_and_a_wrong_solution() -> None:
    splits = preferences(PreferencesParams(source="arithmetic", train=200, val=50))
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 200, "val": 50}
    rows = splits["train"] + splits["val"]
    assert len({row.prompt[0]["content"] for row in rows}) == 250
    early = 0
    for row in rows:
        chosen, rejected = row.extra_info["chosen"], row.extra_info["rejected"]
        scores = [
            score(row.data_source, text, row.ground_truth, method="strict")["score"]
            for text in (chosen, rejected)
        ]
        assert scores == [1.0, 0.0]
        early += rejected.count("=") < chosen.count("=")
    assert 50 < early < 120
    assert splits == preferences(PreferencesParams(source="arithmetic", train=200, val=50))


def test_unknown_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFoundError, match="the data does not exist"):
        preferences(PreferencesParams(source=str(tmp_path / "none.jsonl")))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # no server
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ResourceError, match="not in the local cache"):
        preferences(PreferencesParams(source="trl-lib/ultrafeedback_binarized"))
