"""Run benchmark.sh with mock training scripts, and a small grid of real scripts."""

import io
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from conftest import ROOT, wait_for
from driving import (
    add_grid,
    add_tool,
    bench,
    completed,
    environment,
    finish,
    info_of,
    is_complete,
    log_of,
    names_of,
    processes_in,
    start,
    started,
    succeed,
    trace,
)
from sections import path_of

import race
from analysis.catalog import DIVERGED
from analysis.runs import load
from bench import plan
from bench import run as bench_run
from bench.arguments import parse_args
from bench.run import report_failure

NVIDIA_SMI = """#!/bin/sh
echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-51b2d9a0-6f6b)'
echo 'GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-8f3c7e21-0b7d)'
"""
REPORT = "import sys\nprint('A report of', len(open(sys.argv[-1]).readlines()), 'runs')\n"
ONE = ("--scripts", "linen", "--no-report")
TWO = ("--scripts", "linen,nnx")
LINEN = """
[[runs]]
scripts = ["linen"]
envs = ["CartPole-v1"]
sizes = ["default"]
"""
HANG = {"": "hang"}  # every run name contains ""


@pytest.fixture
def project(tmp_path):
    """Yield a folder with benchmark.sh, mock scripts, and two simulated GPUs."""
    grids = [str(path.relative_to(ROOT)) for path in ROOT.glob("studies/*/grid.toml")]
    files = ["benchmark.sh", "setup.sh", "scripts.toml"]
    tables = ("__init__.py", "catalog.py", "sizes.toml", "environments.csv", "columns.csv")
    files += [f"analysis/{name}" for name in tables]
    files += [str(path.relative_to(ROOT)) for path in ROOT.glob("bench/*.*")]
    for name in (*files, *grids):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "analysis/__main__.py").write_text(REPORT)
    add_tool(tmp_path, "nvidia-smi", NVIDIA_SMI)
    (tmp_path / "more").mkdir()
    for name in ("torch", "torch_compile", "linen", "nnx", "nnx_cached", "rnn_linen"):
        path = path_of(f"ppo_{name}").relative_to(ROOT)
        shutil.copy(ROOT / "tests/helpers/stand_in.py", tmp_path / path)
    yield tmp_path
    while left := processes_in(tmp_path):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()


# === Usage ======================================================================================
@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("fast", "there is no study 'fast'"),
        ("throughput --sizes small", "--sizes"),
        ("--envs @CartPole-v1", "envs must be among"),
        ("--scripts linen,other", "'other' is neither a script of this project nor"),
        ("--envs ,", "--envs: must name one or more, not ','"),
        ("--scripts other/ppo_linen.py", "has the name of a script of this project"),
        ("--scripts other/mine.py,mine.py", "have the same name"),
        ("--only never", "no command matches --only 'never'"),
        ("--only (", "--only: must be a regular expression, not '('"),
        ("--preset mujoco --scripts continuous_torch", "so add --total-timesteps"),
        ("mine other", "mine and other have different runs named CartPole-v1__default__linen__7it"),
        ("--gpus 0,2", "'nvidia-smi -L' lists, not '2'"),
        ("--runs-dir mine.py", "mine.py: Not a directory"),
    ],
)
def test_usage_errors_are_one_line(project, flags, word):
    (project / "other").mkdir()
    add_grid(project, f"{LINEN}iterations = 7")
    add_grid(project, f"{LINEN}iterations = 7\nsteps = 5", "other")
    for name in ("mine.py", "other/mine.py", "other/ppo_linen.py"):
        (project / name).touch()
    driver = bench(project, *shlex.split(flags))
    assert (driver.returncode, driver.stdout) == (2, "")
    assert len(driver.stderr.splitlines()) == 1 and word in driver.stderr
    assert not (project / "runs").exists()


