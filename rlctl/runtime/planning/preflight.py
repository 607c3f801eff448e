"""Checks of a configuration that need no process and write nothing."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from rlctl.errors import ConfigError, Problem, ResourceError
from rlctl.files import free_space
from rlctl.plugins import load, parse_params
from rlctl.recipes import schema
from rlctl.recipes.role_table import ACTOR, ROLLOUT, Role, needed_roles, rollout_pool, trained_role
from rlctl.runtime.algorithms.base import Needs, rows_per_prompt
from rlctl.runtime.base.ops import divisors
from rlctl.runtime.data.model_folder import check_folder, is_hub_silent
from rlctl.runtime.planning.devices import Devices
from rlctl.runtime.planning.error_collector import ErrorCollector
from rlctl.runtime.planning.model_files import check_architecture
from rlctl.runtime.rollout.auto import engine_model_problems
from rlctl.storage import local
from rlctl.text import plural

LOG = logging.getLogger(__name__)

_TENSOR = f"{ROLLOUT.section}.tensor_model_parallel_size"


def check_batches(
    config: schema.Config, ranks: Mapping[str, int], needs: Needs
) -> Iterator[Problem]:
    """Yield a problem for each batch, mini-batch or number of ranks that leaves a remainder.

    Each problem names the nearest numbers that work. `ranks` maps pools to processes.
    """
    batch = config.data.train_batch_size
    placement = config.trainer.placement
    n = rows_per_prompt(config, needs)
    for role in (needed for needed in needed_roles(config, needs) if needed.learns):
        key = f"{role.section}.ppo_mini_batch_size"
        size = role.learner(config).ppo_mini_batch_size
        pool = role.pool(placement) or ""
        num_ranks = max(1, ranks[pool] // role.ranks_per_row(config))  # with different rows
        if size > batch or batch % size:
            yield Problem(
                f"{key}={size} does not divide data.train_batch_size={batch}",
                hint=f"nearest that do: {key}={_near(size, divisors(batch))}"
                f", or data.train_batch_size={_near_multiple(batch, size)}",
                fix=_fix(key, _near(size, divisors(batch))),
            )
        if size * n % num_ranks:
            near = _near_multiple(size, num_ranks // math.gcd(n, num_ranks))
            yield Problem(
                f"{key}={size} × {n} responses = {size * n} rows cannot be split evenly over "
                f"the {num_ranks} ranks of the pool {pool}",
                hint=f"nearest that can: {key}={near}",
                fix=_fix(key, near),
            )
    pool = rollout_pool(config, needs) or trained_role(config, needs).pool(placement) or ""
    num_ranks = ranks[pool]
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    if num_ranks % size:
        message = f"{_TENSOR}={size} does not divide the {num_ranks} ranks of the pool {pool}"
        yield _engine_problem(message, size, num_ranks)


def _engine_problem(message: str, size: int, number: int) -> Problem:
    """Return the problem of an engine on `size` ranks, which do not divide `number`."""
    near = _near(size, divisors(number))
    return Problem(message, hint=f"nearest that do: {_TENSOR}={near}", fix=_fix(_TENSOR, near))


def read_model_config(model: schema.Model, key: str) -> PretrainedConfig:
    """Return the model's config.json.

    Raises `ConfigError`, at `key`, where it cannot be read, and `ResourceError` for a model of the
    hub that is not cached while the hub does not respond.
    """
    check_folder(model.path, key)
    path = local(model.path)
    is_offline = not Path(path).exists() and is_hub_silent()
    try:
        loaded = AutoConfig.from_pretrained(
            path,
            trust_remote_code=model.trust_remote_code,
            local_files_only=is_offline,
            **model.override_config,
        )
        "".join(loaded.architectures or ())  # transformers does not check their types
        return loaded
    except Exception as error:  # of transformers, for values of any wrong type
        from rlctl.runtime.data.model_errors import check_own_code, config_error

        check_own_code(error, model.path, key.rpartition(".")[0])
        raise config_error(error, model.path, key, is_offline) from error


def check_model(config: schema.Config, role: Role = ACTOR) -> Iterator[Problem]:
    """Yield the problems of the model of `role`, the trained one.

    Its weights are complete and fit the config, its attention is supported, its attention heads can
    be split over the ranks, and its context holds a prompt and a response of the longest length.
    """
    data = config.data
    model = role.model(config)
    key = f"{role.model_key}.path"
    try:
        loaded = read_model_config(model, key)
    except ConfigError as error:
        yield from error.problems
        return
    text = loaded.get_text_config()
    yield from check_architecture(model, loaded, role.kind, key, role.fsdp(config))
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    device = "cuda" if config.trainer.device == "cuda" else "cpu"
    with suppress(ConfigError):  # `check_software` reports an unknown engine
        if role is ACTOR:
            yield from engine_model_problems(config.actor_rollout_ref.rollout, loaded, device)
    heads = getattr(text, "num_attention_heads", None)
    if heads and heads % size:
        message = f"{_TENSOR}={size} does not divide the model's {heads} attention heads"
        yield _engine_problem(message, size, heads)
    rank = model.lora_rank
    width = getattr(text, "hidden_size", None)
    if width and rank > width:
        yield Problem(
            f"{role.model_key}.lora_rank={rank} is above the model's hidden size, {width}",
            hint="8 to 128 are usual ranks; 0 trains all weights",
            fix=_fix(f"{role.model_key}.lora_rank", str(min(width, 64))),
        )
    context = getattr(text, "max_position_embeddings", None)
    longest = data.max_prompt_length + data.max_response_length
    is_policy = role.kind == ACTOR.kind  # conversations of reward models are cut to the context
    if is_policy and context is not None and longest > context:
        yield from _too_long(data, context, f"+{role.model_key}.override_config")


def _too_long(data: schema.Data, context: int, override: str) -> Iterator[Problem]:
    """Yield the problems of lengths beyond the context.

    Prompts keep their length within half of the context; else both lengths shrink in proportion.
    """
    longest = data.max_prompt_length + data.max_response_length
    prompt = data.max_prompt_length
    shorter = prompt
    if prompt > context // 2:
        shorter = max(1, context * prompt // longest)
    response = max(1, context - shorter)
    lengths = f"data.max_response_length={response}"
    if shorter != prompt:
        lengths = f"data.max_prompt_length={shorter} {lengths}"
    yield Problem(
        f"data.max_prompt_length + data.max_response_length = {longest} tokens, but the "
        f"model's context is {context}",
        hint=f"{lengths}, a model with a longer context, or "
        f"{override}.max_position_embeddings={longest}",
        fix=_fix("data.max_response_length", str(response)),
    )
    if shorter != prompt:
        yield Problem(
            f"data.max_prompt_length={prompt} leaves too few of the model's {context} tokens",
            hint=f"data.max_prompt_length={shorter}",
            fix=_fix("data.max_prompt_length", str(shorter)),
        )


def check_vocabulary(
    model: schema.Model, tokenizer: PreTrainedTokenizerBase, key: str
) -> dict[int, str]:
    """Return added tokens of the tokenizer that the model lacks, which no prompt may contain.

    `key` is that of the section `model`. Raises ConfigError if the model lacks other tokens.
    """
    try:
        text = read_model_config(model, f"{key}.path").get_text_config()
    except (ConfigError, ResourceError):  # `check_model` reports it
        return {}
    size = getattr(text, "vocab_size", None)
    if not isinstance(size, int):
        return {}
    lacking = {token for token, number in tokenizer.get_vocab().items() if number >= size}
    added: Any = tokenizer.added_tokens_encoder
    ordinary = lacking - set(added)
    if not lacking:
        return {}
    examples = ", ".join(map(repr, sorted(ordinary or lacking)[:3]))
    message = f"the tokenizer has {plural(len(lacking), 'token')} that the model lacks: {examples}"
    if ordinary:
        raise ConfigError(
            f"{message}, …",
            where=f"{key}.tokenizer_path" if model.tokenizer_path else f"{key}.path",
            hint="the tokenizer that the model was trained with, or a model whose embeddings were "
            f"resized to {len(tokenizer)} tokens (it has {size})",
        )
    LOG.warning(f"{message}; no prompt may contain one")
    return {added[token]: token for token in lacking}


def check_software(config: schema.Config, devices: Devices, inline: bool) -> None:
    """Check that the packages of Ray and the rollout engine are installed and support the config.

    Layers are compiled only where a compiler is. Raises `ConfigError` or `MissingExtraError`.
    """
    errors = ErrorCollector()
    if not inline:
        from rlctl.runtime.cluster.ray_access import check_packages

        errors.run(check_packages, config.ray_kwargs.ray_init)
    if config.actor_rollout_ref.actor.use_torch_compile:
        from rlctl.runtime.model.compiled import check_compiler

        errors.run(check_compiler, devices.kind)
    errors.run(_check_engine, config, devices)
    errors.raise_all()


def _check_engine(config: schema.Config, devices: Devices) -> None:
    rollout = config.actor_rollout_ref.rollout
    placement = config.trainer.placement
    num_ranks = placement.pools.get(placement.actor, devices.per_node) * devices.num_nodes
    device = devices.kind
    if placement.rollout not in (None, placement.actor):
        num_ranks = rollout.tensor_model_parallel_size  # each engine has separate processes
        if rollout.is_client:
            device = "cpu"
        from rlctl.runtime.rollout.weight_sync import uses_object_store

        uses_object_store(rollout, devices.kind)
    engine = load("engines", rollout.name)
    parse_params(engine, rollout.name, rollout.params, "actor_rollout_ref.rollout.params")
    engine.check(rollout, device, num_ranks)


def check_disk(config: schema.Config, root: Path, run: Path | None = None) -> None:
    """Raise `ResourceError` where a checkpoint does not fit on the disk.

    A checkpoint holds the exported weights, and weights and two moments of actor and critic. `run`
    is the folder of a run to resume, which may have finished.
    """
    weights = sum(
        file.stat().st_size
        for file in Path(local(config.actor_rollout_ref.model.path)).glob("*.safetensors")
    )
    need = 64 * 2**20
    if config.trainer.saves:
        need += 8 * weights
    root = Path(config.trainer.default_local_dir or root).expanduser().absolute()
    free = free_space(root)
    if free < need:
        from rlctl.runtime.planning.disk_space import refuse

        refuse(config, root, free, need, run)


def _near(size: int, choices: list[int]) -> str:
    below, above = [k for k in choices if k < size], [k for k in choices if k > size]
    return " or ".join(str(k) for k in (*below[-1:], *above[:1]))


def _fix(key: str, values: str) -> tuple[str, str] | None:
    """Return the change of `key` to the first of the `values`, joined by `or`."""
    first = values.partition(" or ")[0]
    return (key, f"{key}={first}") if first else None


def _near_multiple(number: int, size: int) -> str:
    below = number // size * size
    return " or ".join(str(k) for k in (below, below + size) if k)
