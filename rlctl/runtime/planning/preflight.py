"""Everything that can be found wrong before a process is started or a file written, found at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from transformers import AutoConfig, PretrainedConfig

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError, Problem, ResourceError, RlctlError
from rlctl.files import existing_parent, free_space
from rlctl.plugins import load
from rlctl.recipes import schema
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.model.lora import check_peft
from rlctl.runtime.planning.model_files import check_weights
from rlctl.runtime.rewards.pool import RewardPool
from rlctl.runtime.rewards.specs import reward_specs
from rlctl.runtime.rollout.weight_sync import uses_host_memory
from rlctl.storage import local

NUM_REWARD_ROWS = 10

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class ErrorCollector:
    """What the separate checks have found wrong, so that all of it is said at once."""

    errors: list[RlctlError] = field(default_factory=list)

    def run(self, check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What `check` returns, or None when it raises an error of ours, which is kept."""
        try:
            return check(*args, **kwargs)
        except RlctlError as error:
            self.add(error)
            return None

    def add(self, error: RlctlError) -> None:
        self.errors.append(error)

    def raise_all(self) -> None:
        """One error with every problem, once each: of the kind that all of them share, or a `ConfigError` for a mixture."""
        if not self.errors:
            return
        kinds = {type(error) for error in self.errors}
        problems = dict.fromkeys(problem for error in self.errors for problem in error.problems)
        raise (kinds.pop() if len(kinds) == 1 else ConfigError)(*problems)


@dataclass(frozen=True)
class Devices:
    """What a run computes on: `per_node` processes on each of `num_nodes` nodes, each with one device."""

    kind: str  # "cpu" or "cuda"
    num_nodes: int
    per_node: int

    @property
    def total(self) -> int:
        return self.num_nodes * self.per_node

    @classmethod
    def of(cls, trainer: schema.Trainer) -> Devices:
        """`trainer.device: auto` is the GPU where there is one; `n_gpus_per_node: 0` is every GPU, or one process on a CPU."""
        kind = (
            trainer.device
            if trainer.device != "auto"
            else ("cuda" if torch.cuda.is_available() else "cpu")
        )
        found = torch.cuda.device_count() if kind == "cuda" else 1
        per_node = trainer.n_gpus_per_node or found
        if kind == "cuda" and (per_node == 0 or (trainer.nnodes == 1 and per_node > found)):
            raise ResourceError(
                f"trainer.device={trainer.device} and trainer.n_gpus_per_node={trainer.n_gpus_per_node}, but this machine has {found} GPUs",
                hint=f"trainer.n_gpus_per_node={found}" if found else "trainer.device=cpu",
            )
        return cls(kind, trainer.nnodes, per_node)


def check_batches(config: schema.Config, ranks: Mapping[str, int], needs: Needs) -> list[Problem]:
    """Batches, mini-batches and ranks must divide without a remainder; the nearest numbers that do are named.

    `ranks` are pool -> processes: a role is judged by its own pool.
    """
    data, actor_rollout = config.data, config.actor_rollout_ref
    n = actor_rollout.rollout.n if Needs.GROUPS in needs else 1
    placement = config.trainer.placement
    sizes = {
        "actor_rollout_ref.actor.ppo_mini_batch_size": (
            actor_rollout.actor.ppo_mini_batch_size,
            placement.actor,
        )
    }
    if Needs.CRITIC in needs:
        sizes["critic.ppo_mini_batch_size"] = (config.critic.ppo_mini_batch_size, placement.critic)
    problems: list[Problem] = []
    for key, (size, pool) in sizes.items():
        num_ranks = ranks[pool]
        if size > data.train_batch_size or data.train_batch_size % size:
            problems.append(
                Problem(
                    f"{key}={size} does not divide data.train_batch_size={data.train_batch_size}",
                    hint=f"nearest that do: {key}={_near(size, _divisors(data.train_batch_size))}"
                    f", or data.train_batch_size={_near_multiple(data.train_batch_size, size)}",
                )
            )
        if size * n % num_ranks:
            fitting = [k for k in range(1, size + num_ranks + 1) if k * n % num_ranks == 0]
            problems.append(
                Problem(
                    f"{key}={size} × {n} answers = {size * n} rows cannot be shared out evenly to the {num_ranks} ranks of the pool {pool}",
                    hint=f"nearest that can: {key}={_near(size, fitting)}",
                )
            )
    for key, size in _tensor_parallel(config).items():
        if ranks[placement.actor] % size:
            problems.append(
                Problem(
                    f"{key}={size} does not divide the {ranks[placement.actor]} ranks of the pool {placement.actor}",
                    hint=f"nearest that do: {key}={_near(size, _divisors(ranks[placement.actor]))}",
                )
            )
    return problems


