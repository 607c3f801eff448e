"""Secrets: found in keys, values and URLs, and replaced in records, messages and logs.

A secret is a value under a key such as `api_key`, a password or token in a URL, or a text of a
known shape (`sk-…`, `hf_…`, `Bearer …`). Composition also registers the values that it finds, so
that they are replaced wherever they appear later in this process.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
from collections.abc import Mapping
from typing import Any

SECRET = "<secret>"

_PASSWORDS = {
    *("password", "passwd", "pwd", "passphrase", "passcode", "secret", "credential"),
    *("auth", "authorization", "bearer", "cookie", "apikey", "authtoken", "accesstoken"),
    *("accesskey", "secretkey", "privatekey"),
}
_KEYS = {
    *("api", "access", "private", "secret", "auth", "account", "encryption", "signing", "service"),
    *("subscription", "license", "ssh", "client", "session", "master", "hmac", "deploy"),
}
# `eos_token` and the like are parts of a text; a reward or limit per token is a number.
_TEXT_TOKENS = {
    *("pad", "eos", "bos", "unk", "sep", "cls", "mask", "stop", "special", "image", "video"),
    *("audio", "tool", "think", "thinking", "start", "end", "begin", "new", "first", "last"),
    *("next", "per", "max", "min", "num", "extra", "added", "prompt", "response", "word", "by"),
}
# `password_file`, `auth_mode`: about a secret, but none.
_ABOUT = {
    *("file", "path", "dir", "folder", "env", "var", "variable", "name", "type", "mode", "kind"),
    *("length", "len", "limit", "count", "size", "enabled", "required", "reward", "penalty"),
    *("weight", "bonus", "ratio", "rate", "level"),
}
_URL_PARAMETERS = {"sig", "signature", "key", "x-amz-credential", "x-goog-credential"}
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")

_USER_INFO = re.compile(
    r"(?P<scheme>[A-Za-z][\w+.-]{0,40}://)"
    r"(?:[^\s/@'\"]{1,2000}|[^\s/@:'\"]{1,2000}:(?!\d+(?:[/?#\s]|$))[^\s@'\"]{0,2000})@"
)
_PARAMETER = re.compile(r"(?P<before>[?&;])(?P<key>[\w.-]+)=(?P<value>[^&;\s'\"#]+)")
_ASSIGNED = re.compile(
    r"(?P<quote>[\"']?)(?P<key>[A-Za-z_][\w.@/-]{0,80})(?P=quote)(?:\s*=\s*|(?<=[\"'])\s*:\s*|:(?=\S))"
)
# `{name: a, password: b}` on a command line; elsewhere ", token: b" may be part of a sentence.
_IN_MAPPING = re.compile(r"[{,]\s*(?P<quote>[\"']?)(?P<key>[A-Za-z_][\w.-]*)(?P=quote)\s*:\s*")
_NESTED = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}|\[(?:[^\[\]]|\[[^\[\]]*\])*\]"
_QUOTED = r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|(?P<interpolation>\$\{[^}]*\}+)"
_VALUE = re.compile(rf"{_QUOTED}|{_NESTED}|(?:[^\s,;&}}\])\"']|,(?!\s|[\w.\"']+\s*[:=]))+")
_VALUE_IN_MAPPING = re.compile(rf"{_QUOTED}|{_NESTED}|[^,}}\]]+")
_SHAPES = re.compile(
    r"\b(?:sk-[\w-]{20,}|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)"
    r"|(?<=Bearer )[\w.~+/=-]{8,}|(?<=Basic )[A-Za-z0-9+/=]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
_HARMLESS = {"", "null", "none", "true", "false", "~", "…", SECRET}
_REFERENCE = re.compile(r"(?:Bearer |Basic )?\$\{(?:oc\.env:\w+|[\w.]+)\}")

_MIN_LENGTH = 6  # shorter values are found in too many harmless texts
_registered: dict[str, str] = {}  # value -> text that is shown instead


@functools.lru_cache(4096)
def is_secret_name(name: str) -> bool:
    """Return True for a name such as `api_key`, `hfToken` or `password`; False for `max_tokens`."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _ABOUT or name == "PWD":  # the folder of a shell
        return False
    if words[-1] == "token":
        return len(words) == 1 or words[-2] not in _TEXT_TOKENS
    if words[-1] == "tokens":
        return len(words) > 1 and words[-2] in _KEYS | {"bearer", "refresh"}
    pairs = itertools.pairwise(words)
    return any(word.removesuffix("s") in _PASSWORDS for word in words) or any(
        before in _KEYS and word in ("key", "keys") for before, word in pairs
    )


def is_secret_key(key: str) -> bool:
    """Return True if an element of a dotted key, such as `a.api_key.b`, has a secret's name."""
    return any(is_secret_name(part) for part in re.split(r"[./@]", key))


