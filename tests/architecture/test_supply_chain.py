"""Pins of what builds fetch by name: uv, actions and the base image."""

import re

from tests.architecture.source import ROOT

MAKEFILE, DOCKERFILE = (ROOT / name for name in ("Makefile", "Dockerfile"))


def test_actions_are_pinned_by_commit():
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        for used in re.findall(r"uses: *(\S+)", workflow.read_text()):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", used), (workflow, used)


def test_the_base_image_is_pinned_by_digest():
    for image in re.findall(r"(?m)^FROM (\S+)", DOCKERFILE.read_text()):
        assert re.fullmatch(r"\S+@sha256:[0-9a-f]{64}", image), image


def test_uv_has_one_pinned_version():
    made = re.search(r"UV_VERSION := (\S+)", MAKEFILE.read_text())
    image = re.search(r"pip install .*\buv==(\S+)", DOCKERFILE.read_text())
    assert made
    assert image
    assert made[1] == image[1]
    assert "uv==$(UV_VERSION)" in MAKEFILE.read_text()
