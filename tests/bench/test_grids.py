"""The runs that benchmark.sh lists: their number, order and commands."""

import importlib
import re
import shlex
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
from conftest import ROOT
from driving import bench, environment, names_of, succeed
from sections import ROWS, path_of

from analysis.catalog import SIZES
from bench import plan
from bench.arguments import parse_args
from studies.doors import run as doors_run
from studies.nnx_calls import policy


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    return environment(tmp_path_factory.mktemp("grids"))


def cell_of(name):
    """Return the parts of a run name as a dictionary. Without a label, "label" is empty."""
    *label, environment, size, script, iterations, seed = name.split("__")
    cell = {"label": "".join(label), "env": environment, "size": size, "script": script}
    cell["iterations"] = int(iterations.removesuffix("it"))
    cell["seed"] = int(seed.removeprefix("seed"))
    return cell


def test_help_states_the_number_of_runs_of_each_study(env):
    """The help shows the first line of each grid.toml, and needs no packages."""
    words = [sys.executable, "-S", "-m", "bench.arguments", "--help"]
    text = subprocess.check_output(words, cwd=ROOT, text=True)
    assert text == succeed(ROOT, "--help", env=env)
    said = re.findall(r"^  (\w+) .*: (\d+) runs, ", text, re.MULTILINE)
    assert len(said) == len(list(ROOT.glob("studies/*/grid.toml")))
    for name, runs in said:
        studies = {name: plan.read_study(name)}
        assert len(plan.expand(studies, parse_args([name]))) == int(runs)


def test_several_studies_run_one_after_the_other(env):
    names = names_of(ROOT, "throughput", "phases", env=env)
    both = names_of(ROOT, "throughput", env=env), names_of(ROOT, "phases", env=env)
    assert names == [*both[0], *both[1]] and len(names) == 228


def test_a_preset_keeps_its_network_and_length_and_any_gymnasium_id_is_accepted(env):
    flags = "--scripts continuous_torch_gymnasium --envs Ant-v5,ALE/Pong-v5,my_module:MyEnv-v0"
    flags += " --preset mujoco --total-timesteps 1000000 --repeats 2 --returns --list"
    lines = succeed(ROOT, *flags.split(), env=env).splitlines()
    script = "more/ppo_continuous_torch_gymnasium.py mujoco --env-id"
    [ant] = [x for x in lines if f"{script} Ant-v5 --seed 2 --total-timesteps 1000000 " in x]
    assert ant.split()[-1].startswith("Ant-v5__mujoco__default__") and "--save-every" not in ant
    assert len(lines) == 6 and sum("ALE.Pong-v5__mujoco__" in x for x in lines) == 2


def test_the_estimated_time_scales_with_the_iterations(env):
    def minutes(*flags):
        words = succeed(ROOT, "cpu", *flags, "--dry-run", env=env).splitlines()[-1].split()
        return float(words[6]) * {"hours": 60, "minutes": 1}[words[7]]

    usual = minutes()
    assert 60 < usual < 90  # 182 runs of about 25 seconds
    assert minutes("--iterations", "40") == pytest.approx(2 * usual, rel=0.3)  # twice the default


