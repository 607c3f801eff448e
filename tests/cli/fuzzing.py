"""Files with random faults, made of small valid ones, and commands on them in limited processes."""

from __future__ import annotations

import faulthandler
import io
import json
import os
import re
import resource
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import psutil
import yaml
from PIL import Image

from rlctl.data_prep.rows import PromptRow, write_rows
from rlctl.process import die_with_parent
from tests.forks import FORKS
from tests.models import write_tiny_model
from tests.progress import wait_until
from tests.recorded import called

CPU_S = 15  # of one command: 10 on the file, at most 5 for what it does with a valid one
MEMORY = 1 << 30  # bytes of one process, beyond those of its fork

_NUMBERS = ("0", "-1", "1e308", "NaN", "9" * 30, str(2**31), str(2**63), str(-(2**63)), "0.5")
_BINARY = (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
_ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**70, 1e308, float("nan"), "", "\x00", "\ud800", [], {}, [[]], [None]),
    *("<image>", ["a", 1], {"a": None}, "x" * 100_000, "../../x", "$" * 9, "${a}", "\x1b[31m"),
)
_TEMPLATES = (
    "{{ messages[0]['content'] * 999999999 }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ undefined.field.other }}",
    "{% include 'other' %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ raise_exception('no') }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ 1 / 0 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{% set x = messages.append(1) %}",
    "{{ messages | tojson(indent=99999999) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ 'a'.center(999999999) }}",
    "{{ messages['x']() }}",
    "{% if",
)


@dataclass(frozen=True)
class Ended:
    """End of one command: its exit code, or that of the process that it killed."""

    words: Sequence[str]
    code: int
    output: str

    @property
    def fault(self) -> str | None:
        """Fault of this end, None for a result or an error that names its cause."""
        lowered = self.output.lower()
        for text in ("internal error", "traceback (most recent", "out of memory", "memoryerror"):
            if text in lowered:
                return text
        return None if 0 <= self.code < 8 else f"exit {self.code}"


def _random_json(random: Random, value: Any, depth: int = 0) -> Any:
    """Replace one part of a value by one of another type, or of many levels."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        key = random.choice(list(value))
        if random.random() < 0.1:
            return {name: item for name, item in value.items() if name != key}
        return value | {key: _random_json(random, value[key], depth + 1)}
    if isinstance(value, list) and value and random.random() < 0.85:
        index = random.randrange(len(value))
        return [*value[:index], _random_json(random, value[index], depth + 1), *value[index + 1 :]]
    return random.choice(_ODD)


def _bytes(random: Random, content: bytes) -> bytes:
    """Change a few bytes of a file, at random places or in its header or footer."""
    data = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 5))):
        size = len(data) or 1
        place = random.choice((random.randrange(size), random.randrange(min(size, 64))))
        if random.random() < 0.3:
            place = max(0, size - 1 - place)
        span = bytes(data[place : place + random.choice((1, 4, 16, 256))])
        match random.randrange(8):
            case 0:
                for _ in range(random.choice((1, 8, 64))):
                    if data:
                        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
            case 1:
                del data[place:]
            case 2:
                del data[place : place + len(span)]
            case 3:
                data[place:place] = span * random.choice((1, 10, 1000))
            case 4:
                data[place:place] = random.randbytes(random.choice((1, 4, 64)))
            case 5:
                width = random.choice((4, 8))
                number = random.choice(_BINARY) % (1 << 8 * width)
                data[place : place + width] = number.to_bytes(
                    width, random.choice(("little", "big"))
                )
            case 6:
                data[place:place] = random.choice(
                    (b"\x00", b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80")
                )
            case _:
                data[place : place + 1] = bytes([random.randrange(256)])
    return bytes(data)


def _text(random: Random, content: bytes) -> bytes:
    """Change numbers or levels of a text file, or its bytes."""
    numbers = [*re.finditer(rb"\d+", content)]
    choice = random.randrange(4)
    if choice == 0 and numbers:
        found = random.choice(numbers)
        number = random.choice(_NUMBERS).encode()
        return content[: found.start()] + number + content[found.end() :]
    if choice == 1:
        place = random.randrange(len(content) + 1)
        opening, closing = random.choice(
            ((b"[", b"]"), (b'{"a":', b"}"), (b"{{", b"}}"), (b"- ", b""))
        )
        levels = random.choice((10, 1000, 100_000))
        closed = closing * levels if random.random() < 0.5 else b""
        return content[:place] + opening * levels + b"1" + closed + content[place:]
    return _bytes(random, content)


def _json_text(random: Random, content: bytes) -> bytes:
    """Change values of a JSON file or of the lines of a JSONL file, or its text."""
    if random.random() < 0.5:
        return _text(random, content)
    lines = content.splitlines() if b"\n{" in content else [content]
    index = random.randrange(len(lines))
    value = json.loads(lines[index])
    for _ in range(random.choice((1, 1, 3))):
        value = _random_json(random, value)
    lines[index] = json.dumps(value).encode()
    return b"\n".join(lines)


def _yaml_text(random: Random, content: bytes) -> bytes:
    """Change values of a recipe, or its text; sometimes with anchors that multiply."""
    choice = random.random()
    if choice < 0.4:
        return _text(random, content)
    if choice < 0.5:
        names = "abcdefghijk"
        bomb = "".join(
            f"{name}: &{name} [{', '.join([f'*{before}'] * 9) if before else 1}]\n"
            for before, name in zip((None, *names), names, strict=False)
        )
        return bomb.encode() + content
    return yaml.safe_dump(_random_json(random, yaml.safe_load(content))).encode()


def _template(random: Random, content: bytes) -> bytes:
    """Add an expression to a chat template, or change its text."""
    if random.random() < 0.5:
        return _text(random, content)
    place = random.randrange(len(content) + 1)
    return content[:place] + random.choice(_TEMPLATES).encode() + content[place:]


def _picture(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((24, 24), 40).convert("RGB").save(buffer, kind)
    return buffer.getvalue()


ROW: dict[str, Any] = {
    "data_source": "rlctl/arithmetic",
    "prompt": [{"role": "user", "content": "What is 1 + 2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "3"},
    "extra_info": {"index": 7, "more": [1, 2]},
}
RECIPE = """
defaults:
  - grpo_trainer
  - _self_
