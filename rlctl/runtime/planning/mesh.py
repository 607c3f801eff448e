"""Device mesh of each role: how its ranks divide rows and tokens, and whether the sizes fit."""

from __future__ import annotations

from collections.abc import Mapping

from rlctl.errors import ConfigError, Problem
from rlctl.recipes import schema
from rlctl.recipes.roles import Role, built_roles
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.cluster.pools import RANKS_PER_RELAY
from rlctl.runtime.planning.preflight import check_batches, read_model_config

_SEQUENCE = "ulysses_sequence_parallel_size"


def check_sizes(config: schema.Config, ranks: Mapping[str, int], needs: Needs) -> list[Problem]:
    """Return the problems of batches and meshes with the processes of each pool, `ranks`."""
    return [*check_meshes(config, ranks, needs), *check_batches(config, ranks, needs)]


def check_meshes(config: schema.Config, ranks: Mapping[str, int], needs: Needs) -> list[Problem]:
    """Return a problem for each size of a mesh that does not divide the ranks or the heads.

    `ranks` maps pools to processes. A model whose config.json cannot be read is not checked.
    """
    problems: list[Problem] = []
    for role in built_roles(config, needs):
        fsdp, pool = role.fsdp(config), role.pool(config.trainer.placement)
        if fsdp is not None and fsdp.ranks_per_row > 1:
            problems += _check(role, config, fsdp, pool or "", ranks[pool or ""])
    return problems


def _check(
    role: Role, config: schema.Config, fsdp: schema.FSDP, pool: str, num_ranks: int
) -> list[Problem]:
    """Return the problems of the mesh of one role on `num_ranks` ranks."""
    key, size = f"{role.fsdp_key}.{_SEQUENCE}", fsdp.ulysses_sequence_parallel_size
    heads = _num_heads(role, config)
    sizes = range(1, num_ranks + 1)
    fitting = [n for n in sizes if num_ranks % n == 0 and (not heads or heads % n == 0)]
    if num_ranks > RANKS_PER_RELAY:
        fitting = [n for n in fitting if RANKS_PER_RELAY % n == 0]
    if size in fitting:
        return []
    near = max((n for n in fitting if n <= size), default=1)
    counted = f"the {num_ranks} ranks of the pool {pool}"
    if heads:
        counted += f" and the {heads} attention heads of the model"
    return [
        Problem(
            f"the mesh of the {role.name} does not fit: {key}={size} does not divide {counted}",
            hint=f"sizes that do: {', '.join(map(str, fitting))}",
            fix=(key, f"{key}={near}"),
        )
    ]


def _num_heads(role: Role, config: schema.Config) -> int | None:
    """Return the attention heads of the role's model; None if they are unknown."""
    try:
        loaded = read_model_config(role.model(config), f"{role.model_key}.path")
    except ConfigError:
        return None  # reported by the checks of the model
    return getattr(loaded.get_text_config(), "num_attention_heads", None)


def draw_mesh(fsdp: schema.FSDP, num_ranks: int) -> str:
    """Return the sizes of a role's mesh in words, such as `data 2 × sequence 2`; empty for one."""
    size = fsdp.ulysses_sequence_parallel_size
    if size == 1:
        return ""
    return f"data {num_ranks // fsdp.ranks_per_row} × sequence {size}"