def refuse(project, study):
    """Return the error message of bench.plan, which must reject the study with status 2."""
    words = [sys.executable, "-m", "bench.plan", "benchmark.sh", project, project / "plan", study]
    process = subprocess.run(words, cwd=project, capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (2, "")
    [sentence] = process.stderr.splitlines()
    return sentence


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("repeats = three", "grid.toml is not valid TOML: Invalid value (at line 1, column 11)"),
        (f"iteration = 5{LINEN}", "grid.toml: iteration: Extra inputs are not permitted"),
        (f"{LINEN}seeds = [0]", "grid.toml: runs.0.seeds.0: Input should be greater than 0"),
        (LINEN.replace("linen", "lemon"), "there is no script 'lemon'"),
        (LINEN.replace("CartPole-v1", "Cart"), "envs must be among: CartPole-v1 Acrobot"),
        (LINEN.replace('sizes = ["default"]', ""), "grid.toml: sizes is missing"),
        (f"{LINEN}preset = 'mine'", "grid.toml: there is no preset 'mine'"),
        ("repeats = 3", "grid.toml has no [[runs]]"),
    ],
)
def test_errors_in_a_grid_are_one_line(project, text, sentence):
    add_grid(project, text)
    said = refuse(project, "mine")
    assert said.startswith("benchmark.sh: ") and sentence in said


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("scripts.toml", None, "scripts.toml cannot be read: No such file or directory"),
        ("scripts.toml", "linen = 1", "scripts.toml, linen must be a table, not 1"),
        (
            "analysis/sizes.toml",
            "small = 64",
            "sizes.toml: small must be a list of positive integers",
        ),
    ],
)
def test_errors_in_shared_files_are_one_line(project, name, text, sentence):
    (project / name).unlink()
    if text is not None:
        (project / name).write_text(text)
    assert sentence in refuse(project, "quick")


def test_the_example_grid_in_the_documentation_works(project):
    page = (ROOT / "docs/benchmark.md").read_text()
    text, races = re.findall(r"^```toml\n(.+?)^```$", page, re.MULTILINE | re.DOTALL)
    assert race.Study(**tomllib.loads(races)).races[0].turns == 24
    add_grid(project, text)
    lines = succeed(project, "mine", "--list").splitlines()
    assert len(lines) == 18
    wide = [line for line in lines if " --hidden-sizes 512 512 --no-anneal-lr " in line]
    assert {line.split()[-1].partition("__")[0] for line in wide} == {"wide"} and len(wide) == 6


def test_listed_commands_can_be_pasted_and_a_dry_run_writes_nothing(project):
    folder = "it's 5 o'clock & \"late\" \\ $HOME"
    said = succeed(project, "--runs-dir", folder, "--gpus", "1,GPU-51b2d9a0-6f6b", "--dry-run")
    assert said.splitlines()[-1] == "Runs missing: 15 of 15, about 3 minutes on two idle cores."
    assert not (project / folder).exists()
    line = succeed(project, "--list", "--runs-dir", folder).splitlines()[0]
    env = environment(project) | {"RUN_INFO": "{}"}
    subprocess.run(["bash", "-c", line], cwd=project, env=env, check=True)
    assert len(list((project / folder).glob("*/run.json"))) == 1


def test_custom_scripts_and_environments_from_another_folder(project):
    """Start benchmark.sh through a symlink, with a CDPATH that could lead cd to a wrong folder."""
    other = project / "other folder"
    for folder in (other / "checkout", project / "there/checkout"):
        folder.mkdir(parents=True)
    (other / "checkout/race").symlink_to(project / "benchmark.sh")
    (other / "venv").symlink_to(sys.prefix)
    shutil.copy(project / "ppo_linen.py", other / "mine.py")
    env = environment(project) | {"CDPATH": f"{project}/there:{other}", "VENV": "venv"}
    again = "../more/ppo_rnn_linen.py,rnn_linen,ppo_rnn_linen.py"  # by path, name and file name
    flags = ["--scripts", f"mine.py,linen,{again}", "--envs", "games.mine:My-v0", "--no-report"]
    succeed(project, *flags, env=env, cwd=other, program="checkout/race")
    scripts = ("linen", "mine", "rnn_linen")
    linen, mine, rnn = (f"games.mine.My-v0__small__{x}__100it__seed1" for x in scripts)
    assert completed(other) == [linen, mine, rnn]
    info = info_of(other, mine)
    assert (info["args"]["--env-id"], info["folder"]) == ("games.mine:My-v0", str(other))


