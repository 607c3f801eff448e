"""Builder of the quickstart's model: a tokenizer for arithmetic problems and a tiny Llama.

`rlctl train sft` trains it on solutions that mostly omit the last equation, so the model has the
steps but rarely completes them. `make demo` corrects this with reinforcement learning.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rlctl.quickstart import NAME, real_path

SEED = 0
NUM_TRAIN, NUM_VAL, LEVEL, CARELESS = 60_000, 256, 2, 0.7
VOCABULARY = 512
SFT = {
    "data.train_batch_size": 64,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
    "actor_rollout_ref.model.enable_gradient_checkpointing": "false",
    "actor_rollout_ref.actor.optim.lr": 3e-3,
    "actor_rollout_ref.actor.optim.betas": "[0.9,0.98]",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": 50,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine",
    "actor_rollout_ref.actor.optim.min_lr_ratio": 0.05,
    "trainer.total_training_steps": 1800,
    "trainer.total_epochs": 2,
    "trainer.val_before_train": "false",
    "trainer.test_freq": 600,
    "trainer.save_freq": 1800,
    "trainer.num_threads": 1,
    "trainer.seed": SEED,
    "data.max_prompt_length": 96,
    "data.max_response_length": 48,
}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_blank(
    folder: Path,
    texts: Sequence[str],
    chat_template: str,
    roles: Sequence[str] = (),
    markup: Sequence[str] = (),
    hidden_size: int = 160,
) -> None:
    """Write tokenizer and config.json; `actor_rollout_ref.model.init=random` makes the weights.

    The tokenizer is trained on `texts`. `roles` are further special tokens; those of `markup` are
    not special, so that they are part of decoded text.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    # One token per digit, so that numbers of any length are spelled the same way.
    words_and_digits = Regex(r" ?\d| ?\p{L}+| ?[^\s\p{L}\d]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words_and_digits, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", *roles]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(markup),
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in markup])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=chat_template,
    )
    fast.save_pretrained(folder)
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id("<|end|>"),
        pad_token_id=tokenizer.token_to_id("<|pad|>"),
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)


def main(target: Path) -> None:
    """Train the model and write it to the folder `target`, replacing its contents."""
    from rlctl.data_prep.arithmetic import train_and_validation

    rows, _ = train_and_validation(4000, 0, seed=SEED + 1, level=3, careless=0.0)
    texts = [text for row in rows for text in (row.prompt[0]["content"], row.extra_info["answer"])]
    with tempfile.TemporaryDirectory() as work:
        blank, data, runs = (Path(work) / name for name in ("blank", "data", "runs"))
        write_blank(blank, texts, CHAT_TEMPLATE)
        sizes = ["--train", NUM_TRAIN, "--val", NUM_VAL, "--level", LEVEL, "--careless", CARELESS]
        _rlctl("prep", "arithmetic", "--out", data, "--seed", SEED + 2, *sizes)
        settings = SFT | {
            "actor_rollout_ref.model.path": blank,
            "actor_rollout_ref.model.init": "random",
            "data.train_files": data / "train.parquet",
            "data.val_files": data / "val.parquet",
            "trainer.run_dir": runs,
        }
        overrides = [f"{key}={value}" for key, value in settings.items()]
        options = ["--recipe", "sft", "--inline", "--name", "quickstart-model"]
        _rlctl("train", "sft", *options, *overrides)
        newest = max(runs.glob("*/quickstart-model/checkpoints/step_*/huggingface"))
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(newest, target)
    print(f"wrote {target}")


def _rlctl(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "rlctl", *map(str, arguments)], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(real_path(NAME)))
