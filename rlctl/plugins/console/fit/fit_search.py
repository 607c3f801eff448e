"""Search of `rlctl fit`: the fewest devices, and the largest micro-batch, that the memory allows.

The search evaluates the planner's estimate (`memory.py`) for several meshes, ways to save memory,
and shares of vLLM; no weights are read. It leaves a tenth of a device for errors of the estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import attrgetter
from pathlib import Path
from typing import Any

from rlctl.errors import ResourceError
from rlctl.plugins.console.fit.fits import Fit, Mesh
from rlctl.quickstart import NAME
from rlctl.recipes import schema
from rlctl.recipes.compose import Recipe
from rlctl.recipes.role_table import ACTOR, Role, built_roles, rollout_pool
from rlctl.runtime.algorithms.base import Algorithm, routed_models, rows_per_prompt
from rlctl.runtime.base.ops import ceil_div, divisors
from rlctl.runtime.build import load_algorithm
from rlctl.runtime.model.load import Kind
from rlctl.runtime.planning.devices import Devices, pool_sizes
from rlctl.runtime.planning.engine_memory import largest_utilization
from rlctl.runtime.planning.known_gpus import Device
from rlctl.runtime.planning.model_size import ModelSize
from rlctl.runtime.planning.placement import check_placement, check_sizes
from rlctl.runtime.planning.preflight import read_model_config
from rlctl.runtime.planning.role_memory import GIB, MemoryPlan, plan_memory, read_size
from rlctl.runtime.rollout.auto import plans_vllm
from rlctl.runtime.rollout.sampling_params import rows_at_a_time
from rlctl.suggest import written

ENOUGH = 8192  # tokens of a micro-batch above which a GPU computes at its full speed
_FEWEST_SEQUENCES = 32  # that an engine decodes at a time
_ROLLOUT = "actor_rollout_ref.rollout"
_TENSOR = f"{_ROLLOUT}.tensor_model_parallel_size"
_UTILIZATION = f"{_ROLLOUT}.gpu_memory_utilization"
# Ways to save memory, the fastest first.
_SAVINGS = (
    "none",
    "checkpointing",
    "checkpointing, reshard",
    "checkpointing, reshard, optimizer offload",
    "checkpointing, reshard, optimizer offload, parameter offload",
    "checkpointing, reshard, optimizer offload, parameter offload, activation offload",
    "checkpointing, reshard, offload",
)
# Changes of the training itself, which are proposed only where nothing else fits.
_LORA = {"lora_rank": 32}
_HALF = {"model_dtype": "bf16"}


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

    def best(self, mesh: Mesh, extra: Mapping[str, Any] | None = None) -> Fit:
        """Return the fastest settings with micro-batches of `ENOUGH` tokens, else the largest.

        The cache of vLLM holds `_FEWEST_SEQUENCES` rows, or one if no settings allow as many.
        """
        found: list[Fit] = []
        enough = min(self._most_rows(mesh), max(1, ENOUGH // self.longest))
        fsdp_sizes = [-1]
        if mesh.nodes > 1:  # shards on all nodes cost less than copies to the host
            fsdp_sizes = [mesh.per_node, -1]
        for num_cached in (_FEWEST_SEQUENCES, 1):
            for savings in _SAVINGS:
                given = {"savings": savings.split(", "), **(extra or {})}
                for fsdp_size in fsdp_sizes:
                    sharded = Mesh(mesh.nodes, mesh.per_node, fsdp_size)
                    fit = self._largest(sharded, savings, given, num_cached)
                    found.append(fit)
                    if fit.reason or (fit.rows and fit.rows >= enough):
                        return fit
            if any(fit.rows for fit in found):
                break
        # The first of equals; without any row, what is missing least.
        return max(found, key=lambda fit: (fit.rows, 0 if fit.rows else -fit.peak))

    def propose(self, mesh: Mesh) -> str | None:
        """Return overrides that change the training and with which it fits; None if none do."""
        for extra in (_LORA, _HALF, _LORA | _HALF):
            if (fit := self.best(mesh, extra)).rows:
                return " ".join(fit.overrides)
        return None

    def _most_rows(self, mesh: Mesh) -> int:
        """Return the rows of an update on one rank: larger micro-batches change nothing."""
        actor = self.config.actor_rollout_ref.actor
        needs = self.algorithm.needs
        rows = actor.ppo_mini_batch_size * rows_per_prompt(self.config, needs)
        return max(1, ceil_div(rows * ACTOR.ranks_per_row(self.config), mesh.devices))

    def _largest(self, mesh: Mesh, name: str, savings: Mapping[str, Any], num_cached: int) -> Fit:
        """Return the fit with the most rows, by bisection: memory grows with the rows."""
        devices = self._devices(mesh)
        ranks = pool_sizes(self.config, devices, self.algorithm.needs)
        engines = rollout_pool(self.config, self.algorithm.needs)
        problems = [
            *check_placement(self.config, devices, list(ranks), engines),
            *check_sizes(self.config, ranks, self.algorithm.needs),
        ]
        if problems:
            return Fit(mesh, name, 0, 0, 0, reason=problems[0].message)

        low = 1
        high = self._most_rows(mesh)
        settings = dict(savings)
        best = self._at(mesh, name, savings, 1)
        for engine in self._engines(mesh, savings):
            settings = {**savings, **engine}
            best = self._at(mesh, name, settings, 1)
            if best.peak <= self.usable and best.cached >= num_cached:
                break
        else:
            return Fit(mesh, name, 0, 0, best.peak, best.overrides)
        while low < high:
            middle = (low + high + 1) // 2
            fit = self._at(mesh, name, settings, middle)
            if fit.peak <= self.usable:
                low = middle
                best = fit
            else:
                high = middle - 1
        return best

    def _engines(self, mesh: Mesh, savings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield settings of the engine, the fastest first.

        These are the rows that it may decode at a time, for which its cache grows. vLLM has fewer
        ranks per engine, and as large a share as other roles of its processes leave.
        """
        rollout = self.config.actor_rollout_ref.rollout
        needs = self.algorithm.needs
        if not plans_vllm(rollout.name, self.device.kind):
            most = rows_at_a_time(rollout, self.device.kind)
            halves = (most >> k for k in range(1, most.bit_length()))
            enough = (half for half in halves if half >= _FEWEST_SEQUENCES)
            numbers = [rollout.max_num_seqs, *enough]
            yield from ({f"{_ROLLOUT}.max_num_seqs": number} for number in numbers)
        else:
            placement = self.config.trainer.placement
            memory = self.device.memory
            pool = rollout_pool(self.config, needs) or placement.actor
            size = pool_sizes(self.config, self._devices(mesh), needs)[pool]
            for ranks in self._engine_ranks(Mesh(mesh.nodes, size // mesh.nodes)):
                settings = {**savings, _TENSOR: ranks}
                plan = self._plan(self._changed(dict(self._changes(mesh, settings, 1))), mesh)
                share = largest_utilization(plan, pool, self.usable, memory)
                if share > 0 or _UTILIZATION in self.fixed:
                    yield settings | {_UTILIZATION: share}

    def _engine_ranks(self, mesh: Mesh) -> list[int]:
        """Return the numbers of ranks that may share an engine and its heads, on whole nodes."""
        if _TENSOR in self.fixed:
            return [self.config.actor_rollout_ref.rollout.tensor_model_parallel_size]
        text = read_model_config(ACTOR.model(self.config), ACTOR.model_key).get_text_config()
        heads = getattr(text, "num_attention_heads", None) or 1
        heads = math.gcd(heads, getattr(text, "num_key_value_heads", None) or heads)
        node = mesh.per_node
        every = divisors(math.gcd(mesh.devices, heads))
        return [ranks for ranks in every if node % ranks == 0 or ranks % node == 0]

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
        plan = self._plan(self._changed(changes), mesh)
        engines = (role.engine for role in plan.known() if role.engine.share is not None)
        cached = min((engine.num_rows for engine in engines), default=_FEWEST_SEQUENCES)
        peak = self._peak(plan, mesh)
        overrides = [
            f"{key}={written(value)}"
            for key, value in changes.items()
            if key == "trainer.n_gpus_per_node" or value != attrgetter(key)(self.config)
        ]
        tokens = rows * self.longest
        return Fit(mesh, name, rows, tokens, peak, overrides, settings=savings, cached=cached)

    def _changed(self, changes: Mapping[str, Any]) -> schema.Config:
        return reduce(lambda config, change: config.replaced(*change), changes.items(), self.config)

    def _devices(self, mesh: Mesh) -> Devices:
        memory = self.device.memory if self.device.kind == "cuda" else None
        return Devices(self.device.kind, mesh.nodes, mesh.per_node, memory, self.device.has_bf16)

    def _plan(self, config: schema.Config, mesh: Mesh) -> MemoryPlan:
        needs = self.algorithm.needs
        devices = self._devices(mesh)
        ranks = pool_sizes(config, devices, needs)
        plan = plan_memory(
            config, devices, ranks, needs, routed_models(self.algorithm), self._size_of
        )
        if plan.warnings:
            raise ResourceError(plan.warnings[0], hint="start it with smaller micro-batches")
        return plan

    def _peak(self, plan: MemoryPlan, mesh: Mesh) -> int:
        """Return the bytes on the fullest device; on a CPU, of all processes of the machine."""
        peaks = plan.peaks()
        if self.device.kind == "cuda":
            return max(peaks.values())
        ranks = pool_sizes(self.config, self._devices(mesh), self.algorithm.needs)
        return sum(peak * ranks[pool] for pool, peak in peaks.items()) // mesh.nodes

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
        found |= {key: value for key, value in savings.items() if key.startswith(_ROLLOUT)}
        names = savings["savings"]
        for role in roles:
            if role.learns:
                model = role.model_key
                found[f"{model}.enable_gradient_checkpointing"] = "checkpointing" in names
                found[f"{model}.enable_activation_offload"] = "activation offload" in names
                found[f"{role.fsdp_key}.optimizer_offload"] = "optimizer offload" in names
                if "lora_rank" in savings:
                    found[f"{model}.lora_rank"] = savings["lora_rank"]
            if (fsdp := role.fsdp_key) is not None:
                found[f"{fsdp}.reshard_after_forward"] = "reshard" in names
                found[f"{fsdp}.param_offload"] = "parameter offload" in names
                found[f"{fsdp}.offload_policy"] = "offload" in names
                found[f"{fsdp}.fsdp_size"] = mesh.fsdp_size
                if "model_dtype" in savings:
                    found[f"{fsdp}.model_dtype"] = savings["model_dtype"]
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