def test_flags_of_a_table_override_its_preset_which_overrides_the_file(project):
    flags = ["flags = { a = 1, b = 1, c = 1 }", "flags = { c = 3 }\npreset = 'two'"]
    add_grid(project, f"{flags[0]}{LINEN}{flags[1]}\n[presets.two]\nb = 2\nc = 2")
    assert " --a 1 --b 2 --c 3 --seed 1 " in succeed(project, "mine", "--list")


def test_repeats_of_a_table_are_an_upper_bound(project):
    limited = f"{LINEN}label = 'limited'\nrepeats = 3"
    add_grid(project, f"repeats = 5{LINEN}{limited}")
    for repeats, expected in ((2, [2, 2]), (7, [7, 3])):
        names = names_of(project, "mine", "--repeats", repeats)
        in_table = sum(name.startswith("limited__") for name in names)
        assert [len(names) - in_table, in_table] == expected


# === Running ====================================================================================
def test_the_same_command_continues_a_grid(project):
    """Complete runs are kept if --repeats increases; incomplete ones are moved and start over."""
    flags = (*TWO, "--repeats", "2")
    names = names_of(project, *flags)
    empty, killed, third, fourth = names
    # After a power failure, run.json is empty. After a kill, it still has the status "running".
    for name, text in ((empty, ""), (killed, '{\n  "status": "running"\n}')):
        (project / "runs" / name).mkdir(parents=True)
        (project / "runs" / name / "run.json").write_text(text)
    assert "A report of 2 runs\n" in succeed(project, *TWO)
    assert started(project) == [empty, killed]
    variables = info_of(project, empty)["variables"]  # no run reuses compiled code
    assert variables["JAX_ENABLE_COMPILATION_CACHE"] == "false"
    assert variables["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] == "1"
    assert len(list((project / "runs/.benchmark/partial").iterdir())) == 2
    shutil.rmtree(project / "runs" / killed)
    done, *missing, total = succeed(project, *flags, "--dry-run").splitlines()
    assert (done, len(missing)) == (f"done     {empty}", 3)
    assert total.startswith("Runs missing: 3 of 4")
    *_, complete, report = succeed(project, *flags).splitlines()
    assert (complete, report) == ("Runs complete: 4 of 4, in runs.", "A report of 4 runs")
    assert started(project)[2:] == [killed, third, fourth] and completed(project) == sorted(names)
    grids = [json.loads(line) for line in log_of(project) if '"event": "grid"' in line]
    assert [(grid["runs"], grid["complete"]) for grid in grids] == [(2, 0), (4, 1)]


def test_failures_are_recorded_and_the_grid_continues(project):
    plans = {"torch__": "crash", "torch_compile": "hang", "linen": "killed", "nnx__": "silent"}
    plans |= {"nnx_cached": "diverged"}
    flags = ["--timeout", "2", "--repeats", "1", "--gpus", "0,1", "--no-report"]
    driver = bench(project, *flags, **plans)
    assert (driver.returncode, driver.stderr) == (1, "")
    assert len(started(project)) == 5  # one GPU does not repeat a run that failed on the other
    assert not processes_in(project)  # not even a child in another session
    grid, *events = map(json.loads, log_of(project))
    assert (grid["event"], grid["study"], grid["runs"]) == ("grid", "quick", 5)
    starts = [x for x in events if x["event"] == "start"]
    assert all(x["run"] == x["command"].split()[-1] and len(x["load"]) == 3 for x in starts)
    ends = {x["run"].split("__")[2]: x for x in events if x["event"] == "end"}
    statuses = {"torch": 1, "torch_compile": 124, "linen": 137, "nnx": 0, "nnx_cached": 1}
    assert {name: x["exit_status"] for name, x in ends.items()} == statuses
    assert {x["completed"] for x in ends.values()} == {"no"}
    assert f"nnx_cached__25it__seed1: {DIVERGED}\n" in driver.stdout
    assert "RuntimeError: shapes do not match \N{SNOWMAN}" in ends["torch"]["tail"]
    assert "Runs not complete: 5 of 5:" in driver.stdout
    again = driver.stdout.splitlines()[-1]
    assert again == f"To run them again: ./benchmark.sh {' '.join(flags)}"
    succeed(project, *flags)
    assert len(started(project)) == 10


def test_a_run_that_ignores_the_timeout_is_not_reported_as_out_of_memory(project, tmp_path):
    """timeout sends SIGKILL, as the kernel does if the memory is full."""
    args = parse_args(["--scripts", "linen", "--timeout", "1"])
    [run] = plan.expand({"custom": plan.custom_study(args)}, args)
    run.runs_dir = str(tmp_path / "runs")
    run.state.mkdir(parents=True)
    for seconds, reason in ((11, "not finished after 1 s"), (0, "killed after 0 s, probably")):
        event = {"exit_status": 137, "seconds": seconds}
        report_failure(run, event, io.BytesIO())
        assert run.failed.read_text().startswith(reason)


def runs_in(folder, number):
    """Return a run per repeat. The runs would write to the folder."""
    words = ["--scripts", "linen", "--repeats", str(number), "--returns", "--runs-dir", str(folder)]
    args = parse_args(words)
    return plan.expand({"custom": plan.custom_study(args)}, args)


def write_status(run, status):
    folder = Path(run.folder)
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"status": status}))
    (folder / "checkpoint.msgpack").write_text("8")


