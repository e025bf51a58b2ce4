"""The driver, on stand-ins for the training scripts, and one small grid with the real ones."""

import importlib
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
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import psutil
import pytest
import tyro

from analysis.runs import load

ROOT = Path(__file__).parent.parent
NVIDIA_SMI = """#!/bin/sh
echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-51b2d9a0-6f6b)'
echo 'GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-8f3c7e21-0b7d)'
echo '  MIG 1g.10gb     Device  0: (UUID: MIG-2c9e4f70-3d1a)'
"""
CELL = re.compile(r"(?:(.+?)__)??([\w.]+?(?:-\w+)?)__([a-z]+)__([\w-]+?)__(\d+)it__seed(\d+)")
ONE = ("--scripts", "linen", "--no-report")


def cell_of(name):
    match = CELL.fullmatch(name)
    assert match, name
    keys = ("label", "env", "size", "script", "iterations", "seed")
    return dict(zip(keys, match.groups(), strict=True))


@pytest.fixture
def project(tmp_path):
    """A copy of the driver, with stand-ins for the scripts and for two GPUs."""
    copy_driver(tmp_path)
    (tmp_path / "tools").mkdir()
    add_tool(tmp_path, "nvidia-smi", NVIDIA_SMI)
    names = ("torch", "torch_compile", "linen", "nnx", "nnx_cached")
    for name in (*(f"ppo_{x}" for x in names), "dqn_linen", "dqn_torch_gymnasium"):
        shutil.copy(ROOT / "tests/stand_in.py", tmp_path / f"{name}.py")
    yield tmp_path
    while left := processes_in(tmp_path):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def copy_driver(folder):
    names = ["benchmark.sh", "setup.sh", "analysis/machine.py", "analysis/grid.py"]
    names += [str(path.relative_to(ROOT)) for path in ROOT.glob("studies/*/grid")]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def add_tool(project, name, text):
    path = project / "tools" / name
    path.write_text(text)
    path.chmod(0o755)


def add_grid(project, text):
    (project / "studies/mine").mkdir()
    (project / "studies/mine/grid").write_text(text)


def environment(project, **stand_in):
    """The driver uses this Python as it is; its machine-wide lock is this test's own."""
    own = {"VENV": sys.prefix, "TMPDIR": str(project), "TRACE": str(project / "trace")}
    own["PATH"] = f"{project}/tools:{os.environ['PATH']}"
    return os.environ | own | {"STAND_IN": json.dumps(stand_in)}


