"""Tokenizers: rendered prompts, stop tokens and unusable folders."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from rlctl.__main__ import main
from rlctl.errors import ConfigError, ResourceError
from rlctl.recipes.compose import compose
from rlctl.runtime.data.tokenizer import (
    encode_prompt,
    ends_with_assistant,
    load_tokenizer,
    render_prompt,
    stop_token_ids,
    tokenizer_of,
    with_response,
)
from rlctl.runtime.planning.unusual_values import missing_generation_prompt
from tests.models import tiny_tokenizer

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
RENDERED = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_prompt_ends_where_the_response_begins(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    assert render_prompt(tokenizer, CHAT) == RENDERED
    ids = encode_prompt(tokenizer, CHAT)
    num_specials = RENDERED.count("<|im_start|>") + RENDERED.count("<|im_end|>")
    assert (
        len(ids)
        == len(RENDERED) - num_specials * len("<|im_start|>") + 2 * (12 - 10) + num_specials
    )  # a byte a token, else one
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert tokenizer.decode(ids) == RENDERED


def test_no_second_bos_token_is_added(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    tokenizer.add_special_tokens({"bos_token": "<|im_start|>"})
    assert encode_prompt(tokenizer, CHAT).count(tokenizer.bos_token_id) == 3


def test_error_of_a_template_is_reported(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(
        ConfigError, match="rejects a prompt with the roles system, user: no system role"
    ):
        encode_prompt(tokenizer, CHAT)


def test_unusable_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_tokenizer(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        load_tokenizer(str(tmp_path / "config.json"))
    for broken in ("{ broken", '{"version": "1.0", "model": {"type": "none"}}'):
        (tmp_path / "tokenizer.json").write_text(broken)
        (tmp_path / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "PreTrainedTokenizerFast"}'
        )
        with pytest.raises(ConfigError, match="cannot be loaded"):
            load_tokenizer(str(tmp_path))


def test_tokenizer_without_chat_template(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has no chat template") as caught:
        load_tokenizer(str(tmp_path))
    assert caught.value.problems[0].where == str(tmp_path)


def test_stop_token_ids(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    assert stop_token_ids(tokenizer, str(folder)) == (2,)
    for ends, wanted in ((0, (0, 2)), ([2, 1], (1, 2))):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        assert stop_token_ids(tokenizer, str(folder)) == wanted
    (folder / "generation_config.json").write_text("{ broken")
    with pytest.raises(ConfigError, match=r"generation_config\.json cannot be read"):
        stop_token_ids(tokenizer, str(folder))
    (folder / "generation_config.json").unlink()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="defines a stop token"):
        stop_token_ids(tokenizer, str(folder))


MODEL = "actor_rollout_ref.model.path=nobody-at-all/no-such-model"


def test_unreachable_hub_fails_quickly(
    monkeypatch: pytest.MonkeyPatch, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9"
    )  # the discard port: connections are refused
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)  # between attempts
    with pytest.raises(ResourceError, match="cannot be downloaded") as caught:
        load_tokenizer("nobody-at-all/no-such-model")
    assert sum(slept) < 10
    assert "looked up on the hub" in str(caught.value.problems[0].hint)
    assert main(["train", "ppo", "--recipe", "ppo", "--dry-run", "--inline", MODEL]) == 7
    assert "see: rlctl explain E-HUB\n" in capsys.readouterr().err


def test_a_custom_chat_template_replaces_the_tokenizers(folder: Path, tmp_path: Path) -> None:
    """Accept a file or the text itself, also for a tokenizer without a template."""
    (folder / "chat_template.jinja").unlink()
    text = "{{ messages[0].content }}!"
    file = tmp_path / "mine.jinja"
    file.write_text(text)
    settings = ["data.train_files=[t]", f"actor_rollout_ref.model.path={folder}"]
    for given in (str(file), text):
        found = compose("ppo_trainer", settings).config.actor_rollout_ref.model
        model = found.model_copy(update={"custom_chat_template": given})
        tokenizer = tokenizer_of(model)
        assert render_prompt(tokenizer, CHAT) == "Be brief.!"
        tokenizer.save_pretrained(tmp_path / "saved")
        assert render_prompt(load_tokenizer(str(tmp_path / "saved")), CHAT) == "Be brief.!"
        with pytest.raises(ConfigError, match="has no chat template"):
            tokenizer_of(found)
    file.unlink()
    with pytest.raises(ConfigError, match=r"template cannot be read: .*mine.jinja"):
        tokenizer_of(found.model_copy(update={"custom_chat_template": str(file)}))


def test_lone_surrogates_are_replaced(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    broken = [{"role": "user", "content": "half \ud83d"}]
    assert render_prompt(tokenizer, broken).count("half ?") == 1
    assert encode_prompt(tokenizer, broken)


BEGUN = [*CHAT, {"role": "assistant", "content": "Let me see: "}]


def test_a_last_message_of_the_assistant_is_continued(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    assert render_prompt(tokenizer, BEGUN) == RENDERED + "Let me see: "
    closed = render_prompt(tokenizer, BEGUN, add_generation_prompt=False)
    assert closed == f"{RENDERED}Let me see: <|im_end|>\n"  # a conversation that has ended
    again = render_prompt(tokenizer, BEGUN, add_generation_prompt=True)
    assert again == f"{closed}<|im_start|>assistant\n"
    calls = [{**BEGUN[-1], "tool_calls": []}, {"role": "tool", "content": "4"}]
    assert not ends_with_assistant([*CHAT, *calls])


@pytest.mark.plugin("agents")
def test_an_agent_continues_it_likewise(folder: Path) -> None:
    from rlctl.plugins.agents.chat_bridge import ChatBridge

    tokenizer = load_tokenizer(str(folder))
    bridge = ChatBridge(tokenizer, [tokenizer.convert_tokens_to_ids("<|im_end|>")])
    assert bridge.opening_ids(BEGUN, []) == encode_prompt(tokenizer, BEGUN)


def test_a_template_that_cannot_continue_a_message_is_refused(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    with pytest.raises(ConfigError, match="cannot continue a prompt that ends with an assist") as e:
        encode_prompt(tokenizer, BEGUN)
    assert "add_generation_prompt=true" in str(e.value)


def test_a_response_continues_the_last_message_of_its_prompt() -> None:
    assert with_response(CHAT, "4") == [*CHAT, {"role": "assistant", "content": "4"}]
    whole = {"role": "assistant", "content": "Let me see: 4"}
    assert with_response(BEGUN, "4") == [*CHAT, whole]


@pytest.mark.parametrize(
    ("template", "missing"),
    [
        ("{{ m.role }}: {{ m.content }}\n", "assistant:"),
        (
            "{% if m.role == 'user' %}[I]{{ m.content }}[/I]{% else %}{{ m.content }}{% endif %}",
            None,
        ),
    ],
)
def test_a_template_without_a_generation_prompt_is_noticed(
    folder: Path, template: str, missing: str | None
) -> None:
    tokenizer = load_tokenizer(str(folder))
    assert list(missing_generation_prompt(tokenizer, {})) == []
    tokenizer.chat_template = "{% for m in messages %}" + template + "{% endfor %}"
    found = list(missing_generation_prompt(tokenizer, {}))
    assert [f"lack {missing!r}" in warning for warning in found] == ([True] if missing else [])