def test_a_run_that_diverged_starts_over(tmp_path):
    """From its checkpoint, it would diverge again."""
    stopped, diverged = runs_in(tmp_path, 2)
    write_status(stopped, "stopped")
    write_status(diverged, "diverged")
    assert (stopped.can_resume(), diverged.can_resume()) == (True, False)


def test_the_remaining_time_depends_only_on_runs_since_the_start(tmp_path, monkeypatch):
    """Two runs were complete before the start; a third took 100 s."""
    runs = runs_in(tmp_path, 4)
    for run in runs[:3]:
        write_status(run, "completed")
    monkeypatch.setattr(bench_run, "time", SimpleNamespace(time=lambda: 100.0))
    found = bench_run.Plan("", str(tmp_path), 0.0, [], True, True, True, runs, [2, 3])
    assert found.progress() == "[3/4 done, 0:01:40, about 0:01:40 left]"


def test_studies_run_their_begin_and_end_commands(project):
    """benchmark.sh prints the expected duration of the runs first."""
    add_grid(project, f"begin = 'begin.py'\nend = 'end.py RUNS/x RUNS'{LINEN}seconds = 7201")
    add_grid(project, f"end = 'end.py'{LINEN}label = 'b'", "other")
    (project / "begin.py").write_text("import sys\nsys.exit('not today')")
    driver = bench(project, "mine", "other")
    assert (driver.returncode, driver.stderr, started(project)) == (2, "not today\n", [])
    (project / "begin.py").write_text("")
    (project / "end.py").write_text("import sys\nprint(sys.argv)\nsys.exit(1)")
    (project / "analysis/__main__.py").write_text("raise SystemExit(1)")
    first, *said = succeed(project, "mine", "other", "--runs-dir", "my & runs").splitlines()
    assert first.startswith("This takes about 2 hours on two idle cores: 2 runs.")
    assert said[2:] == [
        "Runs complete: 2 of 2, in my & runs.",
        "['end.py', 'my & runs/x', 'my & runs']",
        "This command failed: python end.py 'my & runs/x' 'my & runs'",
        "['end.py']",
        "This command failed: python end.py",
        "Could not write the report; the runs are in my & runs.",
    ]


