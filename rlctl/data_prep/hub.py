"""Quick connection test for the Hugging Face hub, whose own client retries for half a minute."""

from __future__ import annotations

from pathlib import Path

from rlctl.errors import NotFoundError, ResourceError

TIMEOUT_S = 5.0


def hub_answers() -> bool:
    """Return True if the hub, or HF_ENDPOINT, responds to one request in `TIMEOUT_S` seconds.

    False without a network, or if HF_HUB_OFFLINE is set.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT_S)
    except Exception:  # the HTTP library changes with the client, and the errors share no class
        return False
    return True


def hub_parquet(name: str, split: str) -> list[Path]:
    """Return the parquet files of a split of the hub's data set `name`, downloaded if necessary.

    They are the hub's own conversion, which exists for data sets of any format. Raises
    ResourceError without a network or a cached copy, NotFoundError for an unknown split.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            name,
            repo_type="dataset",
            revision="refs/convert/parquet",
            allow_patterns=[f"*/{split}/*.parquet"],
            local_files_only=not hub_answers(),
        )
    except (OSError, ValueError) as error:
        raise ResourceError(
            f"the data set {name!r} is not in the local cache and cannot be downloaded",
            where=f"hub, split {split}",
            hint="check the name and the network; a file of your own works too: give its path",
        ) from error
    files = sorted(Path(folder).glob(f"*/{split}/*.parquet"))
    if not files:
        raise NotFoundError(f"the data set {name!r} has no split {split!r}", hint="--split NAME")
    return files
