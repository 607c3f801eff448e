"""Check of what rows with images can be combined with."""

from __future__ import annotations

from rlctl.errors import Problem, raise_problems
from rlctl.recipes import schema
from rlctl.recipes.role_table import needed_roles
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.base.image_processor import processor_of
from rlctl.runtime.data.model_folder import is_missing
from rlctl.runtime.planning.devices import Devices
from rlctl.runtime.rollout.auto import reads_images


def check_images(config: schema.Config, devices: Devices | None, needs: Needs) -> None:
    """Raise ConfigError with what cannot be combined with rows that have images."""
    roles = needed_roles(config, needs)
    rollout = config.actor_rollout_ref.rollout
    found: list[tuple[str, str]] = []
    kind = devices.kind if devices else "cpu"
    model = config.actor_rollout_ref.model
    if Needs.ENGINE in needs and not reads_images(rollout, model, kind):
        found.append((f"the engine {rollout.name}", "actor_rollout_ref.rollout.name=hf or vllm"))
    if rollout.multi_turn.enable and rollout.agent.program is not None:
        found.append(("an agent program", "actor_rollout_ref.rollout.agent.program=null"))
    for role in roles:
        model = role.model(config)
        if not is_missing(model.path) and processor_of(model.path, model.trust_remote_code) is None:
            what = f"{model.path}, the model of the {role.name}, reads text alone and"
            found.append((what, "a vision-language model with its preprocessor_config.json"))
        fsdp = role.fsdp(config)
        if fsdp is not None and fsdp.ranks_per_row > 1:
            message = f"the {role.name}, whose ranks divide rows or layers,"
            found.append((message, "set the sizes of parallelism to 1; FSDP2 shards all weights"))
    raise_problems(Problem(f"{what} takes no rows with images", hint=hint) for what, hint in found)