def test_a_long_run_resumes_from_its_checkpoint(project):
    """Other runs start over, so their durations come from a single process, without saving."""
    linen = LINEN.replace("CartPole-v1", "@minatar")
    saving = "flags = { save-every = 20 }"
    grid = f"{linen}iterations = 20{linen}iterations = 100\n{saving}{linen}iterations = 7\n{saving}"
    add_grid(project, grid)
    short, long, last = names_of(project, "mine")
    for name, file in ((short, "checkpoint.msgpack"), (last, "checkpoint.new")):
        (project / "runs" / name).mkdir(parents=True)
        (project / "runs" / name / file).write_text("8")
    assert bench(project, "mine", **{"100it": "killed"}).returncode == 1
    assert started(project) == [short, long, last]
    assert f"stopped  {long}" in succeed(project, "mine", "--dry-run")
    succeed(project, "mine")
    assert [info_of(project, x)["first"] for x in (short, long, last)] == [0, 8, 0]
    text = "".join(log_of(project))
    assert text.count(f'ppo_linen.py --resume runs/{long}"') == text.count("--resume") == 1
    assert text.count("--save-every 1000000000") == 1  # only of the short run
    kept = sorted(x.name for x in (project / "runs/.benchmark/partial").iterdir())
    assert [x.rpartition(".")[0] for x in kept] == sorted((short, last))


def test_a_full_disk_stops_the_grid(project):
    """The first run fills the disk, so its end cannot be logged."""
    driver = bench(project, *TWO, "--no-report", **{"": "fill"})
    assert driver.returncode == 1 and len(started(project)) == 1
    assert "no space left in runs; stopping" in driver.stderr
    assert "Runs not complete: 1 of 2:" in driver.stdout


# === Interruptions and concurrent drivers =======================================================
@pytest.mark.parametrize(
    ("sent", "status", "send"),
    [("SIGINT", 130, os.killpg), ("SIGTERM", 143, os.kill), ("SIGHUP", 129, os.killpg)],
)
def test_stopping_leaves_no_process(project, sent, status, send):
    """Ctrl-C and closing the terminal send a signal to the process group of benchmark.sh."""
    driver = start(project, "--gpus", "0,1", **HANG)
    wait_for(lambda: [event for event, *_ in trace(project)].count("hang") == 2)
    limits = [x.cmdline() for x in processes_in(project) if x.name() == "timeout"]
    assert [x[1:3] for x in limits] == [["--kill-after=10", "86400"]] * 2
    send(driver.pid, getattr(signal, sent))
    assert finish(driver).returncode == status
    assert driver.stderr.endswith("To continue: ./benchmark.sh --gpus 0,1\n")
    wait_for(lambda: not processes_in(project))
    assert len(started(project)) == 2  # the signal did not start the next runs


@pytest.mark.parametrize("send", [os.kill, os.killpg])
@pytest.mark.parametrize("runs_dir", ["runs", "other"])
def test_a_second_driver_waits_for_the_run_of_a_killed_driver(project, runs_dir, send):
    """With a different runs folder, the second driver reports that the machine is in use."""
    first = start(project, *TWO, **HANG)
    wait_for(lambda: trace(project)[-1:] and trace(project)[-1][0] == "hang")
    send(first.pid, signal.SIGKILL)
    first.wait()
    (name,) = started(project)
    flags = ("--scripts", name.split("__")[2], "--no-report", "--runs-dir", runs_dir)
    second = start(project, *flags)
    said = second.stdout.readline()
    second.terminate()
    finish(second)
    what = name if runs_dir == "runs" else "another benchmark on this machine"
    assert said.startswith(f"Waiting for {what}")
    (run,) = [x for x in processes_in(project) if x.cmdline()[1].startswith("ppo_")]
    for process in [*run.children(), run]:
        process.kill()
    wait_for(lambda: not processes_in(project))
    assert started(project) == [name]


