"""Patches of vLLM 0.31 and 0.32 in how they import classes of models and their processors."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# (an extra: types are checked where it is installed)
from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, Final

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

_replaced: dict[str, type[PreTrainedConfig]] = {}  # by type


def inspect_models_in_process() -> None:
    """Patch vLLM to inspect model classes in this process.

    On first use vLLM inspects them in a subprocess, to avoid initializing a GPU early. That takes
    ten seconds or more, and this process is about to use the device anyway.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda fn: fn()


def keep_classes() -> None:
    """Patch vLLM to leave the classes of transformers alone, which the trainer has, too.

    It runs models that it does not know by transformers' classes, and changes these to compile.
    vLLM's configs replace those of the same type in `AutoConfig` until `restore_configs`.
    """
    from vllm.model_executor.models.transformers.base import Base
    from vllm.transformers_utils import config

    setattr(Base, "_decorate_for_torch_compile", lambda _: None)  # noqa: B010
    register = config._register_config_class

    def replace(model_type: str, config_class: type[PreTrainedConfig]) -> None:
        if model_type in CONFIG_MAPPING:
            _replaced.setdefault(model_type, CONFIG_MAPPING[model_type])
        register(model_type, config_class)

    config._register_config_class = replace


def restore_configs() -> None:
    """Register the configs of transformers again that vLLM has replaced."""
    for model_type, config_class in _replaced.items():
        AutoConfig.register(model_type, config_class, exist_ok=True)
    _replaced.clear()


def import_without_torchvision() -> None:
    """Give vLLM's classes the image processors for Pillow where others need torchvision.

    They import these also for models of text, and installations for CPUs often lack torchvision.
    """
    if find_spec("torchvision") is not None:
        return
    for family in ("qwen2_vl", "glm4v", "got_ocr2", "gemma3", "pixtral"):
        module = import_module(f"transformers.models.{family}.image_processing_pil_{family}")
        for name in [name for name in vars(module) if name.endswith("ProcessorPil")]:
            setattr(module, name.removesuffix("Pil"), getattr(module, name))
        sys.modules.setdefault(module.__name__.replace("_pil_", "_"), module)
    video = "transformers.models.internvl.video_processing_internvl"
    sys.modules.setdefault(video, ModuleType(video)).__dict__.setdefault(
        "InternVLVideoProcessor", object
    )


class _Limits:
    """Limits that vLLM asks a model's processor for: an image may fill a context."""

    supported_mm_limits: Final = {"image": None}
    allowed_mm_limits: Final = {"image": 2**16}  # images of a prompt
    skip_prompt_length_check: Final = False

    def __init__(self, model_config: Any) -> None:
        self.ctx = SimpleNamespace(model_config=model_config)

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: object) -> dict[str, int]:
        """Return the largest number of tokens of an image."""
        del mm_counts
        return {"image": seq_len}


def replace_processors() -> None:
    """Patch vLLM to load no processors of its own.

    They need a tokenizer and torchvision, and write placeholders again; its engine takes processed
    images.
    """
    from vllm.multimodal.registry import MultiModalRegistry

    def create(_: Any, model_config: Any, **__: Any) -> Any:
        return SimpleNamespace(info=_Limits(model_config))

    registry: Any = MultiModalRegistry
    registry.create_processor = create
    registry.get_processing_info = lambda *args, **__: create(*args[:2]).info