def start(project, *flags, wrapper=(), env=None, cwd=None, program="./benchmark.sh", **stand_in):
    # Where the tests run under nohup or in a shell's background, these signals would be ignored.
    return subprocess.Popen(
        [*wrapper, "env", "--default-signal=INT,HUP", program, *flags],
        cwd=cwd or project,
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


def bench(project, *flags, **options):
    return finish(start(project, *flags, **options))


def succeed(project, *flags, **options):
    driver = bench(project, *flags, **options)
    assert (driver.returncode, driver.stderr) == (0, ""), driver.stdout + driver.stderr
    return driver.stdout


def commands(project, *flags, **options):
    return [
        shlex.split(line) for line in succeed(project, *flags, "--list", **options).splitlines()
    ]


def names_of(project, *flags, **options):
    return [words[-1] for words in commands(project, *flags, **options)]


def log(project):
    return [json.loads(x) for x in (project / "runs/benchmark.jsonl").read_text().splitlines()]


def trace(project):
    path = project / "trace"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def started(project):
    return [name for event, name, *_ in trace(project) if event == "start"]


def completed(project):
    return sorted(path.parent.name for path in (project / "runs").glob("*/run.json"))


def info_of(project, name):
    return json.loads((project / "runs" / name / "run.json").read_text())


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


def programs_in(project):
    found = []
    for process in processes_in(project):
        with suppress(psutil.Error):
            found.append(process.name())
    return found


def overlaps(events):
    """How many runs began while another was going on."""
    running = count = 0
    for event, *_ in events:
        count += event == "start" and running > 0
        running += 1 if event == "start" else -1
    return count


# === The grid ===================================================================================
RUNS = {"quick": 15, "async": 108, "sync": 96 + 24, "full": 231, "dqn": 24, "doors": 140}
RUNS |= {"agents": 3 * 46, "minatar": 10 + 15 + 4, "peers": 90 + 45, "cpu": 300}


def test_help_says_what_a_study_has_and_how_long_it_takes(tmp_path):
    """What a grid's first line says is what its other lines come to."""
    text = succeed(ROOT, "--help", env=environment(tmp_path))
    said = re.findall(r"^  (\w+) .*: (\d+) runs, ([\d.]+) (hours|minutes)$", text, re.MULTILINE)
    assert {name: int(runs) for name, runs, *_ in said} == RUNS
    for name, runs, number, unit in said:
        flags = (name, "--runs-dir", str(tmp_path / "runs"))
        last = succeed(ROOT, *flags, "--dry-run", env=environment(tmp_path)).splitlines()[-1]
        estimate, of = re.findall(r"about (\d+) (\w+)", last)[0]
        seconds = [
            float(x) * {"hours": 60, "minutes": 1}[y] for x, y in ((number, unit), (estimate, of))
        ]
        assert last.startswith(f"Runs missing: {runs} of {runs}, ")
        assert seconds[0] == pytest.approx(seconds[1], rel=0.2)


FAMILIES = {"-m": "", "dqn_torch_gymnasium.py": "dqn_torch_gymnasium", "ppo_torch.py": "ppo_torch"}


@pytest.mark.parametrize("study", [x for x in RUNS if x != "peers"])
def test_its_commands_are_what_their_scripts_take(study, tmp_path):
    """Parsed by representatives of the scripts, they have the size, seed and flags of their names."""
    every = commands(ROOT, study, "--repeats", "2", env=environment(tmp_path))
    assert len({words[-1] for words in every}) == len(every)
    for _, *words in every:
        cell = cell_of(words[-1])
        if words[0] == "-m":
            assert (ROOT / f"{words[1].replace('.', '/')}.py").is_file()
            words = words[2:]
        name = f"ppo_{cell['script'].removesuffix('-none')}"
        name = name.removeprefix("ppo_") if "dqn_" in name else name
        if name == "ppo_one_scan":
            name = "ppo_linen_vmap"
        else:
            assert words.pop(0) == f"{name}.py"
        if name.startswith("ppo_"):
            similar = {"vmap": "ppo_linen_vmap", "torch": "ppo_torch"}
            name = next((y for x, y in similar.items() if x in name), "ppo_linen")
        script = importlib.import_module(name)
        kind = script.Args
        if words[0] in ("minatar", "doors"):
            kind = getattr(script, words.pop(0).title().replace("Minatar", "MinAtar"))
        args = tyro.cli(kind, args=words)
        assert (args.num_iterations, args.seed) == (int(cell["iterations"]), int(cell["seed"]))
        assert cell["env"] in ("minatar", "doors", args.env_id)
        label = cell["label"] or ""
        if cell["size"] != "own":
            assert (
                args.hidden_sizes
                == {"small": (64,) * 2, "medium": (256,) * 3, "large": (1024,) * 6}[cell["size"]]
            )
            assert args.sync_for_timing == label.startswith("sync")
        off = not getattr(args, "jit", True) or not getattr(args, "jit_env", True)
        assert off == cell["script"].endswith("-none")
        assert f"agents-{getattr(args, 'num_agents', '')}" == label or "agents" not in label
        assert (args.save_every == 20) == (cell["env"] == "minatar" and args.num_iterations > 20)
        if cell["env"] == "doors":
            assert args.num_envs == (1024 if "1024" in label else 64)
            limit = "DoorsShort" in args.env_id or getattr(args, "max_episode_steps", 0) == 15
            assert limit == label.startswith("public")


def test_orders(tmp_path):
    """Blocks are whole and shuffled by the seed; nothing else decides, or Slurm would find other runs."""
    env = environment(tmp_path)
    order = names_of(ROOT, "sync", "--repeats", "2", env=env)
    cells = [cell_of(name) for name in order]
    assert [cell["seed"] for cell in cells] == ["1"] * 120 + ["2"] * 120  # repeats are outer
    blocks = groupby(cells, lambda x: (x["seed"], x["label"], x["env"], x["size"]))
    scripts = [tuple(cell["script"] for cell in block) for _, block in blocks]
    assert len(scripts) == 30 and {len(set(block)) for block in scripts} == {8}
    assert len(set(scripts)) > 25
    other = names_of(ROOT, "sync", "--repeats", "2", "--seed", "2", env=env)
    assert other != order and sorted(other) == sorted(order)
    same = (
        "--notes",
        "linen",
        "--runs-dir",
        "linen",
        "--track",
        "--only",
        "linen",
        "--from=3",
        "--to=4",
    )
    wanted = [name for name in order if "linen" in name][2:4]
    own = env | {"VENV": str(tmp_path / "linen/.venv")}
    assert names_of(ROOT, "sync", "--repeats", "2", *same, env=own) == wanted
    # A repeat of these is one block, and in agents no two repeats share the seed of an agent.
    agents = [cell_of(name) for name in names_of(ROOT, "agents", "--seed", "3", env=env)]
    repeats = [(int(cell["seed"]) - 1) // 1000 for cell in agents]
    assert repeats == [0] * 46 + [1] * 46 + [2] * 46
    assert len(list(groupby(agents[:46], lambda x: x["label"]))) > 15
    full = names_of(ROOT, "full", "--repeats", "2", env=env)
    assert len(full) == 3 + 2 * 228 and all(x.startswith("warmup__") for x in full[:3])


@pytest.mark.parametrize(
    ("flags", "runs"),
    [
        (["--envs", "Acrobot-v1,CartPole-v1", "--sizes", "small,large"], 20),
        (["--scripts", "linen nnx,ppo_torch.py ppo_linen.py", "--repeats=2"], 6),
        (["--scripts", "equinox-none,linen_vmap,dqn_torch.py", "--sizes", "own,own"], 3),
        (["async", "--only", "ppo_linen.*Acrobot"], 3),
        (["minatar", "--repeats", "2"], 4 + 4 + 3),
        (["quick", "--from", "14"], 2),
    ],
)
def test_a_grid_of_ones_own(flags, runs, tmp_path):
    names = names_of(ROOT, *flags, env=environment(tmp_path))
    assert len(set(names)) == len(names) == runs
    assert succeed(ROOT, *flags, "--count", env=environment(tmp_path)) == f"{runs}\n"


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["fast"], "there is no study 'fast'"),
        (["../quick"], "there is no study"),
        (["--fast"], "--fast"),
        (["quick", "async"], "async"),
        (["--envs", "Pendulum-v1"], "Pendulum-v1"),
        (["--envs", ""], "--envs"),
        (["--scripts", "keras"], "keras"),
        (["--scripts", "no/mine.py"], "'no/mine.py'"),
        (["--scripts", "own/my-own.py"], "letters, digits and _"),
        (["--scripts", "own/ppo_linen.py"], "has the name of a script of this project"),
        (["--scripts", "own/mine.py,mine.py"], "have one name"),
        (["--sizes", "small,huge"], "huge"),
        (["async", "--sizes", "small"], "--sizes"),
        (["--iterations", "0"], "--iterations"),
        (["minatar", "--iterations", "9"], "--iterations"),
        (["--repeats", "999999999"], "at most 1000"),
        (["--seed"], "--seed"),
        (["--timeout", "-1"], "--timeout"),
        (["--from", "16"], "--from is 16, but the list ends at line 15"),
        (["--from", "5", "--to", "3"], "--from is 5, which is after --to 3"),
        (["--only", "("], "--only"),
        (["--only", "no such run"], "--only"),
        (["--gpus", ""], "--gpus"),
        (["--gpus", "0,7"], "not '7'"),
        (["--gpus", "7", "--dry-run"], "not '7'"),
        (["--gpus", "GPU-8f3c"], "not 'GPU-8f3c'"),  # CUDA would see none where several begin so
        (["--gpus", "0,GPU-51b2d9a0-6f6b"], "'GPU-51b2d9a0-6f6b' is there twice"),
        (["--runs-dir", "--dry-run"], "not '--dry-run'"),
        (["--runs-dir", "/dev/null/runs"], "'/dev/null' is not"),
        (["--runs-dir", "dangling", "--dry-run"], "'dangling' is not"),
        (["mine"], "studies/mine/grid: docs/benchmark.md has no such line: rum all"),
    ],
)
def test_wrong_usage_gets_one_sentence(project, flags, word):
    (project / "own").mkdir()
    (project / "dangling").symlink_to("nowhere/runs")
    add_grid(project, "# Mine\nrun CartPole-v1 own linen\nrum all\n")
    for name in ("mine.py", "own/mine.py", "own/my-own.py", "own/ppo_linen.py"):
        (project / name).touch()
    driver = bench(project, *flags)
    assert (driver.returncode, driver.stdout) == (2, "")
    assert len(driver.stderr.splitlines()) == 1 and word in driver.stderr
    assert not (project / "runs").exists()


