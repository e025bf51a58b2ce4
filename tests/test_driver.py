"""The driver, on stand-ins for the training scripts, and one small grid with the real ones."""

import contextlib
import fcntl
import importlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import psutil
import pytest
import tyro

from analysis.runs import load_runs

ROOT = Path(__file__).parent.parent
SCRIPTS = ["ppo_torch", "ppo_torch_compile", "ppo_linen", "ppo_nnx", "ppo_nnx_cached"]
NVIDIA_SMI = """#!/bin/sh
cat <<'GPUS'
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-51b2d9a0-6f6b-1f0e-9d5c-0a4a8b1c2d3e)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-8f3c7e21-0b7d-4c55-8a10-5e6f7a8b9c0d)
  MIG 1g.10gb     Device  0: (UUID: MIG-2c9e4f70-3d1a-5b86-9e27-7f8091a2b3c4)
GPUS
"""
CELL = re.compile(
    r"(?P<study>(sync|sync-sizes|warmup|side_by_side|agents-\d+)__)?(?P<env>[\w.-]+?)__(?P<size>[a-z]+)__(?P<script>[a-z_-]+)"
    r"__(?P<iterations>\d+)it__seed(?P<seed>\d+)"
)


def cell_of(name):
    match = CELL.search(name)
    assert match, name
    return match.groupdict()


@pytest.fixture
def project(tmp_path):
    """A copy of the driver, with stand-ins for the scripts and for two GPUs."""
    copy_driver(tmp_path)
    set_gpus(tmp_path, NVIDIA_SMI)
    for name in SCRIPTS:
        shutil.copy(ROOT / "tests/stand_in.py", tmp_path / f"{name}.py")
    yield tmp_path
    while left := processes_in(tmp_path):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def copy_driver(folder):
    (folder / "analysis").mkdir(parents=True)
    for name in ("benchmark.sh", "setup.sh", "analysis/machine.py"):
        shutil.copy(ROOT / name, folder / name)


def set_gpus(project, nvidia_smi):
    path = project / "tools/nvidia-smi"
    path.parent.mkdir(exist_ok=True)
    path.write_text(nvidia_smi)
    path.chmod(0o755)


def environment(project, **stand_in):
    """The driver uses this Python as it is; its machine-wide lock is this test's own."""
    own = {"VENV": sys.prefix, "TMPDIR": str(project), "TRACE": str(project / "trace")}
    own["PATH"] = f"{project}/tools:{os.environ['PATH']}"
    return os.environ | own | {"STAND_IN": json.dumps(stand_in)}


