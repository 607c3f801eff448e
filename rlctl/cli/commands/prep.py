"""`rlctl prep`: write the parquet files that training reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rlctl.data_prep.lengths import Lengths
    from rlctl.data_prep.rows import PromptRow

app = typer.Typer(
    no_args_is_help=True,
    help="Write the parquet files that training reads: GSM8K, arithmetic, your own.",
)

Out = Annotated[
    Path,
    typer.Option(
        "--out",
        "-o",
        metavar="DIR",
        help="Folder for one parquet file a split; files of that name are replaced.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="DIR",
        help="Count tokens with the chat template of this model, and show their histogram.",
    ),
]
MaxPromptLength = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Drop and count prompts of more than N tokens; needs --model."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="The summary as JSON on stdout.")]
Seed = Annotated[int, typer.Option(help="The same seed makes the same files.")]


@app.command(
    epilog="Example: rlctl prep gsm8k --out data/gsm8k --model Qwen/Qwen2.5-0.5B-Instruct --max-prompt-length 512"
)
def gsm8k(
    out: Out = Path("data/gsm8k"),
    source: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A folder with train.jsonl and test.jsonl or the hub's parquet files; else from the hub.",
        ),
    ] = None,
    model: Model = None,
    max_prompt_length: MaxPromptLength = None,
    as_json: AsJson = False,
) -> None:
    """GSM8K: 7,473 training and 1,319 test problems, in train.parquet and test.parquet."""
    from rlctl.data_prep.gsm8k import load_gsm8k

    _write(lambda: load_gsm8k(source), out, model, max_prompt_length, as_json)


@app.command(
    epilog="Example: rlctl prep arithmetic --out data/arithmetic --train 4096 --val 256 --seed 1 --level 2"
)
def arithmetic(
    out: Out = Path("data/arithmetic"),
    train: Annotated[int, typer.Option(min=1, metavar="N", help="Training problems.")] = 4096,
    val: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="M",
            help="Validation problems; none of them is among the training problems.",
        ),
    ] = 256,
    seed: Seed = 0,
    level: Annotated[
        int,
        typer.Option(
            help="1: one or two steps, numbers to 30. 2: one to three steps, to 99. 3: two or three steps, to 999."
        ),
    ] = 2,
    careless: Annotated[
        float,
        typer.Option(
            metavar="P",
            help="With this probability a training solution of several steps stops one early and reports that value: "
            "for making a base model that has something to learn. The ground truth stays right.",
        ),
    ] = 0.0,
    model: Model = None,
    max_prompt_length: MaxPromptLength = None,
    as_json: AsJson = False,
) -> None:
    """English word problems made from templates, with GSM8K's schema and scorer, in train.parquet and val.parquet.

    The prompt is the bare question, without an instruction: on a CPU every token counts. The worked solution, such as
    "12 + 5 = 17 ; 17 - 3 = 14 ; #### 14", is in extra_info.answer.
    """
    from rlctl.data_prep.arithmetic import train_and_validation

    def load() -> dict[str, list[PromptRow]]:
        rows = train_and_validation(train, val, seed=seed, level=level, careless=careless)
        return dict(zip(("train", "val"), rows, strict=True))

    _write(load, out, model, max_prompt_length, as_json)


@app.command(
    epilog="Example: rlctl prep jsonl questions.jsonl --prompt-key question --answer-key answer --out data/mine --val-fraction 0.1"
)
def jsonl(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="JSONL, a JSON list or parquet; one record a problem."),
    ],
    prompt_key: Annotated[
        str,
        typer.Option(
            metavar="KEY",
            help="The prompt: a text, or a list of {role, content}; a dot goes deeper.",
        ),
    ],
    answer_key: Annotated[
        str,
        typer.Option(
            metavar="KEY", help="The ground truth that the reward function gets; a dot goes deeper."
        ),
    ],
    out: Out,
    data_source: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name of the data in metrics and for the reward function; by default the file's.",
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A system message before every prompt.")
    ] = None,
    instruction: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="A sentence after every prompt, such as how to end the answer."
        ),
    ] = None,
    val_fraction: Annotated[
        float, typer.Option(metavar="P", help="Share of the records that goes to val.parquet.")
    ] = 0.0,
    seed: Seed = 0,
    model: Model = None,
    max_prompt_length: MaxPromptLength = None,
    as_json: AsJson = False,
) -> None:
    """Your own questions and answers, in train.parquet and, with --val-fraction, val.parquet."""
    from rlctl.data_prep.jsonl import Fields, rows_from_records, split_off

    fields = Fields(prompt_key, answer_key, data_source or file.stem, system, instruction)
    _write(
        lambda: split_off(rows_from_records(file, fields), val_fraction, seed),
        out,
        model,
        max_prompt_length,
        as_json,
    )


def _write(
    load: Callable[[], dict[str, list[PromptRow]]],
    out: Path,
    model: str | None,
    max_prompt_length: int | None,
    as_json: bool,
) -> None:
    """Load all splits, drop over-long prompts, and only then write the first file; then say what was written."""
    from rlctl.cli.console import print_json, stderr
    from rlctl.data_prep.rows import write_rows
    from rlctl.errors import ConfigError, UsageError

    if max_prompt_length is not None and model is None:
        raise UsageError(
            "--max-prompt-length counts tokens and needs a tokenizer", hint="--model DIR"
        )
    num_tokens = (
        _token_counter(model) if model else None
    )  # a model that will not do is told before a download
    splits = load()
    lengths: dict[str, Lengths] = {}
    if num_tokens:
        from rlctl.data_prep.lengths import drop_overlong

        for split, rows in splits.items():
            splits[split], lengths[split] = drop_overlong(rows, num_tokens, max_prompt_length)
            if not splits[split]:
                shortest = lengths[split].quantile(0)
                raise ConfigError(
                    f"all {len(rows)} prompts of {split} are longer than {max_prompt_length} tokens; the shortest has {shortest}"
                )
    for split, rows in splits.items():
        write_rows(out / f"{split}.parquet", rows)
    summary = {
        split: _summary(out / f"{split}.parquet", rows, lengths.get(split))
        for split, rows in splits.items()
    }
    if as_json:
        print_json(summary)
        return
    for split, entry in summary.items():
        dropped = (
            f", {entry['num_dropped']} longer than {max_prompt_length} tokens dropped"
            if max_prompt_length
            else ""
        )
        stderr().print(
            f"{entry['file']}: {entry['num_rows']} rows{dropped}, sha256 {entry['sha256'][:12]}",
            markup=False,
        )
        if split in lengths:
            _print_histogram(lengths[split])


def _token_counter(model: str) -> Callable[[list[dict[str, str]]], int]:
    from rlctl.runtime.data.tokenizer import encode_prompt, load_tokenizer

    tokenizer = load_tokenizer(model)
    return lambda chat: len(encode_prompt(tokenizer, chat))


def _summary(path: Path, rows: list[PromptRow], lengths: Lengths | None) -> dict[str, Any]:
    import hashlib

    tokens = (
        {
            name: lengths.quantile(share)
            for name, share in (("min", 0.0), ("median", 0.5), ("p95", 0.95), ("max", 1.0))
        }
        if lengths
        else None
    )
    return {
        "file": str(path),
        "num_rows": len(rows),
        "num_dropped": lengths.num_dropped if lengths else 0,
        "prompt_tokens": tokens,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }


def _print_histogram(lengths: Lengths) -> None:
    from rlctl.cli.console import stderr, table

    bins = lengths.histogram()
    most = max(count for *_, count in bins)
    rows = [
        (f"  {first}-{last}", str(count), "█" * round(40 * count / most))
        for first, last, count in bins
    ]
    stderr().print(table(["  prompt tokens", "rows", ""], rows, right=["rows"]))
