"""Quick connection test for the Hugging Face hub, whose client retries for half a minute."""

from __future__ import annotations

import threading
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from rlctl.errors import ConfigError, NotFoundError, ResourceError

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


def not_downloaded(model: str, where: str) -> ResourceError:
    """Return the error of a hub's model without a copy in the cache while the hub is silent."""
    from huggingface_hub import constants

    return ResourceError(
        f"the model {model!r} is not in the local cache and cannot be downloaded: "
        f"{constants.ENDPOINT} does not respond, or HF_HUB_OFFLINE is set",
        where=where,
        hint="no folder of that name exists, so it was looked up on the hub; without a network, "
        "give a local folder; HF_ENDPOINT=URL selects a mirror of the hub",
    )


def hub_parquet(name: str, split: str, config: str | None) -> list[Path]:
    """Return the parquet files of a split of the hub's data set `name`, downloaded if necessary.

    They are the hub's conversion, which exists for data sets of any format. `config` is one of
    its configurations; None: the only one. Raises ResourceError without a network or a cached copy,
    NotFoundError for an unknown split or configuration, ConfigError if one must be chosen.
    """
    from huggingface_hub import constants, snapshot_download

    online = hub_answers()
    where: dict[str, Any] = {"repo_type": "dataset", "revision": "refs/convert/parquet"}

    def download(pattern: str) -> list[Path]:
        folder: Any = snapshot_download(
            name, allow_patterns=[pattern], local_files_only=not online, **where
        )
        return sorted(Path(folder).glob(pattern))

    try:
        if online:
            listed: Any = snapshot_download(name, dry_run=True, **where)
            found = [Path(file.filename) for file in listed]
        else:
            found = download(f"*/{split}/*.parquet")
        configs = sorted({path.parts[-3] for path in found if path.parts[-2:-1] == (split,)})
        if not configs:
            raise NotFoundError(
                f"the data set {name!r} has no split {split!r}", hint="--split NAME"
            )
        return download(f"{one_configuration(name, configs, split, config)}/{split}/*.parquet")
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


def one_configuration(name: str, configs: Collection[str], split: str, wanted: str | None) -> str:
    """Return the configuration `wanted` of a data set, or its only one if that is None.

    Raises NotFoundError for one that does not exist, ConfigError if one of several must be chosen.
    """
    known = ", ".join(sorted(config or "data" for config in configs))
    if wanted is not None and wanted not in configs:
        raise NotFoundError(
            f"the split {split!r} of the data set has no configuration {wanted!r}",
            where=name,
            hint=f"configurations: {known}",
        )
    if wanted is None and len(configs) > 1:
        example = next(filter(None, sorted(configs)))
        raise ConfigError(
            f"the split {split!r} of the data set has several configurations: {known}",
            where=name,
            hint=f"choose one: {name}:{example}/{split}",
        )
    if wanted is None:
        return next(iter(configs))
    return wanted
