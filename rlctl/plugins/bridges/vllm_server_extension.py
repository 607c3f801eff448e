"""Extension of the workers of a vLLM server, so that they can load the trainer's weights.

Workers of a server with `--worker-extension-cls` import this module before they build the model.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# (an extra: types are checked where it is installed)
from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch
from vllm.platforms import current_platform

from rlctl.errors import RlctlError
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.model.load import build_empty
from rlctl.runtime.rollout.vllm_engine.cpu import (
    keep_weights_unpacked,
    pack_loaded_experts,
    pad_attention_heads,
    rotate_unaligned_heads,
)
from rlctl.runtime.rollout.vllm_engine.weights import (
    ExpertStacks,
    as_in_files,
    converted_model,
    reload,
)
from rlctl.runtime.rollout.weight_group import Broadcast, GroupAddress, receive_weights
from rlctl.runtime.rollout.weight_sync import join_buckets

if current_platform.is_cpu():
    keep_weights_unpacked()
    pack_loaded_experts()
    pad_attention_heads()
    rotate_unaligned_heads()


class WeightReceiver:
    """Mixin of vLLM's worker, which is a member of the trainer's process group.

    `reload_weights` of vLLM reads weights from a folder.
    """

    rank: int  # among the server's workers
    device: torch.device
    model_config: Any
    model_runner: Any

    def receive_from_trainer(
        self,
        host: str,
        port: int,
        num_receivers: int,
        secret: str,
        number: int,
        timeout_s: float,
    ) -> dict[str, Any]:
        """Load weights as the receiver `number` + rank of a group: see `GroupAddress`.

        Returns their `version`, None if the group breaks, and the `problems` of the run.
        """
        where = RankInfo(0, 1, self.device.type, 1, timeout_s, deterministic=False, log_path=None)
        address = GroupAddress(host, port, num_receivers, secret)
        try:
            version = receive_weights(address, number + self.rank, where, self._load_broadcast)
        except RlctlError as error:
            return {"version": None, "problems": [asdict(problem) for problem in error.problems]}
        return {"version": version, "problems": []}

    def _load_broadcast(self, weights: Broadcast) -> None:
        model, stacks = self._trainer_layout
        reload(self, as_in_files(model, stacks, join_buckets(weights, self.device.type)))

    @cached_property
    def _trainer_layout(self) -> tuple[Any, ExpertStacks]:
        """The trainer's model if its parameters differ from those of files, and its experts."""
        config = self.model_config
        empty = build_empty(config.hf_config, config.trust_remote_code, "policy")
        model = converted_model(empty)
        return model, ExpertStacks(self.model_runner.get_model(), model)
