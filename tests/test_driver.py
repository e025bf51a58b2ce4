"""The driver, on stand-ins for the training scripts, and one small grid with the real ones."""

import json
import os
import random
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

from analysis.runs import load

ROOT = Path(__file__).parent.parent
NVIDIA_SMI = """#!/bin/sh
echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-51b2d9a0-6f6b)'
echo 'GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-8f3c7e21-0b7d)'
echo '  MIG 1g.10gb     Device  0: (UUID: MIG-2c9e4f70-3d1a)'
"""
REPORT = "import sys\nprint('A report of', len(open(sys.argv[-1]).readlines()), 'runs')\n"
ONE = ("--scripts", "linen", "--no-report")


@pytest.fixture
def project(tmp_path):
    """A copy of the driver, with stand-ins for the scripts and for two GPUs."""
    copy_driver(tmp_path)
    (tmp_path / "analysis/__main__.py").write_text(REPORT)
    add_tool(tmp_path, "nvidia-smi", NVIDIA_SMI)
    for name in ("torch", "torch_compile", "linen", "nnx", "nnx_cached"):
        shutil.copy(ROOT / "tests/stand_in.py", tmp_path / f"ppo_{name}.py")
    yield tmp_path
    while left := processes_in(tmp_path):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def copy_driver(folder):
    studies = [str(path.relative_to(ROOT)) for path in ROOT.glob("studies/*/grid")]
    for name in ("benchmark.sh", "setup.sh", "studies/machine.py", "studies/grid.py", *studies):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def add_tool(project, name, text):
    (project / "tools").mkdir(exist_ok=True)
    (project / "tools" / name).write_text(text)
    (project / "tools" / name).chmod(0o755)


def add_grid(project, text, name="mine"):
    (project / "studies" / name).mkdir()
    (project / "studies" / name / "grid").write_text(text)


def environment(project, **stand_in):
    """The driver uses this Python as it is; its machine-wide lock is this test's own."""
    own = {"VENV": sys.prefix, "TMPDIR": str(project), "TRACE": str(project / "trace")}
    own["PATH"] = f"{project}/tools:{os.environ['PATH']}"
    return os.environ | own | {"STAND_IN": json.dumps(stand_in)}


