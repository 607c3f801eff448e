"""Reward model: a sequence classifier of transformers with one label, on packed conversations."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rlctl.errors import ConfigError
from rlctl.runtime.model.causal_lm import PackedModel, run_backbone
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.model.weight_check import HEAD

# Fields of an exported config.json: mean and standard deviation of the model's scores.
MEAN = "reward_mean"
STD = "reward_std"


def write_scale(config: PretrainedConfig, mean: float, std: float) -> None:
    """Write mean and standard deviation of the scores into the config.json of exports."""
    setattr(config, MEAN, mean)
    setattr(config, STD, std)


class RewardModel(PackedModel):
    """Score of a conversation: a linear head without bias on the hidden state of its last token."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__(hf)
        head = getattr(hf, HEAD, None)
        if not isinstance(head, nn.Linear):
            raise ConfigError(
                f"a reward model needs a linear head named {HEAD!r}; {type(hf).__name__} has none",
                hint="use a decoder with a sequence classifier, such as Llama, Qwen3 or Gemma",
            )

    def forward(self, sequences: Sequences) -> Tensor:
        """Return one score per row: (B,) float32."""
        if self.sequence_group is None:
            return self._scores(sequences)
        part = self.sequence_group.slice(sequences)
        return part.join_rows(self._scores(part.sequences))

    def _scores(self, sequences: Sequences) -> Tensor:
        """Return the scores (B,) of the rows whose last token this rank has."""
        output = run_backbone(self.hf.base_model, sequences)
        assert output.last_hidden_state is not None, "every model without head returns them"
        hidden = output.last_hidden_state[0][sequences.last]
        return self.hf.get_submodule(HEAD)(hidden)[:, 0].float()
