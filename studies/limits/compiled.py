"""Run a PyTorch script with another use of torch.compile, on a CPU.

    python studies/limits/compiled.py step --env-id CartPole-v1
    python studies/limits/compiled.py step_gymnasium mujoco

The first variants compile an eager script the way users do. The others are a compiled script
without one of its optimizations. The flags are those of the script. All variants of a script log
the same metrics, up to rounding. races.toml compares their times; race.py reads the metrics that
RunLog writes.
"""

import runpy
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
EAGER = ROOT / "ppo_torch.py"
COMPILED = ROOT / "ppo_torch_compile.py"
EAGER_GYMNASIUM = ROOT / "more/ppo_continuous_torch_gymnasium.py"
COMPILED_GYMNASIUM = ROOT / "more/ppo_continuous_torch_compile_gymnasium.py"
COMPILED_DQN = ROOT / "more/dqn_torch_compile.py"
COMPILED_SAC = ROOT / "more/sac_torch_compile_gymnasium.py"


class Variant(NamedTuple):
    script: Path
    replacements: dict[str, str]  # old text in the script -> new text


def excerpt(script: Path, start: str, end: str) -> str:
    """Return the text of a script from `start` up to `end`."""
    _, found, rest = script.read_text(encoding="utf-8").partition(start)
    body, end_found, _ = rest.partition(end)
    if not (found and end_found):
        raise ValueError(f"{script} no longer contains this text, so update VARIANTS: {start!r}")
    return start + body


# === Eager scripts, compiled the way users do ===================================================
LOOP = "    while iteration < args.num_iterations:\n"
MODULE = {LOOP: f"    agent.compile()\n{LOOP}"}

ADAM = (
    "    optimizer = torch.optim.Adam(params, args.learning_rate, eps=args.adam_eps, fused=True)\n"
)
TENSOR_RATE = """\
    learning_rate = torch.tensor(args.learning_rate, device=device)
    optimizer = torch.optim.Adam(params, learning_rate, eps=args.adam_eps)
"""
SCHEDULER = excerpt(EAGER, "    steps = iteration", "    while iteration")
RATE = '    learning_rate = optimizer.param_groups[0]["lr"]\n'
COPIED_RATE = '    learning_rate = optimizer.param_groups[0]["lr"].clone()\n'
# A scheduler would wrap optimizer.step in a function that cannot be compiled.
SET_RATE = '''\
def set_learning_rate(optimizer, args: Args) -> None:
    """Set the learning rate of the next step, a tensor, because numbers are inlined."""
    steps = int(next(iter(optimizer.state.values()))["step"])
    factor = learning_rate_factor(steps, args)
    optimizer.param_groups[0]["lr"].fill_(args.learning_rate * factor)


'''
STORAGE = "# === Storage"
CALL = "losses.append(minibatch_step(agent, optimizer, scheduler, Batch(*minibatch), args))\n"
NEW_CALL = f"""\
losses.append(minibatch_step(agent, optimizer, Batch(*minibatch), args))
{" " * 12}set_learning_rate(optimizer, args)
"""
LOAD = '        optimizer.load_state_dict(checkpoint["optimizer"])\n'


def step(decorator: str) -> dict[str, str]:
    """Return the changes that compile the policy and the minibatch step, as in LeanRL."""
    return {
        "from torch.optim.lr_scheduler import LambdaLR\n": "",
        ADAM: TENSOR_RATE,
        SCHEDULER: "",
        STORAGE: f"{SET_RATE}{STORAGE}",
        "def update(agent, optimizer, scheduler, ": "def update(agent, optimizer, ",
        RATE: COPIED_RATE,
        CALL: NEW_CALL,
        "def minibatch_step(agent, optimizer, scheduler, ": f"""\
{decorator}
def minibatch_step(agent, optimizer, """,
        "    optimizer.step()\n    scheduler.step()\n": "    optimizer.step()\n",
        "@torch.no_grad()\ndef policy(": f"{decorator}\n@torch.no_grad()\ndef policy(",
        LOAD: f"{LOAD}        set_learning_rate(optimizer, args)\n",
        "metrics = update(agent, optimizer, scheduler, ": "metrics = update(agent, optimizer, ",
    }


PLAIN = "@torch.compile"
OPTIONS = '@torch.compile(options={"cpp_wrapper": True, "cpp.use_decompose_tanh": True})'

