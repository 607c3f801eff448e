"""Import of classes that a YAML file of verl names, also while verl is not installed.

Files of tools and interactions import a few modules of verl. If verl is missing, modules with the
same names offer what such files use. They exist in worker processes only.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rlctl.errors import ConfigError
from rlctl.runtime.agents.environments.stand_ins import provide
from rlctl.runtime.sandbox.user_code import user_line

F = TypeVar("F", bound=Callable[..., Any])


def load_class(class_name: str, where: str, folder: Path) -> Callable[..., Any]:
    """Return the class `package.module.Class`; `folder` is also searched for modules.

    Raises ConfigError if it cannot be imported.
    """
    provide_verl()
    module_name, _, name = class_name.rpartition(".")
    if not module_name:
        raise ConfigError(
            f"class_name is {class_name!r}", where=where, hint="class_name: package.module.Class"
        )
    for path in (str(Path.cwd()), str(folder.resolve())):
        if path not in sys.path:
            sys.path.append(path)
    try:
        return getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"the class {class_name} cannot be imported: {type(error).__name__}: {error}",
            where=user_line(error, class_name) or where,
            hint="the module must be importable from the current folder or that of the YAML file",
        ) from error


def provide_verl() -> None:
    """Offer the modules of verl that tools and interactions import, unless it is installed."""
    from rlctl.runtime.agents.environments import function_tools
    from rlctl.runtime.agents.environments.verl import base_classes, gsm8k

    types = {kind.__name__: kind for kind in base_classes.TYPES}
    contents: dict[str, dict[str, Any]] = {
        "verl": {},
        "verl.tools": {},
        "verl.tools.base_tool": {"BaseTool": base_classes.BaseTool},
        "verl.tools.schemas": types,
        "verl.tools.function_tool": {"function_tool": function_tools.function_tool},
        "verl.tools.gsm8k_tool": {"Gsm8kTool": gsm8k.Gsm8kTool},
        "verl.interactions": {},
        "verl.interactions.base": {"BaseInteraction": base_classes.BaseInteraction},
        "verl.interactions.gsm8k_interaction": {"Gsm8kInteraction": gsm8k.Gsm8kInteraction},
        "verl.utils": {},
        "verl.utils.rollout_trace": {"rollout_trace_op": _untraced},
        "verl.utils.reward_score": {},
        "verl.utils.reward_score.gsm8k": {"compute_score": gsm8k.gsm8k_score},
    }
    provide(contents)


def _untraced(function: F) -> F:
    """Return `function`: calls are not traced."""
    return function
