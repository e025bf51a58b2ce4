"""Measure what continuous PPO and SAC cost, beside the libraries and files in peers/.

    python -m studies.peers.run install studies/control/peers
    python -m studies.control.cost 5 --cleanrl ../cleanrl --leanrl ../leanrl

The numbers are added to studies/control/cost.jsonl, a line per pair of runs. Started again, it goes
on with what lacks there of the rounds. Each round runs every program twice in HalfCheetah: a short
run and a long one, which first changes from round to round, as the order of programs does. Their
difference is iterations of PPO, or steps of SAC with an update each, without imports and
compilation, and takes about ten seconds. All run on one core with one thread. The programs that
compile for minutes run in every second round alone. Every line counts: none is left out later.
"""

import argparse
import json
import os
import platform
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from studies.control import rows
from studies.machine import git_commit

ROOT = Path(__file__).parents[2]
PPO_BIG = "PPO, 32 x 64, batches of 256"  # the one that learns best in HalfCheetah
PPO_SMALL = "PPO, 8 x 256, batches of 64"
SAC = "SAC, 1 environment, batches of 256"
SETTINGS = {
    PPO_BIG: "--num-envs 32 --num-steps 64 --num-minibatches 8",
    PPO_SMALL: "--num-envs 8 --num-steps 256 --num-minibatches 32",
    SAC: "--learning-starts 500",  # as many as RANDOM says
}
UNITS = {PPO_BIG: 2048, PPO_SMALL: 2048, SAC: 1}  # environment steps of what is measured
RANDOM = {PPO_BIG: 0, PPO_SMALL: 0, SAC: 500}  # units without an update, which count as start
OURS_PPO = "--env-id HalfCheetah-v5"
OURS_SAC = "mujoco --num-steps 100 --no-save-replay"


class Program(NamedTuple):
    """A program of one setting."""

    setting: str
    name: str  # in the table
    file: str
    words: str  # before the setting's
    short: int  # iterations, or steps
    long: int
    is_slow: bool = False  # to compile


LINEN, TORCH = "linen_gymnasium", "torch_gymnasium"
PPO_LINEN = "more/ppo_continuous_linen_gymnasium.py"
PPO_TORCH = "more/ppo_continuous_torch_gymnasium.py"
SAC_COMPILE = "more/sac_torch_compile_gymnasium.py"
CLEANRL, LEANRL = "--checkout {cleanrl}", "--checkout {leanrl}"
PROGRAMS = (
    Program(PPO_BIG, LINEN, PPO_LINEN, OURS_PPO, 3, 63),
    Program(PPO_BIG, TORCH, PPO_TORCH, OURS_PPO, 2, 32),
    Program(PPO_BIG, "sb3", "ppo_sb3.py", "", 2, 32),
    Program(PPO_BIG, "sbx", "ppo_sbx.py", "", 2, 42),
    Program(PPO_BIG, "cleanrl", "ppo_cleanrl.py", CLEANRL, 2, 18),
    Program(PPO_BIG, "leanrl", "ppo_leanrl.py", LEANRL, 2, 16),
    Program(PPO_BIG, "leanrl_compile", "ppo_leanrl.py", f"{LEANRL} --compile", 2, 26, True),
    Program(PPO_BIG, "skrl_torch", "ppo_skrl_torch.py", "", 2, 26),
    Program(PPO_BIG, "skrl_jax", "ppo_skrl_jax.py", "", 2, 22, True),
    Program(PPO_SMALL, LINEN, PPO_LINEN, OURS_PPO, 3, 53),
    Program(PPO_SMALL, TORCH, PPO_TORCH, OURS_PPO, 2, 16),
    Program(PPO_SMALL, "sb3", "ppo_sb3.py", "", 2, 12),
    Program(SAC, LINEN, "more/sac_linen_gymnasium.py", OURS_SAC, 600, 1800),
    Program(SAC, TORCH, "more/sac_torch_gymnasium.py", OURS_SAC, 600, 1500),
    Program(SAC, "torch_compile_gymnasium", SAC_COMPILE, OURS_SAC, 600, 2100),
    Program(SAC, "sb3", "sac_sb3.py", "", 600, 1400),
    Program(SAC, "sbx", "sac_sbx.py", "", 600, 1800),
    Program(SAC, "cleanrl", "sac_cleanrl.py", CLEANRL, 600, 1400),
    Program(SAC, "leanrl", "sac_leanrl.py", LEANRL, 600, 1300),
    Program(SAC, "leanrl_compile", "sac_leanrl.py", f"{LEANRL} --compile", 600, 2000, True),
    Program(SAC, "skrl_torch", "sac_skrl_torch.py", "", 600, 1300),
    Program(SAC, "skrl_jax", "sac_skrl_jax.py", "", 600, 1600, True),
)


class Target(NamedTuple):
    """How many times as long as another a script may take, fixed before the measurement."""

    setting: str
    script: str
    of: str
    most: float


TARGETS = (
    Target(PPO_BIG, LINEN, "sb3", 0.25),
    Target(PPO_SMALL, LINEN, "sb3", 0.25),
    Target(PPO_BIG, TORCH, "sb3", 0.8),
    Target(PPO_SMALL, TORCH, "sb3", 0.8),
    Target(SAC, LINEN, "sbx", 0.9),
    Target(SAC, LINEN, "sb3", 0.6),
    Target(SAC, "torch_compile_gymnasium", LINEN, 1.15),
    Target(SAC, TORCH, "sb3", 0.8),
    Target(SAC, TORCH, "cleanrl", 0.65),
)
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "JAX_PLATFORMS": "cpu",
    # Else the long run would find what the short one compiled.
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}
PACKAGES = (
    *("jax", "flax", "optax", "torch", "gymnasium", "mujoco", "numpy"),
    *("stable_baselines3", "sbx-rl", "skrl", "tensordict", "torchrl"),
)