def start(project, *flags, wrapper=(), env=None, cwd=None, program="./benchmark.sh", **stand_in):
    return subprocess.Popen(
        # Under nohup, or in a shell's background, these signals would be ignored.
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


def names_of(project, *flags, **options):
    lines = succeed(project, *flags, "--list", **options).splitlines()
    return [line.split()[-1] for line in lines]


def cell_of(name):
    *label, env, size, script, iterations, seed = name.split("__")
    numbers = {"iterations": int(iterations.removesuffix("it")), "seed": int(seed[4:])}
    return {"label": "".join(label), "env": env, "size": size, "script": script, **numbers}


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
        with suppress(psutil.Error):  # it has ended by now, or is another user's
            ours = process.environ().get("TMPDIR") == str(project)
            return ours and process.status() != psutil.STATUS_ZOMBIE

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


def test_order(tmp_path):
    """A seed shuffles whole blocks; nothing else decides, or Slurm would find other runs."""
    env = environment(tmp_path)
    order = names_of(ROOT, "sync", "--repeats", "2", env=env)
    cells = [cell_of(name) for name in order]
    assert [cell["seed"] for cell in cells] == [1] * 120 + [2] * 120  # repeats are outer
    blocks = groupby(cells, lambda x: (x["seed"], x["label"], x["env"], x["size"]))
    scripts = [tuple(cell["script"] for cell in block) for _, block in blocks]
    assert {len(set(block)) for block in scripts} == {8} and len(set(scripts)) > 25
    other = names_of(ROOT, "sync", "--repeats", "2", "--seed", "2", env=env)
    assert other != order and sorted(other) == sorted(order)
    flags = ("--notes", "linen", "--runs-dir", "linen", "--track", "--only", "linen", "--from=3")
    own = env | {"VENV": str(tmp_path / "linen/.venv")}
    same = names_of(ROOT, "sync", "--repeats", "2", *flags, "--to=4", env=own)
    assert same == [name for name in order if "linen" in name][2:4]
    # There a repeat is one block, and no two repeats share the seed of an agent.
    agents = [cell_of(name) for name in names_of(ROOT, "agents", env=env)]
    assert [(x["seed"] - 1) // 1000 for x in agents] == [0] * 46 + [1] * 46 + [2] * 46
    assert len(list(groupby(agents[:46], lambda x: x["label"]))) > 15
    full = names_of(ROOT, "full", "--repeats", "2", env=env)
    assert [name[:6] == "warmup" for name in full] == [True] * 3 + [False] * 2 * 228
    for flags, runs in {
        "--envs Acrobot-v1,CartPole-v1 --sizes small,large": 20,
        "--scripts ppo_torch.py,linen,ppo_linen.py --repeats=2": 4,
        "--scripts equinox-none,linen_vmap,dqn_torch.py --sizes own": 3,
        "async --only ppo_linen.*Acrobot": 3,
        "minatar --repeats 2": 4 + 4 + 3,
    }.items():
        names = names_of(ROOT, *flags.split(), env=env)
        assert len(set(names)) == len(names) == runs
        assert succeed(ROOT, *flags.split(), "--count", env=env) == f"{runs}\n"


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("fast", "there is no study 'fast'"),
        ("--fast", "'--fast'"),
        ("async --sizes small", "--sizes"),
        ("--envs Pendulum-v1", "'Pendulum-v1'"),
        ("--scripts own/my-own.py", "letters, digits and _"),
        ("--scripts own/ppo_linen.py", "has the name of a script of this project"),
        ("--scripts own/mine.py,mine.py", "have one name"),
        ("--iterations 0", "--iterations"),
        ("minatar --iterations 9", "--iterations"),
        ("--repeats 9999", "at most 1000"),
        ("--from 16", "--from is 16, but the list ends at line 15"),
        ("--only (", "--only"),
        ("--only never", "no command matches --only 'never'"),
        ("--gpus 0,7", "not '7'"),
        ("--gpus GPU-8f3c --dry-run", "not 'GPU-8f3c'"),  # of several CUDA would see none
        ("--gpus 0,GPU-51b2d9a0-6f6b", "'GPU-51b2d9a0-6f6b' is there twice"),
        ("--runs-dir dangling --dry-run", "'dangling' is not"),
        ("mine2", "studies/mine2/grid has a number or a name that is none: 'public'"),
        ("mine", "studies/mine/grid: docs/benchmark.md has no such line: rum all"),
    ],
)
def test_wrong_usage_gets_one_sentence(project, flags, word):
    (project / "own").mkdir()
    (project / "dangling").symlink_to("nowhere/runs")
    add_grid(project, "# Mine\nrun CartPole-v1 own linen\nrum all\n")
    add_grid(project, "run CartPole-v1 own linen flags=public\n", "mine2")
    for name in ("mine.py", "own/mine.py", "own/my-own.py", "own/ppo_linen.py"):
        (project / name).touch()
    driver = bench(project, *shlex.split(flags))
    assert (driver.returncode, driver.stdout) == (2, "")
    assert len(driver.stderr.splitlines()) == 1 and word in driver.stderr
    assert not (project / "runs").exists()


def test_a_list_can_be_pasted_and_a_dry_run_changes_nothing(project):
    folder = "it's 5 o'clock\n& \"late\" \\ $HOME\n"
    said = succeed(project, "--runs-dir", folder, "--gpus", "1,MIG-2c9e4f70-3d1a", "--dry-run")
    assert said.splitlines()[-1] == "Runs missing: 15 of 15, about 3 minutes on two cores."
    assert not (project / folder).exists()
    line = succeed(project, "--list", "--runs-dir", folder).splitlines()[0]
    subprocess.run(["bash", "-c", line], cwd=project, env=environment(project), check=True)
    assert len(list((project / folder).glob("*/run.json"))) == 1


