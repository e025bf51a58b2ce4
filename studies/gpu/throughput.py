"""Plot environment steps per second against the number of environments, from files of race.py.

python -m studies.gpu.throughput runs/gpu/{cartpole,breakout,brax}.jsonl throughput.png
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from analysis import figures, races
from analysis.stats import median_interval

# Part of a script's name -> name in the figure; the first part that matches counts.
VARIANTS = {"linen": "Linen", "nnx": "NNX"}
VARIANTS |= {"torch_compile": "compiled PyTorch", "torch": "PyTorch"}


def read(paths: Iterable[Path]) -> pd.DataFrame:
    """Return one row per environment, script and number of environments."""
    rows = []
    for race in (race for path in paths for race in races.read(path)):
        times, steps = race.times(), race.steps()
        for name, program in zip(race.names(), race.info["args"]["programs"], strict=True):
            if name not in times:  # the program failed
                continue
            script, *words = program.split()
            flags = dict(zip(words[::2], words[1::2], strict=True))
            rate = median_interval((steps[name] / times[name].dropna()).to_numpy())
            variant = next(x for x in VARIANTS if x in script)
            row = {"panel": flags["--env-id"], "mode": VARIANTS[variant]}
            row |= {"framework": variant.partition("_")[0], "x": int(flags["--num-envs"])}
            rows.append(row | rate._asdict())
    return pd.DataFrame(rows)


def main(paths: list[Path], out: Path) -> None:
    frame = read(paths)
    styles = figures.styles(frame[["mode", "framework"]].drop_duplicates())
    figure = figures.bands(frame, styles, "environments", "environment steps per second", log=True)
    out.write_bytes(figures.png(figure))


if __name__ == "__main__":
    *sources, target = map(Path, sys.argv[1:])
    main(sources, target)