# === ppo_torch_compile.py without one of its optimizations ======================================
POLICY = "    policy_fn = partial(policy, agent)  # on a CPU, a compiled policy is slower to call\n"
COMPILED_POLICY = "    policy_fn = compile_graph(partial(policy, agent), device)\n"
CPP_WRAPPER = excerpt(COMPILED, '        "cpp_wrapper"', '        "cpp.use')
DECOMPOSED_TANH = excerpt(COMPILED, '        "cpp.use_decompose_tanh"', '        "cpp.vec')

MINIBATCH_STEP = excerpt(COMPILED, "def minibatch_step(", "def compile_graph(")
BIND = excerpt(COMPILED, "    minibatch_fn = compile_graph(", "    epoch_fn = ")
TWO_GRAPHS = {
    MINIBATCH_STEP: '''\
def gradient(agent, minibatch: Batch, args: Args):
    """Return the clipped gradient (P,), and the metrics of the loss."""
    loss, losses = ppo_loss(agent, minibatch, args)
    params = list(agent.parameters())
    grad = torch.cat([x.flatten() for x in torch.autograd.grad(loss, params)])
    with torch.no_grad():
        grad *= (args.max_grad_norm / (grad.norm() + 1e-6)).clip(max=1.0)
    return grad, {name: x.detach() for name, x in losses.items()}


@torch.no_grad()
def adam_step(agent, optimizer, args: Args, grad):
    optimizer.step(list(agent.parameters()), grad, learning_rate_after(optimizer.count, args))


''',
    BIND: """\
    gradient_fn = compile_graph(partial(gradient, agent, args=args), device)
    adam_fn = compile_graph(partial(adam_step, agent, optimizer, args), device)

    def minibatch_fn(minibatch):
        grad, losses = gradient_fn(minibatch)
        adam_fn(grad)
        return losses

""",
}
TRACE_AUTOGRAD = excerpt(COMPILED, "    torch._dynamo.config.trace_autograd", "    options: dict")
# The loss and its gradient are separate graphs; torch.autograd.grad calls the second one.
THREE_GRAPHS = {
    TRACE_AUTOGRAD: "",
    MINIBATCH_STEP: """\
def loss_and_metrics(agent, minibatch: Batch, args: Args):
    loss, losses = ppo_loss(agent, minibatch, args)
    return loss, {name: x.detach() for name, x in losses.items()}


@torch.no_grad()
def adam_step(agent, optimizer, args: Args, grads):
    grad = torch.cat([x.flatten() for x in grads])
    grad *= (args.max_grad_norm / (grad.norm() + 1e-6)).clip(max=1.0)
    optimizer.step(list(agent.parameters()), grad, learning_rate_after(optimizer.count, args))


""",
    BIND: """\
    loss_fn = compile_graph(partial(loss_and_metrics, agent, args=args), device)
    adam_fn = compile_graph(partial(adam_step, agent, optimizer, args), device)

    def minibatch_fn(minibatch):
        loss, losses = loss_fn(minibatch)
        adam_fn(torch.autograd.grad(loss, list(agent.parameters())))
        return losses

""",
}
TORCH_OPTIM = {
    excerpt(COMPILED, "class Adam(", STORAGE): excerpt(EAGER, "def make_agent(", STORAGE)
    .replace(ADAM, TENSOR_RATE)
    .replace(SCHEDULER, "    return agent, optimizer\n")
    + SET_RATE,
    "    learning_rate = learning_rate_after(optimizer.count, args)\n": COPIED_RATE,
    MINIBATCH_STEP: '''\
def gradient(agent, minibatch: Batch, args: Args):
    """Return the clipped gradient of each parameter, and the metrics of the loss."""
    loss, losses = ppo_loss(agent, minibatch, args)
    grads = torch.autograd.grad(loss, list(agent.parameters()))
    norm = torch.cat([x.flatten() for x in grads]).norm()
    scale = (args.max_grad_norm / (norm + 1e-6)).clip(max=1.0)
    return [scale * x for x in grads], {name: x.detach() for name, x in losses.items()}


''',
    # torch.optim inserts a graph break.
    "fullgraph=True, dynamic=False, options": "dynamic=False, options",
    LOAD: f"{LOAD}        set_learning_rate(optimizer, args)\n",
    BIND: """\
    gradient_fn = compile_graph(partial(gradient, agent, args=args), device)
    adam_fn = compile_graph(optimizer.step, device)

    def minibatch_fn(minibatch):
        grads, losses = gradient_fn(minibatch)
        for x, grad in zip(agent.parameters(), grads, strict=True):
            x.grad = grad
        adam_fn()
        set_learning_rate(optimizer, args)
        return losses

""",
}
GRADIENT = excerpt(
    COMPILED,
    "    grad = torch.cat([x.flatten() for x in torch.auto",
    "    return {name: x.detach()",
)
ADAM_PER_PARAMETER = {
    excerpt(COMPILED, "class Adam(", "def make_agent("): '''\
class Adam(nn.Module):
    """Adam (Kingma & Ba 2015), implemented here so that it compiles together with the loss."""

    count: torch.Tensor

    def __init__(self, params, eps, device):
        super().__init__()
        self.eps = eps
        # The count is a tensor, because a number would be a compile-time constant.
        self.register_buffer("count", torch.zeros((), device=device))
        zeros = [torch.zeros_like(x) for x in params]
        self.mean = nn.ParameterList(zeros).requires_grad_(False)
        self.square = nn.ParameterList(map(torch.clone, zeros)).requires_grad_(False)

    def step(self, params, grads, learning_rate):
        """Update the parameters in place, given their gradients."""
        beta1, beta2 = 0.9, 0.999  # as in torch.optim.Adam
        self.count.add_(1)
        for x, grad, mean, square in zip(params, grads, self.mean, self.square, strict=True):
            mean.lerp_(grad, 1 - beta1)
            square.lerp_(grad**2, 1 - beta2)
            root = (square / (1 - beta2**self.count)).sqrt() + self.eps
            x -= learning_rate * mean / (1 - beta1**self.count) / root


''',
    excerpt(COMPILED, "    num_params = sum(", "def learning_rate_after("): """\
    return agent, Adam(list(agent.parameters()), args.adam_eps, device)


""",
    GRADIENT: """\
    grads = torch.autograd.grad(loss, params)
    with torch.no_grad():
        norm = torch.cat([x.flatten() for x in grads]).norm()
        scale = (args.max_grad_norm / (norm + 1e-6)).clip(max=1.0)
        grads = [scale * x for x in grads]
        optimizer.step(params, grads, learning_rate_after(optimizer.count, args))
""",
}