def test_a_listed_line_can_be_pasted(project):
    folder = "it's 5 o'clock\n& \"late\" \\ $HOME\n"
    lines = succeed(project, "--list", "--runs-dir", folder).splitlines()
    subprocess.run(["bash", "-c", lines[0]], cwd=project, env=environment(project), check=True)
    assert len(lines) == 15 and len(list((project / folder).glob("*/run.json"))) == 1


def test_a_dry_run_changes_nothing(project):
    said = succeed(project, "--runs-dir", "a/b", "--gpus", "1,MIG-2c9e4f70-3d1a", "--dry-run")
    assert not (project / "a").exists()
    assert said.splitlines()[-1] == "Runs missing: 15 of 15, about 3 minutes on two cores."


def test_from_another_folder_with_what_is_ones_own(project):
    """Through a link, and though CDPATH leads to another folder of the same name."""
    own = project / "own folder"
    for folder in (own / "checkout", project / "there/checkout"):
        folder.mkdir(parents=True)
    (own / "checkout/race").symlink_to(project / "benchmark.sh")
    (own / "venv").symlink_to(sys.prefix)
    shutil.copy(project / "ppo_linen.py", own / "mine.py")
    env = environment(project) | {"CDPATH": f"{project}/there:{own}", "VENV": "venv"}
    flags = ["--scripts", "mine.py,linen", "--envs", "CartPole-v1,games.mine:My-v0"]
    flags += ["--runs-dir", "runs", "--no-report"]
    succeed(project, *flags, env=env, cwd=own, program="checkout/race")
    assert completed(own) == [
        f"{env}__small__{script}__100it__seed1"
        for env in ("CartPole-v1", "games.mine.My-v0")
        for script in ("linen", "mine")
    ]
    info = info_of(own, "games.mine.My-v0__small__mine__100it__seed1")
    assert (info["args"]["--env-id"], info["folder"]) == ("games.mine:My-v0", str(own))


