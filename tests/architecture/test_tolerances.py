"""Tolerances of tensors in tests come from float64, not from the machine where they were written.

See `tests/tolerance.py`. `pytest.approx` is for formulas of a few numbers.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from tests.plugin_folders import in_this_tree

TESTS = Path(__file__).parents[1]
SMALL = 0.01  # a bound of a comparison at most as large as this is a tolerance

_METRIC = "bound of a run's metric, 100 times the rounding of float32; runs have no float64"
_OTHERS = "kernels of vLLM or SGLang, which are less exact than float32"
_FORMULA = "formulas of fewer than 100 numbers in float32: at least 8 roundings"
_WIDE = "float64 against float64"
_NO_TOLERANCE = "no tolerance: two things differ by more, or bounds of a setting"

# Numbers of fixed tolerances by file, and the reason.
ALLOWED: dict[str, tuple[int, str]] = {
    "abroad/on_quickstart.py": (1, _METRIC),
    "abroad/on_verl_numbers.py": (1, _FORMULA),
    "distributed/test_gradient.py": (1, _NO_TOLERANCE),
    "distributed/test_lora.py": (1, "weights in 4 bits have no model in float64"),
    "distributed/test_two_machines.py": (2, _METRIC),
    "distributed/test_vllm_actor.py": (2, _OTHERS),
    "e2e/combinations.py": (1, _METRIC),
    "e2e/test_async_training.py": (1, _METRIC),
    "e2e/test_engine_pool.py": (1, _METRIC),
    "e2e/test_export.py": (1, _METRIC),
    "e2e/test_mismatch.py": (1, _METRIC),
    "e2e/test_own_code.py": (1, _METRIC),
    "e2e/test_shapes.py": (2, _METRIC),
    "e2e/test_train.py": (1, _METRIC),
    "e2e/test_vllm.py": (2, _OTHERS),
    "miniatures.py": (1, _OTHERS),
    "real/test_smollm.py": (1, _METRIC),
    "numerics/test_advantages.py": (2, _FORMULA),
    "numerics/test_aggregate.py": (2, _WIDE),
    "numerics/test_divided.py": (1, _FORMULA),
    "numerics/test_equivalents.py": (2, _FORMULA),
    "numerics/test_losses.py": (1, _FORMULA),
    "plugins/objectives/test_distillation.py": (2, _WIDE),
    "plugins/objectives/test_pair_losses.py": (1, _FORMULA),
    "plugins/objectives/test_replies.py": (1, _FORMULA),
    "runtime/test_optimizers.py": (2, "moments in 8 bits have no model in float64"),
    "runtime/test_rollout_correction.py": (1, _FORMULA),
    "runtime/test_second_device.py": (1, "the same kernels twice, under another device's name"),
    "plugins/bridges/test_sglang_engine.py": (4, _OTHERS),
    "runtime/test_vllm_install.py": (1, _OTHERS),
    "plugins/bridges/test_vllm_server_engine.py": (1, _OTHERS),
    "plugins/bridges/test_vllm_server_weights.py": (1, _OTHERS),
    "runtime/test_vllm_types.py": (3, _OTHERS),
    "sweeps/test_study.py": (1, _NO_TOLERANCE),
}


def is_small(node: ast.expr) -> bool:
    """Return whether a node is a number that is a tolerance, or a product with one."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return is_small(node.left) or is_small(node.right)
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, float) and 0 < value <= SMALL


def fixed_tolerances(source: str) -> list[int]:
    """Return the lines with a fixed tolerance: `atol`, `rtol`, or a comparison with a small one."""
    lines: list[int] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            given = (each.value for each in node.keywords if each.arg in ("atol", "rtol"))
            if any(isinstance(each, ast.Constant) and each.value for each in given):
                lines.append(node.lineno)
        elif isinstance(node, ast.Compare):
            sides = zip(node.ops, node.comparators, strict=True)
            if any(isinstance(op, ast.Lt | ast.LtE) and is_small(side) for op, side in sides):
                lines.append(node.lineno)
    return lines


def test_fixed_tolerances_are_found() -> None:
    source = "close(x, y, atol=1e-5)\nassert (x - y).norm() <= 1e-6\nclose(x, y, atol=0)\nx < 3.0\n"
    source += "assert (x - y).norm() <= 1e-6 * y.norm()\nassert x < 3.0 * y\n"
    assert fixed_tolerances(source) == [1, 2, 5]


def test_tensors_have_no_fixed_tolerance() -> None:
    found = Counter[str]()
    for file in sorted(TESTS.rglob("*.py")):
        found[str(file.relative_to(TESTS))] = len(fixed_tolerances(file.read_text()))
    expected = {name: count for name, (count, _) in ALLOWED.items() if in_this_tree(name)}
    assert {name: count for name, count in found.items() if count} == expected