VARIANTS = {
    "module": Variant(EAGER, MODULE),
    "step": Variant(EAGER, step(PLAIN)),
    "step_options": Variant(EAGER, step(OPTIONS)),
    "step_gymnasium": Variant(EAGER_GYMNASIUM, step(PLAIN)),
    "torch_optim": Variant(COMPILED, TORCH_OPTIM),
    "three_graphs": Variant(COMPILED, THREE_GRAPHS),
    "two_graphs": Variant(COMPILED, TWO_GRAPHS),
    "adam_per_parameter": Variant(COMPILED, ADAM_PER_PARAMETER),
    "python_wrapper": Variant(COMPILED, {CPP_WRAPPER: ""}),
    "python_wrapper_gymnasium": Variant(COMPILED_GYMNASIUM, {CPP_WRAPPER: ""}),
    "python_wrapper_dqn": Variant(COMPILED_DQN, {CPP_WRAPPER: ""}),
    "python_wrapper_sac": Variant(COMPILED_SAC, {CPP_WRAPPER: ""}),
    "library_tanh": Variant(COMPILED, {DECOMPOSED_TANH: ""}),
    "compiled_policy": Variant(COMPILED, {POLICY: COMPILED_POLICY}),
}


def text_of(name: str) -> str:
    """Return the text of the script in a variant."""
    script, replacements = VARIANTS[name]
    text = script.read_text(encoding="utf-8")
    for old, new in replacements.items():
        if text.count(old) != 1:
            raise ValueError(f"{script} no longer contains this text, so update VARIANTS: {old!r}")
        text = text.replace(old, new)
    return text


def main() -> None:
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in VARIANTS:
        sys.exit(f"compiled.py: name one of {', '.join(VARIANTS)}, then the flags of the script")
    with TemporaryDirectory() as folder:
        path = Path(folder, VARIANTS[name].script.name)
        path.write_text(text_of(name), encoding="utf-8")
        runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    main()
