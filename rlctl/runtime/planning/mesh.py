"""Device mesh of each role: how its ranks divide rows and tokens, and whether the sizes fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from transformers import PretrainedConfig

from rlctl.errors import ConfigError, Problem, ResourceError
from rlctl.recipes import schema
from rlctl.recipes.role_table import Role, built_roles
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.cluster.pools import RANKS_PER_RELAY
from rlctl.runtime.model.compiled import KEY as COMPILE_KEY
from rlctl.runtime.model.mixture import num_experts
from rlctl.runtime.model.state_layers import has_states
from rlctl.runtime.planning.preflight import read_model_config

_SEQUENCE = "ulysses_sequence_parallel_size"
_TENSOR = "tensor_model_parallel_size"
_EXPERTS = "expert_model_parallel_size"
_PIPELINE = "pipeline_model_parallel_size"


def check_meshes(
    config: schema.Config, ranks: Mapping[str, int], needs: Needs
) -> Iterator[Problem]:
    """Yield a problem for each size of a mesh that does not divide the ranks or the heads.

    `ranks` maps pools to processes. A model whose config.json cannot be read is not checked.
    """
    for role in built_roles(config, needs):
        fsdp = role.fsdp(config)
        pool = role.pool(config.trainer.placement) or ""
        if fsdp is not None and fsdp.ranks_per_row > 1:
            yield from _check(role, config, fsdp, pool, ranks[pool])
        if fsdp is not None and fsdp.expert_model_parallel_size > 1:
            yield from _check_experts(role, config, fsdp, ranks[pool])


def _check(
    role: Role, config: schema.Config, fsdp: schema.FSDP, pool: str, num_ranks: int
) -> Iterator[Problem]:
    """Yield the problems of the mesh of one role on `num_ranks` ranks."""
    tensor = fsdp.tensor_model_parallel_size
    sequence = fsdp.ulysses_sequence_parallel_size
    stages = fsdp.pipeline_model_parallel_size
    loaded = _text_config(role, config)
    if tensor > 1:
        yield from _check_split(role, config, tensor, loaded)
    if stages > 1:
        yield from _check_stages(role, config, stages, loaded)
    if loaded is not None and has_states(loaded):
        given = {_SEQUENCE: sequence, _TENSOR: tensor, _PIPELINE: stages}
        yield from (_states(role, loaded, name) for name, size in given.items() if size > 1)
    heads = getattr(loaded, "num_attention_heads", None)
    if heads and heads % tensor:
        heads = None
    limit = min(num_ranks, RANKS_PER_RELAY)
    per_stage = tensor * sequence
    sizes = (_TENSOR, tensor, 1), (_SEQUENCE, sequence, tensor), (_PIPELINE, stages, per_stage)
    for name, size, others in sizes:
        fitting = [
            n
            for n in range(1, num_ranks + 1)
            if num_ranks % (n * others) == 0
            and limit % (n * others) == 0
            and (name != _SEQUENCE or not heads or heads // others % n == 0)
        ]
        if size in fitting or num_ranks % others:
            continue
        counted = f"the {num_ranks // others} ranks of the pool {pool}"
        if others > 1:
            counted += f" for each of the {others} that split layers"
            if name != _SEQUENCE:
                counted += " and rows"
        if heads and name == _SEQUENCE:
            counted += f" and the {heads // others} attention heads of a rank"
        key = f"{role.fsdp_key}.{name}"
        near = max((n for n in fitting if n <= size), default=1)
        yield Problem(
            f"the mesh of the {role.name} does not fit: {key}={size} must divide {counted}",
            hint=f"sizes that do: {', '.join(map(str, fitting)) or 'none'}",
            fix=(key, f"{key}={near}"),
        )


def _states(role: Role, loaded: PretrainedConfig, name: str) -> Problem:
    """Return the problem of a size that divides tokens or layers of a model with states."""
    key = f"{role.fsdp_key}.{name}"
    return Problem(
        f"layers of {loaded.model_type} carry a state from token to token, which {name} "
        "cannot divide",
        key,
        f"{key}=1; FSDP2 shards such models over all ranks",
        (key, f"{key}=1"),
    )


def _check_split(
    role: Role, config: schema.Config, size: int, loaded: PretrainedConfig | None
) -> Iterator[Problem]:
    """Yield why `size` ranks cannot split the layers of the role's model."""
    from rlctl.runtime.model.tensor_parallel import unsplittable

    key = f"{role.fsdp_key}.{_TENSOR}"
    if loaded is not None:
        for problem in unsplittable(loaded, size, role.kind == "policy"):
            yield replace(problem, where=key)
    if role.learns and role.model(config).lora_rank > 0:
        yield from _check_adapters(role, config, size, loaded)
    if _compiles(role, config):
        text = f"layers that {size} ranks split cannot be compiled"
        yield Problem(text, key, f"{COMPILE_KEY}=false, or {key}=1")


