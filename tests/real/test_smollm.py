"""SmolLM2-135M-Instruct, a pretrained model with a real vocabulary and template: `make real`.

Log-probs, gradients and responses are compared with those of transformers, runs with each other.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlctl.data_prep.rows import PromptRow, write_rows
from rlctl.quickstart import real_path
from rlctl.recipes.compose import compose
from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.data.tokenizer import encode_prompt, load_tokenizer, stop_token_ids
from rlctl.runtime.model.adapter_names import engine_parameters, merged_parameters
from rlctl.runtime.model.attention import use_rlctl_attention
from rlctl.runtime.model.causal_lm import PolicyModel
from rlctl.runtime.model.lora import add_adapters
from rlctl.runtime.model.padded_rows import use_own_attention
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.rollout.engine import SamplingParams
from rlctl.runtime.rollout.hf import HFEngine
from tests.e2e.command import metrics, rlctl, train
from tests.e2e.killed_runs import learned
from tests.generation import engine_spec
from tests.settings import given
from tests.tolerance import assert_all_as_exact, assert_as_exact, in_float64
from tools.real_model import gguf_file

pytestmark = [pytest.mark.real, pytest.mark.slow]

# Training rows of GSM8K (MIT license).
ROWS = [
    (
        "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in "
        "May. How many clips did Natalia sell altogether in April and May?",
        "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = <<48+24=72>>72 "
        "clips altogether in April and May.\n#### 72",
    ),
    (
        "Weng earns $12 an hour for babysitting. Yesterday, she just did 50 minutes of "
        "babysitting. How much did she earn?",
        "Weng earns 12/60 = $<<12/60=0.2>>0.2 per minute.\nWorking 50 minutes, she earned 0.2 x 50 "
        "= $<<0.2*50=10>>10.\n#### 10",
    ),
    (
        "Betty is saving money for a new wallet which costs $100. Betty has only half of the money "
        "she needs. Her parents decided to give her $15 for that purpose, and her grandparents "
        "twice as much as her parents. How much more money does Betty need to buy the wallet?",
        "In the beginning, Betty has only 100 / 2 = $<<100/2=50>>50.\nBetty's grandparents gave "
        "her 15 * 2 = $<<15*2=30>>30.\nThis means, Betty needs 100 - 50 - 30 - 15 = "
        "$<<100-50-30-15=5>>5 more.\n#### 5",
    ),
    (
        "James writes a 3-page letter to 2 different friends twice a week. How many pages does he "
        "write a year?",
        "He writes each friend 3*2=<<3*2=6>>6 pages a week\nSo he writes 6*2=<<6*2=12>>12 pages "
        "every week\nThat means he writes 12*52=<<12*52=624>>624 pages a year\n#### 624",
    ),
]
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.fixture(scope="session")
def gguf() -> Path:
    return gguf_file()


@pytest.fixture(scope="session")
def folder(gguf: Path) -> Path:
    return Path(real_path(str(gguf)))


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(folder))


@pytest.fixture
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="session")
def texts(tokenizer: PreTrainedTokenizerBase) -> tuple[Ragged, Ragged]:
    """Four prompts, of which the first and the third are equal, and their responses."""
    questions, answers = zip(*[ROWS[0], ROWS[1], ROWS[0], ROWS[3]], strict=True)
    prompts = [encode_prompt(tokenizer, [{"role": "user", "content": each}]) for each in questions]
    responses = [[*tokenizer.encode(each), 2] for each in answers[:2]]
    responses += [tokenizer.encode("She sold 72 clips."), [*tokenizer.encode(answers[3]), 2]]
    return rows(prompts), rows(responses)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the rows, as SFT reads them and as pairs."""
    target = tmp_path_factory.mktemp("data")
    write_rows(target / "train.parquet", [row(*each) for each in ROWS])
    pairs = [
        row(question, answer, chosen=answer, rejected=f"I do not know.\n#### {number}")
        for number, (question, answer) in enumerate(ROWS)
    ]
    write_rows(target / "pairs.parquet", pairs)
    return target


def row(question: str, answer: str, **fields: str) -> PromptRow:
    return PromptRow(
        "openai/gsm8k",
        [{"role": "user", "content": question}],
        answer.partition("#### ")[2],
        extra_info={"answer": answer, **fields},
    )


