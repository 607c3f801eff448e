"""Key that `wandb login` has stored: an entry for the server in a file `.netrc`."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit


def netrc_key(url: str) -> str | None:
    """Return the password for the host of `url` in `NETRC`, or in `~/.netrc` or `~/_netrc`.

    None without an entry, and for a file that cannot be read. W&B's function is in a private
    module, which not every version has.
    """
    paths = [Path("~/.netrc"), Path("~/_netrc")]
    if given := os.environ.get("NETRC"):
        paths = [Path(given)]
    for path in paths:
        try:
            found = netrc.netrc(path.expanduser()).authenticators(urlsplit(url).netloc)
        except (OSError, netrc.NetrcParseError):
            continue
        if found is not None and found[2]:
            return found[2]
    return None
