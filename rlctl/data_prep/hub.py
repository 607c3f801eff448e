"""Whether the Hugging Face hub can be reached. Its own client tries for half a minute before it says that it cannot."""

from __future__ import annotations

TIMEOUT_S = 5.0


def hub_answers() -> bool:
    """One short request to the hub (or the mirror in HF_ENDPOINT). False without a network, and when HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT_S)
    except (
        Exception
    ):  # each release of the client brings another HTTP library, whose errors share no other class
        return False
    return True
