"""Measurements of rlctl. What it is compared with has the same OpenMP settings, set here."""

import rlctl.runtime  # noqa: F401  before torch is imported