# === Running ====================================================================================
def test_the_same_command_resumes(project):
    """What is complete counts, also of fewer repeats; what is not is set aside and begins anew."""
    names = names_of(project)
    empty, killed, gone = names[:3]
    for name in (empty, killed):
        (project / "runs" / name).mkdir(parents=True)
    (project / "runs" / empty / "run.json").touch()  # from a machine that lost its power
    (project / "runs" / killed / "metrics.jsonl").touch()
    succeed(project, "--repeats", "1", "--no-report")
    assert started(project) == names[:5]
    kept = sorted(x.name.split(".")[0] for x in (project / "runs/.benchmark/partial").iterdir())
    assert kept == sorted(x.split(".")[0] for x in (empty, killed))
    shutil.rmtree(project / "runs" / gone)
    dry = succeed(project, "--dry-run").splitlines()
    assert f"missing  {gone}" in dry and f"done     {empty}" in dry
    assert dry[-1].startswith("Runs missing: 11 of 15")
    assert succeed(project).splitlines()[-1] == "Runs complete: 15 of 15, in runs."
    assert started(project)[5:] == [gone, *names[5:]] and completed(project) == sorted(names)


def test_the_log_says_what_ran_when(project):
    (project / "runs").mkdir()
    (project / "runs/benchmark.jsonl").write_text('"half a li')
    succeed(project, "--notes", "@first=\n5", "--seed", "7", "--to", "2")
    lines = (project / "runs/benchmark.jsonl").read_text().splitlines()[1:]
    grid, *events = map(json.loads, lines)
    assert (grid["event"], grid["study"], grid["runs"]) == ("grid", "quick", 2)
    assert (grid["repeats"], grid["order_seed"], grid["notes"]) == (3, 7, "@first=\n5")
    assert [event["event"] for event in events] == ["start", "end"] * 2
    for line, (before, after) in enumerate(zip(events[::2], events[1::2], strict=True), 1):
        assert before["line"] == line and before["run"] == after["run"]
        assert before["run"] == before["command"].split()[-1] and len(before["load"]) == 3
        assert (after["completed"], after["exit_status"]) == ("yes", 0)