def rows(ids: list[list[int]]) -> Ragged:
    return Ragged.from_rows([torch.tensor(each) for each in ids])


def settings(data: Path, **changes: Any) -> list[str]:
    own = {"batch": 4, "mini_batch": 4, "prompt": 256, "response": 128, "steps": 2, "save": 1}
    files = {"train": data / "train.parquet", "val": None, "validate": -1, "logger": []}
    return given(**{**own, **files, "keep": 5, "validate_first": False, **changes})


def of_transformers(model: Any, texts: tuple[Ragged, Ragged]) -> Tensor:
    """Return the log-probs (T,) of each row alone."""
    found = []
    for prompt, response in zip(*(each.rows() for each in texts), strict=True):
        logits = model(torch.cat([prompt, response])[None], use_cache=False).logits[0]
        log_probs = logits.to(logits.dtype if logits.dtype == torch.float64 else torch.float32)
        log_probs = log_probs.log_softmax(-1)[len(prompt) - 1 : -1]
        found.append(log_probs.gather(1, response[:, None])[:, 0])
    return torch.cat(found)


def of_rlctl(
    model: PreTrainedModel, texts: tuple[Ragged, Ragged], of_row: Tensor | None = None
) -> Tensor:
    """Return the log-probs (T,) of packed rows."""
    sequences = Sequences.from_ragged(*texts, prompt_of_row=of_row)
    return PolicyModel(model, 1.0)(sequences).log_probs


SHARED = [None, torch.tensor([0, 1, 0, 3])]


