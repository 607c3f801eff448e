"""List of all places that import users' code, and the test that each ends in a user's error."""

from __future__ import annotations

import ast

from tests.architecture.source import FILES, ROOT, parsed
from tests.plugin_folders import in_this_tree

LOADERS = {"load", "load_with_params", "load_named", "import_file", "exec_module", "import_module"}

# Kind of plug-in by the function that imports it. `tests/e2e/test_users_code.py` has, for every
# kind, code that fails at its import, when it is built, and when it is called. `None` marks rlctl's
# own modules and libraries, and kinds that no key selects: users' code is not among them.
PLACES = {
    "__init__.py:__getattr__": None,
    "workers.py:__getattr__": None,
    "cli/__init__.py:load": "commands",
    "cli/__init__.py:_plugins": None,
    "cli/address_option.py:launched": None,
    "plugins/agents/commands/env.py:show": "tools",
    "plugins/agents/commands/env.py:_descriptions": "tools",
    "plugins/agents/commands/env.py:_is_tool": "environments",
    "plugins/agents/commands/env_test.py:_parser": "tool_parsers",
    "cli/commands/data.py:get_command": "commands",
    "cli/commands/prep.py:get_command": "datasets",
    "cli/commands/recipes.py:_check_recipe": "samplers",
    "plugins/__init__.py:_import": "advantages",
    "plugins/console/lm_eval/harness.py:evaluate_tasks": None,
    "gguf_model.py:_reader": None,
    "recipes/dialects.py:dialects": None,
    "recipes/plugin_params.py:_unknown_names": "advantages",
    "recipes/plugin_params.py:_load": "advantages",
    "recipes/key_reference.py:setting_rows": "advantages",
    "recipes/unused_keys.py:_declared_by_plugins": "advantages",
    "runs/details.py:plugin_fields": None,
    "runs/listing.py:value_of": None,
    "recipes/python_values.py:override_texts": None,
    "runs/run_comparison.py:_repr_html_": None,
    "runs/run.py:_repr_html_": None,
    "sweeps/results.py:_repr_html_": None,
    "runs/tracked.py:_num_samples": "loggers",
    "plugins/console/sync.py:sync": "loggers",
    "plugins/agents/episode_setup.py:episode_settings": "tool_parsers",
    "plugins/agents/environments/function_tools.py:tools_of_file": "tools",
    "plugins/agents/environments/environment_loading.py:find_environment": "environments",
    "plugins/agents/environments/program.py:prepare": "programs",
    "plugins/agents/environments/skyrl.py:prepare": "environments",
    "plugins/agents/environments/toolset.py:_named": "tools",
    "plugins/agents/environments/trl.py:prepare": "environments",
    "plugins/agents/environments/verl/base_classes.py:load_class": "tools",
    "runtime/algorithms/advantages/base.py:load_estimator": "advantages",
    "runtime/algorithms/kl.py:load_kl_estimator": "kl_estimators",
    "runtime/algorithms/policy_losses/base.py:load_policy_loss": "policy_losses",
    "runtime/base/image_processor.py:_auto": None,
    "runtime/build.py:load_algorithm": "algorithms",
    "plugins/objectives/dataset_class.py:dataset_class": "readers",
    "runtime/data/readers.py:load_reader": "readers",
    "runtime/build.py:role_plugin": None,
    "runtime/data/samplers.py:from_config": "samplers",
    "runtime/generators.py:open_generator": "generators",
    "runtime/planning/unusual_values.py:check_rows": "generators",
    "runtime/planning/draft.py:_check_surroundings": "engines",
    "runtime/planning/early_checks.py:_check_engine": None,
    "runtime/planning/early_checks.py:_check_logger": "loggers",
    "runtime/planning/preflight.py:_check_engine": "engines",
    "runtime/rewards/loading.py:find_reward": "rewards",
    "runtime/rewards/specs.py:_sources_of_plugin": "rewards",
    "runtime/rollout/sync_contents.py:adapter_sync": "engines",
    "runtime/rollout/auto.py:load_engine": "engines",
    "runtime/rollout/shared_engine.py:check": "engines",
    "runtime/rollout/shared_engine.py:from_spec": "engines",
    "runtime/rollout/vllm_engine/classes.py:import_without_torchvision": None,
    "plugins/user_code.py:load_named": "rewards",
    "plugins/user_code.py:import_file": "rewards",
    "runtime/workers/actor.py:_startup_phases": "engines",
    "plugins/objectives/judge_worker.py:__init__": "engines",
    "runtime/workers/optimizers.py:_class_of": None,
    "runtime/workers/rollout.py:__init__": "engines",
    "runtime/training/listeners.py:_load": "listeners",
    "runtime/training/run_folder.py:_keep_evidence": None,
    "tracking/loggers.py:make_tracker": "loggers",
    "tracking/loggers.py:preflight": "loggers",
}


def test_every_place_that_imports_users_code_is_listed() -> None:
    found = set()
    for path in FILES:
        tree = parsed(path)
        loaders = _loaders(tree)
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{path.relative_to(ROOT / 'rlctl')}:{function.name}"
                found |= {name for node in ast.walk(function) if _imports_code(node, loaders)}
    assert found == {*filter(in_this_tree, PLACES)}


def test_each_kind_of_users_code_is_tried() -> None:
    from tests.e2e.test_users_code import KINDS

    assert {kind for kind in PLACES.values() if kind is not None} <= KINDS


def _loaders(tree: ast.Module) -> set[str]:
    """Return the names of functions in the module that import code by name."""
    modules = ("rlctl.plugins", "rlctl.plugins.user_code", "importlib")
    names = {
        alias.name
        for statement in ast.walk(tree)
        if isinstance(statement, ast.ImportFrom) and statement.module in modules
        for alias in statement.names
    }
    names |= {part.name for part in tree.body if isinstance(part, ast.FunctionDef)} & {
        "import_file"
    }
    return names & LOADERS


def _imports_code(node: ast.AST, loaders: set[str]) -> bool:
    if isinstance(node, ast.Attribute):
        is_module = isinstance(node.value, ast.Name) and node.value.id in ("plugins", "importlib")
        return node.attr == "exec_module" or (is_module and node.attr in LOADERS)
    return isinstance(node, ast.Name) and node.id in loaders