def test_from_another_folder_with_what_is_ones_own(project):
    """Through a link, and though CDPATH leads to another folder of the same name."""
    own = project / "own folder"
    for folder in (own / "checkout", project / "there/checkout"):
        folder.mkdir(parents=True)
    (own / "checkout/race").symlink_to(project / "benchmark.sh")
    (own / "venv").symlink_to(sys.prefix)
    shutil.copy(project / "ppo_linen.py", own / "mine.py")
    env = environment(project) | {"CDPATH": f"{project}/there:{own}", "VENV": "venv"}
    flags = ["--scripts", "mine.py,linen", "--envs", "CartPole-v1,games.mine:My-v0", "--no-report"]
    succeed(project, *flags, env=env, cwd=own, program="checkout/race")
    envs, name = ("CartPole-v1", "games.mine.My-v0"), "{}__small__{}__100it__seed1"
    assert completed(own) == [name.format(x, y) for x in envs for y in ("linen", "mine")]
    info = info_of(own, name.format("games.mine.My-v0", "mine"))
    assert (info["args"]["--env-id"], info["folder"]) == ("games.mine:My-v0", str(own))


# === Running ====================================================================================
def test_the_same_command_resumes(project):
    """What is complete counts, also of fewer repeats; what is not is set aside and begins anew."""
    names = names_of(project)
    empty, killed, gone = names[:3]
    for name, file in ((empty, "run.json"), (killed, "metrics.jsonl")):  # power lost; killed
        (project / "runs" / name).mkdir(parents=True)
        (project / "runs" / name / file).touch()
    assert "A report of 5 runs\n" in succeed(project, "--repeats", "1")
    assert started(project) == names[:5]
    kept = [x.name.rpartition(".")[0] for x in (project / "runs/.benchmark/partial").iterdir()]
    assert sorted(kept) == sorted([empty, killed])
    shutil.rmtree(project / "runs" / gone)
    dry = succeed(project, "--dry-run").splitlines()
    assert f"missing  {gone}" in dry and f"done     {empty}" in dry
    assert dry[-1].startswith("Runs missing: 11 of 15")
    assert succeed(project).splitlines()[-1] == "Runs complete: 15 of 15, in runs."
    assert started(project)[5:] == [gone, *names[5:]] and completed(project) == sorted(names)


def test_failures_are_recorded_and_the_grid_goes_on(project):
    (project / "runs").mkdir()
    (project / "runs/benchmark.jsonl").write_text('"half a li')  # from when the disk was full
    plans = {"torch__": "crash", "torch_compile": "hang", "linen": "killed", "nnx__": "silent"}
    flags = ["--timeout", "2", "--repeats", "1", "--seed", "7", "--gpus", "0,1", "--no-report"]
    driver = bench(project, *flags, "--notes", "@first=\n5", **plans)
    assert (driver.returncode, driver.stderr) == (1, "")
    assert [cell_of(name)["script"] for name in completed(project)] == ["nnx_cached"]
    assert len(started(project)) == 5  # one GPU does not repeat what failed on the other
    assert not processes_in(project)  # one had left a child in a session of its own
    lines = (project / "runs/benchmark.jsonl").read_text().splitlines()
    grid, *events = map(json.loads, lines[1:])
    assert (grid["event"], grid["study"], grid["runs"], grid["repeats"]) == ("grid", "quick", 5, 1)
    assert (grid["order_seed"], grid["notes"]) == (7, "@first=\n5")
    starts = [x for x in events if x["event"] == "start"]
    assert sorted(x["line"] for x in starts) == [1, 2, 3, 4, 5]
    assert all(x["run"] == x["command"].split()[-1] and len(x["load"]) == 3 for x in starts)
    ends = {cell_of(x["run"])["script"]: x for x in events if x["event"] == "end"}
    assert (ends["torch"]["exit_status"], ends["torch"]["completed"]) == (1, "no")
    assert "RuntimeError: shapes do not match \N{SNOWMAN}" in ends["torch"]["tail"]
    assert ends["torch_compile"]["reason"] == "no end after 2 s"
    assert ends["linen"]["exit_status"] == 137 and "memory" in ends["linen"]["reason"]
    assert (ends["nnx"]["exit_status"], ends["nnx"]["completed"]) == (0, "no")
    assert (ends["nnx_cached"]["exit_status"], ends["nnx_cached"]["completed"]) == (0, "yes")
    first, *lines, last = driver.stdout.splitlines()[-6:]
    assert first == "Runs not complete: 4 of 5:"
    assert any("torch__25it__seed1: exit status 1, after " in line for line in lines)
    assert last.startswith(f"To run them again: ./benchmark.sh {' '.join(flags)} --notes $'")
    succeed(project, *flags)
    assert len(started(project)) == 9


