"""Key that `wandb login` has stored: an entry for the server in a file `.netrc`."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit


def netrc_key(url: str) -> str | None:
    """Return the password for the host of `url` in `NETRC`, or in `~/.netrc` or `~/_netrc`.

    None without an entry, and for a file that cannot be read. W&B's own function is in a private
    module, which not every version has.
    """
    usual = [Path("~/.netrc"), Path("~/_netrc")]
    given = os.environ.get("NETRC")
    for path in [Path(given)] if given else usual:
        try:
            found = netrc.netrc(path.expanduser()).authenticators(urlsplit(url).netloc)
        except (OSError, netrc.NetrcParseError):
            continue
        if found is not None and found[2]:
            return found[2]
    return None