def _tensor_parallel(config: schema.Config) -> dict[str, int]:
    actor_rollout = config.actor_rollout_ref
    return {
        "actor_rollout_ref.actor.tensor_parallel_size": actor_rollout.actor.tensor_parallel_size,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": actor_rollout.rollout.tensor_model_parallel_size,
    }


def is_missing(model_path: str) -> bool:
    """Whether this can only be a folder, and there is none."""
    path = Path(local(model_path)).expanduser()
    return not path.exists() and (path.is_absolute() or len(path.parts) != 2)


def read_model_config(model: schema.Model, key: str) -> PretrainedConfig:
    """The model's config.json; `key` is the one that named it. `ConfigError`."""
    try:
        return AutoConfig.from_pretrained(
            local(model.path), trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"the model {model.path!r} has no readable config.json: {reason}", where=key
        ) from error


def check_model(config: schema.Config) -> list[Problem]:
    """The model's folder is complete, its heads can be shared out, and its context holds a prompt and an answer of the longest kind."""
    data = config.data
    try:
        loaded = read_model_config(config.actor_rollout_ref.model, "actor_rollout_ref.model.path")
    except ConfigError as error:
        return error.problems
    text = loaded.get_text_config()
    problems = check_weights(config.actor_rollout_ref.model, "actor_rollout_ref.model.path")
    heads = getattr(text, "num_attention_heads", None)
    for key, size in _tensor_parallel(config).items():
        if heads and heads % size:
            hint = f"nearest that do: {key}={_near(size, _divisors(heads))}"
            problems.append(
                Problem(
                    f"{key}={size} does not divide the model's {heads} attention heads", hint=hint
                )
            )
    context = getattr(text, "max_position_embeddings", None)
    longest = data.max_prompt_length + data.max_response_length
    if context is not None and longest > context:
        problems.append(
            Problem(
                f"data.max_prompt_length + data.max_response_length = {longest} tokens, but the model's context is {context}",
                hint=f"data.max_response_length={max(1, context - data.max_prompt_length)}, or shorter prompts",
            )
        )
    return problems


def check_engine(config: schema.Config, devices: Devices, separate: bool) -> None:
    """The rollout engine is there and can do what is asked of it; a `separate` one has one device. `ConfigError`, `MissingExtraError`."""
    rollout, placement = config.actor_rollout_ref.rollout, config.trainer.placement
    num_ranks = (
        1
        if separate
        else placement.pools.get(placement.actor, devices.per_node) * devices.num_nodes
    )
    load("engines", rollout.name).check(rollout, devices.kind, num_ranks)
    uses_host_memory(rollout, devices.kind)


def check_placement(
    config: schema.Config, devices: Devices, pools: Sequence[str], rollout_pool: str | None
) -> list[Problem]:
    """The pools share the GPUs of a node out among them: together they cannot have more than there are. Of a CPU all have a part.

    A pool of rollout engines has no other role: an engine may die, and is started again.
    """
    sizes = {name: config.trainer.placement.pools.get(name, devices.per_node) for name in pools}
    problems = [] if rollout_pool is None else _check_rollout_pool(config, rollout_pool)
    if devices.kind != "cuda" or sum(sizes.values()) <= devices.per_node:
        return problems
    listing = ", ".join(f"{name}: {size}" for name, size in sizes.items())
    return [
        *problems,
        Problem(
            f"the pools want {sum(sizes.values())} GPUs a node ({listing}), but each node has {devices.per_node}",
            where="trainer.placement",
            hint="say in trainer.placement.pools how many each pool has, or put the roles into one pool",
        ),
    ]


