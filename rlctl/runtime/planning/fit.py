"""Search of `rlctl fit`: the fewest devices, and the largest micro-batch, that the memory allows.

The search evaluates the planner's estimate (`memory.py`) for several meshes and ways to save
memory; no weights are read. It leaves a tenth of a device for what the estimate does not include.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import attrgetter
from pathlib import Path
from typing import Any

from rlctl.errors import ResourceError
from rlctl.quickstart import NAME
from rlctl.recipes import schema
from rlctl.recipes.compose import Recipe
from rlctl.recipes.roles import ACTOR, Role, built_roles, rollout_pool
from rlctl.runtime.algorithms.base import Algorithm, rows_per_prompt
from rlctl.runtime.algorithms.references import routed_models
from rlctl.runtime.build import load_algorithm
from rlctl.runtime.model.load import Kind
from rlctl.runtime.ops import ceil_div
from rlctl.runtime.planning.devices import Devices, pool_sizes
from rlctl.runtime.planning.gpus import Device
from rlctl.runtime.planning.mesh import check_sizes
from rlctl.runtime.planning.model_size import ModelSize
from rlctl.runtime.planning.placement import check_placement
from rlctl.runtime.planning.role_memory import GIB, plan_memory, read_size

ENOUGH = 8192  # tokens of a micro-batch above which a GPU computes at its full speed
_FEWEST_SEQUENCES = 32  # that an engine decodes at a time
# Ways to save memory, the fastest first.
_SAVINGS = (
    "none",
    "checkpointing",
    "checkpointing, reshard",
    "checkpointing, reshard, optimizer offload",
    "checkpointing, reshard, optimizer offload, activation offload",
    "checkpointing, reshard, offload",
)
# Changes of the training itself, which are proposed only where nothing else fits.
_LORA = {"lora_rank": 32}
_HALF = {"model_dtype": "bf16"}


@dataclass(frozen=True)
class Mesh:
    """Nodes, devices of each, and ranks that share one copy of the parameters (-1: all)."""

    nodes: int
    per_node: int
    fsdp_size: int = -1

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.nodes * self.per_node


@dataclass(frozen=True)
class Fit:
    """Settings for one mesh; `rows` of the longest length are in a micro-batch, 0: none fit."""

    mesh: Mesh
    savings: str
    rows: int
    tokens: int
    peak: int  # bytes on the fullest device
    overrides: list[str] = field(default_factory=list)
    reason: str = ""  # why nothing fits
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Search:
    """Model, algorithm and device of a search; sizes of models are computed once."""

    config: schema.Config
    algorithm: Algorithm
    device: Device
    fixed: frozenset[str]  # keys that the user set
    sizes: dict[tuple[str, Kind], ModelSize] = field(default_factory=dict)

    @classmethod
    def of(cls, recipe: Recipe, config: schema.Config, device: Device) -> Search:
        """Build the search for a recipe, with `config` as its resolved configuration."""
        given = (key for key, chain in recipe.origins.items() if chain[-1].level == 3)
        return cls(config, load_algorithm(config, 1), device, frozenset(given))

    @property
    def usable(self) -> int:
        """Bytes of a device for the roles, without a tenth, and at least 1 GiB, for the rest."""
        return self.device.memory - max(self.device.memory // 10, GIB)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return self.config.data.max_prompt_length + self.config.data.max_response_length

    def fits(self, meshes: Sequence[Mesh]) -> list[Fit]:
        """Return the best settings of each mesh."""
        return [self.best(mesh) for mesh in meshes]

    def best(self, mesh: Mesh, extra: Mapping[str, Any] | None = None) -> Fit:
        """Return the fastest settings with micro-batches of `ENOUGH` tokens, else the largest."""
        found: list[Fit] = []
        for fsdp_size in (mesh.per_node, -1) if mesh.nodes > 1 else (-1,):
            sharded = Mesh(mesh.nodes, mesh.per_node, fsdp_size)
            for savings in _SAVINGS:
                names = savings.split(", ")
                fit = self._largest(sharded, savings, {"savings": names, **(extra or {})})
                found.append(fit)
                if fit.reason or (fit.rows and fit.rows >= self._enough(mesh)):
                    return fit
        return max(found, key=lambda each: each.rows)  # the first of equals

    def propose(self, mesh: Mesh) -> str | None:
        """Return overrides that change the training and with which it fits; None if none do."""
        for extra in (_LORA, _HALF, _LORA | _HALF):
            if (fit := self.best(mesh, extra)).rows:
                return " ".join(fit.overrides)
        return None

    def _enough(self, mesh: Mesh) -> int:
        return min(self._most_rows(mesh), max(1, ENOUGH // self.longest))

    def _most_rows(self, mesh: Mesh) -> int:
        """Return the rows of an update on one rank: larger micro-batches change nothing."""
        actor, needs = self.config.actor_rollout_ref.actor, self.algorithm.needs
        rows = actor.ppo_mini_batch_size * rows_per_prompt(self.config, needs)
        return max(1, ceil_div(rows * ACTOR.ranks_per_row(self.config), mesh.devices))

    def _largest(self, mesh: Mesh, name: str, savings: Mapping[str, Any]) -> Fit:
        """Return the fit with the most rows, by bisection: memory grows with the rows."""
        devices = Devices(self.device.kind, mesh.nodes, mesh.per_node)
        ranks = pool_sizes(self.config, devices, self.algorithm.needs)
        engines = rollout_pool(self.config, self.algorithm.needs)
        problems = [
            *check_placement(self.config, devices, list(ranks), engines),
            *check_sizes(self.config, ranks, self.algorithm.needs),
        ]
        if problems:
            return Fit(mesh, name, 0, 0, 0, reason=problems[0].message)

        low, high = 1, self._most_rows(mesh)
        smallest = [
            (settings := {**savings, "max_num_seqs": sequences}, self._at(mesh, name, settings, 1))
            for sequences in self._num_sequences()
        ]
        settings, best = next(
            (each for each in smallest if each[1].peak <= self.usable), smallest[-1]
        )
        if best.peak > self.usable:
            return Fit(mesh, name, 0, 0, best.peak, best.overrides)
        while low < high:
            middle = (low + high + 1) // 2
            fit = self._at(mesh, name, settings, middle)
            if fit.peak <= self.usable:
                low, best = middle, fit
            else:
                high = middle - 1
        return best

    def _num_sequences(self) -> list[int]:
        """Return the rows that an engine may decode at a time, the most first; its cache grows."""
        most = self.config.actor_rollout_ref.rollout.max_num_seqs
        halves = [most >> k for k in range(1, most.bit_length()) if most >> k >= _FEWEST_SEQUENCES]
        return [most, *halves]

    def with_rows(self, fit: Fit, rows: int) -> Fit:
        """Return the fit with another number of rows in a micro-batch."""
        return self._at(fit.mesh, fit.savings, fit.settings, rows)

    def for_trial(self, fit: Fit) -> list[str]:
        """Return overrides for a batch that fills one micro-batch on each rank."""
        n = rows_per_prompt(self.config, self.algorithm.needs)
        ranks = fit.mesh.devices // ACTOR.ranks_per_row(self.config)
        prompts = ceil_div(fit.rows * ranks, n)
        while prompts * n % ranks:
            prompts += 1
        mini = f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}"
        return [f"data.train_batch_size={prompts}", mini]

    def trial_tokenizer(self) -> list[str]:
        """Return the override that gives a model without a tokenizer that of the quickstart."""
        model = self.config.actor_rollout_ref.model
        folder = Path(model.path)
        if model.tokenizer_path or not folder.is_dir() or (folder / "tokenizer.json").exists():
            return []
        return [f"actor_rollout_ref.model.tokenizer_path={NAME}"]

    def _at(self, mesh: Mesh, name: str, savings: Mapping[str, Any], rows: int) -> Fit:
        """Return the fit of micro-batches of `rows`, with its peak."""
        changes = dict(self._changes(mesh, savings, rows))
        peak = self._peak(reduce(_replaced, changes.items(), self.config), mesh)
        written = [
            f"{key}={_written(value)}"
            for key, value in changes.items()
            if key == "trainer.n_gpus_per_node" or value != attrgetter(key)(self.config)
        ]
        return Fit(mesh, name, rows, rows * self.longest, peak, written, settings=savings)

    def _peak(self, config: schema.Config, mesh: Mesh) -> int:
        """Return the bytes on the fullest device; on a CPU, of all processes of the machine."""
        needs, devices = self.algorithm.needs, Devices(self.device.kind, mesh.nodes, mesh.per_node)
        ranks = pool_sizes(config, devices, needs)
        plan = plan_memory(
            config, devices, ranks, needs, routed_models(self.algorithm), self._size_of
        )
        if plan.warnings:
            raise ResourceError(plan.warnings[0], hint="start it with smaller micro-batches")
        pools = plan.pools()
        peaks = {
            pool: sum(each.held for each in roles) + max(each.passing for each in roles)
            for pool, roles in pools.items()
        }
        if devices.kind == "cpu":
            return sum(peak * ranks[pool] for pool, peak in peaks.items()) // devices.num_nodes
        return max(peaks.values())

    def _size_of(self, model: schema.Model, role: Role) -> ModelSize:
        others = {"enable_gradient_checkpointing", "enable_activation_offload", "dtype"}
        key = model.model_dump_json(exclude=others), role.kind
        if key not in self.sizes:
            self.sizes[key] = read_size(model, role)
        return self.sizes[key]

    def _changes(
        self, mesh: Mesh, savings: Mapping[str, Any], rows: int
    ) -> Iterator[tuple[str, Any]]:
        """Yield the keys and values of a fit: limits, and settings that the user did not set."""
        roles = built_roles(self.config, self.algorithm.needs)
        found: dict[str, Any] = {"trainer.n_gpus_per_node": mesh.per_node}
        found["trainer.nnodes"] = mesh.nodes
        found["actor_rollout_ref.rollout.max_num_seqs"] = savings["max_num_seqs"]
        for role in roles:
            if role.learns:
                model, names = role.model_key, savings["savings"]
                found[f"{model}.enable_gradient_checkpointing"] = "checkpointing" in names
                found[f"{model}.enable_activation_offload"] = "activation offload" in names
                found[f"{role.fsdp_key}.optimizer_offload"] = "optimizer offload" in names
            if role.learns and "lora_rank" in savings:
                found[f"{role.model_key}.lora_rank"] = savings["lora_rank"]
            if role.fsdp_key is not None:
                found[f"{role.fsdp_key}.reshard_after_forward"] = "reshard" in savings["savings"]
                found[f"{role.fsdp_key}.param_offload"] = "offload" in savings["savings"]
                found[f"{role.fsdp_key}.fsdp_size"] = mesh.fsdp_size
            if role.fsdp_key is not None and "model_dtype" in savings:
                found[f"{role.fsdp_key}.model_dtype"] = savings["model_dtype"]
        yield from ((key, value) for key, value in found.items() if key not in self.fixed)
        for role in roles:
            if role.passes is not None:
                yield from self._limit(role, rows).items()

    def _limit(self, role: Role, rows: int) -> dict[str, int]:
        """Return the micro-batch limit of a role, in rows or tokens as configured."""
        prefix = f"{role.section}.{role.passes}"
        if role.max_rows(self.config) is None:
            fsdp = role.fsdp(self.config)
            slices = fsdp.ulysses_sequence_parallel_size if fsdp else 1
            return {f"{prefix}_max_token_len_per_gpu": ceil_div(rows * self.longest, slices)}
        return {role.max_rows_key or f"{prefix}_micro_batch_size_per_gpu": rows}


def meshes(per_node: int, nodes: int) -> list[Mesh]:
    """Return the meshes of at most `nodes` nodes with `per_node` devices, the smallest first."""
    counts = sorted({per_node, *(2**k for k in range(per_node.bit_length()) if 2**k <= per_node)})
    whole = sorted({nodes, *(2**k for k in range(nodes.bit_length()) if 2**k <= nodes)})
    return [
        *(Mesh(1, count) for count in counts),
        *(Mesh(count, per_node) for count in whole if count > 1),
    ]


def _replaced(config: Any, change: tuple[str, Any]) -> Any:
    """Return a section of the configuration with another value at a dotted key."""
    key, value = change
    name, _, rest = key.partition(".")
    inner = value if not rest else _replaced(getattr(config, name), (rest, value))
    return config.model_copy(update={name: inner})


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
