"""Time tanh on 65,536 float32 numbers on one core, in microseconds, in PyTorch and JAX.

taskset --cpu-list 0 python studies/mkl/tanh.py > studies/mkl/tanh.csv
"""

import timeit

import jax
import jax.numpy as jnp
import torch

torch.set_num_threads(1)
x = torch.randn(256, 256)
compiled = torch.compile(torch.tanh)
jitted = jax.jit(jnp.tanh)
ways = {
    "PyTorch": lambda: torch.tanh(x),
    "PyTorch, by sigmoid": lambda: 2 * torch.sigmoid(2 * x) - 1,
    "PyTorch, compiled": lambda: compiled(x),
    "JAX": lambda: jitted(x.numpy()).block_until_ready(),
}
exact = torch.tanh(x.double())
print("way,microseconds,error")
for way, function in ways.items():
    error = float((torch.tensor(function().tolist()) - exact).abs().max())
    seconds = min(timeit.repeat(function, number=100, repeat=7)) / 100
    print(way.replace(",", ""), f"{1e6 * seconds:.0f}", f"{error:.0e}", sep=",", flush=True)
