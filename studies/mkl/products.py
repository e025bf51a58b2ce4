"""Time float32 products in PyTorch, with matmul precision high and medium.

    taskset --cpu-list 0 python studies/mkl/products.py > products.csv

Needs only PyTorch. Each row contains the time of a product (rows, width) x (width, width) in
microseconds, and its mean error relative to float64, divided by the mean magnitude: about 1e-7 in
float32, and 1e-3 in bfloat16.
"""

import timeit

import torch

torch.set_num_threads(1)
print("rows,width,high,medium,error_high,error_medium")
for rows in (64, 256, 1024):
    for width in (32, 64, 96, 128, 192, 256, 512):
        x, weight = torch.randn(rows, width), torch.randn(width, width)
        exact = x.double() @ weight.double()
        times, errors = [], []
        for precision in ("high", "medium"):
            torch.set_float32_matmul_precision(precision)
            errors.append(float((x @ weight - exact).abs().mean() / exact.abs().mean()))
            names = {"x": x, "weight": weight}
            seconds = min(timeit.repeat("x @ weight", number=100, repeat=7, globals=names)) / 100
            times.append(round(1e6 * seconds, 1))
        print(rows, width, *times, *(f"{error:.0e}" for error in errors), sep=",", flush=True)
