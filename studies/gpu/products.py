"""Time matrix products with the shapes of the large network, in JAX and in PyTorch.

    python -m studies.gpu.products products.json

The matrices are float32, multiplied in TF32 if the device supports it, which is also the default of
the scripts. study.py defines how many products an iteration has.
"""

import json
import sys
from pathlib import Path
from timeit import repeat

import jax
import jax.numpy as jnp
import torch

WIDTH = 1024
ROWS = (32, 1024, 16384)  # rows in a step, a minibatch, and obs and next_obs of a rollout
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COUNT = 200 if DEVICE == "cuda" else 1  # chained products; each uses the previous result


def jax_products(rows: int):
    weights = jnp.full((WIDTH, WIDTH), 1 / WIDTH)
    x = jnp.ones((rows, WIDTH))
    function = jax.jit(lambda x: jax.lax.fori_loop(0, COUNT, lambda _, y: y @ weights, x))
    return lambda: function(x).block_until_ready()


def torch_products(rows: int):
    weights = torch.full((WIDTH, WIDTH), 1 / WIDTH, device=DEVICE)

    def products() -> None:
        x = torch.ones(rows, WIDTH, device=DEVICE)
        for _ in range(COUNT):
            x = x @ weights
        x[0, 0].item()  # sync

    return products


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    found = []
    for name, products in (("jax", jax_products), ("torch", torch_products)):
        for rows in ROWS:
            # Keep the fastest of six repetitions; JAX compiles in the first.
            seconds = min(repeat(products(rows), number=1, repeat=6)) / COUNT
            found.append({"framework": name, "rows": rows, "seconds": seconds})
            print(f"{name}, {rows} rows: {2e-12 * rows * WIDTH**2 / seconds:.3g} TFLOP/s")
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
