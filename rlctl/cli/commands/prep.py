"""`rlctl prep`: write the parquet files that training reads.

The commands are the plug-ins of kind `datasets`: the fields of their settings become options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from rlctl import plugins
from rlctl.cli.console import print_json, table
from rlctl.cli.options import Json
from rlctl.cli.stderr import stderr
from rlctl.errors import ConfigError, UsageError
from rlctl.text import plural

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from rlctl.data_prep.datasets import Dataset
    from rlctl.data_prep.lengths import Lengths
    from rlctl.data_prep.rows import PromptRow, RowSource


class DatasetGroup(TyperGroup):
    """Command group with one command per installed data set, built when it is used."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return the names of the data sets."""
        return plugins.names("datasets")

    def get_command(
        self,
        ctx: Any,  # noqa: ARG002
        cmd_name: str,
    ) -> TyperCommand | None:
        """Return the command of a data set, or None if there is no data set of that name."""
        if cmd_name not in plugins.names("datasets"):
            return None
        return dataset_command(cmd_name, plugins.load("datasets", cmd_name))


app = typer.Typer(cls=DatasetGroup)


Out = Annotated[
    Path,
    typer.Option(
        "--out",
        "-o",
        metavar="DIR",
        help="Folder for one parquet file per split; files of that name are replaced.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="DIR",
        help="Count tokens with the chat template of this model, and print a histogram.",
    ),
]
MaxPromptLength = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Drop and count prompts of more than N tokens; needs --model."
    ),
]


def dataset_command(name: str, dataset: Dataset) -> TyperCommand:
    """Build the command of a data set from its docstring, its example and its settings."""
    model = plugins.params_model(dataset)
    fields: Mapping[str, FieldInfo] = {}
    if model is not None:
        fields = model.model_fields

    def command(
        ctx: typer.Context,
        out: Path,
        model: str | None,
        max_prompt_length: int | None,
        as_json: bool,
        **values: Any,
    ) -> None:
        from rlctl.data_prep.agent_columns import ToolsParams

        params = plugins.parse_params(dataset, name, values, f"rlctl prep {name}")
        is_default = getattr(ctx.get_parameter_source("out"), "name", None) == "DEFAULT"
        if is_default and isinstance(params, ToolsParams) and params.tools is not None:
            out = out.with_name(f"{out.name}_tools")  # its rows do not replace the plain ones
        out = out.expanduser()

        def load() -> Mapping[str, RowSource]:
            from rlctl.plugins.result_check import check_result

            splits = dataset(params)
            is_right = isinstance(splits, Mapping) and all(
                hasattr(rows, "__iter__") and hasattr(rows, "__len__") for rows in splits.values()
            )
            check_result(dataset, is_right, splits, "rows by split")
            return splits

        summary = _write(load, out, model, max_prompt_length, as_json)
        if not as_json:
            words = getattr(dataset, "train", lambda _: None)(params)
            files = {split: Path(entry["file"]) for split, entry in summary.items()}
            num_rows = next(iter(summary.values()))["num_rows"]
            stderr().print(f"next: {next_command(words, files, num_rows)}", soft_wrap=True)

    out = inspect.Parameter.empty
    if default_out := getattr(dataset, "default_out", None):
        out = Path(default_out)
    parameters = [
        _parameter("ctx", typer.Context, inspect.Parameter.empty),
        _parameter("out", Out, out),
        *(_field_parameter(field_name, field) for field_name, field in fields.items()),
        _parameter("model", Model, None),
        _parameter("max_prompt_length", MaxPromptLength, None),
        _parameter("as_json", Json, False),
    ]
    vars(command)["__signature__"] = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = inspect.getdoc(dataset)
    single = typer.Typer(add_completion=False)
    example = getattr(dataset, "example", None)
    single.command(name, epilog=f"Example: {example}" if example else None)(command)
    built = get_command(single)
    assert isinstance(built, TyperCommand)  # a Typer app with one command
    return built


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _field_parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """Return the option, or positional argument, that sets a field of the settings."""
    extra: Mapping[str, Any] = {}
    if isinstance(field.json_schema_extra, dict):
        extra = field.json_schema_extra
    bounds = {
        option: getattr(limit, bound)
        for option, bound in (("min", "ge"), ("max", "le"))
        for limit in field.metadata
        if hasattr(limit, bound)
    }
    make: Any = typer.Option
    if extra.get("argument"):
        make = typer.Argument
    info = make(help=field.description, metavar=extra.get("metavar"), **bounds)
    default = field.default
    if field.is_required():
        default = inspect.Parameter.empty
    return _parameter(name, Annotated[field.annotation, info], default)


