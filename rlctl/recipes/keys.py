"""Table of all keys of the schema, with kind, type in words and help.

Suggestions for unknown keys know words of other libraries, other case, and typos.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

from rlctl.recipes.schema import Config, Section
from rlctl.recipes.schema.fields import UnusedIf
from rlctl.suggest import nearest, question

_PLURAL = re.compile(r"(?<=[a-z])(?= [≥>≤<]|$)")
_PRIMITIVES = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    Any: "anything",
}
_SIGNS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the configuration: a section, a value, or open (a mapping with free keys)."""

    name: str
    kind: Literal["section", "value", "open"]
    type: str
    help: str
    choices: tuple[str, ...] = ()
    nullable: bool = False
    unused_if: tuple[UnusedIf, ...] = ()  # with one that holds, the key has no effect


@cache
def schema_keys() -> dict[str, Key]:
    """Return all keys, sections included, in the order of the schema."""
    return {key.name: key for key in model_keys(Config, "")}


def known_key(name: str) -> Key | None:
    """Return the key of that name, or the open mapping that contains it, or None if unknown."""
    keys = schema_keys()
    if name in keys:
        return keys[name]
    parent = name
    while "." in parent:
        parent = parent.rpartition(".")[0]
        if parent in keys:
            return keys[parent] if keys[parent].kind == "open" else None
    return None


def without_empty_text(name: str, value: Any) -> Any:
    """Return null for `''` as the value of a nullable key, as shell scripts write it."""
    key = schema_keys().get(name)
    if value == "" and key is not None and key.nullable:
        return None
    return value


def model_keys(
    model: type[BaseModel], prefix: str, section_unused_if: Sequence[UnusedIf] = ()
) -> Iterator[Key]:
    """Yield the fields of a model as keys below `prefix`, those of its sections included.

    `section_unused_if` applies to all keys but those that decide about it.
    """
    for name, field in model.model_fields.items():
        annotation: Any = field.annotation
        dotted = f"{prefix}{name}"
        unused_if = [condition for condition in section_unused_if if dotted not in condition.values]
        unused_if += [item.below(prefix) for item in field.metadata if isinstance(item, UnusedIf)]
        if isinstance(annotation, type) and issubclass(annotation, Section):
            yield Key(dotted, "section", "section", "")
            yield from model_keys(annotation, f"{dotted}.", unused_if)
            continue
        parts = _members(annotation)
        limits = [*field.metadata, Field(json_schema_extra=field.json_schema_extra)]
        named = [_words(part, limits) for part in parts if part is not type(None)]
        choices = tuple(
            str(value) for part in parts if get_origin(part) is Literal for value in get_args(part)
        )
        if bool in parts:
            choices = ("true", "false", *choices)
        nullable = type(None) in parts
        if nullable:
            named.append("null")
        open_mapping = any(get_origin(part) is dict for part in parts)
        yield Key(
            dotted,
            "open" if open_mapping else "value",
            " or ".join(named),
            field.description or "",
            choices,
            nullable,
            tuple(unused_if),
        )


def _members(annotation: Any) -> list[Any]:
    """Return the alternatives of a union, or the annotation itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        return list(get_args(annotation))
    return [annotation]


def _words(annotation: Any, metadata: list[Any]) -> str:
    """Describe a type for messages: `whole number ≥ 1`, `list of text`, `fixed | adaptive`."""
    origin = get_origin(annotation)
    args = get_args(annotation)
    if origin is Annotated:
        return _words(args[0], [*metadata, *args[1:]])
    if len(alternatives := _members(annotation)) > 1:
        return " or ".join(_words(alternative, []) for alternative in alternatives)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"{{{', '.join(annotation.model_fields)}}}"
    if origin is Literal:
        return " | ".join(str(value) for value in args)
    if origin is tuple and args[-1] is Ellipsis:
        return f"list of {_words(args[0], [])}"
    if origin is tuple:
        return f"list of {len(args)} {_PLURAL.sub('s', _words(args[0], []), count=1)}"
    if origin is dict and args[1] is Any:
        return "mapping"
    if origin is dict:
        return f"mapping of {_words(args[1], [])}"
    return " ".join([_PRIMITIVES.get(annotation, str(annotation)), *_bounds(metadata)]).strip()


def _bounds(metadata: list[Any]) -> Iterator[str]:
    """Yield bounds in words, from pydantic's metadata and a field's `bounds` text."""
    marks: list[Any] = []
    for item in metadata:
        if isinstance(item, FieldInfo):
            extra = item.json_schema_extra
            if isinstance(extra, dict) and "bounds" in extra:
                yield str(extra["bounds"])
            marks += item.metadata
        else:
            marks.append(item)
    limits = [
        f"{sign} {getattr(mark, name)}"
        for mark in marks
        for name, sign in _SIGNS
        if getattr(mark, name, None) is not None
    ]
    if limits:
        yield " and ".join(limits)


_ACTOR = "actor_rollout_ref.actor"
# Words that other libraries use, with the key here.
_WORDS = {
    "epochs": "trainer.total_epochs",
    "num_epochs": "trainer.total_epochs",
    "num_train_epochs": "trainer.total_epochs",
    "steps": "trainer.total_training_steps",
    "max_steps": "trainer.total_training_steps",
    "num_steps": "trainer.total_training_steps",
    "total_step": "trainer.total_training_steps",
    "total_steps": "trainer.total_training_steps",
    "gpus": "trainer.n_gpus_per_node",
    "ngpus": "trainer.n_gpus_per_node",
    "n_gpus": "trainer.n_gpus_per_node",
    "num_gpus": "trainer.n_gpus_per_node",
    "batch_size": "data.train_batch_size",
    "mini_batch_size": f"{_ACTOR}.ppo_mini_batch_size",
    "micro_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "per_device_train_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "learning_rate": f"{_ACTOR}.optim.lr",
    "max_grad_norm": f"{_ACTOR}.grad_clip",
    "beta": f"{_ACTOR}.kl_loss_coef",
    "epsilon": f"{_ACTOR}.clip_ratio",
    "model_path": "actor_rollout_ref.model.path",
    "model_name_or_path": "actor_rollout_ref.model.path",
    "partial_pretrain": "actor_rollout_ref.model.path",
    "num_generations": "actor_rollout_ref.rollout.n",
    "max_new_tokens": "data.max_response_length",
    "max_tokens": "data.max_response_length",
    "max_completion_length": "data.max_response_length",
    "run_name": "trainer.experiment_name",
    "save_steps": "trainer.save_freq",
    "eval_steps": "trainer.test_freq",
    "output_dir": "trainer.run_dir",
}


def suggest_key(name: str) -> str | None:
    """Return `did you mean KEY?` for an unknown key, or None if nothing is similar."""
    return question(similar_keys(name))


def similar_keys(name: str) -> list[str]:
    """Return the keys that an unknown one may stand for, the most probable first."""
    keys = schema_keys()
    if name.lower() in keys:
        return [name.lower()]
    section, _, leaf = name.rpartition(".")
    word = _WORDS.get(leaf.lower())
    if word is not None:
        nearby = f"{section}.{word.rpartition('.')[2]}"
        if nearby in keys:
            return [nearby]
        return [word]
    return nearest(name, keys)