def test_failures_are_recorded_and_the_grid_goes_on(project):
    plans = {"torch__": "crash", "torch_compile": "hang", "linen": "killed", "nnx__": "silent"}
    flags = ["--timeout", "2", "--repeats", "1", "--gpus", "0,1", "--no-report"]
    driver = bench(project, *flags, **plans)
    assert (driver.returncode, driver.stderr) == (1, "")
    assert [cell_of(name)["script"] for name in completed(project)] == ["nnx_cached"]
    assert len(started(project)) == 5  # the other GPU does not repeat what failed
    ends = {cell_of(x["run"])["script"]: x for x in log(project) if x["event"] == "end"}
    assert (ends["torch"]["exit_status"], ends["torch"]["completed"]) == (1, "no")
    assert "RuntimeError: shapes do not match \N{SNOWMAN}" in ends["torch"]["tail"]
    assert ends["torch_compile"]["reason"] == "no end after 2 s"
    assert not processes_in(project)  # it had left a child in a session of its own
    assert ends["linen"]["exit_status"] == 137 and "memory" in ends["linen"]["reason"]
    assert (ends["nnx"]["exit_status"], ends["nnx"]["completed"]) == (0, "no")
    summary = driver.stdout.splitlines()[-6:]
    assert summary[0] == "Runs not complete: 4 of 5:"
    assert any("torch__25it__seed1: exit status 1, after " in line for line in summary)
    assert any("torch_compile__25it__seed1: no end after 2 s; output" in line for line in summary)
    assert summary[-1] == f"To run them again: ./benchmark.sh {' '.join(flags)}"
    succeed(project, *flags)
    assert len(started(project)) == 9


def test_what_takes_over_two_hours_says_so_before_it_starts(project):
    for flags, hours in ((("async", "--repeats", "5"), "about 196 hours"), (("quick",), "hours")):
        driver = start(project, *flags, **{"__": "hang"})
        wait_for(lambda: started(project))
        driver.terminate()
        said = finish(driver).stdout
        assert said.startswith(f"This takes {hours} on two cores") == (flags[0] == "async")
        assert (hours in said) == (flags[0] == "async")
        (project / "trace").unlink()


def test_a_study_has_commands_at_its_begin_and_end(project):
    add_grid(project, "begin begin.py\nrun CartPole-v1 own linen\nend end.py RUNS/x RUNS\n")
    (project / "begin.py").write_text("import sys\nsys.exit('not today')")
    driver = bench(project, "mine")
    assert (driver.returncode, driver.stderr) == (2, "not today\n") and not started(project)
    (project / "begin.py").write_text("")
    (project / "end.py").write_text("import sys\nprint(sys.argv)\nsys.exit(1)")
    said = succeed_but_for_reports(project, "mine", "--runs-dir", "my runs")
    assert said[-4:] == [
        "['end.py', 'my runs/x', 'my runs']",
        "This failed at the end: python end.py RUNS/x RUNS",
        "The report could not be made; the runs are in my runs.",
        "Runs complete: 1 of 1, in my runs.",
    ]


def succeed_but_for_reports(project, *flags):
    driver = bench(project, *flags)  # no analysis lies beside this copy of the driver
    assert driver.returncode == 0, driver.stderr
    return driver.stdout.splitlines()


