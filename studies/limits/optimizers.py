"""Compare torch.optim with our hand-written Adam in compiled PyTorch updates.

    OMP_NUM_THREADS=1 python -m studies.limits.optimizers > studies/limits/optimizers.jsonl

A compiled gradient and a compiled torch.optim.Adam.step, whose lr is a tensor, are two graphs; the
update of the scripts is a single graph. Both variants train on one batch, interleaved in one
process. Each line of JSON is a round with the CPU seconds per step of each variant. The last line
contains the geometric mean of the ratio, with Student's 95% interval over rounds.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy import stats

import ppo_torch_compile as ppo
from bench.machine import describe
from more import dqn_torch_compile as dqn

ROUNDS, STEPS = 21, 100
CPU = torch.device("cpu")


def second_graph(params: list[Any], loss_fn: Callable, clip: float, eps: float) -> Callable:
    """Return a step with two compiled graphs: the clipped gradient of loss_fn(), and Adam."""

    def gradient():
        grads = torch.autograd.grad(loss_fn(), params)
        if clip == 0:  # DQN does not clip gradients
            return grads
        norm = torch.cat([x.flatten() for x in grads]).norm()
        scale = (clip / (norm + 1e-6)).clip(max=1.0)
        return [x * scale for x in grads]

    optimizer = torch.optim.Adam(params, torch.tensor(2.5e-4), eps=eps)
    gradient_fn = ppo.compile_graph(gradient, CPU)
    step_fn = torch.compile(optimizer.step, dynamic=False)

    def step():
        for x, grad in zip(params, gradient_fn(), strict=True):
            x.grad = grad
        step_fn()

    return step


def of_ppo() -> tuple[Callable, Callable]:
    """Return the PPO minibatch step in CartPole, with hand-written Adam and with torch.optim."""
    args = ppo.Args()
    size = args.minibatch_size
    action = torch.randint(2, (size,)).int()
    numbers = [torch.randn(size) for _ in range(4)]
    batch = ppo.Batch(torch.randn(size, 4), action, *numbers)
    agent, optimizer = ppo.make_agent(args, (4,), 2, CPU)
    written = ppo.compile_graph(partial(ppo.minibatch_step, agent, optimizer, args=args), CPU)
    other, _ = ppo.make_agent(args, (4,), 2, CPU)
    params = list(other.parameters())

    def loss_fn():
        return ppo.ppo_loss(other, batch, args)[0]

    return partial(written, batch), second_graph(params, loss_fn, args.max_grad_norm, args.adam_eps)


def of_dqn() -> tuple[Callable, Callable]:
    """Return the DQN update in CartPole, with hand-written Adam and with torch.optim."""
    args = dqn.Args()
    size = args.batch_size
    action = torch.randint(2, (size,)).int()
    end = torch.rand(size) < 0.1
    batch = dqn.Transition(
        torch.randn(size, 4), action, torch.ones(size), end, torch.randn(size, 4)
    )
    agent, target, optimizer = dqn.make_agent(args, (4,), 2, CPU)
    written = partial(dqn.update, agent, target, optimizer, args=args)
    written = dqn.compile_graph(written, CPU)
    learning_rate = torch.tensor(args.learning_rate)
    other, other_target, _ = dqn.make_agent(args, (4,), 2, CPU)
    params = list(other.parameters())

    def loss_fn():
        return dqn.dqn_loss(other, other_target, batch, args)[0]

    own = partial(written, batch, learning_rate)
    return own, second_graph(params, loss_fn, 0, args.optimizer_eps)


def main() -> None:
    print(json.dumps(describe() | {"torch": torch.__version__, "steps": STEPS}))
    for name, make in (("ppo_torch_compile", of_ppo), ("dqn_torch_compile", of_dqn)):
        ways = dict(zip(("written out", "torch.optim"), make(), strict=True))
        for step in ways.values():
            for _ in range(STEPS):
                step()
        logs = []
        for number in range(ROUNDS):
            row: dict[str, Any] = {"script": name, "round": number}
            for way, step in ways.items():
                start = time.process_time()
                for _ in range(STEPS):
                    step()
                row[way] = (time.process_time() - start) / STEPS
            logs.append(np.log(row["torch.optim"] / row["written out"]))
            print(json.dumps(row))
        mean = np.mean(logs)
        half = stats.t.ppf(0.975, ROUNDS - 1) * stats.sem(logs)
        low, middle, high = np.exp([mean - half, mean, mean + half]).round(3).tolist()
        found = {"script": name, "time ratio": middle, "low": low, "high": high}
        print(json.dumps(found))
        print(found, file=sys.stderr)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