@pytest.mark.parametrize("study", ["async", "quick"])
def test_what_takes_over_two_hours_says_so_before_it_starts(project, study):
    driver = start(project, study, "--repeats", "5", **{"__": "hang"})
    wait_for(lambda: started(project))
    driver.terminate()
    lines = finish(driver).stdout.splitlines()
    assert [x.startswith("This takes about 196 hours on two cores: 540 runs.") for x in lines] == (
        [True, False] if study == "async" else [False]
    )


def test_a_study_has_commands_at_its_begin_and_end(project):
    add_grid(project, "begin begin.py\nrun CartPole-v1 own linen\nend end.py RUNS/x RUNS\n")
    (project / "begin.py").write_text("import sys\nsys.exit('not today')")
    driver = bench(project, "mine")
    assert (driver.returncode, driver.stderr, started(project)) == (2, "not today\n", [])
    (project / "begin.py").write_text("")
    (project / "end.py").write_text("import sys\nprint(sys.argv)\nsys.exit(1)")
    (project / "analysis/__main__.py").write_text("raise SystemExit(1)")
    assert succeed(project, "mine", "--runs-dir", "my & runs").splitlines()[-4:] == [
        "['end.py', 'my & runs/x', 'my & runs']",
        "This failed at the end: python end.py RUNS/x RUNS",
        "The report could not be made; the runs are in my & runs.",
        "Runs complete: 1 of 1, in my & runs.",
    ]


@pytest.mark.parametrize(
    ("sent", "status", "send"),
    [("SIGINT", 130, os.killpg), ("SIGTERM", 143, os.kill), ("SIGHUP", 129, os.killpg)],
)
def test_stopping_leaves_no_process(project, sent, status, send):
    """A terminal's Ctrl-C or its end reaches the driver's whole process group."""
    driver = start(project, "--gpus", "0,1", **{"__": "hang"})
    wait_for(lambda: programs_in(project).count("sleep") == 2)
    send(driver.pid, getattr(signal, sent))
    assert finish(driver).returncode == status
    words = "Stopped. Completed runs are kept; to go on: ./benchmark.sh --gpus 0,1\n"
    assert driver.stderr == words
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


def test_two_drivers_on_two_gpus_share_a_grid(project):
    """Each cell once, and on a GPU one run at a time: else both measurements would be spoilt."""
    gpus = ("0", "GPU-8f3c7e21-0b7d")
    drivers = [start(project, "--gpus", ",".join(gpus), **{"__": "0.2"}) for _ in range(2)]
    assert [finish(driver).returncode for driver in drivers] == [0, 0]
    assert sorted(started(project)) == completed(project) and len(completed(project)) == 15
    by_gpu = [[x for x in trace(project) if x[2] == f"gpu={gpu}"] for gpu in gpus]
    assert all(len(events) >= 4 and overlaps(events) == 0 for events in by_gpu)
    assert overlaps(trace(project)) > 0 and sum(map(len, by_gpu)) == 30
    variables = info_of(project, completed(project)[0])["variables"]
    assert variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_full_disk_stops_the_grid(project):
    (project / "runs").mkdir()
    wrapper = ("unshare", "--mount", "--map-root-user", "sh", "-c")
    mount = f"mount -t tmpfs -o size=4m none {project}/runs &&"
    if subprocess.run([*wrapper, f"{mount} true"], capture_output=True).returncode:
        pytest.skip("needs user namespaces, to mount a small disk")
    names = names_of(project, "--repeats", "1")
    keep = f'{mount} "$0" "$@"; status=$?; cp -r runs kept; exit $status'
    plan = {cell_of(names[2])["script"] + "__25": "fill"}
    driver = bench(project, "--repeats", "1", "--no-report", wrapper=(*wrapper, keep), **plan)
    assert driver.returncode == 1 and started(project) == names[:3]
    assert "no room left in runs, so the grid stops" in driver.stderr
    assert all((project / "kept" / name / "run.json").stat().st_size for name in names[:2])
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
            list(map(json.loads, (runs / "benchmark.jsonl").read_text().splitlines()))
            shutil.rmtree(runs)


