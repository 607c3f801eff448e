"""A rank holds its share of a model and one block more, never the whole, while it is loaded."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from rlctl.recipes.compose import compose
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.model.causal_lm import PolicyModel
from rlctl.runtime.model.load import load_model
from rlctl.runtime.model.lora import add_adapters
from rlctl.runtime.model.mapped import RankStorage
from rlctl.runtime.workers.base import prepare
from tests.distributed.ranks import in_a_process, on_ranks, rank_info

HEADS: dict[str, Any] = {"vocab_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8}
SMALL: dict[str, Any] = HEADS | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
}
CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "gemma3": Gemma3TextConfig(**SMALL, head_dim=8),  # with a buffer that is no weight
}
MIB = 2**20


def stored(folder: Path, config: Any, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a model with random weights in `dtype`; return its folder."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    return folder


def load(path: Path, info: RankInfo, *overrides: str) -> PolicyModel:
    config = compose("ppo", [f"actor_rollout_ref.model.path={path}", *overrides]).config
    roles = config.actor_rollout_ref
    hf = load_model(roles.model, "policy", torch.float32, 0, mapped=True)
    add_adapters(hf, roles.model, 0)
    return prepare(PolicyModel(hf, 1.0), roles.model, roles.actor.fsdp_config, info)


def anonymous_bytes() -> int:
    """Return the private memory of this process that no file holds, without freed memory."""
    ctypes.CDLL(None).malloc_trim(0)
    text = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("Anonymous:"))
    return int(line.split()[1]) * 1024


def peak_on_fake_ranks(_: RankInfo, path: Path, world_size: int) -> tuple[int, int]:
    """Return the bytes that loading adds at most on one of many ranks, and the bytes it keeps."""
    dist.init_process_group("fake", rank=0, world_size=world_size)
    before, peak, move = anonymous_bytes(), 0, RankStorage.move

    def measured(storage: RankStorage, block: torch.nn.Module) -> None:
        nonlocal peak
        move(storage, block)
        peak = max(peak, anonymous_bytes() - before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankStorage, "move", measured)
        model = load(path, rank_info(0, world_size))
    dist.destroy_process_group()
    return peak, sum(each.to_local().nbytes for each in model.parameters())  # pyright: ignore


@pytest.mark.soak
def test_a_rank_of_32_never_holds_the_model(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 32}
    path = stored(tmp_path, LlamaConfig(**HEADS, **sizes))
    peak, share = in_a_process(peak_on_fake_ranks, path, 32)
    whole = 32 * share
    assert whole > 500 * MIB
    # The packing check has two layers in float32.
    assert peak < share + whole / 8, f"{peak / MIB:.0f} MiB of {whole / MIB:.0f}"


def weights(info: RankInfo, path: Path, *overrides: str) -> dict[str, torch.Tensor]:
    model = load(path, info, *overrides)
    values = {**dict(model.hf.named_parameters()), **dict(model.hf.named_buffers())}
    whole = {
        name: getattr(each, "full_tensor", lambda e=each: e)() for name, each in values.items()
    }
    return {name: each.detach() for name, each in whole.items()}


def weights_of_all(info: RankInfo, paths: list[Path]) -> list[dict[str, torch.Tensor]]:
    return [weights(info, path) for path in paths]


def test_mapped_weights_and_buffers_equal_loaded_ones(tmp_path: Path) -> None:
    """Load each architecture, stored in either precision, on one rank and on two."""
    paths = [
        stored(tmp_path / f"{name}-{dtype}", config, dtype)
        for name, config in CONFIGS.items()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    ranks = [*on_ranks(1, weights_of_all, paths), *on_ranks(2, weights_of_all, paths)]
    for number, path in enumerate(paths):
        plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        expected = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
        for rank in ranks:
            assert rank[number].keys() == expected.keys()
            for key, value in expected.items():
                assert rank[number][key].dtype == torch.float32
                assert torch.equal(rank[number][key], value), (path.name, key)


def test_frozen_weights_have_the_dtype_of_passes(tmp_path: Path) -> None:
    path = stored(tmp_path, CONFIGS["llama"], torch.float32)
    lora = ["lora_rank=2", "dtype=bfloat16"]
    try:
        model = load(path, rank_info(), *(f"actor_rollout_ref.model.{text}" for text in lora))
    finally:
        dist.destroy_process_group()  # of the mesh
    dtypes = {each.dtype for each in model.parameters() if not each.requires_grad}
    trained = {each.dtype for each in model.parameters() if each.requires_grad}
    assert (dtypes, trained) == ({torch.bfloat16}, {torch.float32})
