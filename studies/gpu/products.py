"""Time products of matrices as large as those of the large network, in JAX and in PyTorch.

    python -m studies.gpu.products products.json

They are of float32 numbers, with TF32 where the device has it, as the scripts compute by default.
What the large network's iteration would take if it were its products alone, study.py says.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch

WIDTH = 1024
ROWS = (32, 1024, 16384)  # of a step, of a minibatch, and of a rollout's obs and next_obs
ROUNDS = 5  # the fastest counts


def fastest(function: Callable[[], Any], count: int) -> float:
    """Return the seconds of a product, of which function does count, and waits for them."""
    function()  # compiles
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds) / count


def in_jax(rows: int, count: int) -> float:
    weights = jnp.full((WIDTH, WIDTH), 1 / WIDTH)
    x = jnp.ones((rows, WIDTH))
    products = jax.jit(lambda x: jax.lax.fori_loop(0, count, lambda _, y: y @ weights, x))
    return fastest(lambda: products(x).block_until_ready(), count)


def in_torch(rows: int, count: int) -> float:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = torch.full((WIDTH, WIDTH), 1 / WIDTH, device=device)
    x = torch.ones(rows, WIDTH, device=device)

    def products() -> None:
        y = x
        for _ in range(count):
            y = y @ weights
        y[0, 0].item()  # sync

    return fastest(products, count)


def main() -> None:
    torch.set_float32_matmul_precision("high")
    count = 200 if torch.cuda.is_available() else 1
    rows = []
    for name, measure in (("jax", in_jax), ("torch", in_torch)):
        for size in ROWS:
            seconds = measure(size, count)
            rows.append({"framework": name, "rows": size, "seconds": seconds})
            teraflops = 2 * size * WIDTH**2 / seconds / 1e12
            print(f"{name}: {size} x {WIDTH} x {WIDTH}: {teraflops:.3g} TFLOP/s")
    Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