data:
  train_files: [quickstart]
  train_batch_size: 32
  max_prompt_length: 64
actor_rollout_ref:
  model:
    path: quickstart
  actor:
    ppo_mini_batch_size: 16
    optim: {lr: 3.0e-4, betas: [0.9, 0.99]}
  rollout:
    n: 4
    val_kwargs: {temperature: 1.0, do_sample: true}
trainer:
  project_name: x
  total_training_steps: 4
  logger: [console]
"""
KINDS = (
    "parquet",
    "wrong types",
    "picture",
    "picture file",
    "jsonl",
    "recipe",
    "template",
    "model",
)
# Files of a model, of which one is changed.
MODEL_FILES = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")


def write_valid(folder: Path) -> Path:
    """Write the valid files that the faults are put into; return their folder."""
    model = write_tiny_model(folder / "model")
    text = model / "chat_template.jinja"
    assert text.is_file()
    rows = [
        PromptRow("rlctl/arithmetic", [{"role": "user", "content": f"{n} + 1?"}], str(n))
        for n in range(40)
    ]
    write_rows(folder / "rows.parquet", rows)
    (folder / "rows.jsonl").write_text("".join(json.dumps(ROW) + "\n" for _ in range(40)))
    (folder / "recipe.yaml").write_text(RECIPE)
    for kind in ("png", "jpeg"):
        (folder / f"picture.{kind}").write_bytes(_picture(kind))
    return folder


def case(index: int, seed: int, valid: Path, folder: Path) -> list[list[str]]:
    """Write the file of a case into an empty folder; return the commands that read it."""
    random = Random(f"{seed}/{index}")
    kind = KINDS[index % len(KINDS)]
    train = ["train", "grpo", "--inline", "--dry-run"]
    sizes = ["data.max_prompt_length=128", "data.max_response_length=64"]
    sizes += ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    if kind == "parquet":
        file = folder / "rows.parquet"
        file.write_bytes(_bytes(random, (valid / "rows.parquet").read_bytes()))
    elif kind == "wrong types":
        file = folder / "rows.parquet"
        _write_odd_parquet(random, file)
    elif kind == "jsonl":
        file = folder / "rows.jsonl"
        file.write_bytes(_json_text(random, (valid / "rows.jsonl").read_bytes()))
    elif kind in ("picture", "picture file"):
        return _picture_case(random, kind, valid, folder, train)
    elif kind == "recipe":
        (folder / "recipe.yaml").write_bytes(
            _yaml_text(random, (valid / "recipe.yaml").read_bytes())
        )
        return [[*train, "--recipe", "recipe.yaml"]]
    else:
        shutil.copytree(valid / "model", folder / "model")
        change = _template if kind == "template" else _json_text
        name = "chat_template.jinja" if kind == "template" else random.choice(MODEL_FILES)
        change = _bytes if name == "model.safetensors" else change
        file = folder / "model" / name
        file.write_bytes(change(random, file.read_bytes()))
        show = ["data", "show", f"{valid}/rows.parquet", "--model", "model"]
        given = [f"data.{split}_files={valid}/rows.parquet" for split in ("train", "val")]
        given += ["actor_rollout_ref.model.path=model"]
        return [show, [*train, *sizes, *given]]
    prep = ["prep", "jsonl", file.name, "--out", "out", "--prompt-key", "prompt"]
    given = [f"data.{split}_files={file.name}" for split in ("train", "val")]
    given += [f"actor_rollout_ref.model.path={valid}/model"]
    return [
        ["data", "show", file.name, *random.choice(([], ["--json"]))],
        [*prep, "--answer-key", "reward_model.ground_truth"],
        [*train, *sizes, *given],
    ]


def _picture_case(
    random: Random, kind: str, valid: Path, folder: Path, train: list[str]
) -> list[list[str]]:
    form = random.choice(("png", "jpeg"))
    content = _bytes(random, (valid / f"picture.{form}").read_bytes())
    if kind == "picture file":
        (folder / f"picture.{form}").write_bytes(content)
        record = {"q": "<image>What?", "a": "1", "images": [f"picture.{form}"]}
        (folder / "rows.jsonl").write_text(json.dumps(record) + "\n")
        words = ["prep", "jsonl", "rows.jsonl", "--out", "out", "--prompt-key", "q"]
        return [[*words, "--answer-key", "a", "--image-key", "images"]]
    chat = [{"role": "user", "content": "<image>What?"}]
    rows = [PromptRow("rlctl/shapes", chat, "1", images=(content or b"\x00",)) for _ in range(40)]
    write_rows(folder / "rows.parquet", rows)
    show = ["data", "show", "rows.parquet"]
    given = ["data.train_files=rows.parquet", "data.val_files=rows.parquet"]
    return [show, [*train, "--recipe", "shapes", *given]]


def _write_odd_parquet(random: Random, file: Path) -> None:
    """Write rows whose columns have types that Arrow can store and that are no prompts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for _ in range(100):
        row = ROW
        for _ in range(random.choice((1, 1, 2))):
            row = _random_json(random, row)
        try:
            table = pa.Table.from_pylist([row] * random.choice((1, 40)))
            pq.write_table(table, file)
            return
        except (pa.ArrowException, TypeError, ValueError, AttributeError, OverflowError):
            continue