def test_two_drivers_on_two_gpus_share_a_grid(project):
    """Each run is executed once. A GPU executes one run at a time, which keeps timings valid."""
    gpus = ("0", "GPU-8f3c7e21-0b7d")
    flags = (*TWO, "--repeats", "4", "--no-report", "--gpus", ",".join(gpus))
    drivers = [start(project, *flags, **{"": "0.7"}) for _ in range(2)]
    assert [finish(driver).returncode for driver in drivers] == [0, 0]
    assert sorted(started(project)) == completed(project) and len(completed(project)) == 8
    for among, at_once in (*((gpu, 1) for gpu in gpus), (",".join(gpus), 2)):
        events = [event for event, _, gpu in trace(project) if gpu in among.split(",")]
        assert max(accumulate(1 if x == "start" else -1 for x in events)) == at_once
    variables = info_of(project, completed(project)[0])["variables"]
    assert variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_grid_completes_after_kills_at_random_moments(project):
    """Kill benchmark.sh, its runs or both. The variable KILLS sets how often (default 4)."""
    flags = (*TWO, "--repeats", "4", "--no-report")
    rng = random.Random(1)
    for _ in range(int(os.environ.get("KILLS", "4"))):
        driver = start(project, *flags, **{"": "0.05"})
        time.sleep(rng.uniform(0.4, 2))
        running = processes_in(project)
        for process in rng.sample(running, rng.randint(0, len(running))):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with suppress(subprocess.TimeoutExpired):
            driver.wait(0.1)  # reap the driver: a zombie would look alive
        finish(driver)
    succeed(project, *flags)
    assert completed(project) == sorted(names_of(project, *flags))
    partial = (project / "runs").glob(".benchmark/partial/*/run.json")
    assert not any(map(is_complete, partial))  # only incomplete runs were moved
    assert all(json.loads(line) for line in log_of(project))


# === W&B and real scripts =======================================================================
def without_settings(project):
    """Return environment variables without W&B settings."""
    env = environment(project) | {"HOME": str(project), "NETRC": str(project / "netrc")}
    return {name: x for name, x in env.items() if not name.startswith("WANDB_")}


def test_wandb_groups_and_notes(project):
    """W&B runs are online if the server accepts the API key; the mock of wandb accepts it."""
    (project / "wandb.py").write_text("def login(verify):\n    return verify\n")
    flags = ("quick", "--only", "linen", "--repeats", "2", "--track")
    another = {"WANDB_RUN_GROUP": "another", "WANDB_NOTES": "it's 5"}
    succeed(project, *flags, env=without_settings(project) | another)
    for repeat, name in enumerate(completed(project), 1):
        variables = info_of(project, name)["variables"]
        assert variables["WANDB_RUN_GROUP"] == f"quick-repeat{repeat}"
        assert (variables["WANDB_NOTES"], variables["WANDB_MODE"]) == ("it's 5", "online")
        assert variables["WANDB_FINISH_TIMEOUT"] == "60"


def test_a_small_real_grid(tmp_path):
    """Run a script and a renamed copy of it offline, and write the report."""
    shutil.copy(ROOT / "ppo_linen.py", tmp_path / "mine.py")
    runs = tmp_path / "runs"
    flags = ("--scripts", f"linen,{tmp_path}/mine.py", "--iterations", "1", "--track")
    env = without_settings(tmp_path)
    said = succeed(ROOT, *flags, "--runs-dir", str(runs), env=env).splitlines()
    for name in completed(tmp_path):
        run = info_of(tmp_path, name)
        assert run["status"] == "completed"
        assert len(run["machine"]) == 8 and run["cores"] == psutil.cpu_count(logical=False)
    assert sorted(load(runs).runs["mode"]) == ["mine", "ppo_linen"]
    place = said.index(f"Report: {runs}/report/report.html")
    send, end = said[place - 2 : place]
    assert end == f"Runs complete: 2 of 2, in {runs}."
    # The output ends with a sentence and a table.
    assert said[place + 2].startswith("On CartPole-v1, 1 iteration took ")
    assert [line.split()[0] for line in said[-2:]] == ["ppo_linen", "mine"]
    what, _, command = send.partition(": ")
    assert what == "To upload the offline runs to W&B"
    words = subprocess.check_output(["bash", "-c", f"echo {command}"], cwd=ROOT, text=True)
    program, verb, *folders = words.split()
    assert os.access(ROOT / program, os.X_OK) and verb == "sync" and len(folders) == 2