class Seconds(NamedTuple):
    cpu: float  # of the process and its children, in user and system mode
    wall: float


def is_ours(program: Program) -> bool:
    return program.file.startswith("more/")


def python_of(program: Program) -> str:
    """The interpreter of a program's environment; a peer's must be installed."""
    if is_ours(program):
        return sys.executable
    if not shutil.which("uv"):
        rows.fail("uv must be installed: it runs the libraries in environments of their own")
    path = ROOT / "studies/control/peers" / program.file
    words = ["uv", "python", "find", "--offline", "--script", str(path)]
    env = os.environ | {"UV_PYTHON": sys.executable}
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    python = done.stdout.strip()
    if "environments-" not in python:  # uv names Python itself where there is no environment
        rows.fail(
            f"{program.file} has no environment: see the first lines of studies/control/cost.py"
        )
    return python


def versions_of(python: str) -> dict[str, str]:
    """Of what an environment has of PACKAGES."""
    code = "import json, importlib.metadata as m; "
    code += "print(json.dumps({x.name: x.version for x in m.distributions()}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return {name: x for name, x in json.loads(done.stdout).items() if name in PACKAGES}


def command_of(program: Program, python: str, length: int, args: argparse.Namespace) -> list[str]:
    """A run of so many iterations, or steps."""
    folder = ROOT if is_ours(program) else ROOT / "studies/control/peers"
    words = program.words.format(cleanrl=args.cleanrl, leanrl=args.leanrl).split()
    steps = length * UNITS[program.setting]
    flags = [*SETTINGS[program.setting].split(), "--total-timesteps", str(steps)]
    return [python, str(folder / program.file), *words, *flags]


def measure(command: list[str], core: int) -> Seconds:
    """Run a command in an empty folder and wait for it; it must succeed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    # Pinned to a core: XLA's pool of threads would have one for each.
    pinned = ["taskset", "--cpu-list", str(core), *command]
    env = os.environ | ONE_THREAD
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(pinned, cwd=folder, env=env, capture_output=True, text=True)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Seconds(cpu, wall)


def split(short: Seconds, long: Seconds, program: Program) -> dict[str, Any]:
    """What an iteration or a step takes, and the start: what remains of the short run."""
    steps = program.long - program.short
    starting = program.short - RANDOM[program.setting]
    found: dict[str, Any] = {}
    for name in Seconds._fields:
        first = getattr(short, name)
        each = (getattr(long, name) - first) / steps
        found[f"{name}_seconds"] = [first, getattr(long, name)]
        found[f"{name}_each"] = each
        found[f"{name}_start"] = first - starting * each
    return found


def done_in(path: Path) -> set[tuple[int, str, str]]:
    """What a file has: rounds, settings and scripts."""
    found = rows.read(path, ("round", "setting", "script", "cpu_each"))
    return {(x["round"], x["setting"], x["script"]) for x in found}


def checkout(text: str) -> str:
    """A path that holds in the folder of a run, too."""
    return str(Path(text).absolute())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=rows.positive)
    parser.add_argument("--out", type=Path, default=Path("studies/control/cost.jsonl"))
    parser.add_argument("--only", default="", help="of 'SETTING SCRIPT', by a regular expression")
    parser.add_argument("--cleanrl", type=checkout, default="../cleanrl", help="its checkout")
    parser.add_argument("--leanrl", type=checkout, default="../leanrl", help="its checkout")
    parser.add_argument("--core", type=int, default=0, help="that all runs are pinned to")
    args = parser.parse_args()
    try:
        re.compile(args.only)
    except re.error as error:
        parser.error(f"--only is no regular expression: {error}")
    if args.core not in os.sched_getaffinity(0):
        parser.error(f"--core: there is no core {args.core}")
    return args


def main() -> None:
    args = parse_args()
    chosen = [x for x in PROGRAMS if re.search(args.only, f"{x.setting} {x.name}")]
    if not chosen:
        rows.fail(f"--only: no program is called '{args.only}'")
    pythons = {program.file: python_of(program) for program in chosen}
    versions = {python: versions_of(python) for python in set(pythons.values())}
    cpu = platform.processor() or platform.machine()
    machine = {"cpu": cpu, "python": platform.python_version()}
    for round_number in range(args.rounds):
        begin = time.perf_counter()
        done = done_in(args.out)
        order = random.Random(round_number)
        for program in order.sample(chosen, len(chosen)):
            if (round_number, program.setting, program.name) in done:
                continue
            if program.is_slow and round_number % 2:
                continue
            python = pythons[program.file]
            lengths = [program.short, program.long]
            if round_number % 2:
                lengths.reverse()
            taken = {}
            for length in lengths:
                taken[length] = measure(command_of(program, python, length, args), args.core)
            short, long = taken[program.short], taken[program.long]
            row: dict[str, Any] = {
                "round": round_number,
                "setting": program.setting,
                "script": program.name,
                "short": program.short,
                "long": program.long,
            }
            row |= split(short, long, program)
            row |= {
                "load": os.getloadavg()[0],
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "commit": git_commit(Path(__file__).absolute()),
                "machine": machine,
                "versions": versions[python],
            }
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            each = f"{row['cpu_each']:.4f} CPU s each, {row['cpu_start']:.1f} to start"
            print(f"{program.setting} {program.name}: {each}", flush=True)
        print(f"round {round_number}: {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