@pytest.mark.parametrize(
    ("sent", "status", "to_group"),
    [("SIGINT", 130, True), ("SIGTERM", 143, False), ("SIGHUP", 129, True)],
)
def test_stopping_leaves_no_process(project, sent, status, to_group):
    """A terminal's Ctrl-C or its end reaches the driver's whole process group."""
    driver = start(project, "--gpus", "0,1", **{"__": "hang"})
    wait_for(lambda: programs_in(project).count("sleep") == 2)
    (os.killpg if to_group else os.kill)(driver.pid, getattr(signal, sent))
    finish(driver)
    assert driver.returncode == status
    assert driver.stderr.splitlines() == [
        "Stopped. Completed runs are kept; to go on: ./benchmark.sh --gpus 0,1"
    ]
    wait_for(lambda: not processes_in(project))
    assert len(started(project)) == 2  # no other run began meanwhile


def test_a_process_that_outlives_its_run_holds_up_nobody(project):
    """One of no environment, parent or group that shows where it came from."""
    succeed(project, *ONE, **{"__": "daemon"})
    (path,) = (project / "runs").glob("*/daemon")
    daemon = psutil.Process(int(path.read_text()))
    try:
        (path.parent / "run.json").unlink()
        succeed(project, *ONE)
        assert len(started(project)) == 2 and daemon.is_running()
    finally:
        daemon.kill()


@pytest.mark.parametrize("runs_dir", ["runs", "other"])
def test_a_driver_says_what_it_waits_for(project, runs_dir):
    """The first is killed, but not its run: the second waits for that, or for the machine."""
    first = start(project, *ONE, **{"__": "hang"})
    wait_for(lambda: "sleep" in programs_in(project))
    first.kill()
    first.wait()
    second = start(project, *ONE, "--runs-dir", runs_dir)
    wait_for(lambda: "flock" in programs_in(project))
    time.sleep(0.1)
    second.terminate()
    (name,) = started(project)
    what = name if runs_dir == "runs" else "another benchmark on this machine"
    assert finish(second).stdout.startswith(f"Waiting for {what}")


def test_two_drivers_share_a_grid(project):
    """They never run the same cell, nor at the same time: that would spoil both measurements."""
    drivers = [start(project, "--no-report", **{"__": "0.05"}) for _ in range(2)]
    assert [finish(driver).returncode for driver in drivers] == [0, 0]
    assert sorted(started(project)) == completed(project) and len(completed(project)) == 15
    assert overlaps(trace(project)) == 0


