"""Pictures of coloured shapes, and the question what they show."""

from __future__ import annotations

import io
import random

from pydantic import Field

from rlctl.data_prep.datasets import dataset, option
from rlctl.data_prep.decoded_images import require_pillow
from rlctl.data_prep.rows import PromptRow
from rlctl.plugins import Params

DATA_SOURCE = "rlctl/shapes"
QUESTION = "<image>What is it?"
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 220),
    "yellow": (230, 210, 40),
    "purple": (150, 50, 180),
    "white": (245, 245, 245),
}
SHAPES = ("circle", "square", "triangle")
_SIZE = 32  # pixels of a side
_BACKGROUND = (20, 90)  # range of a grey value


class ShapesParams(Params):
    """Options of `rlctl prep shapes`."""

    train: int = option(2048, "N", "Training pictures.", ge=1)
    val: int = option(192, "M", "Validation pictures.", ge=1)
    seed: int = Field(default=0, description="Another seed draws other pictures.")


@dataset(
    ShapesParams,
    "rlctl prep shapes --out data/shapes --train 2048 --val 192 --seed 1",
    default_out="data/shapes",
    train=lambda _: "grpo --recipe shapes",
)
def shapes(params: ShapesParams) -> dict[str, list[PromptRow]]:
    """Pictures of a coloured shape, whose name is the answer: train.parquet, val.parquet."""
    require_pillow("rlctl prep shapes")
    counts = {"train": params.train, "val": params.val}
    return {
        split: [_row(params, split, index) for index in range(count)]
        for split, count in counts.items()
    }


def _row(params: ShapesParams, split: str, index: int) -> PromptRow:
    rng = random.Random(f"{params.seed} {split} {index}")
    truth = _name(rng)
    return PromptRow(
        data_source=DATA_SOURCE,
        prompt=[{"role": "user", "content": QUESTION}],
        ground_truth=truth,
        ability="vision",
        extra_info={"split": split, "index": index, "answer": truth},
        images=(_picture(truth, rng),),
    )


def _name(rng: random.Random) -> str:
    return f"{rng.choice(list(COLOURS))} {rng.choice(SHAPES)}"


def _picture(name: str, rng: random.Random) -> bytes:
    """Draw a shape anywhere in a picture; return a PNG."""
    from PIL import Image, ImageDraw

    colour, shape = name.split()
    grey = rng.randint(*_BACKGROUND)
    picture = Image.new("RGB", (_SIZE, _SIZE), (grey, grey, grey))
    draw = ImageDraw.Draw(picture)
    size = rng.randint(14, 24)
    left = rng.randint(0, _SIZE - size - 1)
    top = rng.randint(0, _SIZE - size - 1)
    right = left + size
    bottom = top + size
    if shape == "circle":
        draw.ellipse((left, top, right, bottom), fill=COLOURS[colour])
    elif shape == "square":
        draw.rectangle((left, top, right, bottom), fill=COLOURS[colour])
    else:
        corners = [(left, bottom), (right, bottom), ((left + right) // 2, top)]
        draw.polygon(corners, fill=COLOURS[colour])
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()
