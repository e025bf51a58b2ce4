"""Tests on a GPU: arrays that JAX and PyTorch share, CUDA graphs, and memory use."""

import importlib
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from running import train
from sections import SCRIPTS

import ppo_torch_compile as script

pytestmark = pytest.mark.skipif(
    "TEST_DEVICE" not in os.environ, reason="needs a GPU. Run tests/gpu/run.sh"
)
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")


# === DLPack and streams =========================================================================
def address(array):
    return array.ctypes.data if isinstance(array, np.ndarray) else array.unsafe_buffer_pointer()


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool"])
def test_arrays_are_shared_in_both_directions(dtype):
    array = jnp.arange(1024).astype(dtype)
    tensor = script.to_torch(array)
    back = script.to_jax(tensor)
    assert address(array) == tensor.data_ptr() == address(back)
    assert tensor.is_cuda == torch.cuda.is_available()
    expected = np.arange(1024).astype(dtype)
    np.testing.assert_array_equal(tensor.cpu().numpy(), expected)
    np.testing.assert_array_equal(np.asarray(back), expected)


@ON_GPU
def test_jax_passes_its_stream_so_that_torch_records_an_event(monkeypatch):
    streams = []
    dlpack = torch.Tensor.__dlpack__

    def watched(tensor, **kwargs):
        streams.append(kwargs.get("stream"))
        return dlpack(tensor, **kwargs)

    monkeypatch.setattr(torch.Tensor, "__dlpack__", watched)
    script.to_jax(torch.zeros(1, device="cuda"))
    assert [type(x) for x in streams] == [int]


@ON_GPU
def test_jax_waits_for_torch():
    total = jax.jit(jnp.sum)
    total(script.to_jax(torch.zeros(1000, device="cuda")))  # the first call compiles
    for value in range(1, 6):
        torch.cuda._sleep(10**8)  # about 50 ms
        tensor = torch.full((1000,), float(value), device="cuda")
        result = total(script.to_jax(tensor))
        assert not torch.cuda.current_stream().query()  # otherwise there was nothing to wait for
        assert result.item() == 1000 * value


@ON_GPU
def test_torch_waits_for_jax():
    """PyTorch must not read an array before JAX has computed it.

    The Python loop unrolls the products, because JAX may run a loop from the host.
    """

    @jax.jit
    def slow(x):  # about 20 ms
        y = x
        for _ in range(40):
            y = jnp.tanh(y @ x)
        return y

    inputs = [jax.random.normal(jax.random.key(i), (4096, 4096)) for i in range(5)]
    expected = [np.asarray(slow(x)) for x in inputs]
    for x, numbers in zip(inputs, expected, strict=True):
        copy = script.to_torch(slow(x)) + 0
        np.testing.assert_array_equal(copy.cpu().numpy(), numbers)


# === CUDA graphs and memory =====================================================================
@ON_GPU
def test_the_next_replay_does_not_change_inputs_and_outputs_of_a_graph():
    state = torch.zeros(1, device="cuda")

    def count(x):
        state.add_(1)
        return [x + state]

    replay = script.capture(count, [state])
    x = torch.tensor([10.0], device="cuda")
    (first,) = replay(x)
    (second,) = replay(x + 1)
    assert [tensor.item() for tensor in (first, second, state, x)] == [11, 13, 2, 10]


def memory_in_use():
    """Return the memory in use on the host and on the GPU, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    in_jax = (jax.devices()[0].memory_stats() or {}).get("bytes_in_use", 0)
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, (in_jax + torch.cuda.memory_allocated()) / 1e6


@pytest.mark.parametrize("name", SCRIPTS)
def test_memory_does_not_grow_over_a_thousand_iterations(name, tmp_path, monkeypatch):
    script = importlib.import_module(name)
    write, used = script.RunLog.write, []

    def measured(log, *args):
        write(log, *args)
        used.append(memory_in_use())

    monkeypatch.setattr(script.RunLog, "write", measured)
    sizes = ("--num-steps", 8, "--update-epochs", 1, "--total-timesteps", 32 * 1000)
    train(name, tmp_path, "long", *sizes)
    assert len(used) == 1000
    host, device = np.max(used[-200:], axis=0) - np.max(used[100:300], axis=0)
    assert host < 16 and device < 0.1
