"""Removal of the optimizer from older checkpoints: `trainer.checkpoint.max_optimizers_to_keep`."""

from __future__ import annotations

import json
import logging
import shutil

from rlctl.files import read_record, write_text
from rlctl.runtime.training.checkpoint_store import MANIFEST, CheckpointStore
from rlctl.runtime.workers.learner_state import OPTIMIZER

LOG = logging.getLogger(__name__)


def drop_optimizers(store: CheckpointStore, newest: int) -> None:
    """Remove the optimizers of all checkpoints but the `newest` ones, as far as possible.

    The manifest is replaced first, so that a checkpoint is complete at any moment.
    """
    for step in store.steps()[:-newest]:
        folder = store.path(step)
        try:
            manifest = json.loads(read_record(folder / MANIFEST))
            if OPTIMIZER in manifest.get("contents", ()):
                files = manifest["files"].items()
                others = {name: file for name, file in files if f"/{OPTIMIZER}/" not in name}
                contents = [part for part in manifest["contents"] if part != OPTIMIZER]
                manifest |= {"contents": contents, "files": others}
                write_text(folder / MANIFEST, json.dumps(manifest, indent=1))
            for part in folder.glob(f"*/{OPTIMIZER}"):
                shutil.rmtree(part)
        except (OSError, ValueError, KeyError, TypeError) as error:
            LOG.warning("the optimizer of step %d could not be removed: %s", step, error)