def test_gpus_take_one_run_at_a_time_each(project):
    uuid = "GPU-8f3c7e21-0b7d"
    succeed(project, "--gpus", f"0,{uuid}", "--no-report", **{"__": "0.2"})
    assert sorted(started(project)) == completed(project) and len(completed(project)) == 15
    by_gpu = {gpu: [x for x in trace(project) if x[2] == f"gpu={gpu}"] for gpu in ("0", uuid)}
    assert all(len(events) >= 4 and overlaps(events) == 0 for events in by_gpu.values())
    assert overlaps(trace(project)) > 0 and sum(map(len, by_gpu.values())) == 30
    for name in completed(project):
        assert info_of(project, name)["variables"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_run_is_told_what_machine_it_is_on(project):
    """What a tool says as it fails is no answer, wherever it says it."""
    git = ["git", "-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "-q"], ["add", "ppo_linen.py"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], cwd=project, check=True)
    succeed(project, "--scripts", "linen,torch", "--no-report")
    torch, linen = (info_of(project, x)["machine"] for x in reversed(completed(project)))
    assert re.fullmatch("[0-9a-f]{40}", linen["git_commit"]) and torch["git_commit"] is None
    assert linen["cores"] == psutil.cpu_count(logical=False) and linen["load"] >= 0
    assert isinstance(linen["container"], bool) and isinstance(linen["cpu"], str)
    with open(project / "ppo_linen.py", "a") as file:
        file.write("# changed\n")
    add_tool(project, "nvidia-smi", "#!/bin/sh\necho 'a, b' >&2 && echo '570.1, NVIDIA H200, x'\n")
    shutil.rmtree(project / "runs")
    succeed(project, *ONE)
    gpu = info_of(project, *completed(project))["machine"]
    assert (gpu["driver"], gpu["gpu"]) == ("570.1", "NVIDIA H200, x")
    assert gpu["git_commit"] == linen["git_commit"] + "-dirty"
    assert gpu["machine"] == linen["machine"]
    for name in ("nvidia-smi", "lscpu", "git"):
        add_tool(project, name, "#!/bin/sh\necho 'Model name: it has failed' && exit 9\n")
    shutil.rmtree(project / "runs")
    succeed(project, *ONE)
    failed = info_of(project, *completed(project))["machine"]
    assert failed["gpu"] is failed["driver"] is failed["git_commit"] is None
    assert "failed" not in str(failed)


def test_the_machine_is_a_hash_of_its_id_or_of_its_boot(monkeypatch):
    from analysis import machine

    for files, expected in (
        ({"/etc/machine-id": "abc"}, "ba7816bf"),
        ({"/etc/machine-id": "", "/proc/sys/kernel/random/boot_id": "abc"}, "ba7816bf"),
        ({"/etc/machine-id": "abd", "/proc/sys/kernel/random/boot_id": "abc"}, "a52d159f"),
        ({}, None),
    ):
        monkeypatch.setattr(machine, "read", lambda path, files=files: files.get(str(path)))
        assert machine.machine_id() == expected


def test_a_full_disk_stops_the_grid(project):
    runs = project / "runs"
    runs.mkdir()
    mount = f"mount -t tmpfs -o size=4m none {runs} &&"
    wrapper = ("unshare", "--mount", "--map-root-user", "sh", "-c")
    if subprocess.run([*wrapper, f"{mount} true"], capture_output=True).returncode:
        pytest.skip("needs user namespaces, to mount a small disk")
    flags = ("--repeats", "1", "--no-report")
    names = names_of(project, *flags)
    keep = f'{mount} "$0" "$@"; status=$?; cp -r {runs} {project}/kept; exit $status'
    plan = {cell_of(names[2])["script"] + "__25": "fill"}
    driver = bench(project, *flags, wrapper=(*wrapper, keep), **plan)
    assert driver.returncode == 1
    assert "no room left in runs, so the grid stops" in driver.stderr
    assert started(project) == names[:3]
    for name in names[:2]:
        json.loads((project / "kept" / name / "run.json").read_text())
    assert "Runs not complete: 3 of 5:" in driver.stdout


def test_killed_at_random_moments(project):
    """KILLS=100 does what the default does more often."""
    kills, flags = int(os.environ.get("KILLS", "6")), ("--repeats", "2", "--no-report")
    rng, runs = random.Random(kills), project / "runs"
    while kills > 0:
        driver = start(project, *flags, **{"__": "0.05"})
        time.sleep(rng.uniform(0, 1.5))
        running = [x.pid for x in processes_in(project) if x.pid != driver.pid]
        victims = rng.choice([[driver.pid], running, [driver.pid, *running]])
        for victim in rng.sample(victims, rng.randint(0, len(victims))):
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                kills -= 1
        finish(driver)
        if len(completed(project)) == 10 or kills <= 0:
            succeed(project, *flags, **{"__": "0.05"})
            assert completed(project) == sorted(names_of(project, *flags))
            assert not list(runs.glob(".benchmark/partial/*/run.json"))  # none ran twice
            log(project)
            shutil.rmtree(runs)


# === Long runs ==================================================================================
@pytest.mark.parametrize(
    ("victim", "sent"), [("driver", "SIGINT"), ("driver", "SIGKILL"), ("run", "SIGKILL")]
)
def test_a_long_run_goes_on_from_its_checkpoint(project, victim, sent):
    """A short one starts anew: its durations must be those of one process."""
    text = "run @minatar own dqn_linen iterations=20\n"
    add_grid(project, text + "run @minatar own dqn_linen iterations=100 --save-every 20\n")
    short, long = names_of(project, "mine")
    (project / "runs" / short).mkdir(parents=True)
    (project / "runs" / short / "checkpoint.npz").write_text("8")
    driver = start(project, "mine", "--no-report", **{"100it": "long"})
    wait_for(lambda: [f"iteration-{5}", long] in [x[:2] for x in trace(project)])
    (run,) = [x for x in processes_in(project) if "dqn_linen.py" in x.cmdline()[1:2]]
    os.kill(driver.pid if victim == "driver" else run.pid, getattr(signal, sent))
    if (victim, sent) == ("driver", "SIGKILL"):  # which its run outlives
        driver.wait()
        run.kill()
    finish(driver)
    wait_for(lambda: not processes_in(project))
    assert f"stopped  {long}" in succeed(project, "mine", "--dry-run")
    succeed(project, "mine", "--no-report", **{"100it": "long"})
    assert info_of(project, short)["first"] == 0 and info_of(project, long)["first"] >= 5
    (go_on,) = [x for x in log(project) if "--resume" in x.get("command", "")]
    assert go_on["command"].endswith(f"dqn_linen.py --resume runs/{long}")
    (kept,) = (project / "runs/.benchmark/partial").iterdir()
    assert kept.name.startswith(short)


def test_trained_agents_are_evaluated_once(tmp_path, monkeypatch):
    """Long runs only, by three settings, and not what was evaluated before by the same rules."""
    from studies.minatar import judge

    names = {"minatar__a": 20, "minatar__b": 20, "minatar__short": 0, "other": 20}
    for name, save_every in names.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"args": {"save_every": save_every}}))
    calls = []

    def evaluate(command):
        calls.append([Path(x).name for x in command if str(tmp_path) in x])
        file = "evaluation"
        if "--epsilon" in command:
            file += f"-epsilon-{command[command.index('--epsilon') + 1]}"
        if (tmp_path / calls[-1][0] / "damaged").exists():
            return subprocess.CompletedProcess(command, 2)
        for name in calls[-1]:
            found = {"episodes": 100, "max_steps": 10_000}
            (tmp_path / name / f"{file}.json").write_text(json.dumps(found))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(judge.subprocess, "run", evaluate)
    monkeypatch.setattr(sys, "argv", ["judge", str(tmp_path)])
    for _ in range(2):
        judge.main()
        assert calls == [["minatar__a", "minatar__b"]] * 3
    (tmp_path / "minatar__a/damaged").touch()
    for name in ("a", "b"):
        (tmp_path / f"minatar__{name}/evaluation.json").write_text('{"episodes": 1}')
    judge.main()
    assert calls[3:] == [["minatar__a", "minatar__b"], ["minatar__a"], ["minatar__b"]]