@pytest.mark.parametrize("victim", ["driver", "driver, then run", "run"])
def test_a_long_run_goes_on_from_its_checkpoint(project, victim):
    """A short one starts anew: its durations must be those of one process."""
    line = "run @minatar own linen"
    lines = [f"{line} iterations=20", f"{line} iterations=100 --save-every 20", f"{line} name=last"]
    add_grid(project, "\n".join(lines))
    short, long, last = names_of(project, "mine")
    (project / "runs" / short).mkdir(parents=True)
    (project / "runs" / short / "checkpoint.npz").write_text("8")
    driver = start(project, "mine", **{"100it": "long"})
    wait_for(lambda: ["iteration-5", long] in [x[:2] for x in trace(project)])
    (run,) = [x for x in processes_in(project) if "ppo_linen.py" in x.cmdline()[1:2]]
    if "driver" in victim:
        driver.send_signal(signal.SIGINT if victim == "driver" else signal.SIGKILL)
        driver.wait()
    if "run" in victim:  # it outlives a driver that was killed
        run.kill()
    finish(driver)
    wait_for(lambda: not processes_in(project))
    assert started(project) == [short, long] + [last] * (victim == "run")
    assert f"stopped  {long}" in succeed(project, "mine", "--dry-run")
    succeed(project, "mine", **{"100it": "long"})
    assert info_of(project, short)["first"] == 0 and info_of(project, long)["first"] >= 5
    text = (project / "runs/benchmark.jsonl").read_text()
    assert text.count(f'ppo_linen.py --resume runs/{long}"') == text.count("--resume") == 1
    (kept,) = (project / "runs/.benchmark/partial").iterdir()
    assert kept.name.startswith(short)


# === The real scripts ===========================================================================
def test_a_small_real_grid(tmp_path):
    """Of a script and of a copy under another name; the report takes the grid's runs alone."""
    shutil.copy(ROOT / "ppo_linen.py", tmp_path / "mine.py")
    runs, scripts = tmp_path / "runs", f"linen,{tmp_path}/mine.py"
    flags = ("--scripts", scripts, "--iterations", "1", "--runs-dir", str(runs))
    driver = bench(ROOT, *flags, env=environment(tmp_path))
    assert driver.returncode == 0, driver.stdout + driver.stderr
    for name in completed(tmp_path):
        run = info_of(tmp_path, name)
        assert run["status"] == "completed" and run["peak_host_bytes"] > 0
        assert len(run["machine"]) == 8 and run["cores"] == psutil.cpu_count(logical=False)
    assert sorted(load(runs).runs["mode"]) == ["mine", "ppo_linen"]
    ends = [f"Report: {runs}/report/report.html", f"Runs complete: 2 of 2, in {runs}."]
    assert driver.stdout.splitlines()[-2:] == ends
    # The same run by hand, and later, would take its place.
    (first,) = runs.glob("*__linen__*")
    shutil.copytree(first, runs / "by_hand")
    text = (runs / "by_hand/run.json").read_text()
    (runs / "by_hand/run.json").write_text(text.replace('"started": "20', '"started": "21'))
    assert "by_hand" in set(load(runs).runs["run"])
    found = load(runs, only=[first.name])
    assert list(found.runs["run"]) == [first.name] and not found.left_out
    assert found.notes == (f"Left out, since the grid does not list them: 2 of the runs in {runs}",)