def redact(text: str) -> str:
    """Return `text` with all secrets replaced by `SECRET`; references such as `${…}` are kept."""
    for value in sorted(_registered, key=len, reverse=True):
        if value in text:
            text = text.replace(value, _registered[value])
    # Bounds of repetitions keep the time proportional to the length, also for a long word.
    if "://" in text:
        text = _USER_INFO.sub(_without_user, text)
    if "=" in text:
        text = _PARAMETER.sub(_without_parameter, text)
    if "=" in text or ":" in text:
        text = _without_values(text, _ASSIGNED, _VALUE)
    return _SHAPES.sub(SECRET, text)


def redact_word(word: str) -> str:
    """Return a word of a command line; of `KEY=VALUE` with a secret key the whole value is."""
    key, equals, value = word.partition("=")
    if equals and is_secret_key(key.lstrip("+~-")):
        return f"{key}={redact_value(value, key)}"
    return redact(_without_values(word, _IN_MAPPING, _VALUE_IN_MAPPING))


def redact_value(value: Any, key: str = "") -> Any:
    """Return plain data with secrets replaced; `key` is the dotted key of `value`, if it has one.

    References to environment variables and to other keys are kept as written.
    """
    secret = is_secret_key(key)
    if isinstance(value, Mapping):
        return {
            redact(name) if isinstance(name, str) else name: redact_value(
                inner, key if secret else str(name)
            )
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_value(inner, key) for inner in value]
    if not secret or value is None or isinstance(value, bool):
        return redact(value) if isinstance(value, str) else value
    if isinstance(value, str) and (value.lower() in _HARMLESS or _REFERENCE.fullmatch(value)):
        return value
    return SECRET


def redact_texts(value: Any) -> Any:
    """Return plain data with secrets in its texts replaced; names of keys have no meaning."""
    if isinstance(value, Mapping):
        return {redact(str(name)): redact_texts(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact_texts(inner) for inner in value]
    return redact(value) if isinstance(value, str) else value


def register(value: Any, key: str = "", shown: Any = SECRET) -> None:
    """Replace the texts and numbers in `value` by `shown` from now on, wherever they appear.

    `shown` is a text, or has the shape of `value`. Unless `key` is secret, numbers, existing paths
    and plain words are left alone.
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            other = shown[name] if isinstance(shown, Mapping) else shown
            register(inner, f"{key}.{name}", other)
    elif isinstance(value, list | tuple):
        others = shown if isinstance(shown, list) else [shown] * len(value)
        for inner, other in zip(value, others, strict=True):
            register(inner, key, other)
    elif value is not None and not isinstance(value, bool):
        text = str(value)
        unknown = "${" in text or SECRET in text  # unresolved, or hidden before
        if len(text) < _MIN_LENGTH or unknown:
            return
        if is_secret_key(key) or not _is_plain(text):
            _registered.setdefault(text, str(shown))


def registered_in(value: Any) -> dict[str, str]:
    """Return the registered texts in `value`, and what is shown instead: see `restore`."""
    text = str(value)
    return {found: shown for found, shown in _registered.items() if found in text}


def restore(registered: Mapping[str, str]) -> None:
    """Register texts of another process."""
    _registered.update(registered)


def _is_plain(text: str) -> bool:
    """Return True for a number, a word in lower case, or an existing path."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return re.fullmatch(r"[a-z]+", text) is not None or os.path.lexists(text)


def _without_user(match: re.Match[str]) -> str:
    plain_ssh = match["scheme"].endswith("ssh://") and ":" not in match[0][len(match["scheme"]) :]
    kept = plain_ssh or SECRET in match[0] or "${" in match[0]
    return match[0] if kept else f"{match['scheme']}{SECRET}@"


def _without_parameter(match: re.Match[str]) -> str:
    name = match["key"].lower()
    secret = name in _URL_PARAMETERS or name.endswith("-signature") or is_secret_name(match["key"])
    kept = not secret or "${" in match["value"]
    return match[0] if kept else f"{match['before']}{match['key']}={SECRET}"


def _without_values(text: str, keys: re.Pattern[str], values: re.Pattern[str]) -> str:
    """Return `text` without the values that follow those of `keys` with a secret's name."""
    kept: list[str] = []
    end = 0
    for match in keys.finditer(text):
        value = values.match(text, match.end())
        if match.start() < end or value is None or not is_secret_key(match["key"]):
            continue
        plain = value[0].strip("\"'")
        reference = value["interpolation"] or _REFERENCE.fullmatch(plain)
        if reference or plain.lower() in _HARMLESS or plain.startswith(("//", SECRET)):
            continue
        kept += [text[end : match.end()], SECRET]
        end = value.end()
    return "".join([*kept, text[end:]])