# === The real scripts ===========================================================================
def test_a_small_real_grid(tmp_path):
    """Of a script and of a copy under another name; the report takes the grid's runs alone."""
    shutil.copy(ROOT / "ppo_linen.py", tmp_path / "mine.py")
    runs = tmp_path / "runs"
    flags = ["--scripts", f"linen,{tmp_path}/mine.py", "--iterations", "1", "--runs-dir", str(runs)]
    said = bench(ROOT, *flags, env=environment(tmp_path))
    assert said.returncode == 0, said.stdout + said.stderr
    for name in completed(tmp_path):
        run = info_of(tmp_path, name)
        assert run["status"] == "completed" and run["peak_host_bytes"] > 0
        assert len(run["machine"]) == 8 and run["cores"] == psutil.cpu_count(logical=False)
    assert sorted(load(runs).runs["mode"]) == ["mine", "ppo_linen"]
    assert said.stdout.splitlines()[-2:] == [
        f"Report: {runs}/report/report.html",
        f"Runs complete: 2 of 2, in {runs}.",
    ]
    # The same run made by hand, and later, would take its place.
    (copied,) = runs.glob("*__linen__*")
    shutil.copytree(copied, runs / "by_hand")
    text = (runs / "by_hand/run.json").read_text()
    (runs / "by_hand/run.json").write_text(text.replace('"started": "20', '"started": "21'))
    again = bench(ROOT, *flags, env=environment(tmp_path))
    assert f"Left out, since the grid does not list them: 1 of the runs in {runs}." in again.stdout
    assert "by_hand" not in again.stdout + again.stderr
    assert copied.name in load(runs, only=completed(tmp_path)[1:]).runs["run"].to_list()
