"""Models in GGUF files: converted once, read as any folder, refused if they cannot be read."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlctl import gguf_model
from rlctl.errors import ConfigError, MissingExtraError, ResourceError
from rlctl.quickstart import real_path
from rlctl.runtime.data.tokenizer import load_tokenizer, stop_token_ids
from rlctl.storage import CACHE_VARIABLE
from tests.e2e.command import rlctl
from tests.models import CHAT_TEMPLATE, tiny_model, tiny_tokenizer
from tests.settings import given

GGUF = pytest.mark.extra("gguf")
# Weights of a layer: transformers' names and those of GGUF files.
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
END_OF_TURN = 2


def model_and_tokens() -> tuple[PreTrainedModel, list[str]]:
    """Return a tiny Llama and its tokens, of which the last is a merge of two others."""
    vocabulary = tiny_tokenizer().get_vocab()
    tokens = [*sorted(vocabulary, key=vocabulary.__getitem__), "ab"]
    return tiny_model("llama", vocab_size=len(tokens)).eval(), tokens


def write(path: Path, *, architecture: str = "llama", lacking: str = "", parts: int = 0) -> Path:
    """Write the tiny model with matrices in 8 bits."""
    import gguf

    model, tokens = model_and_tokens()
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(END_OF_TURN)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    if parts:
        writer.add_uint16("split.count", parts)
    for name, value in quantized(model).items():
        if name != lacking:
            data, kind = value
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantized(model: PreTrainedModel) -> dict[str, tuple[Any, Any]]:
    """Return data and type of each tensor; the model gets the values that the data stands for."""
    import gguf

    found: dict[str, tuple[Any, Any]] = {}
    for name, parameter in model.named_parameters():
        value, kind = parameter.detach(), gguf.GGMLQuantizationType.F32
        if value.dim() == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
        heads = {"q_proj": model.config.num_attention_heads}
        heads["k_proj"] = model.config.num_key_value_heads
        number = next((heads[each] for each in heads if each in name), 0)
        if number:  # GGUF files pair neighbours in rotary embeddings
            rows = value.view(number, 2, -1, value.shape[-1])
            value = rows.transpose(1, 2).reshape(value.shape)
        data = gguf.quantize(value.contiguous().numpy(), kind)
        back = torch.from_numpy(gguf.dequantize(data, kind)).view(value.shape)
        if number:
            back = back.view(number, -1, 2, value.shape[-1]).transpose(1, 2).reshape(value.shape)
        parameter.data.copy_(back)
        found[in_gguf(name)] = (data, kind)
    return found


def in_gguf(name: str) -> str:
    if not name.startswith("model.layers."):
        names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
        return f"{names[name.removesuffix('.weight')]}.weight"
    number, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{LAYER[rest.removesuffix('.weight')]}.weight"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the cache, which is empty."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    gguf_model._converted.cache_clear()
    return tmp_path / "cache"


def converted(cache: Path) -> list[str]:
    """Return what conversions left in the cache, without locks."""
    return sorted(file.name for file in cache.glob("gguf-*/*") if file.name != ".lock")


@GGUF
def test_the_folder_has_the_files_weights_tokens_and_template(tmp_path: Path) -> None:
    folder = real_path(str(write(tmp_path / "Tiny.GGUF")))
    model, tokens = model_and_tokens()
    quantized(model)
    found = AutoModelForCausalLM.from_pretrained(folder)
    assert found.dtype == torch.float32
    expected = dict(model.named_parameters())
    for name, value in found.named_parameters():
        assert torch.equal(value, expected[name]), name
    tokenizer = load_tokenizer(folder)
    assert tokenizer.convert_ids_to_tokens([*range(len(tokens))]) == tokens
    assert tokenizer.encode("ab") == [len(tokens) - 1]
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert stop_token_ids(tokenizer, folder) == (0, END_OF_TURN)
    assert {file.stat().st_mode & 0o044 for file in Path(folder).iterdir()} == {0o044}


@GGUF
def test_a_file_is_trained_and_exported_as_a_folder(tmp_path: Path, cache: Path) -> None:
    write(tmp_path / "tiny.gguf")
    own = given(model="tiny.gguf", train="quickstart", val="quickstart", train_rows=4, val_rows=2)
    own += given(batch=2, mini_batch=2, prompt=200, response=8, steps=1, save=1, logger=[])
    words = ["train", "grpo", "--inline", "--name", "run", *own]
    more = {CACHE_VARIABLE: str(cache)}
    said = rlctl(*words, "--dry-run", cwd=tmp_path, more=more).stderr
    assert said.count("the model tiny.gguf is converted once to float32 safetensors") == 1
    said = rlctl(*words, cwd=tmp_path, more=more).stderr
    assert said.count("the model tiny.gguf is read as float32 safetensors, converted before") == 1
    assert "tiny.gguf" in rlctl("show", "run", cwd=tmp_path).stdout
    rows = given(val="quickstart", val_rows=2, prompt=200, response=8)
    assert "val-core" in rlctl("eval", "tiny.gguf", *rows, cwd=tmp_path, more=more).stdout
    rlctl("export", "run", "out", cwd=tmp_path, more=more)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert converted(cache) == ["model"]


def cut(path: Path) -> None:
    os.truncate(write(path), path.stat().st_size - 100)


@GGUF
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.write_bytes(b"no model"), "is no complete GGUF file"),
        (lambda path: path.touch(), "is no complete GGUF file"),
        (cut, "is no complete GGUF file"),
        (lambda path: write(path, architecture="unheard"), "cannot be read by transformers"),
        (lambda path: write(path, lacking="blk.1.ffn_up.weight"), "lacks 1 of"),
        (lambda path: write(path, parts=2), "is one of 2 parts"),
        (lambda _: None, "there is no model file"),
    ],
    ids=["text", "empty", "cut", "architecture", "weight", "part", "missing"],
)
def test_what_cannot_be_read_is_one_error(
    make: Callable[[Path], Any], says: str, tmp_path: Path, cache: Path
) -> None:
    make(tmp_path / "tiny.gguf")
    words = given(model="tiny.gguf", train="quickstart", val="quickstart")
    done = rlctl("train", "grpo", "--inline", "--dry-run", *words, cwd=tmp_path, code=3)
    assert done.stderr.count("error:") == 1
    assert says in done.stderr
    assert converted(cache) == []


def test_a_missing_package_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "tiny.gguf").touch()
    with pytest.raises(MissingExtraError, match="needs the package gguf") as caught:
        real_path(str(tmp_path / "tiny.gguf"))
    assert caught.value.problems[0].hint == "pip install 'rlctl[gguf]'"


@GGUF
def test_a_file_of_the_hub_is_named_after_its_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository, commit = tmp_path / "models--owner--name", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    file = write(repository / "snapshots" / commit / "tiny.gguf")
    assert real_path("owner/name:tiny.gguf") == real_path(str(file))


def in_process(work: Callable[[], object]) -> Any:
    process = get_context("fork").Process(target=work)
    process.start()
    return process


@GGUF
def test_processes_share_one_conversion_and_a_killed_one_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write(tmp_path / "tiny.gguf"))
    with monkeypatch.context() as patch:
        patch.setattr(gguf_model, "apply_umask", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        killed = in_process(lambda: real_path(path))
        killed.join(120)
        assert killed.exitcode == -signal.SIGKILL
    assert "model" not in converted(cache)
    convert, marks = gguf_model._convert, tmp_path / "marks"
    marks.mkdir()

    def counted(*arguments: Any) -> None:
        (marks / str(os.getpid())).touch()
        convert(*arguments)

    monkeypatch.setattr(gguf_model, "_convert", counted)
    started = [in_process(lambda: real_path(path)) for _ in range(2)]
    for process in started:
        process.join(120)
        assert process.exitcode == 0
    assert len([*marks.iterdir()]) == 1
    assert converted(cache) == ["model"]


@GGUF
def test_a_write_that_fails_is_an_error_of_the_disk(tmp_path: Path, cache: Path) -> None:
    path = str(write(tmp_path / "tiny.gguf"))

    def convert_within_a_limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
        with pytest.raises(ResourceError, match=r"cannot be written as float32: .*too large"):
            real_path(path)

    process = in_process(convert_within_a_limit)
    process.join(120)
    assert process.exitcode == 0
    assert converted(cache) == []


@GGUF
def test_a_changed_file_is_converted_again(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "tiny.gguf")
    first = real_path(str(path))
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    os.utime(path, (1, 1))
    assert real_path(str(path)) != first
    assert converted(cache) == ["model", "model"]


def test_a_name_without_owner_is_a_missing_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_model, "require", lambda *_: None)
    with pytest.raises(ConfigError, match="there is no model file"):
        real_path("name-without-owner:tiny.gguf")
