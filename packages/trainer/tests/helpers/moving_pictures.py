"""Frames of videos, and torchvision, with which transformers processes them.

``TRAINER_TEST_TORCHVISION`` names a folder with torchvision. It is for the tests of videos alone:
where transformers finds it, it processes images with it, too.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

PLACE = os.environ.get("TRAINER_TEST_TORCHVISION")
# Kept: the operators are gone with it.
_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")

if PLACE is not None:
    sys.path.insert(0, PLACE)
    try:
        import torchvision
    except RuntimeError:
        # PyPI's build fails beside a torch for CPUs: it lacks operators that its own modules name.
        for _name in ("nms", "qnms"):
            _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision  # noqa: F401

HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
needs_torchvision = pytest.mark.skipif(not HAS_TORCHVISION, reason="torchvision")


def draw_frames(folder: Path, count: int, size: tuple[int, int] = (16, 24)) -> list[str]:
    """Write pictures of one size that differ, and return their names."""
    width, height = size
    names: list[str] = []
    for number in range(count):
        image = Image.linear_gradient("L").resize((width, height))
        steps = [40 * number + 13 * band for band in range(3)]
        bands = [image.point(lambda value, step=step: (value + step) % 256) for step in steps]
        names.append(f"frame{number}_{width}x{height}.png")
        Image.merge("RGB", bands).save(folder / names[-1])
    return names
