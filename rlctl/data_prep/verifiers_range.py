"""Releases of verifiers whose environments rlctl plays."""


def check_release() -> None:
    """Raise ImportError unless verifiers 0.1.14 to 0.3 is installed.

    Its source also runs in other interpreters, which lack rlctl.
    """
    import re
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("verifiers")
    except PackageNotFoundError:
        raise ImportError("No module named 'verifiers'") from None
    if not (0, 1, 14) <= tuple(map(int, re.findall(r"\d+", found)[:3])) < (0, 4):
        raise ImportError(f"its release is {found}, and rlctl plays environments of 0.1.14 to 0.3")
