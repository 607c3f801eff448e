"""Checks of a model before it is loaded: its config, its weight files and their headers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from rlctl.errors import ConfigError, Problem
from rlctl.recipes import schema
from rlctl.runtime.data.tokenizer import tokenizer_of
from rlctl.runtime.model.attention import use_rlctl_attention
from rlctl.runtime.model.hf_files import INDEX, SINGLE_FILE, tensors_in, weight_files, weight_folder
from rlctl.runtime.model.load import Kind
from rlctl.runtime.model.padded_rows import check_undivided
from rlctl.runtime.model.weight_check import check_fit
from rlctl.runtime.planning.model_size import UnknownSizeError, build_on_meta

_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_WRITERS = "ForCausalLM", "ForConditionalGeneration"
_AGAIN = "copy or download the model again"


def check_architecture(
    model: schema.Model,
    config: PretrainedConfig,
    kind: Kind,
    key: str,
    fsdp: schema.FSDP | None = None,
) -> list[Problem]:
    """Return the problems of a model with `config`, built without data, and of its weights.

    `key` is the config key of the model, `fsdp` the role's mesh. A model whose code needs data is
    not checked.
    """
    writers = [name for name in config.architectures or () if name.endswith(_WRITERS)]
    if kind == "classifier" and writers:
        return [_generative(model, writers[0], key)]
    problems = check_weights(model, key)
    try:
        built = build_on_meta(config, model, kind)
        if not problems:
            weights = {
                name: torch.empty(entry["shape"], device="meta")
                for file in weight_files(model)
                for name, entry in tensors_in(file).items()
            }
            problems = check_fit(built, weights, key, kind == "new_classifier") if weights else []
        use_rlctl_attention(built)
        if fsdp is not None:
            check_undivided(built, fsdp.ranks_per_row)
    except UnknownSizeError:
        pass  # the memory plan warns of it
    except ConfigError as error:
        problems += error.problems
    return problems


def _generative(model: schema.Model, architecture: str, key: str) -> Problem:
    """Return the problem of a reward model that writes text: its head would be random."""
    return Problem(
        f"{model.path} is a {architecture}, which writes text and has no head for a score",
        key,
        f"reward.judge.model.path={model.path} 'reward.functions=[judge]' "
        "reward.reward_model.enable=false scores with it as a judge; `rlctl train rm` trains a "
        "classifier from it",
    )


def check_tokenizer(
    model: schema.Model, actors: PreTrainedTokenizerBase, key: str
) -> Iterator[Problem]:
    """Yield a problem if the tokenizer of `model` has other tokens than the actor's.

    A policy can only give log-probs of another one's responses if the token ids mean the same.
    """
    found = tokenizer_of(model).get_vocab()
    wanted = actors.get_vocab()
    if found != wanted:
        token = min(found.items() ^ wanted.items(), key=lambda entry: entry[1])[0]
        yield Problem(
            f"the tokenizer of {model.path} is not the actor's: the token {token!r} is "
            f"{found.get(token, 'missing')} instead of {wanted.get(token, 'missing')}",
            key,
            "a model of the same family; distillation between tokenizers is not supported",
        )


def check_weights(model: schema.Model, key: str) -> list[Problem]:
    """Return a problem for missing weights, missing shards of an index, or truncated files.

    `key` is the config key of the model. Models with random weights, and hub models that are not in
    the cache, are not checked.
    """
    folder = weight_folder(model)
    if folder is None:
        return []
    try:
        files = weight_files(model)
    except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        text = f"{folder / INDEX} cannot be read as an index of weights: {error}"
        return [Problem(text, key, _AGAIN)]
    if not files:
        return [_no_weights(folder, key)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        text = f"{len(missing)} of {len(files)} weight files are missing in {folder}: "
        return [Problem(text + ", ".join(missing), key, _AGAIN)]
    damaged = {file: _damage(file) for file in files}
    return [
        Problem(f"{file} is damaged: {problem}", key, _AGAIN, code="E-MODEL-FOLDER")
        for file, problem in damaged.items()
        if problem
    ]


def _no_weights(folder: Path, key: str) -> Problem:
    pickles = [name for name in _PICKLES if (folder / name).is_file()]
    if pickles:
        return Problem(
            f"{folder} holds its weights as pickle only ({pickles[0]}), which can run any code",
            key,
            "convert it: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER) "
            "of transformers writes *.safetensors",
        )
    return Problem(
        f"{folder} holds no weights: neither {SINGLE_FILE} nor an index of shards",
        key,
        "a folder with *.safetensors, or actor_rollout_ref.model.init=random for random weights",
    )


def _damage(file: Path) -> str | None:
    """Return what is wrong with a safetensors file, or None.

    It has eight bytes with the length of the header, the header in JSON, and the data it lists.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
    if size < 8 + length:
        return f"its header should take {length} bytes, and the file has {size}"
    try:
        end = max((entry["data_offsets"][1] for entry in tensors_in(file).values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        return "its header is not that of a safetensors file"
    expected = 8 + length + end
    if size == expected:
        return None
    return f"{size} bytes long instead of {expected}"