def _check_stages(
    role: Role, config: schema.Config, size: int, loaded: PretrainedConfig | None
) -> Iterator[Problem]:
    """Yield why the layers of the role's model cannot be divided over `size` stages."""
    from rlctl.runtime.model.pipeline_parallel import unsplittable

    key = f"{role.fsdp_key}.{_PIPELINE}"
    if loaded is not None:
        for problem in unsplittable(loaded, size):
            yield replace(problem, where=key)
    if _compiles(role, config):
        text = f"layers of {size} stages cannot be compiled"
        yield Problem(text, key, f"{COMPILE_KEY}=false, or {key}=1")


def _compiles(role: Role, config: schema.Config) -> bool:
    """Return True if the layers of the role's model are compiled."""
    return bool(config.actor_rollout_ref.actor.use_torch_compile) and role.kind != "classifier"


def _check_adapters(
    role: Role, config: schema.Config, size: int, loaded: PretrainedConfig | None
) -> Iterator[Problem]:
    """Yield why the adapters of layers that `size` ranks split are not supported."""
    from rlctl.runtime.model.tensor_parallel import unsplittable_adapters

    model = role.model(config)
    name = role.model_key
    key = f"{role.fsdp_key}.{_TENSOR}"
    others = [] if loaded is None else unsplittable_adapters(loaded, model.target_modules)
    if model.use_dora:
        text = f"DoRA adapters of layers that {size} ranks split are not supported"
        yield Problem(text, key, f"{name}.use_dora=false, or {key}=1")
    elif others:
        yield Problem(
            f"LoRA adapters of {', '.join(others)} are not supported where {size} ranks split "
            "layers",
            key,
            f"{name}.target_modules=[all-linear]",
        )


def _check_experts(
    role: Role, config: schema.Config, fsdp: schema.FSDP, num_ranks: int
) -> Iterator[Problem]:
    """Yield the problem of experts that cannot be divided over the ranks of one role."""
    key = f"{role.fsdp_key}.{_EXPERTS}"
    size = fsdp.expert_model_parallel_size
    tensor = fsdp.tensor_model_parallel_size
    rest = num_ranks // tensor // fsdp.pipeline_model_parallel_size
    sharing = rest if fsdp.fsdp_size == -1 else fsdp.fsdp_size
    text = _text_config(role, config)
    number = 0 if text is None else num_experts(text)
    subject = f"the mesh of the {role.name} does not fit: {key}={size}"
    if size != sharing:
        yield Problem(
            f"{subject} is not the number of ranks that share one copy of the parameters "
            f"({sharing})",
            hint=f"{role.fsdp_key}.fsdp_size={size}, or {key}={sharing}, or 1",
        )
    elif text is not None and (not number or number % (size * tensor)):
        also = f" times {_TENSOR}={tensor}" if tensor > 1 else ""
        yield Problem(
            f"{subject}{also} does not divide the {number} experts of the model",
            hint=f"{key}=1: the weights of a layer's experts are then gathered for each pass",
            fix=(key, f"{key}=1"),
        )
    elif fsdp.offload_policy:
        offload = f"{role.fsdp_key}.offload_policy"
        yield Problem(
            f"{subject} keeps the experts on their ranks, and {offload}=true in host memory",
            hint=f"{offload}=false, or {key}=1",
        )


def _text_config(role: Role, config: schema.Config) -> PretrainedConfig | None:
    """Return the config of the role's model; None if it cannot be read."""
    try:
        loaded = read_model_config(role.model(config), f"{role.model_key}.path")
    except (ConfigError, ResourceError):
        return None  # reported by the checks of the model
    return loaded.get_text_config()


def draw_mesh(fsdp: schema.FSDP, num_ranks: int) -> str:
    """Return the sizes of a role's mesh, such as `data 2 × sequence 2`; empty for data only."""
    named = {
        "data": num_ranks // fsdp.ranks_per_row,
        "pipeline": fsdp.pipeline_model_parallel_size,
        "sequence": fsdp.ulysses_sequence_parallel_size,
        "tensor": fsdp.tensor_model_parallel_size,
    }
    used = [f"{name} {size}" for name, size in named.items() if size > 1 or name == "data"]
    sizes: list[str] = []
    if len(used) > 1:
        sizes.append(" × ".join(used))
    if fsdp.expert_model_parallel_size > 1:
        sizes.append(f"experts {fsdp.expert_model_parallel_size}")
    return ", ".join(sizes)
