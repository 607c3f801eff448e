"""Numeric tests under other instruction sets of the CPU: rounding must not decide a test.

`python -m tests.instruction_sets` runs all combinations, as `make soak` does. With `--one SEED` it
runs a quick part under one combination, which the seed selects, as CI does. A CPU without an
instruction set uses the best that it has.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys

ATEN, ONEDNN = "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"
COMBINATIONS: tuple[dict[str, str], ...] = (
    {},
    *({ATEN: name} for name in ("default", "avx2", "avx512")),
    *({ONEDNN: name} for name in ("SSE41", "AVX2", "AVX512_CORE")),
    {ATEN: "default", ONEDNN: "SSE41"},
    {ATEN: "avx2", ONEDNN: "AVX2"},
    {ATEN: "avx512", ONEDNN: "AVX512_CORE"},
)
_VISION = "tests/runtime/test_vision.py::"
QUICK = (
    *("tests/numerics/test_ops.py", "tests/numerics/test_losses.py"),
    *("tests/numerics/test_aggregate.py", "tests/runtime/test_attention.py"),
    f"{_VISION}test_packed_rows_are_exact_with_their_gradients",
    f"{_VISION}test_scores_of_packed_rows_are_those_of_transformers",
)
ALL = (
    *("tests/numerics", "tests/runtime/test_attention.py", "tests/runtime/test_vision.py"),
    *(f"tests/plugins/objectives/test_{name}.py" for name in ("distillation", "replies")),
    *("tests/runtime/test_fused.py", "tests/runtime/test_hf_engine.py"),
    *("tests/runtime/test_probe.py", "tests/runtime/test_routing.py"),
    *("tests/runtime/test_rollout_correction.py", "tests/runtime/test_engine_contract.py"),
    *("tests/runtime/test_graphs.py", "tests/runtime/test_onednn.py"),
    *("tests/distributed/test_gradient.py", "tests/distributed/test_lora.py"),
    "tests/distributed/test_state.py",
)
_CHOSEN = "not gpu and not soak and not extra"


def run(combination: dict[str, str], tests: tuple[str, ...]) -> int:
    """Run tests under one combination, which is printed, and return the exit code."""
    shown = " ".join(f"{name}={value}" for name, value in combination.items())
    print(f"instruction sets: {shown or 'those of the CPU'}", flush=True)
    kept = {name: value for name, value in os.environ.items() if name not in (ATEN, ONEDNN)}
    command = [sys.executable, "-m", "pytest", "-m", _CHOSEN, *tests]
    return subprocess.run(command, env=kept | combination, check=False).returncode


def main() -> int:
    """Run the combinations and return 1 if any test failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", metavar="SEED", help="one combination with the quick tests")
    seed = parser.parse_args().one
    if seed is not None:
        return run(random.Random(seed).choice(COMBINATIONS[1:]), QUICK)
    codes = [run(combination, ALL) for combination in COMBINATIONS]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