def _check_rollout_pool(config: schema.Config, pool: str) -> list[Problem]:
    placement, rollout = config.trainer.placement, config.actor_rollout_ref.rollout
    problems: list[Problem] = []
    if pool in (placement.reference, placement.critic):
        others = [role for role in ("reference", "critic") if getattr(placement, role) == pool]
        problems.append(
            Problem(
                f"pool {pool!r} holds the rollout engines and {' and '.join(others)}",
                "trainer.placement",
                "a pool of its own: an engine that dies is started again, and would take other roles with it",
            )
        )
    if rollout.tensor_model_parallel_size > 1:
        problems.append(
            Problem(
                f"actor_rollout_ref.rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size}: an engine of a pool of its own"
                " has one device",
                "trainer.placement.rollout",
                "1, or the engines in the actor's processes (trainer.placement.rollout=null)",
            )
        )
    return problems


def check_reward(reward: schema.Reward, rows: Sequence[PromptRow]) -> None:
    """Call the reward functions on ten real rows, each answered with its own ground truth. `ConfigError` when not one call succeeds.

    A single failure is no mistake of the configuration: an answer that cannot be scored scores 0. The first row goes alone, so that a
    function that always hangs takes one timeout and not ten.
    """
    with RewardPool(reward_specs(reward), timeout_s=reward.timeout_s, num_processes=1) as pool:
        some = rows[:NUM_REWARD_ROWS]
        first_error: str | None = None
        for part in (some[:1], some[1:]):
            report = pool.score(part, [str(row.ground_truth) for row in part])
            first_error = first_error or report.first_error
            if report.num_timeouts == len(part) > 0:
                break
            if any(result.error is None for result in report.results):
                return
        if first_error is not None:
            raise ConfigError(
                f"the reward function fails on every one of the first {len(some)} training rows: {first_error}",
                hint="`rlctl reward` tries it on one answer",
            )


def check_built(config: schema.Config) -> list[Problem]:
    """Keys that the schema knows and that nothing behind them does yet: said, not silently passed over."""
    actor_rollout, critic = config.actor_rollout_ref, config.critic
    wanted = {
        "actor_rollout_ref.actor.tensor_parallel_size": actor_rollout.actor.tensor_parallel_size
        > 1,
        "actor_rollout_ref.actor.context_parallel_size": actor_rollout.actor.context_parallel_size
        > 1,
        "actor_rollout_ref.rollout.multi_turn.enable": actor_rollout.rollout.multi_turn.enable,
        "actor_rollout_ref.model.use_remove_padding": not actor_rollout.model.use_remove_padding,
        "critic.model.use_remove_padding": not critic.model.use_remove_padding,
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload": actor_rollout.actor.fsdp_config.optimizer_offload,
        "critic.tensor_parallel_size": critic.tensor_parallel_size > 1,
        "critic.context_parallel_size": critic.context_parallel_size > 1,
        "critic.fsdp_config.optimizer_offload": critic.fsdp_config.optimizer_offload,
        "reward.reward_model.enable": config.reward.reward_model.enable,
    }
    set_keys = [key for key, is_set in wanted.items() if is_set]
    return [
        Problem(f"{key} is set, but rlctl cannot do that yet", hint="leave it at its default")
        for key in set_keys
    ]


def check_adapters(config: schema.Config, needs: Needs) -> None:
    """What trains adapters must be there. `MissingExtraError`."""
    if config.actor_rollout_ref.model.lora_rank > 0 or (
        Needs.CRITIC in needs and config.critic.model.lora_rank > 0
    ):
        check_peft()


def check_disk(config: schema.Config, root: Path) -> None:
    """A checkpoint of the model must fit: weights for export, and weights with two moments for actor and critic. `ResourceError`."""
    weights = sum(
        file.stat().st_size
        for file in Path(local(config.actor_rollout_ref.model.path)).glob("*.safetensors")
    )
    need = 64 * 2**20 + (8 * weights if config.trainer.save_freq > 0 else 0)
    root = Path(config.trainer.default_local_dir or root).expanduser().absolute()
    free = free_space(root)
    if free < need:
        raise ResourceError(
            f"{existing_parent(root)} has {free / 2**20:.0f} MiB free, and the run needs about {need / 2**20:.0f} MiB",
            hint="trainer.default_local_dir=DIR on a larger disk, or trainer.save_freq=-1",
        )


def _divisors(number: int) -> list[int]:
    return [k for k in range(1, number + 1) if number % k == 0]


def _near(size: int, choices: list[int]) -> str:
    below, above = [k for k in choices if k < size], [k for k in choices if k > size]
    return " or ".join(str(k) for k in (*below[-1:], *above[:1]))


def _near_multiple(number: int, size: int) -> str:
    below = number // size * size
    return " or ".join(str(k) for k in (below, below + size) if k)