def _write(
    load: Callable[[], Mapping[str, RowSource]],
    out: Path,
    model: str | None,
    max_prompt_length: int | None,
    as_json: bool,
) -> dict[str, dict[str, Any]]:
    """Load all splits, drop over-long prompts, write one file per split and print a summary.

    Return the summary of each split. Writes nothing unless every split is valid.
    """
    from rlctl.data_prep.rows import write_rows

    if max_prompt_length is not None and model is None:
        raise UsageError(
            "--max-prompt-length counts tokens and needs a tokenizer", hint="--model DIR"
        )
    num_tokens = None
    if model:
        num_tokens = _token_counter(model)  # before load(): it may download
    splits = load()
    num_skipped = getattr(splits, "num_skipped", 0)
    lengths: dict[str, Lengths] = {}
    if num_tokens:
        splits, lengths = _drop_overlong(splits, num_tokens, max_prompt_length)
    for split, rows in splits.items():
        write_rows(out / f"{split}.parquet", rows)
    summary = {
        split: _summary(out / f"{split}.parquet", rows, lengths.get(split))
        for split, rows in splits.items()
    }
    next(iter(summary.values()))["num_skipped"] = num_skipped  # before the rows were divided
    if as_json:
        print_json(summary)
    else:
        print_summary(summary, lengths, max_prompt_length)
    return summary


def next_command(train: str | None, files: Mapping[str, Path], num_rows: int) -> str:
    """Return the command line that trains on the files of a data set, or shows their rows.

    `train` are its words without settings; `num_rows` are the rows for training. Files and batch
    sizes that the recipe has anyway are left out.
    """
    import shlex

    train_file, *held_out = files.values()
    if train is None:
        return f"rlctl data show {shlex.quote(str(train_file))}"
    from rlctl.recipes.compose import compose

    config = compose(train.partition(" --recipe ")[2]).config
    words = [f"rlctl train {train}"]
    for key, file in (("train_files", train_file), *(("val_files", file) for file in held_out)):
        read = [str(Path(path).expanduser()) for path in getattr(config.data, key) or ()]
        if read != [str(file)]:
            words.append(_override(f"data.{key}", str(file)))
    sizes = {
        "data.train_batch_size": config.data.train_batch_size,
        "actor_rollout_ref.actor.ppo_mini_batch_size": (
            config.actor_rollout_ref.actor.ppo_mini_batch_size
        ),
    }
    words += [f"{key}={num_rows}" for key, size in sizes.items() if size > num_rows]
    return " ".join(words)


def _override(key: str, value: str) -> str:
    """Return an override, quoted only if Hydra or a shell needs it."""
    from rlctl.recipes.repairs import PLAIN
    from rlctl.suggest import quoted

    if PLAIN.fullmatch(value):
        return f"{key}={value}"
    return quoted(key, value)


def _drop_overlong(
    splits: Mapping[str, RowSource],
    num_tokens: Callable[[PromptRow], int],
    limit: int | None,
) -> tuple[dict[str, RowSource], dict[str, Lengths]]:
    """Return the rows of at most `limit` tokens and the lengths of all rows, per split.

    Raises ConfigError if no row of a split remains.
    """
    from rlctl.data_prep.lengths import drop_overlong

    kept: dict[str, RowSource] = {}
    lengths: dict[str, Lengths] = {}
    for split, rows in splits.items():
        kept[split], lengths[split] = drop_overlong(rows, num_tokens, limit)
        if not kept[split]:
            raise ConfigError(
                f"all {len(rows)} prompts of {split} are longer than {limit} tokens; "
                f"the shortest has {lengths[split].quantile(0)}"
            )
    return kept, lengths


def _token_counter(model: str) -> Callable[[PromptRow], int]:
    from rlctl.runtime.data.image_prompts import row_renderer
    from rlctl.runtime.data.tokenizer import encode_text, load_tokenizer

    tokenizer = load_tokenizer(model)
    render = row_renderer(tokenizer)
    return lambda row: len(encode_text(tokenizer, render(row)))


def _summary(path: Path, rows: RowSource, lengths: Lengths | None) -> dict[str, Any]:
    import hashlib

    shares = (("min", 0.0), ("median", 0.5), ("p95", 0.95), ("max", 1.0))
    tokens = None
    num_dropped = 0
    if lengths:
        tokens = {name: lengths.quantile(share) for name, share in shares}
        num_dropped = lengths.num_dropped
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "file": str(path),
        "num_rows": len(rows),
        "num_dropped": num_dropped,
        "num_skipped": 0,
        "prompt_tokens": tokens,
        "sha256": digest,
    }


_BAR_WIDTH = 40


def print_summary(
    summary: Mapping[str, Mapping[str, Any]],
    lengths: Mapping[str, Lengths],
    max_prompt_length: int | None,
) -> None:
    """Print one line per written file, and the histogram of prompt lengths where counted."""
    for split, entry in summary.items():
        parts = [f"{entry['file']}: {plural(entry['num_rows'], 'row')}"]
        if entry["num_skipped"]:
            parts.append(f"{plural(entry['num_skipped'], 'invalid record')} left out")
        if max_prompt_length:
            parts.append(f"{entry['num_dropped']} longer than {max_prompt_length} tokens dropped")
        parts.append(f"sha256 {entry['sha256'][:12]}")
        stderr().print(", ".join(parts))
        if split in lengths:
            _print_histogram(lengths[split])


def _print_histogram(lengths: Lengths) -> None:
    bins = lengths.histogram()
    most = max(count for *_, count in bins)
    rows = [
        (f"  {first}-{last}", str(count), "█" * round(_BAR_WIDTH * count / most))
        for first, last, count in bins
    ]
    stderr().print(table(["  prompt tokens", "rows", ""], rows, right=["rows"]))
