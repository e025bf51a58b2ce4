"""Count the operators that PyTorch's GRU calls on a CPU in the forward and backward passes.

python -m studies.recurrent.operators --out studies/recurrent/operators.json
"""

import argparse
import json
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

STEPS, BATCH = 256, 4  # shape of a minibatch in the scripts


def count(size: int) -> int:
    gru = torch.nn.GRU(size, size)
    x = torch.randn(STEPS, BATCH, size)
    gru(x)[0].sum().backward()  # warm-up: creates the gradient tensors
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        gru(x)[0].sum().backward()
    named = [event for event in seen.events() if event.name.startswith("aten::")]
    return sum(not event.cpu_children for event in named)  # skip operators that call others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    args = parser.parse_args()
    found = {"torch": torch.__version__, "steps": STEPS, "batch": BATCH}
    found["operators"] = {size: count(size) for size in (64, 256)}
    args.out.write_text(json.dumps(found, indent=2) + "\n")
    print(args.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