def test_template_stop_tokens_and_system_prompt_are_the_models(
    folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    user = {"role": "user", "content": "Hi"}
    text = tokenizer.decode(encode_prompt(tokenizer, [user]))
    turns = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert text == f"<|im_start|>system\n{SYSTEM}<|im_end|>\n{turns}"
    own = [{"role": "system", "content": "Be brief."}, user]
    own_text = tokenizer.decode(encode_prompt(tokenizer, own))
    assert own_text == f"<|im_start|>system\nBe brief.<|im_end|>\n{turns}"
    assert stop_token_ids(tokenizer, str(folder)) == (2,)
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == [
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    ]
    assert len(tokenizer) == 49_152
    for question, answer in ROWS:
        assert (
            tokenizer.decode(tokenizer.encode(f"{question}\n{answer}")) == f"{question}\n{answer}"
        )


def test_log_probs_and_gradients_are_those_of_transformers(
    model: PreTrainedModel, texts: tuple[Ragged, Ragged]
) -> None:
    exact_model = in_float64(model)
    alone, exact = of_transformers(model, texts), of_transformers(exact_model, texts)
    for each in (alone, exact):
        each.square().sum().backward()
    expected, exact_gradients = gradients(model), gradients(exact_model)
    use_rlctl_attention(model)
    for of_row in SHARED:
        found = of_rlctl(model, texts, of_row)
        assert_as_exact(found, alone, exact)
        found.square().sum().backward()
        assert_all_as_exact(gradients(model), expected, exact_gradients)


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    named = model.named_parameters()
    found = {name: value.grad for name, value in named if value.grad is not None}
    model.zero_grad()
    return found


def test_log_probs_in_bfloat16_are_as_near_as_those_of_transformers(
    model: PreTrainedModel, texts: tuple[Ragged, Ragged]
) -> None:
    half = model.to(torch.bfloat16)
    with torch.no_grad():
        exact = of_transformers(in_float64(half), texts)
        alone = of_transformers(half, texts)
        use_rlctl_attention(half)
        for of_row in SHARED:
            assert_as_exact(of_rlctl(half, texts, of_row), alone, exact)


def test_packed_rows_are_those_alone(model: PreTrainedModel, texts: tuple[Ragged, Ragged]) -> None:
    exact = in_float64(model)
    use_rlctl_attention(model)
    with torch.no_grad():
        each = zip(*(part.rows() for part in texts), strict=True)
        alone = [of_rlctl(model, (rows([p.tolist()]), rows([r.tolist()]))) for p, r in each]
        assert_as_exact(of_rlctl(model, texts), torch.cat(alone), of_transformers(exact, texts))


def test_the_engine_generates_the_tokens_of_transformers(
    model: PreTrainedModel, texts: tuple[Ragged, Ragged]
) -> None:
    check_responses(model, texts[0])


def check_responses(model: PreTrainedModel, prompts: Ragged) -> None:
    """Compare greedy tokens with transformers', and log-probs of samples with its passes."""
    expected = [
        model.generate(ids[None], max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
        for ids in prompts.rows()
    ]
    exact = in_float64(model)
    limits = torch.full((len(prompts),), 24)
    engine = HFEngine(model, 4)
    greedy = engine.generate(prompts, SamplingParams(0.0, 1.0, -1, (2,), limits, 7, 1))
    assert [ids.tolist() for ids in greedy.response_ids.rows()] == expected
    sampled = engine.generate(prompts, SamplingParams(1.0, 1.0, -1, (2,), limits, 7, 1))
    use_own_attention(model, "eager")
    texts = (prompts, sampled.response_ids)
    with torch.no_grad():
        own = of_transformers(model, texts), of_transformers(exact, texts)
    assert_as_exact(torch.cat([*sampled.log_probs.rows()]), *own)


@pytest.mark.extra("vllm")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_vllm_reports_the_log_probs_of_transformers(
    model: PreTrainedModel, folder: Path, texts: tuple[Ragged, Ragged], dtype: torch.dtype
) -> None:
    from rlctl.runtime.rollout.vllm_engine.vllm_in_process import VLLMEngine

    policy, prompts = model.to(dtype), texts[0]
    spec = engine_spec(folder, "actor_rollout_ref.rollout.name=vllm", max_length=256)
    engine = VLLMEngine.from_spec(replace(spec, dtype=dtype), None)
    try:
        engine.load_weights(engine_parameters(policy, lambda _: True))
        limits = torch.full((len(prompts),), 24)
        found = engine.generate(prompts, SamplingParams(1.0, 1.0, -1, (2,), limits, 7, 1))
    finally:
        engine.close()
    sampled = (prompts, found.response_ids)
    with torch.no_grad():
        own = of_transformers(policy, sampled), of_transformers(in_float64(policy), sampled)
    assert_as_exact(found.log_probs.values, *own)


def test_adapters_train_as_the_merged_model(
    model: PreTrainedModel, folder: Path, texts: tuple[Ragged, Ragged]
) -> None:
    words = [f"actor_rollout_ref.model.path={folder}", "actor_rollout_ref.model.lora_rank=8"]
    merged = in_float64(model)
    add_adapters(model, compose("grpo", words).config.actor_rollout_ref.model, seed=0)
    generator = torch.Generator().manual_seed(0)
    adapters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert len(adapters) == 2 * 7 * 30  # A and B of seven linear layers in each of 30
    with torch.no_grad():
        for name, value in adapters.items():
            if "lora_B" in name:
                value.copy_(0.01 * torch.randn(value.shape, generator=generator))
    second = in_float64(model)
    weights = dict(merged_parameters(second))
    assert weights.keys() == {name for name, _ in merged.named_parameters()}
    merged.load_state_dict(weights, strict=False)  # the head is the embedding
    use_rlctl_attention(model)
    with torch.no_grad():
        exact = of_transformers(merged, texts)
        alone = of_transformers(merged.float(), texts)
        for of_row in SHARED:
            assert_as_exact(of_rlctl(model, texts, of_row), alone, exact)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def tuned(root: Path, data: Path, gguf: Path) -> Path:
    """Return a run of two steps of SFT on the GGUF file."""
    return train("sft", "tuned", "--inline", *settings(data, model=gguf, lr=1e-5), cwd=root)


def test_sft_lowers_the_loss_and_resumes_byte_for_byte(
    tuned: Path, root: Path, data: Path, gguf: Path
) -> None:
    first, second = (line["actor/loss"] for line in metrics(tuned) if "actor/loss" in line)
    assert second < first < 2
    own = settings(data, model=gguf, lr=1e-5, steps=1)
    parted = train("sft", "parted", "--inline", *own, cwd=root)
    rlctl("resume", "parted", "--inline", *given(steps=2), cwd=root)
    assert learned(parted) == learned(tuned)


def test_an_export_generates_the_same_tokens_in_transformers(
    tuned: Path, root: Path, texts: tuple[Ragged, Ragged], tokenizer: PreTrainedTokenizerBase
) -> None:
    rlctl("export", tuned.name, "out", cwd=root)
    assert [*(root / "out").glob("*.safetensors")]
    own = load_tokenizer(str(root / "out"))
    assert own.chat_template == tokenizer.chat_template
    assert own.get_vocab() == tokenizer.get_vocab()
    exported = AutoModelForCausalLM.from_pretrained(root / "out", dtype=torch.float32)
    check_responses(exported, texts[0])


@pytest.mark.extra("lm-eval")
def test_tasks_score_an_export_before_training_as_the_file(
    root: Path, data: Path, gguf: Path, folder: Path
) -> None:
    own = settings(data, model=gguf, lr=0.0, steps=1)
    still = train("sft", "still", "--inline", *own, cwd=root)
    rlctl("export", still.name, "same", cwd=root)
    assert tensors(root / "same") == tensors(folder)
    lines = [json.dumps({"question": question, "answer": answer}) for question, answer in ROWS]
    (root / "rows.jsonl").write_text("\n".join(lines))
    (root / "answers.yaml").write_text(yaml.safe_dump(task(root)))
    scores = [evaluated(each, root) for each in (gguf, folder, root / "same")]
    assert [each["metric"] for each in scores[0]] == ["perplexity", "acc"]
    assert scores[0] == scores[1] == scores[2]
    assert math.isfinite(scores[0][0]["value"])


def tensors(folder: Path) -> dict[str, bytes]:
    """Return the bytes of each tensor of a model's folder."""
    values = load_file(folder / "model.safetensors")
    return {name: value.numpy().tobytes() for name, value in values.items()}


def task(folder: Path) -> dict[str, Any]:
    """Return the task of lm-eval that measures how likely the answers of `ROWS` are."""
    files = {"data_files": {"test": str(folder / "rows.jsonl")}}
    higher = {"perplexity": False, "acc": True}
    return {
        "task": "rlctl_answers",
        "dataset_path": "json",
        "dataset_kwargs": files | {"cache_dir": str(folder / "cache")},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [
            {"metric": name, "aggregation": mean, "higher_is_better": higher[name]}
            for name, mean in (("perplexity", "perplexity"), ("acc", "mean"))
        ],
    }


def evaluated(model: Path, folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of a model on that task."""
    words = ("--task-dir", folder, "--tasks", "rlctl_answers", "--json")
    return json.loads(rlctl("eval", model, *words, cwd=folder).stdout)["results"]


def test_grpo_with_adapters_on_the_file(root: Path, data: Path, gguf: Path) -> None:
    lora = ["actor_rollout_ref.model.lora_rank=8", "reward.num_processes=1"]
    own = settings(data, model=gguf, n=2, batch=2, mini_batch=2, response=24, steps=1)
    run = train("grpo", "lora", "--inline", *own, *lora, cwd=root)
    [line] = [each for each in metrics(run) if "actor/grad_norm" in each]
    assert line["training/rollout_probs_diff_max"] < 1e-3
    assert str(gguf) in (run / "config.yaml").read_text()


def test_a_reward_model_learns_pairs(root: Path, data: Path, gguf: Path) -> None:
    files = settings(data, train=data / "pairs.parquet")
    own = [each for each in files if "actor_rollout_ref" not in each]
    learns = [f"reward.reward_model.model.path={gguf}", "reward.reward_model.optim.lr=1e-5"]
    learns.append("reward.reward_model.ppo_mini_batch_size=4")
    run = train("rm", "pairs", "--inline", *own, *learns, cwd=root)
    key = "reward_model/pair_loss"
    first, second = (line[key] for line in metrics(run) if key in line)
    assert second < first < 3 * math.log(2)
    rlctl("export", "pairs", "judge", cwd=root)
    loaded: Any = AutoModelForSequenceClassification.from_pretrained(
        root / "judge", output_loading_info=True
    )
    assert not loaded[1]["missing_keys"]
