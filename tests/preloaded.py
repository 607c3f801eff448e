"""Modules that commands and ranks import, in the process that `tests.forks` forks; not Ray.

Workers of Ray are forks of the commands. Nothing here starts a thread, with which no process can
fork: not pyarrow, whose allocator has one.
"""

from __future__ import annotations

import gc
from importlib import import_module

from rlctl.recipes.keys import schema_keys
from tests.plugin_folders import is_there

NAMES = (
    "fsspec",
    "numpy.ma",
    "pytest",
    "torch.distributed.checkpoint.staging",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "rlctl.cli.commands.resume",
    "rlctl.cli.commands.train",
    "rlctl.recipes.unused_keys",
    "rlctl.runtime.cluster.session",
    "rlctl.runtime.resume",
    "rlctl.runtime.rewards.gsm8k",
    "rlctl.sweeps.sweep_launch",
    "rlctl.tracking.console_tracker",
)

for name in NAMES:
    import_module(name)
if is_there("objectives"):
    import_module("rlctl.plugins.objectives.judge")
if is_there("bridges"):
    translate = import_module("rlctl.plugins.bridges.verl.translate").translate
    for key in schema_keys():
        translate(key, None)  # fills the caches of patterns
gc.collect()
gc.freeze()  # a collection in a fork would copy the pages of these objects
