"""Quick connection test for the Hugging Face hub, whose own client retries for half a minute."""

from __future__ import annotations

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