def start(project, *flags, wrapper=(), env=None, **stand_in):
    # Where the tests run under nohup or in a shell's background, these signals would be ignored.
    wrapper = (*wrapper, "env", "--default-signal=INT,HUP")
    return subprocess.Popen(
        [*wrapper, "./benchmark.sh", *flags],
        cwd=project,
        env=env or environment(project, **stand_in),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(driver):
    driver.stdout, driver.stderr = map(str, driver.communicate(timeout=120))
    return driver


def bench(project, *flags, **stand_in):
    return finish(start(project, *flags, **stand_in))


def list_names(project, *flags):
    lines = bench(project, *flags, "--list").stdout.splitlines()
    return [line.split()[-1] for line in lines]


def cells(project, *flags):
    return [cell_of(name) for name in list_names(project, *flags)]


def log(project):
    return [
        json.loads(line) for line in (project / "runs/benchmark.jsonl").read_text().splitlines()
    ]


def trace(project):
    path = project / "trace"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def started(project):
    return [name for event, name, *_ in trace(project) if event == "start"]


def completed(project):
    return sorted(path.parent.name for path in (project / "runs").glob("*/run.json"))


def wait_for(condition):
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("what the test waits for does not come")


def processes_in(project):
    """Those whose environment shows that this test's driver started them, at any remove."""

    def belongs(process):
        try:
            ours = process.environ().get("TMPDIR") == str(project)
            return ours and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:  # it has ended by now, or is another user's
            return False

    return [x for x in psutil.process_iter() if belongs(x)]


def name_of(process):
    """Its program's name; of one that has just ended, none."""
    with contextlib.suppress(psutil.Error):
        return process.name()


# === The grid ===================================================================================
@pytest.mark.parametrize(
    "flags, runs",
    [
        ([], 15),
        (["quick", "--iterations", "9"], 15),
        (["--repeats", "1"], 5),
        (["async"], 108),
        (["sync"], 96 + 24),
        (["full"], 231),
        (["full", "--repeats", "3"], 3 + 3 * 228),
        (["dqn"], 24),
        (["doors"], 140),
        (["agents"], 3 * (7 * 4 + 18)),
        (["agents", "--repeats", "1", "--agents", "2,64,2", "--iterations", "9"], 2 * 4 + 18),
        (["--scripts", "linen_vmap,ppo_nnx_vmap.py,torch_vmap"], 3),
        (["--scripts", "dqn_linen,dqn_torch.py,linen_gymnasium"], 3),
        (["minatar"], 10 + 15 + 4),
        (["minatar", "--repeats", "2"], 4 + 4 + 3),
        (["minatar", "--frames", "500000,1000000"], 15 + 4),
        (["--envs", "Acrobot-v1,CartPole-v1", "--sizes", "small,large"], 20),
        (["--scripts", "linen nnx ppo_torch.py", "--repeats=2"], 6),
        (["--envs", "CartPole-v1,CartPole-v1", "--sizes", "small,small"], 5),
        (["--scripts", "linen,ppo_linen.py,linen"], 1),
        (["--scripts", "equinox-none,ppo_equinox.py,linen"], 3),
        (["--envs", "Acrobot-v1\nCartPole-v1\n", "--sizes", "small\tlarge"], 20),
        (["async", "--only", "ppo_linen.*Acrobot"], 3),
        (["async", "--from", "101"], 8),
        (["async", "--from", "101", "--to", "103"], 3),
    ],
)
def test_count(project, flags, runs):
    names = list_names(project, *flags)
    assert len(names) == len(set(names)) == runs
    assert bench(project, *flags, "--count").stdout == f"{runs}\n"


def test_presets_hold_what_they_say(project):
    scripts = {x.removeprefix("ppo_") for x in SCRIPTS}
    for repeat, block in groupby(cells(project), lambda x: x["seed"]):
        block = list(block)
        assert {cell["script"] for cell in block} == scripts and len(block) == 5, repeat
        assert {cell["iterations"] for cell in block} == {"25"}
    full = cells(project, "full")
    assert [cell["study"] for cell in full[:4]] == ["warmup__"] * 3 + [None]
    overlapped = [cell for cell in full if cell["study"] is None]
    assert Counter(cell["script"] for cell in overlapped) == dict.fromkeys(
        ("linen", "nnx_cached", "torch_compile"), 36
    )
    assert set(Counter(cell["env"] for cell in overlapped).values()) == {9}
    assert set(Counter(cell["size"] for cell in overlapped).values()) == {36}
    synced = [cell for cell in full if (cell["study"] or "").startswith("sync")]
    assert len(synced) == 120 and set(Counter(x["script"] for x in synced).values()) == {15}
    assert {x["env"] for x in synced if x["study"] == "sync-sizes__"} == {"Acrobot-v1"}
    for line in bench(project, "full", "--list").stdout.splitlines():
        cell = cell_of(line.split()[-1])
        assert ("--sync-for-timing" in line) == (cell["study"] in ("sync__", "sync-sizes__"))
        assert ("--no-jit " in line) == (cell["script"] in ("linen-none", "nnx-none"))
        assert ("--no-jit-env" in line) == (cell["script"] == "torch-none")
        assert f"ppo_{cell['script'].removesuffix('-none')}.py --env-id {cell['env']} " in line
        assert f"--seed {cell['seed']} --total-timesteps 819200 " in line


def test_equinox_is_run_only_where_it_is_named(project):
    for preset in ("quick", "async", "full", "dqn"):
        assert "equinox" not in bench(project, preset, "--list").stdout
    lines = bench(project, "--scripts", "equinox,equinox-none", "--list").stdout.splitlines()
    assert all(line.split()[1] == "ppo_equinox.py" for line in lines)
    assert {cell_of(x.split()[-1])["script"]: "--no-jit " in x for x in lines} == {
        **{"equinox": False, "equinox-none": True}
    }


def test_the_presets_of_dqn(project):
    lines = bench(project, "dqn", "--repeats", "1", "--list").stdout.splitlines()
    scripts = {line.split()[1].removesuffix(".py") for line in lines}
    both = {f"{x}{y}" for x in ("linen", "torch") for y in ("", "_gymnasium")}
    assert scripts == {f"{x}_{y}" for x in ("ppo", "dqn") for y in both}
    for line in lines:
        steps = {"ppo": 8192, "dqn": 5000}[line.split()[1][:3]] * 25
        assert "--env-id CartPole-v1 " in line and f"--total-timesteps {steps} " in line
        assert ("--hidden-sizes" in line) == ("ppo" in line)

    lines = bench(project, "minatar", "--list").stdout.splitlines()
    runs = Counter()
    for line in lines:
        _, script, configuration, *flags = line.split()
        frames = int(flags[flags.index("--total-timesteps") + 1])
        cell = cell_of(line.split()[-1])
        assert configuration == "minatar" and "--env-id" not in line
        assert (f"{cell['script']}.py", int(cell["iterations"])) == (script, frames // 5000)
        assert ("--save-every 20 " in line) == (frames > 100_000)
        runs[script, frames] += 1
    names = "dqn_linen.py", "dqn_torch_gymnasium.py"
    counts = [[runs[x, n] for n in (100_000, 500_000, 5_000_000)] for x in names]
    assert counts == [[5, 10, 3], [5, 5, 1]]
    blocks = [
        [cell["script"] for cell in block]
        for _, block in groupby(cells(project, "minatar"), lambda x: (x["iterations"], x["seed"]))
    ]
    assert [len(set(x)) for x in blocks] == [2] * 10 + [1] * 5 + [2] + [1] * 2
    assert len({tuple(x) for x in blocks if len(x) == 2}) == 2  # the seed decides who is first


def test_the_preset_doors(project):
    """Its commands have what the scripts take, and are the same length whatever num_envs is."""
    lines = bench(project, "doors", "--repeats", "2", "--list").stdout.splitlines()
    for line in lines:
        words = shlex.split(line)
        assert words[1:3] == ["-m", "analysis.doors_run"] and words[4] == "doors"
        script = importlib.import_module(words[3].removesuffix(".py"))
        args = tyro.cli(script.Doors, args=words[5:])
        assert args.num_iterations == 125 and args.total_timesteps == 640_000
        assert args.num_envs * args.num_steps == 5120 and args.save_every == 0
        short = "doors-public" in words[-1]  # 15 steps, in both libraries
        limit = "DoorsShort" in args.env_id or getattr(args, "max_episode_steps", 0) == 15
        assert short == limit
    runs = Counter((cell_of(x.split()[-1])["env"], x.split()[3]) for x in lines)
    assert set(runs.values()) == {2} and len(runs) == 14
    seeds = [[cell_of(x.split()[-1])[y] for x in lines] for y in ("seed", "env", "script")]
    assert seeds[0] == sorted(seeds[0])  # a seed's runs follow each other, in an order of their own
    cells = list(zip(*seeds[1:], strict=True))
    assert cells[:14] != cells[14:] and sorted(cells[:14]) == sorted(cells[14:])


def test_the_preset_agents(project):
    """Its commands have what the programs take; no two repeats have an agent of the same seed."""
    one, many = (importlib.import_module(x).Args for x in ("ppo_linen", "ppo_linen_vmap"))
    flags = ("agents", "--repeats", "3", "--agents", "1,1000")
    lines = bench(project, *flags, "--list").stdout.splitlines()
    runs, seeds, order = Counter(), {}, {}
    for line in lines:
        _, *words = shlex.split(line)
        cell = cell_of(words[-1])
        way, script = cell["study"] or "", f"ppo_{cell['script']}.py"
        if way == "side_by_side__":
            assert words[:3] == ["-m", "analysis.side_by_side", script]
        elif cell["script"] == "one_scan":
            assert words[:2] == ["-m", "analysis.one_scan"]
        else:
            assert words[0] == script
        first = next(i for i, x in enumerate(words) if x.startswith("--"))
        args = tyro.cli(many if way.startswith("agents") else one, args=words[first:])
        assert args.env_id == "CartPole-v1" and args.num_iterations == 100
        assert args.hidden_sizes == (64, 64) and args.seed == int(cell["seed"])
        count = args.num_agents if way.startswith("agents") else 1
        assert way in ("", "side_by_side__", f"agents-{count}__")
        repeat = (args.seed - 1) // 1000
        seeds.setdefault(repeat, set()).update(range(args.seed, args.seed + count))
        order.setdefault(repeat, []).append((way, cell["script"]))
        runs[way, cell["script"]] += 1
    each = {"": 4, "side_by_side__": 2}  # in a repeat
    assert all(x == 3 * each.get(way, 1) for (way, _), x in runs.items()) and len(runs) == 14
    single = {("", x) for x in ("linen", "nnx", "torch_compile")}
    assert single | {("side_by_side__", x) for _, x in single} < set(runs)
    assert len(set.union(*seeds.values())) == sum(map(len, seeds.values())) == 3000
    assert list(order) == [0, 1, 2]  # repeats are outer, and each has an order of its own
    assert order[0] != order[1] and sorted(order[0]) == sorted(order[1])
    tracked = bench(project, *flags, "--track", "--list").stdout.splitlines()
    assert [("--track" in x) != ("side_by_side" in x) for x in tracked] == [True] * len(lines)


def test_blocks_are_whole_and_shuffled_by_the_seed(project):
    order = list_names(project, "sync", "--repeats", "2")
    assert order == list_names(project, "sync", "--repeats", "2", "--seed", "1")
    other = list_names(project, "sync", "--repeats", "2", "--seed", "2")
    assert other != order and sorted(other) == sorted(order)
    matches = [cell_of(name) for name in order]
    blocks = [
        tuple(cell["script"] for cell in block)
        for _, block in groupby(matches, lambda x: (x["seed"], x["study"], x["env"], x["size"]))
    ]
    assert len(blocks) == 30 and {len(block) for block in blocks} == {8}
    assert len(set(blocks)) > 25
    seeds = [cell["seed"] for cell in matches]
    assert seeds == ["1"] * 120 + ["2"] * 120  # repeats are outer


def test_neither_order_nor_choice_depends_on_folders_notes_or_tracking(project):
    """A Slurm array that is submitted again with a note must find the same run in each line."""
    flags = ("sync", "--only", "linen", "--repeats", "2")
    order = list_names(project, *flags)
    other = (*flags, "--notes", "linen again", "--runs-dir", "linen", "--track")
    assert list_names(project, *other) == order
    own = environment(project) | {"VENV": str(project / "linen/.venv")}
    driver = start(project, *flags, "--list", env=own)
    assert [line.split()[-1] for line in finish(driver).stdout.splitlines()] == order


def test_a_listed_line_can_be_pasted(project):
    folder = "it's 5 o'clock\n& \"late\"\n"
    line = bench(project, "--list", "--runs-dir", folder).stdout.splitlines()[0]
    subprocess.run(["bash", "-c", line], cwd=project, env=environment(project), check=True)
    assert len(list((project / folder).glob("*/run.json"))) == 1


@pytest.mark.parametrize(
    "flags, word",
    [
        (["fast"], "fast"),
        (["--fast"], "--fast"),
        (["quick", "async"], "async"),
        (["--envs", "Pendulum-v1"], "Pendulum-v1"),
        (["--envs", ""], "--envs"),
        (["--scripts", "keras"], "keras"),
        (["--sizes", "small,huge"], "huge"),
        (["async", "--sizes", "small"], "--sizes"),
        (["--iterations", "0"], "--iterations"),
        (["--repeats", "many"], "many"),
        (["--repeats", "999999999", "--only", "zzz"], "at most 1000"),
        (["--seed"], "--seed"),
        (["--timeout", "-1"], "--timeout"),
        (["--from", "16"], "--from is 16, but the list ends at line 15."),
        (["--from", "5", "--to", "3"], "--from is 5, which is after --to 3."),
        (["--only", "("], "--only"),
        (["--only", "no such run"], "--only"),
        (["--frames", "500000"], "--frames is for the preset minatar"),
        (["minatar", "--frames", "1000"], "multiples of 5000, as 500000,5000000; not '1000'"),
        (["minatar", "--frames", ""], "--frames"),
        (["minatar", "--iterations", "9"], "--frames"),
        (["--agents", "1,2"], "--agents is for the preset agents"),
        (["agents", "--agents", "0"], "whole numbers from 1 to 1000, as 1,2,4; not '0'"),
        (["agents", "--agents", "1,2 1001"], "not '1001'"),
        (["agents", "--agents", ""], "--agents"),
        (["agents", "--agents", "2;ls"], "not '2;ls'"),
        (["agents", "--gpus", "0,1"], "The preset agents takes one GPU"),
        (["agents", "--sizes", "small"], "--sizes"),
        (["--scripts", "dqn_linen", "--sync"], "--sync is for PPO, not for dqn_linen"),
        (["--scripts", "linen_gymnasium", "--envs", "Asterix-MinAtar"], "not in Asterix-MinAtar"),
        (["--scripts", "sbx", "--envs", "mine:Env-v0"], "not in mine:Env-v0"),
        (["--envs", "mine.py:Env;ls"], "not 'mine.py:Env;ls'"),
        (["--envs", "a/mine:Env"], "not 'a/mine:Env'"),
        (["--scripts", ""], "--scripts must name at least one"),
        (["--scripts", "mine"], "or the path of a script; not 'mine'"),
        (["--scripts", "no/mine.py"], "there is no file 'no/mine.py'"),
        (["--scripts", "own/my-own.py"], "letters, digits and _ only"),
        (["--scripts", "own/ppo_linen.py"], "has the name of a script of this project"),
        (["--scripts", "own/mine.py,mine.py"], "have one name"),
        (["--gpus", "0;1"], "--gpus"),
        (["--gpus", "0,7"], "not '7'"),
        (["--gpus", "GPU-8f3d"], "not 'GPU-8f3d'"),
        (["--gpus", "GPU-"], "not 'GPU-'"),  # CUDA would see none where several begin so
        (["--gpus", "7", "--dry-run"], "not '7'"),
        (["--gpus", "0,1\n2"], "--gpus"),
        (["--gpus", "0,GPU-51b2"], "'GPU-51b2' is there twice"),
        (["--runs-dir", "/dev/null/runs"], "--runs-dir"),
        (["--runs-dir", ""], "--runs-dir"),
        (["--runs-dir", "--dry-run"], "not '--dry-run'"),
        (["--runs-dir", "/dev/null/runs", "--dry-run"], "--runs-dir"),
        (["--runs-dir", "benchmark.sh", "--dry-run"], "--runs-dir"),
    ],
)
def test_wrong_usage_gets_one_sentence(project, flags, word):
    (project / "own").mkdir()
    for name in ("mine.py", "own/mine.py", "own/my-own.py", "own/ppo_linen.py"):
        (project / name).touch()
    driver = bench(project, *flags)
    assert (driver.returncode, driver.stdout) == (2, "")
    assert len(driver.stderr.splitlines()) == 1 and word in driver.stderr
    assert not (project / "runs").exists()


def test_without_gpus_their_numbers_are_refused_where_they_would_be_used(project):
    set_gpus(project, "#!/bin/sh\necho 'NVIDIA-SMI has failed' && exit 9\n")
    for flags in ([], ["--dry-run"]):
        driver = bench(project, "--gpus", "0,1", *flags)
        assert (driver.returncode, driver.stdout) == (2, "")
        assert len(driver.stderr.splitlines()) == 1 and "not '0'" in driver.stderr
    assert bench(project, "--gpus", "0,1", "--count").stdout == "15\n"
    assert list_names(project, "--gpus", "0,1") == list_names(project)


def test_gpus_may_be_named_as_nvidia_smi_does(project):
    gpus = "1,GPU-51b2d9a0-6f6b-1f0e-9d5c-0a4a8b1c2d3e,MIG-2c9e4f70-3d1a-5b86-9e27-7f8091a2b3c4"
    driver = bench(project, "--gpus", gpus, "--dry-run")
    assert (driver.returncode, driver.stderr) == (0, "")


def test_a_dry_run_changes_nothing(project):
    driver = bench(project, "--runs-dir", "a/b", "--dry-run")
    assert driver.returncode == 0 and not (project / "a").exists()
    assert driver.stdout.splitlines()[-1] == "Runs missing: 15 of 15."


@pytest.mark.parametrize("folder", ["dangling", "read-only", "read-only/a/b"])
def test_a_dry_run_sees_a_folder_that_cannot_be_written_to(project, folder):
    (project / "dangling").symlink_to("nowhere/runs")
    (project / "read-only").mkdir(mode=0o555)
    if folder != "dangling" and os.access(project / "read-only", os.W_OK):
        pytest.skip("root may write to every folder")
    driver = bench(project, "--runs-dir", folder, "--dry-run")
    assert (driver.returncode, driver.stdout) == (2, "")
    assert f"--runs-dir needs a folder to write to, which '{folder[:9]}" in driver.stderr


@pytest.mark.parametrize(
    "path",
    [
        "benchmark.jsonl",
        ".benchmark/partial",
        ".benchmark/warmup",
        ".benchmark/started",
        ".benchmark/{}.log",
        ".benchmark/{}.failed",
    ],
)
@pytest.mark.parametrize("link", [True, False])
def test_what_is_in_the_drivers_way_gets_one_sentence(project, path, link):
    name = list_names(project)[-1]
    path = project / "runs" / path.format(name)
    path.parent.mkdir(parents=True)
    if link:
        path.symlink_to("nowhere")
    elif path.name in ("partial", "warmup"):
        path.write_text("in the way")
    else:
        path.mkdir()
    for flags in ([], ["--dry-run"]):
        driver = bench(project, *flags)
        assert (driver.returncode, driver.stdout, started(project)) == (2, "", [])
        assert len(driver.stderr.splitlines()) == 1
        assert f"'{path.relative_to(project)}'" in driver.stderr


@pytest.mark.parametrize("folder", ["/dev/null", "/no/such/folder"])
def test_a_folder_for_locks_that_cannot_be_written_to_gets_one_sentence(project, folder):
    driver = finish(start(project, env=environment(project) | {"TMPDIR": folder}))
    assert (driver.returncode, driver.stdout, started(project)) == (2, "", [])
    assert len(driver.stderr.splitlines()) == 1 and f"'{folder}/" in driver.stderr


def test_it_finds_what_lies_beside_it_through_a_link(project):
    elsewhere = project / "some where"
    elsewhere.mkdir()
    (elsewhere / "race").symlink_to(project / "benchmark.sh")
    env = environment(project)
    command = ["./race", "--scripts", "linen", "--runs-dir", "runs", "--no-report"]
    driver = subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True)
    assert (driver.returncode, driver.stderr) == (0, "")
    assert len(list(elsewhere.glob("runs/*/run.json"))) == 1


def test_cdpath_does_not_lead_to_another_folder(project):
    """With CDPATH, `cd checkout` may go to another checkout, and prints where it went."""
    (project / "there/checkout").mkdir(parents=True)
    copy_driver(project / "here/checkout")
    for path in project.glob("*.py"):
        shutil.copy(path, project / "here/checkout")
    (project / "here/own").symlink_to(sys.prefix)
    env = environment(project) | {"CDPATH": f"{project}/there:{project}/here", "VENV": "own"}
    flags = ["--repeats", "1", "--runs-dir", "checkout/runs", "--no-report"]
    command = ["checkout/benchmark.sh", *flags]
    driver = subprocess.run(command, cwd=project / "here", env=env, capture_output=True, text=True)
    assert (driver.returncode, driver.stderr) == (0, "")
    assert len(list(project.glob("here/checkout/runs/*/run.json"))) == 5


def test_ones_own_environment_is_found_from_any_folder(project):
    elsewhere = project / "some/where"
    elsewhere.mkdir(parents=True)
    (elsewhere / "own").symlink_to(sys.prefix)
    env = environment(project) | {"VENV": "own"}
    flags = ["--scripts", "linen", "--runs-dir", "runs", "--no-report"]
    driver = subprocess.run(
        ["../../benchmark.sh", *flags], cwd=elsewhere, env=env, capture_output=True, text=True
    )
    assert (driver.returncode, driver.stderr) == (0, "")
    assert "Runs complete: 1 of 1, in " in driver.stdout
    assert len(list(elsewhere.glob("runs/*/run.json"))) == 1


@pytest.mark.parametrize("called_from", [".", "own folder"])
def test_a_script_of_ones_own_runs_wherever_it_lies(project, called_from):
    """Under its own name, beside this project's; from any folder."""
    own = project / "own folder"
    own.mkdir()
    shutil.copy(project / "ppo_linen.py", own / "mine.py")
    script = os.path.relpath(own / "mine.py", project / called_from)
    flags = ["--scripts", f"{script},linen"] if called_from != "." else ["--scripts", script]
    driver = subprocess.run(
        [project / "benchmark.sh", *flags, "--runs-dir", project / "runs", "--no-report"],
        cwd=project / called_from,
        env=environment(project),
        capture_output=True,
        text=True,
    )
    assert (driver.returncode, driver.stderr) == (0, "")
    names = {"CartPole-v1__small__mine__100it__seed1", "CartPole-v1__small__linen__100it__seed1"}
    assert set(completed(project)) == (names if called_from != "." else {max(names)})
    flags = json.loads((project / "runs" / max(names) / "run.json").read_text())["args"]
    assert (flags["--env-id"], flags["--hidden-sizes"]) == ("CartPole-v1", "64")
    assert flags["--total-timesteps"] == "819200"


def test_where_ones_own_script_lies_decides_neither_its_runs_nor_their_order(project):
    (project / "linen").mkdir()
    for folder in (project, project / "linen"):
        (folder / "mine.py").touch()
    flags = ("--envs", "Acrobot-v1,CartPole-v1", "--only", "linen", "--scripts")
    order = list_names(project, *flags, "torch,linen,mine.py")
    assert list_names(project, *flags, "torch,linen,linen/mine.py") == order and len(order) == 2
    of_dqn = bench(project, "--scripts", "dqn_linen", "--list").stdout
    shutil.copy(project / "mine.py", project / "dqn_mine.py")
    assert bench(project, "--scripts", "dqn_mine.py", "--list").stdout == of_dqn.replace(
        "dqn_linen.py", f"{project}/dqn_mine.py"
    ).replace("dqn_linen", "dqn_mine")


def test_an_environment_of_ones_own(project):
    """Its runs have names of their own, and their script finds its module where one calls from."""
    own = project / "own folder"
    own.mkdir()
    flags = ["--envs", "CartPole:v1,CartPole-v1,games.mine:My-v0", "--scripts", "linen"]
    names = [f"{x}__small__linen__100it__seed1" for x in ("CartPole.v1", "games.mine.My-v0")]
    for folder in (project, own):
        driver = subprocess.run(
            [project / "benchmark.sh", *flags, "--runs-dir", folder / "runs", "--no-report"],
            cwd=folder,
            env=environment(project),
            capture_output=True,
            text=True,
        )
        assert (driver.returncode, driver.stderr) == (0, "")
        found = {x.parent.name: json.loads(x.read_text()) for x in folder.glob("runs/*/run.json")}
        assert len(found) == 3 and {found[x]["folder"] for x in names} == {str(folder)}
        assert [found[x]["args"]["--env-id"] for x in names] == ["CartPole:v1", "games.mine:My-v0"]


# === Running ====================================================================================
def test_the_same_command_resumes(project):
    driver = bench(project)
    assert driver.returncode == 0, driver.stdout + driver.stderr
    assert "Runs complete: 15 of 15, in runs." in driver.stdout.splitlines()[-1]
    assert started(project) == list_names(project)
    again = bench(project)
    assert again.returncode == 0 and len(started(project)) == 15
    gone, killed = completed(project)[:2]
    shutil.rmtree(project / "runs" / gone)
    (project / "runs" / killed / "run.json").unlink()
    assert "Runs missing: 2 of 15." in bench(project, "--dry-run").stdout
    assert len(started(project)) == 15
    assert bench(project).returncode == 0
    assert sorted(started(project)[15:]) == sorted([gone, killed])
    assert len(completed(project)) == 15
    (kept,) = (project / "runs/.benchmark/partial").iterdir()  # what a killed run had measured
    assert kept.name.startswith(killed) and (kept / "metrics.jsonl").exists()


def test_more_repeats_go_on_from_fewer(project):
    """A folder from when `quick` had one repeat of 40 iterations is gone on with too."""
    for flags in ([], ["--iterations", "40"]):
        first = list_names(project, *flags, "--repeats", "1")
        every = list_names(project, *flags)
        assert every[:5] == first and len(every) == 15
        before = len(started(project))
        for command in ([*flags, "--repeats", "1"], flags):
            assert bench(project, *command, "--no-report").returncode == 0
        assert started(project)[before:] == every  # none twice
    assert len(completed(project)) == 30


def test_only_a_file_with_something_in_it_makes_a_run_complete(project):
    flags = ("--repeats", "1")
    empty, folder, link = list_names(project, *flags)[:3]
    (project / "runs" / empty).mkdir(parents=True)
    (project / "runs" / empty / "run.json").touch()
    (project / "runs" / folder / "run.json/folder").mkdir(parents=True)
    (project / "runs" / link).symlink_to("nowhere")
    assert "Runs missing: 5 of 5." in bench(project, *flags, "--dry-run").stdout
    driver = bench(project, *flags, "--no-report")
    assert (driver.returncode, driver.stderr) == (0, "")
    assert started(project) == list_names(project, *flags)
    assert len(list((project / "runs/.benchmark/partial").iterdir())) == 3


def test_the_log_says_what_ran_when(project):
    bench(project, "--notes", "@first=\n5", "--seed", "7")
    grid, *events = log(project)
    assert (grid["event"], grid["preset"]) == ("grid", "quick")
    assert (grid["runs"], grid["repeats"], grid["order_seed"]) == (15, 3, 7)
    assert grid["notes"] == "@first=\n5"
    assert [event["event"] for event in events] == ["start", "end"] * 15
    for line, (before, after) in enumerate(zip(events[::2], events[1::2], strict=True), 1):
        assert before["line"] == line and before["run"] == after["run"]
        assert before["run"] == before["command"].split()[-1] and len(before["load"]) == 3
        assert (after["completed"], after["exit_status"]) == ("yes", 0)
        assert before["time"] <= after["time"]


def test_failures_are_recorded_and_the_grid_goes_on(project):
    plans = {
        "torch__": "crash",
        "torch_compile": "hang",
        "linen": "killed",
        "nnx__": "silent",
    }
    flags = ["--timeout", "2", "--repeats", "1", "--no-report"]
    driver = bench(project, *flags, **plans)
    assert (driver.returncode, driver.stderr) == (1, "")
    assert [cell_of(name)["script"] for name in completed(project)] == ["nnx_cached"]
    ends = {cell_of(x["run"])["script"]: x for x in log(project) if x["event"] == "end"}
    assert ends["torch"]["exit_status"] == 1 and ends["torch"]["completed"] == "no"
    assert "RuntimeError: shapes do not match \N{SNOWMAN}" in ends["torch"]["tail"]
    assert ends["torch_compile"]["reason"] == "no end after 2 s"
    assert ends["torch_compile"]["tail"] == "hangs\n"
    assert not processes_in(project)  # it had left a child in a session of its own
    assert ends["linen"]["exit_status"] == 137 and "memory" in ends["linen"]["reason"]
    assert ends["nnx"]["exit_status"] == 0 and ends["nnx"]["completed"] == "no"
    summary = driver.stdout.splitlines()[-6:]
    assert summary[0] == "Runs not complete: 4 of 5:"
    assert any("torch__25it__seed1: exit status 1, after " in line for line in summary)
    assert any("torch_compile__25it__seed1: no end after 2 s; output" in line for line in summary)
    assert summary[-1] == f"To run them again: ./benchmark.sh {' '.join(flags)}"
    again = bench(project, *flags)
    assert again.returncode == 0 and len(completed(project)) == 5
    assert len(started(project)) == 9


def test_without_a_report_the_exit_status_is_the_grids(project):
    driver = bench(project, "--repeats", "1")  # no analysis lies beside this copy of the driver
    assert driver.returncode == 0
    assert driver.stdout.splitlines()[-2:] == [
        "The report could not be made; the runs are in runs.",
        "Runs complete: 5 of 5, in runs.",
    ]


@pytest.mark.parametrize("sent, status", [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
@pytest.mark.parametrize("to_group", [True, False])
def test_stopping_leaves_no_process(project, sent, status, to_group):
    """A terminal's Ctrl-C or its end reaches the driver's whole process group."""
    driver = start(project, "--gpus", "0,1", **{"__": "hang"})
    wait_for(lambda: len(started(project)) == 2)
    wait_for(lambda: sum(name_of(x) == "sleep" for x in processes_in(project)) == 2)
    (os.killpg if to_group else os.kill)(driver.pid, getattr(signal, sent))
    finish(driver)
    assert driver.returncode == status
    assert driver.stderr.splitlines() == [
        "Stopped. Completed runs are kept; to go on: ./benchmark.sh --gpus 0,1"
    ]
    wait_for(lambda: not processes_in(project))
    assert len(started(project)) == 2  # no other run began meanwhile


def test_an_interrupt_lets_the_log_get_its_line(project):
    (project / "runs").mkdir()
    path = project / "runs/benchmark.jsonl"

    def opened(process):
        try:
            return any(file.path == str(path) for file in process.open_files())
        except psutil.Error:
            return False

    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        driver = start(project)
        wait_for(lambda: any(map(opened, processes_in(project))))
        os.killpg(driver.pid, signal.SIGINT)
        time.sleep(0.1)
    finish(driver)
    assert driver.returncode == 130
    assert len(driver.stderr.splitlines()) == 1 and driver.stderr.startswith("Stopped.")
    assert [event["event"] for event in log(project)] == ["grid"]


def test_a_killed_driver_leaves_only_what_is_of_use(project):
    driver = start(project, **{"__": "hang"})
    wait_for(lambda: started(project))
    driver.kill()
    (name,) = started(project)
    assert {x.name for x in (project / "runs/.benchmark").iterdir()} == {f"{name}.log"}


def test_a_process_that_outlives_its_run_holds_up_nobody(project):
    """One of no environment, parent or group that shows where it came from."""
    flags = ("--scripts", "linen", "--no-report")
    assert bench(project, *flags, **{"__": "daemon"}).returncode == 0
    (path,) = (project / "runs").glob("*/daemon")
    daemon = psutil.Process(int(path.read_text()))
    try:
        (path.parent / "run.json").unlink()
        driver = start(project, *flags)
        wait_for(lambda: len(started(project)) == 2)
        assert finish(driver).returncode == 0 and daemon.is_running()
    finally:
        daemon.kill()


def names_below(pid):
    """Those of all processes that it started; some may end meanwhile."""
    names = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            names.append(process.name())
    return names


@pytest.mark.parametrize("runs_dir", ["runs", "other"])
def test_a_driver_says_what_it_waits_for(project, runs_dir):
    """The first waits for its run, and the second for the first: for its cell, or for its GPU."""
    flags = ("--scripts", "linen", "--runs-dir")
    start(project, *flags, "runs", **{"__": "hang"})
    wait_for(lambda: started(project))
    run, *_ = [x for x in processes_in(project) if "ppo_linen.py" in x.cmdline()[1:2]]
    second = start(project, *flags, runs_dir)
    wait_for(lambda: "flock" in names_below(second.pid))
    time.sleep(0.1)
    second.terminate()
    (line,) = finish(second).stdout.splitlines()
    (name,) = started(project)
    what = name if runs_dir == "runs" else "another benchmark on this machine"
    assert line.startswith(f"Waiting for {what}") and str(run.pid) in re.findall(r"\d+", line)


def overlaps(events):
    """How many runs began while another was going on."""
    running = count = 0
    for event, *_ in events:
        count += event == "start" and running > 0
        running += 1 if event == "start" else -1
    return count


def test_two_drivers_share_a_grid(project):
    """They never run the same cell, nor at the same time: that would spoil both measurements."""
    drivers = [start(project, **{"__": "0.05"}) for _ in range(2)]
    for driver in drivers:
        assert finish(driver).returncode == 0, driver.stderr
    assert sorted(started(project)) == completed(project)
    assert len(completed(project)) == 15
    assert overlaps(trace(project)) == 0


def test_a_failure_is_not_repeated_by_the_next_gpu(project):
    assert bench(project, "--gpus", "0,1", **{"__": "crash"}).returncode == 1
    assert sorted(started(project)) == sorted(list_names(project))


def test_gpus_take_one_run_at_a_time_each(project):
    flags = ("--repeats", "4", "--gpus", "0,GPU-8f3c")
    driver = bench(project, *flags, **{"__": "0.3"})
    assert driver.returncode == 0, driver.stderr
    assert sorted(started(project)) == completed(project)
    by_gpu = {gpu: [x for x in trace(project) if x[2] == gpu] for gpu in ("gpu=0", "gpu=GPU-8f3c")}
    assert all(len(events) >= 4 and overlaps(events) == 0 for events in by_gpu.values())
    assert overlaps(trace(project)) > 0
    assert sum(map(len, by_gpu.values())) == len(trace(project)) == 40
    for path in (project / "runs").glob("*/run.json"):
        assert json.loads(path.read_text())["variables"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_run_is_told_what_machine_it_is_on(project):
    """What a tool says as it fails is no answer, wherever it says it."""
    commit = ["commit", "--quiet", "--allow-empty", "--message", "x"]
    who = ["-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "--quiet"], ["add", "ppo_linen.py"], [*who, *commit]):
        subprocess.run(["git", *words], cwd=project, check=True)
    flags = ("--scripts", "linen,torch", "--no-report")
    assert bench(project, *flags).returncode == 0
    told = {cell_of(x)["script"]: machine_of(project, x) for x in completed(project)}
    usual = told["linen"]
    assert re.fullmatch("[0-9a-f]{40}", usual["git_commit"])
    assert told["torch"]["git_commit"] is None  # nobody has committed it
    assert usual["cores"] == psutil.cpu_count(logical=False) and usual["load"] >= 0
    assert isinstance(usual["container"], bool) and isinstance(usual["cpu"], str)
    with open(project / "ppo_linen.py", "a") as file:
        file.write("# changed\n")
    set_gpus(project, "#!/bin/sh\necho 'H200, with a, comma' >&2 && echo '570.1, NVIDIA H200, x'\n")
    shutil.rmtree(project / "runs")
    assert bench(project, *flags, "--only", "linen").returncode == 0
    gpu = machine_of(project, *completed(project))
    assert (gpu["driver"], gpu["gpu"]) == ("570.1", "NVIDIA H200, x")
    assert gpu["git_commit"] == usual["git_commit"] + "-dirty"
    for name in ("nvidia-smi", "lscpu", "git"):
        (project / "tools" / name).write_text(
            "#!/bin/sh\necho 'Model name: it has failed' && exit 9\n"
        )
        (project / "tools" / name).chmod(0o755)
    shutil.rmtree(project / "runs")
    assert bench(project, *flags, "--only", "linen").returncode == 0
    failed = machine_of(project, *completed(project))
    for name in ("gpu", "driver", "git_commit"):
        assert failed[name] is None
    assert "failed" not in str(failed)


def machine_of(project, name):
    return json.loads((project / "runs" / name / "run.json").read_text())["machine"]


def test_half_a_line_in_the_log_is_dropped(project):
    bench(project, "--to", "1")
    path = project / "runs/benchmark.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"event": "st')
    bench(project, "--to", "2")
    assert path.read_text().startswith(whole)
    assert [event["event"] for event in log(project)] == ["grid", "start", "end"] * 2


def test_a_full_disk_stops_the_grid(project):
    runs = project / "runs"
    runs.mkdir()
    mount = f"mount -t tmpfs -o size=4m none {runs} && exec"
    wrapper = ("unshare", "--mount", "--map-root-user", "sh", "-c", f'{mount} "$0" "$@"')
    if subprocess.run([*wrapper, "true"], capture_output=True).returncode:
        pytest.skip("needs user namespaces, to mount a small disk")
    flags = ("--repeats", "1", "--no-report")
    names = list_names(project, *flags)
    keep = f"; status=$?; cp -r {runs} {project}/kept; exit $status"
    wrapper = (*wrapper[:-1], f'{mount.removesuffix("exec")} "$0" "$@"{keep}')
    plan = {cell_of(names[2])["script"] + "__25": "fill"}
    driver = finish(start(project, *flags, wrapper=wrapper, **plan))
    assert driver.returncode == 1
    assert "no room left in runs, so the grid stops" in driver.stderr
    assert started(project) == names[:3]
    for name in names[:2]:
        json.loads((project / "kept" / name / "run.json").read_text())
    assert "Runs not complete: 3 of 5:" in driver.stdout
    for line in (project / "kept/benchmark.jsonl").read_text().splitlines():
        json.loads(line)


def test_killed_at_random_moments(project):
    """KILLS=100 does what the default does more often."""
    kills, flags = int(os.environ.get("KILLS", "6")), ("--repeats", "2", "--no-report")
    rng, stand_in, runs = random.Random(kills), {"__": "0.05"}, project / "runs"
    while kills > 0:
        driver = start(project, *flags, **stand_in)
        time.sleep(rng.uniform(0, 1.5))
        running = [x for x in processes_in(project) if x.pid != driver.pid]
        victims = rng.choice(
            [[driver.pid], [x.pid for x in running], [driver.pid, *(x.pid for x in running)]]
        )
        victims = rng.sample(victims, rng.randint(0, len(victims)))
        for victim in victims:
            try:
                os.kill(victim, signal.SIGKILL)
                kills -= 1
            except ProcessLookupError:
                pass
        finish(driver)
        if len(completed(project)) == 10 or kills <= 0:
            driver = bench(project, *flags, **stand_in)
            assert driver.returncode == 0, driver.stdout + driver.stderr
            assert completed(project) == sorted(list_names(project, *flags))
            assert not list(runs.glob(".benchmark/partial/*/run.json"))  # none ran twice
            state = {
                x.name for x in runs.glob(".benchmark/*") if x.suffix not in (".log", ".failed")
            }
            assert state <= {"partial"}
            for path in runs.glob("*/run.json"):
                json.loads(path.read_text())
            for path in [*runs.glob("*/metrics.jsonl"), runs / "benchmark.jsonl"]:
                for line in path.read_text().splitlines():
                    json.loads(line)
            shutil.rmtree(runs)


# === Long runs ==================================================================================
RESUMABLE = """
import json, os, sqlite3, sys, time
from pathlib import Path

flags = dict(zip(sys.argv[1:], sys.argv[2:]))
folder, first = Path(flags.get("--resume") or f"{flags['--runs-dir']}/{flags['--run-name']}"), 0
if "--resume" in flags:
    text = (folder / "checkpoint.npz").read_text()
    lock = sqlite3.connect(folder / "lock", timeout=0)
    try:
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError:
        sys.exit(f"{folder} is in use by another process")
    reasons = {
        "damaged": "checkpoint.npz is not there, or is damaged (BadZipFile)",
        "full": "checkpoint.npz is not there, or is damaged (MemoryError)",
        "other": "it has no replay/obs of shape (8, 4) in its checkpoint",
        "random": "CartPole-v1 does not repeat itself, so no run in it can go on",
    }
    if text in reasons:
        sys.exit(reasons[text])
    first = int(text)
else:
    folder.mkdir(parents=True)
with open(os.environ["TRACE"], "a") as trace:
    for i in range(first, 12):
        print("iteration", folder.name, i, file=trace, flush=True)
        (folder / "metrics.jsonl").touch()
        time.sleep(0.05)
        if "--resume" in flags or "--save-every" in flags and i % 4 == 3:
            (folder / "partial").write_text(str(i + 1))
            os.replace(folder / "partial", folder / "checkpoint.npz")
    (folder / "run.json").write_text(json.dumps({"first": first}))
"""
LONG = ("minatar", "--frames", "100000,500000", "--repeats", "1")  # a short and a long run of each


@pytest.fixture
def long_project(project):
    for name in ("dqn_linen", "dqn_torch_gymnasium"):
        (project / f"{name}.py").write_text(RESUMABLE)
    return project


def iterations(project, name):
    return [int(i) for _, run, i in trace(project) if run == name]


def first_of(project, name):
    return json.loads((project / "runs" / name / "run.json").read_text())["first"]


@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("victim", ["driver", "run"])
def test_a_long_run_goes_on_from_its_checkpoint(long_project, sent, victim):
    """A short one starts anew: its durations must be those of one process."""
    project = long_project
    *short, name, last = list_names(project, *LONG)
    driver = start(project, *LONG, "--no-report")
    wait_for(lambda: len(iterations(project, name)) >= 6)
    runs = [x for x in processes_in(project) if f"{name.split('__')[2]}.py" in x.cmdline()[1:2]]
    (run,) = runs
    os.kill(driver.pid if victim == "driver" else run.pid, getattr(signal, sent))
    if (victim, sent) == ("driver", "SIGKILL"):  # which its run outlives
        driver.wait()
        run.kill()
    finish(driver)
    wait_for(lambda: not processes_in(project))
    before = iterations(project, name)
    if victim == "driver":
        assert f"stopped  {name}" in bench(project, *LONG, "--dry-run").stdout
        assert "Runs missing: 2 of 4." in bench(project, *LONG, "--dry-run").stdout
    assert bench(project, *LONG, "--no-report").returncode == 0
    assert completed(project) == sorted([*short, name, last])
    first = first_of(project, name)
    assert first >= 4 and first % 4 == 0 and len(before) - first <= 4 + 1
    assert iterations(project, name)[len(before) :] == list(range(first, 12))
    assert first_of(project, last) == 0
    (go_on,) = [x for x in log(project) if "--resume" in x.get("command", "")]
    assert go_on["run"] == name
    assert go_on["command"].endswith(f"{name.split('__')[2]}.py --resume runs/{name}")
    assert not (project / "runs/.benchmark/partial").exists()


def test_a_short_run_never_resumes(long_project):
    project, flags = long_project, ("minatar", "--frames", "100000", "--repeats", "1")
    name, _ = list_names(project, *flags)
    folder = project / "runs" / name
    folder.mkdir(parents=True)
    (folder / "checkpoint.npz").write_text("8")
    assert f"missing  {name}" in bench(project, *flags, "--dry-run").stdout
    assert bench(project, *flags, "--no-report").returncode == 0
    assert first_of(project, name) == 0 and len(iterations(project, name)) == 12
    assert len(list((project / "runs/.benchmark/partial").iterdir())) == 1


@pytest.mark.parametrize("content", ["damaged", "other", "", "random"])
def test_a_checkpoint_of_no_use_is_set_aside(long_project, content):
    project, flags = long_project, ("minatar", "--frames", "500000", "--repeats", "1")
    name, other = list_names(project, *flags)
    folder = project / "runs" / name
    folder.mkdir(parents=True)
    (folder / "checkpoint.npz").write_text(content)
    driver = bench(project, *flags, "--no-report")
    assert (driver.returncode, driver.stderr) == (0, "")
    assert completed(project) == sorted([name, other]) and first_of(project, name) == 0
    (kept,) = (project / "runs/.benchmark/partial").iterdir()
    assert (kept / "checkpoint.npz").read_text() == content


def test_a_checkpoint_that_cannot_be_read_now_is_kept(long_project):
    """Memory may be free tomorrow: hours of training are not thrown away."""
    project, flags = long_project, ("minatar", "--frames", "500000", "--repeats", "1")
    name, other = list_names(project, *flags)
    folder = project / "runs" / name
    folder.mkdir(parents=True)
    (folder / "checkpoint.npz").write_text("full")
    driver = bench(project, *flags, "--no-report")
    assert driver.returncode == 1 and f"FAILED {name}: exit status 1" in driver.stdout
    assert (folder / "checkpoint.npz").read_text() == "full" and not iterations(project, name)
    assert completed(project) == [other]
    (folder / "checkpoint.npz").write_text("8")
    assert bench(project, *flags, "--no-report").returncode == 0 and first_of(project, name) == 8


def test_a_run_that_someone_resumed_by_hand_is_left_alone(long_project):
    project, flags = long_project, ("minatar", "--frames", "500000", "--repeats", "1")
    name, other = list_names(project, *flags)
    folder = project / "runs" / name
    folder.mkdir(parents=True)
    (folder / "checkpoint.npz").write_text("8")
    lock = sqlite3.connect(folder / "lock")
    lock.execute("BEGIN EXCLUSIVE")
    driver = bench(project, *flags, "--no-report")
    lock.close()
    assert driver.returncode == 1
    assert f"    runs/{name} is in use by another process\n" in driver.stdout
    assert folder.exists() and not iterations(project, name) and completed(project) == [other]
    assert bench(project, *flags, "--no-report").returncode == 0 and first_of(project, name) == 8


def test_lengths_count_once(project):
    flags = ("minatar", "--frames", "500000,100000,500000", "--repeats", "1")
    assert len(list_names(project, *flags)) == 4


def test_trained_agents_are_evaluated_once(long_project):
    """Long runs only, by three settings, and not what was evaluated before."""
    project, call = long_project, "evaluate"
    (project / "evaluate.py").write_text(
        "import os, sys\nfrom pathlib import Path\n"
        "runs = [x for x in sys.argv[1:] if x.startswith('runs')]\n"
        "name = 'evaluation'\n"
        "if '--epsilon' in sys.argv:\n"
        "    name += '-epsilon-' + sys.argv[sys.argv.index('--epsilon') + 1]\n"
        "print('evaluate', name, len(runs), file=open(os.environ['TRACE'], 'a'))\n"
        "if Path(runs[0], 'damaged').exists():\n    sys.exit(2)\n"
        'text = \'{\\n  "episodes": 100,\\n  "max_steps": 10000,\\n}\'\n'
        "for run in runs:\n    Path(run, name + '.json').write_text(text)\n"
    )
    for _ in range(2):
        assert bench(project, *LONG).returncode == 0
        done = [x[1:] for x in trace(project) if x[0] == call]
        names = ("evaluation", "evaluation-epsilon-0.05", "evaluation-epsilon-1")
        assert done == [[name, "2"] for name in names]
    for name in list_names(project, *LONG):
        found = list((project / "runs" / name).glob("evaluation*.json"))
        assert len(found) == (3 if "100it" in name else 0)
    # A quick look of the user's is not the study's, and a damaged run costs no other its numbers.
    first, second = [name for name in list_names(project, *LONG) if "100it" in name]
    for name in (first, second):
        (project / "runs" / name / "evaluation.json").write_text('{"episodes": 1,}')
    (project / "runs" / first / "damaged").touch()
    driver = bench(project, *LONG)
    assert f"This run could not be evaluated: runs/{first}\n" in driver.stdout
    done = [x[1:] for x in trace(project) if x[0] == call]
    assert done[3:] == [["evaluation", "2"], ["evaluation", "1"], ["evaluation", "1"]]
    assert "100" in (project / "runs" / second / "evaluation.json").read_text()


def test_a_real_long_run_goes_on(tmp_path):
    """The driver finds what a real one left that was killed, and names only its folder."""
    name = "minatar__own__dqn_linen__21it__seed1"
    small = "--num-steps 100 --total-timesteps 4000 --learning-starts 100 --buffer-size 1000"
    command = [sys.executable, "dqn_linen.py", *small.split(), "--save-every", "2"]
    command += ["--runs-dir", str(tmp_path / "runs"), "--run-name", name, "--num-envs", "1"]
    run = subprocess.Popen(command, cwd=ROOT, env=environment(tmp_path))
    metrics = tmp_path / "runs" / name / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 5)
    run.kill()
    run.wait()
    done = metrics.read_text().count("\n")
    assert done < 40, "killed too late"
    only = "dqn_linen.*seed 1 "
    flags = ["minatar", "--frames", "105000", "--only", only, "--no-report", "--runs-dir"]
    driver = subprocess.run(
        [ROOT / "benchmark.sh", *flags, tmp_path / "runs"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert driver.returncode == 0, driver.stdout + driver.stderr
    info = json.loads((metrics.parent / "run.json").read_text())
    assert len(info["resumed"]) == 1 and done - info["resumed"][0] <= 2 + 1
    assert [json.loads(x)["iteration"] for x in metrics.read_text().splitlines()] == list(range(40))


# === The real scripts ===========================================================================
def test_a_small_real_grid(tmp_path):
    """Of a script and of a copy under another name, which the report compares."""
    shutil.copy(ROOT / "ppo_linen.py", tmp_path / "mine.py")
    flags = ["--scripts", f"linen,{tmp_path}/mine.py", "--iterations", "1"]
    flags += ["--runs-dir", tmp_path / "runs"]
    env = environment(tmp_path)
    driver = subprocess.run(
        [ROOT / "benchmark.sh", *flags], env=env, capture_output=True, text=True
    )
    assert driver.returncode == 0, driver.stdout + driver.stderr
    assert len(completed(tmp_path)) == 2
    for path in (tmp_path / "runs").glob("*/run.json"):
        run = json.loads(path.read_text())
        assert run["status"] == "completed" and run["peak_host_bytes"] > 0
        assert run["cores"] == psutil.cpu_count(logical=False)
    report = tmp_path / "runs/report/report.html"
    assert report.exists() and "mine" in driver.stdout
    found = load_runs(tmp_path / "runs")
    assert sorted(found["mode"]) == ["mine", "ppo_linen"] and set(found["algorithm"]) == {"ppo"}
    assert driver.stdout.splitlines()[-2:] == [
        f"Report: {report}",
        f"Runs complete: 2 of 2, in {tmp_path}/runs.",
    ]
