"""Run ppo_cnn_linen_gymnasium.py with another number of images at a time, or unrolled differently.

    python studies/convolutions/chunks.py IMAGES UNROLL --env-id ALE/Pong-v5

IMAGES is the number of images that are convolved at a time, and UNROLL how many iterations of this
loop XLA compiles as straight-line code. The script uses 8 and 4. race.py reads the metrics that
RunLog writes.
"""

import runpy
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

SCRIPT = Path(__file__).parents[2] / "more/ppo_cnn_linen_gymnasium.py"


def text_of(images: int, unroll: int) -> str:
    text = SCRIPT.read_text(encoding="utf-8")
    replacements = {
        "len(images) > 8 and len(images) % 8 == 0": f"len(images) > {images}",
        "images.reshape(-1, 8, *": f"images.reshape(-1, {images}, *",
        "unroll=4": f"unroll={unroll}",
    }
    for old, new in replacements.items():
        if old not in text:
            raise ValueError(f"{SCRIPT.name} no longer contains {old!r}, so update chunks.py")
        text = text.replace(old, new)
    return text


def main() -> None:
    images, unroll = int(sys.argv.pop(1)), int(sys.argv.pop(1))
    with TemporaryDirectory() as folder:
        path = Path(folder, SCRIPT.name)
        path.write_text(text_of(images, unroll), encoding="utf-8")
        runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    main()
