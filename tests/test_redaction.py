"""Secrets in names, texts, URLs and plain data are replaced; everything else is left alone."""

from __future__ import annotations

import logging

import pytest

from rlctl.errors import ConfigError, Problem
from rlctl.log import StderrHandler
from rlctl.recipes.compose import base_settings
from rlctl.recipes.keys import schema_keys
from rlctl.redaction import (
    is_secret_key,
    is_secret_name,
    redact,
    redact_texts,
    redact_value,
    redact_word,
    register,
)

SECRETS = (
    "api_key apiKey OPENAI_API_KEY api_keys HF_TOKEN token access_token password db_password "
    "passwd secret client_secret AWS_SECRET_ACCESS_KEY access_key_id credential credentials auth "
    "Authorization private_key APIKey api-key"
).split()
HARMLESS = (
    "max_tokens stop_tokens tokenizer tokenizer_path token_budget pad_token eos_token key "
    "prompt_key reward_fn_key author auth_mode password_file secretary loss_agg_mode "
    "train_batch_size PWD"
).split()


@pytest.mark.parametrize("name", SECRETS)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)
    assert is_secret_key(f"reward.params.x.{name}")
    assert is_secret_key(f"x.{name}.value")


@pytest.mark.parametrize("name", HARMLESS)
def test_other_names(name: str) -> None:
    assert not is_secret_name(name)


def test_no_key_and_no_default_of_the_schema_is_a_secret() -> None:
    assert [key for key in schema_keys() if is_secret_key(key)] == []
    defaults = {key: origin.value for key, origin in base_settings().items()}
    assert {key: redact_value(value, key) for key, value in defaults.items()} == defaults


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a.api_key=abc,def", "a.api_key=<secret>"),
        ("+kwargs={api_key:abc,n:1}", "+kwargs={api_key:<secret>,n:1}"),
        ('{"password": "a b", "n": 1}', '{"password": <secret>, "n": 1}'),
        ("call(token='a b', n=1)", "call(token=<secret>, n=1)"),
        ("s3://KEY:SEC/RET@bucket/x", "s3://<secret>@bucket/x"),
        (
            "https://user:pass@host:80/x?token=a&n=1",
            "https://<secret>@host:80/x?token=<secret>&n=1",
        ),
        (
            "https://h/x?X-Amz-Signature=1a&X-Amz-Date=3",
            "https://h/x?X-Amz-Signature=<secret>&X-Amz-Date=3",
        ),
        ("https://abc@github.com/a/b.git", "https://<secret>@github.com/a/b.git"),
        ("Authorization: Bearer abcdefgh12", "Authorization: Bearer <secret>"),
        ("key sk-" + "a1" * 12, "key <secret>"),
        ("hf_" + "aB" * 12, "<secret>"),
    ],
)
def test_texts_with_secrets(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "api_key=${oc.env:KEY}",
        "unexpected token: foo at 3",
        "git@github.com:a/b",
        "ssh://git@github.com/a",
        "http://host:8265/a@b",
        "s3://lab/runs/metric@1",
        "algorithm.loss_agg_mode=token-mean",
        "val-core/gsm8k/acc/mean@1=0.5",
        "data.max_prompt_length=512",
    ],
)
def test_texts_without_secrets(text: str) -> None:
    assert redact(text) == text


def test_words_of_a_command_line() -> None:
    assert redact_word("+a.api_key=two words, and more") == "+a.api_key=<secret>"
    assert redact_word("+a.api_key=${oc.env:KEY}") == "+a.api_key=${oc.env:KEY}"
    assert redact_word("+a.api_key=${oc.env:KEY,default}") == "+a.api_key=<secret>"
    assert redact_word("trainer.seed=3") == "trainer.seed=3"
    assert redact_word("+a=[{n: b, password: c d}]") == "+a=[{n: b, password: <secret>}]"
    nested = "+a={x: {y: {credentials: {user: b, pin: 1}}}, api_keys: [b, c], n: 2}"
    assert redact_word(nested) == "+a={x: {y: {credentials: <secret>}}, api_keys: <secret>, n: 2}"


def test_plain_data() -> None:
    given = {
        "services": [{"name": "a", "password": "b"}, "https://u:p@h/"],
        "credentials": {"user": "me", "pin": 1234},
        "token": None,
        "max_tokens": 8,
        "api_keys": ["x", "y"],
        "headers": ["Authorization: Bearer 0123456789"],
    }
    assert redact_value(given) == {
        "services": [{"name": "a", "password": "<secret>"}, "https://<secret>@h/"],
        "credentials": {"user": "<secret>", "pin": "<secret>"},
        "token": None,
        "max_tokens": 8,
        "api_keys": ["<secret>", "<secret>"],
        "headers": ["Authorization: Bearer <secret>"],
    }


def test_registered_values_are_replaced_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    register("planted-1", "x.url")
    register({"pin": 1234567, "n": 7654321}, "x.password")
    register("/tmp", "x.path")
    register("word", "x.y")
    assert redact("planted-1 1234567 7654321 /tmp word") == "<secret> <secret> <secret> /tmp word"
    assert redact_texts({"planted-1": ["a planted-1"]}) == {"<secret>": ["a <secret>"]}
    found = Problem("bad planted-1", "at planted-1", "not planted-1")
    assert "planted" not in str(found)
    register("later-secret", "secret")
    assert "later" not in str(ConfigError(found, "later-secret"))
    logger = logging.Logger("any")
    logger.addHandler(StderrHandler())
    logger.warning("it is %s", "planted-1")
    assert capsys.readouterr().err == "warning: it is <secret>\n"
