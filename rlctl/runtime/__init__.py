"""Runtime of one training run, from its plan to its checkpoints.

Importing it lets Python search for unreachable cycles after 50,000 new objects, not 700: torch,
transformers and Ray create 400,000 that stay, and the searches took a fifth of their import. It
also limits how long OpenMP's threads spin, which libgomp reads when torch is imported.
"""

import gc
import os

from rlctl.cores import OPENMP_WAIT, SPIN_COUNT

gc.set_threshold(max(50_000, gc.get_threshold()[0]))
if not any(name in os.environ for name in OPENMP_WAIT):
    os.environ[OPENMP_WAIT[0]] = SPIN_COUNT