def run(commands: Sequence[Sequence[str]], folder: Path) -> list[Ended]:
    """Run commands one after the other in one forked process; return their ends.

    The last is that of the process if it did not get through all.
    """
    results = folder / "results.jsonl"
    results.touch()
    process = FORKS.Process(target=_child, args=(commands, folder, results))
    process.start()
    assert process.pid is not None
    try:
        wait_until(lambda: process.exitcode is not None, process.pid, str(commands))
    finally:
        process.kill()
        process.join()
    ends = [Ended(*json.loads(line)) for line in results.read_text().splitlines()]
    if len(ends) < len(commands):
        text = (folder / "stderr").read_text(errors="replace")
        ends.append(Ended(commands[len(ends)], process.exitcode or 0, text))
    return ends


def _child(commands: Sequence[Sequence[str]], folder: Path, results: Path) -> None:
    die_with_parent()
    os.setsid()
    os.environ |= {"NO_COLOR": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}  # others reserve 1 GiB
    error = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(error, 2)
    os.dup2(error, 1)
    import pyarrow.parquet  # noqa: F401

    data = psutil.Process().memory_info().data  # type: ignore[attr-defined]
    resource.setrlimit(resource.RLIMIT_DATA, (data + MEMORY, data + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.register(signal.SIGXCPU, chain=True)
    for words in commands:
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + 1 + CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        done = called(*words, cwd=folder)
        more = (folder / "stderr").read_text(errors="replace")
        entry = [words, done.returncode, done.stdout[-3000:] + done.stderr[-6000:] + more[-6000:]]
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
    os._exit(0)
