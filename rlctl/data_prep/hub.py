"""Quick connection test for the Hugging Face hub, whose own client retries for half a minute."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

from rlctl.errors import NotFoundError, ResourceError

TIMEOUT_S = 5.0


def hub_answers() -> bool:
    """Return True if the hub, or HF_ENDPOINT, responds to one request in `TIMEOUT_S` seconds.

    False without a network, or if HF_HUB_OFFLINE is set. The result holds for the process.
    """
    from huggingface_hub import constants

    return _answers(constants.ENDPOINT)


@cache
def _answers(endpoint: str) -> bool:
    from huggingface_hub.utils import get_session

    answered: list[bool] = []

    def ask() -> None:
        # The HTTP library changes with the client, and the errors share no class.
        with suppress(Exception):
            get_session().head(endpoint, timeout=TIMEOUT_S)
            answered.append(True)

    # The client's time limit does not cover the look-up of the host's name.
    thread = threading.Thread(target=ask, name="hub", daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    return bool(answered)


def hub_parquet(name: str, split: str) -> list[Path]:
    """Return the parquet files of a split of the hub's data set `name`, downloaded if necessary.

    They are the hub's own conversion, which exists for data sets of any format. Raises
    ResourceError without a network or a cached copy, NotFoundError for an unknown split.
    """
    from huggingface_hub import constants, snapshot_download

    online = hub_answers()
    try:
        folder = snapshot_download(
            name,
            repo_type="dataset",
            revision="refs/convert/parquet",
            allow_patterns=[f"*/{split}/*.parquet"],
            local_files_only=not online,
        )
    except (OSError, ValueError) as error:
        reason = f"{constants.ENDPOINT} does not respond, or HF_HUB_OFFLINE is set"
        if online:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ResourceError(
            f"the data set {name!r} is not in the local cache and cannot be downloaded: {reason}",
            where=f"hub, split {split}",
            hint="check the name and the network; HF_ENDPOINT=URL selects a mirror; a file of your "
            "own works too: give its path",
        ) from error
    files = sorted(Path(folder).glob(f"*/{split}/*.parquet"))
    if not files:
        raise NotFoundError(f"the data set {name!r} has no split {split!r}", hint="--split NAME")
    return files