def test_runs_are_shuffled_within_blocks(env, tmp_path):
    """Flags and the environment do not change the order, so all Slurm jobs agree on it."""
    phases = ("phases", "--repeats", "2")
    order = names_of(ROOT, *phases, env=env)
    cells = [cell_of(name) for name in order]
    assert [cell["seed"] for cell in cells] == [1] * 120 + [2] * 120  # repeat by repeat
    blocks = groupby(cells, lambda x: (x["seed"], x["label"], x["env"], x["size"]))
    scripts = [tuple(cell["script"] for cell in block) for _, block in blocks]
    assert {len(set(block)) for block in scripts} == {8} and len(set(scripts)) > 25
    flags = ("--runs-dir", "linen", "--track", "--only", "linen", "--from=3")
    (tmp_path / "linen").symlink_to(sys.prefix)
    own = env | {"VENV": str(tmp_path / "linen")}
    same = names_of(ROOT, *phases, *flags, "--to=4", env=own)
    assert same == [name for name in order if "linen" in name][2:4]
    # The runs of a repeat are contiguous, and each repeat uses different seeds for its agents.
    agents = [cell_of(name) for name in names_of(ROOT, "agents", env=env)]
    assert [(x["seed"] - 1) // 1000 for x in agents] == [0] * 35 + [1] * 35 + [2] * 35
    assert len(list(groupby(agents[:35], lambda x: x["label"]))) > 15
    # A script that is listed twice runs once.
    flags = "--scripts ppo_torch.py,linen,ppo_linen.py --sizes small,large --repeats=2"
    names = names_of(ROOT, *flags.split(), env=env)
    assert len(set(names)) == len(names) == 2 * 2 * 2
    # Warmup runs come first and are not repeated.
    names = names_of(ROOT, "dqn", "--repeats", "2", env=env)
    assert [name[:6] == "warmup" for name in names] == [True] * 2 + [False] * 8


def test_iterations_in_a_grid_take_precedence_over_the_flag(env):
    cells = map(cell_of, names_of(ROOT, "dqn", "--iterations", "7", env=env))
    assert {(x["label"] == "warmup", x["iterations"]) for x in cells} == {(True, 1), (False, 7)}


@pytest.mark.parametrize(
    "study", ["throughput", "phases", "dqn", "doors", "agents", "minatar", "gpu"]
)
def test_scripts_accept_the_listed_commands(env, study, monkeypatch):
    """The script of each command parses its flags, and the result agrees with the run name."""
    kinds = {}  # the last command of each kind
    for line in succeed(ROOT, study, "--list", env=env).splitlines():
        cell = cell_of(line.split()[-1])
        kinds[cell["label"], cell["script"], cell["size"], cell["iterations"]] = line, cell
    for line, cell in kinds.values():
        script, label = cell["script"], cell["label"]
        words = shlex.split(line)
        compiles = words[:2] != ["env", "JAX_DISABLE_JIT=1"]
        assert compiles == (not script.endswith("-none"))
        words = words[1:] if compiles else words[3:]  # drop the interpreter
        while words[0] == "-m":
            assert (ROOT / f"{words[1].replace('.', '/')}.py").is_file()
            words = words[2:]
        name = "ppo_linen_vmap"  # the script whose flags one_scan takes
        if script != "one_scan":
            name = script if script in ROWS else f"ppo_{script.removesuffix('-none')}"
            assert words.pop(0) == str(path_of(name).relative_to(ROOT))
        module = importlib.import_module(name)
        monkeypatch.setattr(sys, "argv", [name, *doors_run.flags_of(name, words)])
        args = module.parse_args()
        assert (args.num_iterations, args.seed) == (cell["iterations"], cell["seed"])
        assert study in ("doors", "minatar") or args.env_id == cell["env"]
        assert study != "doors" or args.env_id.startswith("envs.doors")
        assert args.hidden_sizes == tuple(SIZES.get(cell["size"], args.hidden_sizes))
        assert getattr(args, "sync_for_timing", False) == label.startswith("phases")
        assert "agents" not in label or label == f"agents-{args.num_agents}"
        assert (args.save_every == 20) == (cell["env"] == "minatar" and args.num_iterations > 20)


def test_the_default_environment_fits_the_actions_of_the_scripts(env):
    scripts = ("--scripts", "continuous_linen,continuous_torch_gymnasium")
    assert {cell_of(x)["env"] for x in names_of(ROOT, *scripts, env=env)} == {"Pendulum-v1"}
    (line, _) = succeed(ROOT, *scripts, "--list", env=env).splitlines()
    assert " --total-timesteps 409600 " in line


def test_track_applies_to_all_runs_except_side_by_side(env):
    """In W&B, runs side by side would be indistinguishable from runs on an idle machine."""
    assert " --track " not in succeed(ROOT, "agents", "--list", env=env)
    for line in succeed(ROOT, "agents", "--track", "--list", env=env).splitlines():
        assert (" --track " in line) == ("side_by_side" not in line)


def test_scripts_accept_the_programs_of_the_gpu_races(monkeypatch):
    said = subprocess.check_output([ROOT / "tests/gpu/run.sh", "steps"], text=True)
    words = [word for line in said.splitlines() for word in shlex.split(line)]
    programs = {word.partition("python ")[2] or word for word in words if word.count(".py ")}
    assert len(programs) > 60
    for program in programs:
        path, *flags = program.split()
        if path == "studies/nnx_calls/policy.py":
            path, (way, *flags) = policy.SCRIPT, flags
            assert way in policy.WAYS
        monkeypatch.setattr(sys, "argv", [path, *flags, "--total-timesteps", "1000000000"])
        assert importlib.import_module(Path(path).stem).parse_args().num_iterations > 100


def test_devices_trains_on_several_devices(env):
    """PyTorch is launched with torchrun. For JAX, an environment variable sets the number."""
    flags = ("--scripts", "linen_sharded,nnx_sharded,torch_ddp", "--devices", "2")
    lines = succeed(ROOT, *flags, "--list", env=env).splitlines()
    *in_jax, torch = sorted((shlex.split(x) for x in lines), key=len)
    assert {x[3] for x in in_jax} == {"more/ppo_linen_sharded.py", "more/ppo_nnx_sharded.py"}
    assert all(x[:2] == ["env", "JAX_NUM_CPU_DEVICES=2"] for x in in_jax)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert torch[1:6] == [*launch, "more/ppo_torch_ddp.py"]
    assert all("__2devices__" in words[words.index("--run-name") + 1] for words in (*in_jax, torch))
    several = "linen_sharded, nnx_sharded, torch_ddp"
    for others, said in [
        (("--scripts", "linen"), f"--devices is for {several}, not for linen"),
        (("--scripts", "torch_ddp", "--gpus", "0"), "omit --gpus"),
    ]:
        process = bench(ROOT, "--devices", "2", *others, "--list", env=env)
        assert process.returncode == 2 and said in process.stderr
