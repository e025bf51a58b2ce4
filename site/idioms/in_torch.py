"""PyTorch idioms that appear in no script; tests/pages/test_site.py runs them."""

import numpy as np
import torch
from torch import nn


def to_device(array: np.ndarray) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.from_numpy(array).to(device)


def to_host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()  # sync: waits for the device


def count_parameters(agent: nn.Module) -> int:
    return sum(x.numel() for x in agent.parameters())


@torch.compile(backend="eager")  # the default backend needs a C++ compiler
def mean_square(x):
    print(x.shape)  # printed at every call; a graph break, so fullgraph=True rejects it
    return (x**2).mean()
