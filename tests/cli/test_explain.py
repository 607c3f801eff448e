"""`rlctl explain`: codes, metrics, keys and options have entries, which name what exists."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache

import pytest

from rlctl import errors
from rlctl.__main__ import main
from rlctl.cli.complete import explained
from rlctl.cli.explain.lookup import LIBRARIES, explain, known_names, library_options
from rlctl.cli.explain.metric_entries import metric_entry
from rlctl.error_codes import code_of, error_entries, message_pattern
from rlctl.errors import ConfigError, DeviceMemoryError, NotFoundError, RlctlError
from rlctl.recipes.keys import schema_keys
from tests.architecture.source import FILES
from tests.plugin_folders import FOLDERS, is_there


@cache
def texts() -> tuple[tuple[str, str], ...]:
    """Return file and text of every string of the code; placeholders of f-strings are …."""
    return *_sentences_of_tables(), *(
        (str(path), text) for path in FILES for text in _texts(ast.parse(path.read_text()))
    )


def _sentences_of_tables() -> Iterator[tuple[str, str]]:
    if is_there("bridges"):
        from rlctl.plugins.bridges.verl.tables import FEATURES

        yield from (("tables.yaml", feature.sentence) for feature in FEATURES.values())


def _texts(tree: ast.AST) -> Iterator[str]:
    parts = set()
    for node in ast.walk(tree):  # an f-string comes before its parts
        if isinstance(node, ast.JoinedStr):
            parts |= {id(each) for each in node.values}
            yield "".join(
                str(each.value) if isinstance(each, ast.Constant) else "…" for each in node.values
            )
        elif isinstance(node, ast.Constant) and id(node) not in parts:
            yield from [node.value] if isinstance(node.value, str) else []


def has_message(template: str) -> bool:
    """Return True if a text of the code begins as `template`, which may fill its placeholders."""
    longest, pattern = max(template.split("…"), key=len), message_pattern(template)
    if any(longest in text and pattern.match(text) for _, text in texts()):
        return True
    filled = (text for _, text in texts() if "…" in text and len(text.replace("…", "")) >= 12)
    return any(message_pattern(text).match(template) for text in filled)


@pytest.mark.plugin(*FOLDERS)
def test_every_message_of_an_entry_is_in_the_code() -> None:
    unused = [
        f"{entry.code}: {template}"
        for entry in error_entries().values()
        for template in entry.messages
        if not has_message(template)
    ]
    assert unused == []


def test_every_error_class_has_an_entry_of_its_exit_code() -> None:
    kinds = [each for each in vars(errors).values() if isinstance(each, type)]
    codes = {each.code: each.exit_code for each in kinds if issubclass(each, RlctlError)}
    assert {code: error_entries()[code].exit for code in codes} == codes
    general = {entry.exit for entry in error_entries().values() if not entry.messages}
    assert general == set(codes.values())


@pytest.mark.parametrize(
    ("message", "kind", "code"),
    [
        ("unknown key trainer.x", ConfigError, "E-UNKNOWN-KEY"),
        ("out of memory with 3 rows at a time (x=3): y\nz", DeviceMemoryError, "E-OOM"),
        ("a cause of its own", DeviceMemoryError, "E-OOM"),
        ("a cause of its own", ConfigError, "E-CONFIG"),
        ("out of memory", NotFoundError, "E-NOT-FOUND"),
    ],
)
def test_code_of_a_message(message: str, kind: type[RlctlError], code: str) -> None:
    assert code_of(message, kind) == code == code_of(message, kind(message))


def test_an_error_names_its_codes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "ppo", "--dry-run", "trainer.sed=1", "trainer.seed=x"]
    assert main(words) == 3
    lines = capsys.readouterr().err.splitlines()
    assert "  see: rlctl explain E-UNKNOWN-KEY E-WRONG-VALUE" in lines
    assert main(["train", "--nothing"]) == 2
    assert "see:" not in capsys.readouterr().err


METRIC = re.compile(
    r"(actor|critic|reward|response_length|prompt_length|rollout_corr|filter_groups|async|agent|tool|"
    r"perf|timing_s|timing_per_token_ms|global_seqlen|training|curriculum|raft|pairs|train|data/share|"
    r"val-core|val-aux|distill)/[\w/@…-]+"
)


RENAMED = {"val-aux/…/accuracy"}  # it is logged as val-core/…/acc


def test_every_metric_in_the_code_has_an_entry() -> None:
    found = {text for path, text in texts() if "/runtime/" in path and METRIC.fullmatch(text)}
    assert len(found) > 80
    assert sorted(text for text in found - RENAMED if not described(text)) == []


def described(text: str) -> bool:
    """Return True if an entry has the name, with any text for …, or names below it."""
    pattern = re.compile(".+".join(map(re.escape, text.split("…"))))
    names = [name for name in known_names() if "/" in name]
    return metric_entry(text.replace("…", "x")) is not None or any(
        pattern.fullmatch(name) or name.startswith(f"{text}/") for name in names
    )


def test_every_option_of_a_library_has_keys_that_exist() -> None:
    for library in LIBRARIES:
        options = library_options(library)
        assert len(options) > 50
        keys = {key for option in options.values() for key in option.keys}
        assert sorted(keys - set(schema_keys())) == []
        assert all(option.keys or option.note for option in options.values())


@pytest.mark.parametrize(
    ("name", "kind", "label", "part"),
    [
        ("e-oom", "error", "remedy", "ppo_max_token_len_per_gpu"),
        ("7", "exit code", "errors", "E-OOM"),
        ("entropy_collapse", "alarm", "limit", "trainer.alarms.entropy_collapse"),
        ("val-core/openai/gsm8k/acc/mean@1", "metric", "usual", "rises"),
        ("trainer.seed", "key", "type", "whole number"),
        ("data.sampler_params.explore", "key", "default", "0.1"),
        ("--n_samples_per_prompt", "option of OpenRLHF", "use", "actor_rollout_ref.rollout.n"),
        ("num_generations", "option of TRL", "use", "actor_rollout_ref.rollout.n"),
        *(
            pytest.param(*case, marks=pytest.mark.plugin("bridges"))
            for case in (
                ("ray_kwargs.ray_init.num_cpus", "key", "verl", "ray_init.num_cpus"),
                ("actor_rollout_ref.actor.qat.enable", "key of verl", "instead", "remove"),
                ("trainer.default_hdfs_dir", "key of verl", "instead", "trainer.mirror"),
            )
        ),
    ],
)
def test_explanations(name: str, kind: str, label: str, part: str) -> None:
    found = explain(name)[0]
    assert found.kind == kind
    assert part in found.facts[label]


def test_the_end_of_a_key_is_explained_as_an_option_of_other_libraries_too() -> None:
    assert [each.kind for each in explain("loss_type")] == ["key", "option of TRL"]


@pytest.mark.plugin("bridges")
def test_verl_names_of_a_key() -> None:
    from rlctl.plugins.bridges.verl.translate import aliases

    assert aliases("critic.fsdp_config.param_offload") == [
        "critic.model.fsdp_config.param_offload",
        "critic.fsdp.param_offload",
        "critic.megatron.param_offload",
    ]
    assert aliases("trainer.seed") == []


@pytest.mark.parametrize("given", ["actor/entropi", "entropi"])
def test_a_near_name_is_suggested(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", given]) == 4
    assert "did you mean actor/entropy?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("zebra", "no description has the word, either; searched are codes, alarms, metrics, keys"),
        ("checkpoints", "described with it: E-NO-CHECKPOINT, E-DISK, trainer.save_freq"),
    ],
)
def test_a_word_that_is_no_name_is_searched_in_descriptions(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", word]) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"nothing is named '{word}'" in captured.err
    assert hint in captured.err


def test_json_and_completion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--json", "E-DISK", "actor/lr"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["kind"] for each in found] == ["error", "metric"]
    assert explained("e-di") == ["E-DISK"]
    assert explained("trainer.see") == ["trainer.seed"]
    assert set(known_names()) >= {"E-OOM", "entropy_collapse", "actor/entropy", "trainer.seed"}
