"""What N agents cost: one program for all, or a process for each; and what is said of that."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
from conftest import ROOT
from fake_runs import metrics_rows, run_info, write_run
from made_up import table
from scipy import stats as scipy_stats
from test_driver import wait_for

from analysis import agents, schema
from analysis.pack import of_first_agents, problems
from analysis.runs import Data, load, save
from analysis.schema import SourceError
from studies.agents import side_by_side

COUNTS = (1, 2, 4, 8)
CORES = 2


# === Tables of runs whose truth is known ========================================================
def program(mode, count, repeat, seconds, steady, memory=1e9, first_return=480.0):
    """A row per agent of a program; its first has the durations."""
    first = 1000 * (repeat - 1) + 1
    return [
        {"run": f"{mode} {count} {repeat}/seed{first + k}", "mode": mode, "num_agents": count}
        | {"agent": k, "seed": first + k, "repeat": first + k, "settings": settings(count)}
        | {"process": seconds if k == 0 else None, "steady": steady if k == 0 else None}
        | {"peak_host_bytes": memory, "final_return": first_return + k % 5}
        for k in range(count)
    ]


def processes(mode, count, repeat, seconds, steady, memory=1e9, offset=0):
    """A row per process; of those side by side, each takes a second less than the one before."""
    first, beside = 1000 * (repeat - 1) + 1 + offset, f", {count} side by side" * (count > 1)
    return [
        {"run": f"{mode}{beside} {repeat} {offset}/seed{first + k}", "mode": f"{mode}{beside}"}
        | {"seed": first + k, "repeat": first + k, "process": seconds - k, "steady": steady}
        | {"peak_host_bytes": memory, "final_return": 481.0 + k, "settings": settings()}
        for k in range(count)
    ]


def settings(count=None):
    return json.dumps({"gamma": 0.99} | ({"num_agents": count} if count else {}))


NOISE = (1.0, 1.1, 0.95)  # of a repeat, the same in all ways: it cancels in ratios


def made_up(repeats=3, **changes):
    """Linen: vmap takes 10 + N seconds, alone 8, two side by side 12; one scan 12 + N."""
    rows = []
    for repeat, noise in zip(range(1, repeats + 1), NOISE, strict=False):
        for count in COUNTS:
            rows += program("ppo_linen_vmap", count, repeat, noise * (10 + count), 0.1)
            rows += program("one_scan", count, repeat, noise * (12 + count), 0.05)
        for offset in range(4):
            rows += processes("ppo_linen", 1, repeat, noise * 8, 0.04, offset=offset)
        for offset in (4, 24):  # as the preset has it
            rows += processes("ppo_linen", CORES, repeat, noise * 12, 0.08, offset=offset)
    # A ratio without any spread has no width: a little of it, so that intervals are intervals.
    rng = np.random.default_rng(0)
    for row in rows:
        if row["process"]:
            row["process"] *= np.exp(0.001 * rng.standard_normal())
    for row in rows:
        row["startup"] = row["process"] and row["process"] * 5 / 8
    common = {"batch_size": 8192.0, "num_iterations": 100.0} | changes
    frame = table(rows, **common)
    return Data(frame, schema.complete(pd.DataFrame(), schema.ITERATIONS), {})


def cell(own, way, count, framework="linen"):
    rows = own.summary
    here = (rows["framework"] == framework) & (rows["way"] == way) & (rows["agents"] == count)
    [row] = rows[here].to_dict("records")
    return row


def test_what_each_way_costs():
    own = agents.study(made_up())
    middle = scipy_stats.gmean(NOISE)
    for count in COUNTS:
        vmap, after = cell(own, agents.VMAP, count), cell(own, agents.AFTER, count)
        assert vmap["seconds"] == pytest.approx(middle * (10 + count), rel=0.01)
        assert vmap["rate"] == pytest.approx(count * 8192 / 0.1) and vmap["bytes"] == pytest.approx(
            1e9
        )
        assert after["seconds"] == pytest.approx(middle * 8 * count, rel=0.01)
        assert after["rate"] == pytest.approx(8192 / 0.04)
        assert after["measured"] == (count == 1) and vmap["measured"]
        beside = cell(own, agents.BESIDE, count)
        # The last two take as long as the longer of them, those before as long as their mean.
        seconds = 8 if count == 1 else 12 + (count / CORES - 1) * 11.5
        assert beside["seconds"] == pytest.approx(middle * seconds, rel=0.01)
        assert math.isnan(after["bytes_low"]) and vmap["seconds_low"] < vmap["seconds"]
        warm = (8 + (count - 1) * 3) * middle  # five of its eight seconds are its start
        assert vmap["started"] == pytest.approx(middle * (10 + count) / warm, rel=0.05)
        assert beside["rate"] == pytest.approx(8192 / 0.04 if count == 1 else 2 * 8192 / 0.08)
        assert beside["bytes"] == pytest.approx(min(count, CORES) * 1e9)
        assert beside["measured"] == (count <= CORES)
        assert vmap["after"] == pytest.approx((10 + count) / (8 * count), rel=0.01)
        assert vmap["after_low"] < vmap["after"] < vmap["after_high"]
        assert vmap["after_high"] / vmap["after_low"] < 1.05  # the noise of repeats cancels
        scan = cell(own, agents.SCAN, count)
        assert scan["vmap"] == pytest.approx((12 + count) / (10 + count), rel=0.01)
        assert scan["vmap_iteration"] == pytest.approx(0.5)
        assert vmap["growth"] == pytest.approx(count)


def test_side_by_side_is_calculated_where_the_processes_divide_the_agents():
    """Three at a time: of 6 agents, the first three take 29 s in the mean, the last 30 s."""
    rows, counts = processes("ppo_linen", 3, 1, 30.0, 0.1), [1, 2, 3, 6, 8]
    for count in counts:
        rows += program("ppo_linen_vmap", count, 1, 5.0, 0.1)
    common = {"batch_size": 10.0, "num_iterations": 9, "startup": 1.0}
    own = agents.study(made_up()._replace(runs=table(rows, **common)))
    beside = own.costs[own.costs["way"] == agents.BESIDE]
    assert beside["agents"].tolist() == [3, 6]  # one process alone was not measured
    assert beside["seconds"].tolist() == [30, 59] and beside["measured"].tolist() == [True, False]
    assert beside["bytes"].tolist() == pytest.approx([3e9, 3e9])
    assert beside["rate"].tolist() == pytest.approx([300, 300])
    none = own.runs["num_agents"].isin([3, 6])
    said = agents.sentences(agents.study(made_up()._replace(runs=own.runs[~none])))
    assert "No N is a multiple of 3, as many processes as ran side by side." in said
    assert "Flax Linen, vmap against ppo_linen one after another: not measured." in said


def test_of_groups_of_two_sizes_one_counts():
    data = made_up()
    more = table(processes("ppo_linen", 4, 1, 1.0, 0.1), batch_size=8192.0, num_iterations=100.0)
    both = agents.study(data._replace(runs=pd.concat([data.runs, more], ignore_index=True)))
    assert both.summary.equals(agents.study(data).summary)
    said = agents.sentences(both)
    assert "1 group of other than 2 processes side by side left out." in said


def test_several_processes_alone_in_a_repeat_are_one_number():
    data = made_up()
    one = data.runs["run"] == "ppo_linen 1 2/seed3"
    assert one.sum() == 1
    data.runs.loc[one, "process"], data.runs.loc[one, "peak_host_bytes"] = 24.0, 3e9
    own = agents.study(data)
    after = own.costs[(own.costs["way"] == agents.AFTER) & (own.costs["agents"] == 8)]
    assert after["seconds"].tolist() == pytest.approx([8 * 12, 8 * 8.8, 8 * 7.6], rel=0.01)
    assert cell(own, agents.AFTER, 8)["bytes"] == 3e9  # the most, and no mean


@pytest.mark.parametrize(
    "changed, said",
    [
        ({8: None}, "it is done sooner from 2 to 4 agents .* there are too few runs with N = 8"),
        (
            {4: None},
            "it is done sooner with N = 8 .*; by single intervals it is done sooner with N = 2",
        ),
        (
            {8: 1e3},
            "by single intervals it is done sooner with N = 2 .*by .* it takes longer with N = 8",
        ),
        (
            {2: 16},
            r"from 4 to 8 agents .*; it takes longer .* = 1 .*; no difference .* = 2 \(",
        ),
    ],
)
def test_what_a_lacking_or_slow_n_leaves_to_claim(changed, said):
    """One after another takes 8 N; vmap takes what is given, else 10 + N."""
    data = made_up()
    for count, seconds in changed.items():
        one = (data.runs["mode"] == "ppo_linen_vmap") & (data.runs["num_agents"] == count)
        if seconds is None:
            data = data._replace(runs=data.runs[~(one & (data.runs["repeat"] > 1))])
        elif seconds == 16:
            noise = data.runs["repeat"].map({1: 0.9, 1001: 1.2, 2001: 1.0})
            data.runs.loc[one, "process"] = 16 * noise[one]
        else:
            data.runs.loc[one & data.runs["process"].notna(), "process"] *= seconds
    after = next(x for x in agents.sentences(agents.study(data)) if "one after another" in x)
    assert re.search(said, after), after


def test_what_was_left_out_is_said():
    data = made_up()
    stopped = (data.runs["mode"] == "one_scan") & (data.runs["num_agents"] == 1)
    data.runs["resumed"] = stopped
    said = agents.sentences(agents.study(data._replace(left_out={"agents-8": "killed"})))
    assert "1 run failed or not whole: agents-8." in said
    assert "3 runs stopped and resumed: without durations." in said
    assert any("one scan" in x and "too few runs with N = 1" in x for x in said)


def test_what_is_said():
    said = agents.sentences(agents.study(made_up()))
    assert said[0] == "CartPole-v1, the small network, 100 iterations, 3 repeats."
    after = next(x for x in said if "ppo_linen one after another" in x)
    assert re.match(
        r"Flax Linen, vmap against .*: it is done sooner from 2 to 8 agents \(0.75\d?", after
    )
    assert "0.281 [" in after and "of its time at 8" in after
    assert re.search(r"it takes longer with N = 1 \(1.3\d", after)
    started = next(x for x in said if "import and compile" in x)
    assert re.search(r"of 8 processes .* vmap would take 0.6\d\d? \[.* of their time", started)
    beside = next(x for x in said if "side by side" in x)  # 12 against 12, 14 against 23.5
    assert (
        "from 4 to 8 agents" in beside
        and "no difference can be shown" in beside
        and "N = 2 (" in beside
    )
    growth = next(x for x in said if "steps per second" in x)
    assert "8 agents in one program take 8.00" in growth and "655,360 against 81,920" in growth
    scan, steady = (x for x in said if "one scan" in x)
    assert "vmap: it takes longer with N = 1 (1.18" in scan and "sooner" not in scan
    assert "one in vmap: it is done sooner from 1 to 8 agents (0.500" in steady
    memory = next(x for x in said if "MB" in x)
    assert "1,000 MB with 1 and 1,000 MB with 8, a process of one agent 1,000 MB" in memory
    assert "together 2,000 MB" in memory
    returns = next(x for x in said if "final returns" in x)
    assert "ppo_linen_vmap and ppo_linen were trained from 18 seeds in common" in returns
    assert "equivalent (the first minus" in returns and "margin 25" in returns
    assert len(said) == 9


def test_where_vmap_never_pays_it_is_said():
    data = made_up()
    slow = data.runs["mode"] == "ppo_linen_vmap"
    data.runs.loc[slow, "process"] *= 100
    said = " ".join(agents.sentences(agents.study(data)))
    assert "is done sooner" not in said.split("one scan")[0]
    assert re.search(r"ppo_linen one after another: it takes longer with N = 1 \(.*and 8 \(", said)


def test_steps_per_second_that_vary_are_no_claim():
    data = made_up()
    last = (data.runs["mode"] == "ppo_linen_vmap") & (data.runs["num_agents"] == COUNTS[-1])
    data.runs.loc[last, "steady"] *= data.runs.loc[last, "repeat"].map({1: 1, 1001: 30, 2001: 9})
    [growth] = [x for x in agents.sentences(agents.study(data)) if "steps per second" in x]
    assert "no difference in steps per second can be shown" in growth and "1.24 [" in growth


def test_of_one_repeat_nothing_is_claimed():
    said = agents.sentences(agents.study(made_up(1)))
    assert sum("nothing can be claimed" in x for x in said) == 4
    assert not any("sooner" in x or "longer" in x for x in said)
    assert any("of one repeat, this is no claim" in x for x in said)
    assert any("from 6 seeds in common" in x for x in said)


def test_a_group_that_is_not_whole_is_left_out():
    data = made_up()
    [last] = data.runs.index[data.runs["run"] == "ppo_linen, 2 side by side 3 4/seed2006"]
    own = agents.study(data._replace(runs=data.runs.drop(index=last)))
    assert any("has 1 of 2 runs: left out" in x for x in agents.sentences(own))
    assert cell(own, agents.BESIDE, 4)["repeats"] == 3  # the repeat's other group is whole
    assert len(own.runs) == len(data.runs) - 1


def test_other_settings_and_lengths_are_not_mixed_in():
    data = made_up()
    other = program("ppo_linen_vmap", 2, 1, 1.0, 0.1)
    short = table(other, batch_size=8192.0, num_iterations=25.0)
    short["run"] += " short"
    own = agents.study(data._replace(runs=pd.concat([data.runs, short], ignore_index=True)))
    assert cell(own, agents.VMAP, 2)["seconds"] > 10
    assert "2 runs of other machines, settings or lengths left out." in agents.sentences(own)


def test_without_a_program_of_many_there_is_no_study():
    data = made_up()
    for mode, words in (("ppo_linen", "no run is of a program"), ("", "there are no runs")):
        runs_of = data.runs[data.runs["mode"] == mode]
        with pytest.raises(SourceError, match=words):
            agents.study(data._replace(runs=runs_of))


def test_a_study_says_what_its_runs_say_and_is_drawn(tmp_path, monkeypatch, capsys):
    """What is packed is enough; and the table, the figure and the sentences are written."""
    data = made_up()
    save(data, tmp_path / "study")
    assert agents.sentences(agents.study(load(tmp_path / "study"))) == agents.sentences(
        agents.study(data)
    )
    out = tmp_path / "report/agents.csv"
    monkeypatch.setattr(sys, "argv", ["agents", str(tmp_path / "study"), str(out)])
    agents.main()
    assert "from 2 to 8 agents" in capsys.readouterr().out
    assert len(pd.read_csv(out)) == 4 * len(COUNTS)
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    own = agents.study(data)
    cells = agents.seconds_table(own).cells
    assert list(cells) == ["framework", "way", "1", "2", "4", "8"] and len(cells) == 4
    assert set(agents.ratio_table(own).cells["way"]) == set(agents.WAYS[:-1])
    assert agents.rate_table(own).cells["8"][0].startswith("655")
    assert agents.memory_table(own).cells["8"].tolist() == ["1,000", "1,000", "2,000", "1,000"]


def test_of_a_packed_study_the_first_agents_are_enough():
    data = made_up()
    logs = pd.DataFrame({"run": data.runs["run"], "iteration": 0.0, "global_step": 8192.0})
    data = data._replace(iterations=schema.complete(logs, schema.ITERATIONS))
    assert problems(data) == [
        "runs of scripts that are not committed, so nobody can make them again"
    ]
    small = of_first_agents(data)
    assert len(small.runs) == len(data.runs) == 2 * 3 * sum(COUNTS) + 3 * 8
    assert len(small.iterations) == 2 * 3 * len(COUNTS) + 3 * 8 and len(small.notes) == 1
    assert agents.sentences(agents.study(small)) == agents.sentences(agents.study(data))
    lacking = data.runs["run"] != "one_scan 1 3/seed2001"
    others = lacking & ~data.runs["run"].str.match("one_scan . 3/seed2001")
    assert "one_scan lacks 4 runs that others have" in problems(
        data._replace(runs=data.runs[others])
    )


@pytest.mark.parametrize("name", ["x.png", "runs.csv"])
def test_another_file_to_write_is_refused(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["agents", str(tmp_path), str(tmp_path / name)])
    with pytest.raises(SystemExit, match="2"):
        agents.main()
    assert "must end in .csv" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["agents", str(tmp_path), str(tmp_path / "x.csv")])
    with pytest.raises(SystemExit, match="2"):
        agents.main()
    assert capsys.readouterr().err.count("\n") == 1


# === Processes side by side =====================================================================
SMALL = "--total-timesteps 256 --num-envs 4 --num-steps 32 --hidden-sizes 8 --num-minibatches 2"
SMALL += " --update-epochs 2"
SLEEPER = """
import os, subprocess, sys, time
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
subprocess.Popen(["sleep", "1000"])
open(flags["--runs-dir"] + "/" + flags["--run-name"] + ".pid", "w").close()
time.sleep(1000)
"""


def run_side_by_side(tmp_path, *words, wait=True):
    module = "studies.agents.side_by_side"
    command = [sys.executable, "-m", module, *words, "--runs-dir", str(tmp_path)]
    process: Any = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"SIDE_BY_SIDE_TEST": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if wait:
        process.stdout, process.stderr = map(str, process.communicate(timeout=300))
    return process


def left_of(tmp_path):
    """The processes that a test's command started, at any remove, by their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            mine = process.environ().get("SIDE_BY_SIDE_TEST") == str(tmp_path)
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_real_processes_side_by_side(tmp_path):
    words = ["ppo_linen.py", *SMALL.split(), "--seed", "7", "--run-name", "both"]
    process = run_side_by_side(tmp_path, *words)
    assert process.returncode == 0, process.stderr
    cores, folder = len(side_by_side.usable_cores()), tmp_path / "both"
    assert json.loads((folder / "side_by_side.json").read_text()) == {"processes": cores}
    own = json.loads((folder / "run.json").read_text())
    found = [json.loads(x.read_text()) for x in sorted(folder.glob("*/run.json"))]
    assert [x["args"]["seed"] for x in found] == list(range(7, 7 + cores))
    assert own["status"] == "completed" and own["processes"] == cores
    assert own["peak_host_bytes"] == sum(x["peak_host_bytes"] for x in found) > 1e8 * cores
    lasted = [x["durations"]["imports"] + x["durations"]["total"] for x in found]
    assert max(lasted) <= own["seconds"] < sum(lasted) + 10
    data = load(tmp_path)
    assert not data.left_out and set(data.runs["mode"]) == {f"ppo_linen, {cores} side by side"}
    assert data.runs["run"].tolist() == [f"both/seed{7 + k}" for k in range(cores)]
    again = run_side_by_side(tmp_path, *words)
    assert again.returncode == 2 and again.stderr.count("\n") == 1 and "exists" in again.stderr


def test_a_container_with_time_for_fewer_cores_gets_fewer_processes(tmp_path, monkeypatch):
    limit = tmp_path / "cpu.max"
    monkeypatch.setattr(side_by_side, "CGROUP", limit)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(side_by_side, "TOPOLOGY", str(tmp_path / "{}{}"))  # which is hidden
    assert side_by_side.usable_cores() == [{0}, {1}, {2}, {3}]
    for text, cores in (
        ("max 100000", [{0}, {1}, {2}, {3}]),
        ("800000 100000", [{0}, {1}, {2}, {3}]),
        ("250000 100000", [set(), set()]),  # the system places them
        ("50000 100000", [set()]),
    ):
        limit.write_text(f"{text}\n")
        assert side_by_side.usable_cores() == cores


def test_a_process_that_fails_fails_them_all(tmp_path):
    words = ["ppo_linen.py", "--num-envs", "0", "--run-name", "bad"]
    process = run_side_by_side(tmp_path, *words)
    assert process.returncode == 1 and "seed1 ended with status 2" in process.stderr
    assert (tmp_path / "bad/side_by_side.json").exists()
    assert not (tmp_path / "bad/run.json").exists()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=str
)
def test_killed_it_leaves_no_process(number, tmp_path):
    script = tmp_path / "ppo_sleeper.py"
    script.write_text(SLEEPER if number != signal.SIGKILL else SLEEPER.replace("subprocess.P", "#"))
    cores = len(side_by_side.usable_cores())
    process = run_side_by_side(tmp_path, str(script), "--run-name", "x", wait=False)
    try:
        wait_for(lambda: len([*(tmp_path / "x").glob("*.pid")]) == cores)
        each = 1 if number == signal.SIGKILL else 2
        assert len(left_of(tmp_path)) == 1 + each * cores
        process.send_signal(number)
        assert process.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
        wait_for(lambda: not left_of(tmp_path))
        assert not (tmp_path / "x/run.json").exists()
    finally:
        for one in left_of(tmp_path):
            one.kill()
        process.communicate()


@pytest.mark.parametrize(
    "words, said",
    [
        (["keras.py"], "must be a script"),
        (["README.md"], "must be a script"),
        (["ppo_linen_vmap.py"], "trains several agents already"),
        (["ppo_linen.py", "--track"], "--track is for a process alone"),
        (["ppo_linen.py", "--resume=runs/x"], "--resume is for a process alone"),
    ],
)
def test_what_cannot_run_side_by_side_is_one_sentence(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x", *words, "--runs-dir", str(tmp_path / "new")])
    with pytest.raises(SystemExit, match="2"):
        side_by_side.main()
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not (tmp_path / "new").exists()


def side_by_side_folder(tmp_path, content, metrics=False):
    info = run_info(seed=3)
    info["args"]["run_name"] = "seed3"
    write_run(tmp_path / "pair", info, metrics_rows(info, np.ones(12), np.arange(12.0)))
    (tmp_path / "pair/side_by_side.json").write_text(content)
    (tmp_path / "pair/run.json").write_text('{"status": "completed"}')
    alone = run_info(seed=3)
    write_run(tmp_path, alone, metrics_rows(alone, np.ones(12), np.arange(12.0)))
    if metrics:
        (tmp_path / "pair/metrics.jsonl").write_text("")


def test_runs_side_by_side_are_never_taken_for_runs_alone(tmp_path):
    side_by_side_folder(tmp_path, '{"processes": 2}')
    data = load(tmp_path)
    assert sorted(data.runs["mode"]) == ["ppo_linen", "ppo_linen, 2 side by side"]
    assert not data.left_out  # not even their folder, which has a run.json
    [beside] = data.runs.index[data.runs["mode"] != "ppo_linen"]
    assert data.runs["algorithm"][beside] == "ppo" and data.runs["script"][beside] == "ppo_linen"
    within = load(tmp_path / "pair/seed3")  # the folder itself, too
    assert within.runs["mode"].tolist() == ["ppo_linen, 2 side by side"]


@pytest.mark.parametrize(
    "content",
    [
        *(
            "a pipe",
            "",
            "[",
            "[" * 100_000,
            "2",
            "{}",
            '{"processes": "2, faster"}',
            '{"processes": true}',
        ),
        *('{"processes": 0}', '{"processes": 1e9}', '{"processes": 99999}', '{"processes": null}'),
    ],
)
def test_what_does_not_say_how_many_there_were_leaves_its_runs_out(content, tmp_path):
    side_by_side_folder(tmp_path, content)
    if content == "a pipe":
        (tmp_path / "pair/side_by_side.json").unlink()
        os.mkfifo(tmp_path / "pair/side_by_side.json")
    data = load(tmp_path)
    assert data.runs["mode"].tolist() == ["ppo_linen"]
    assert list(data.left_out) == ["pair/seed3"]
    assert "must say how many processes there were" in data.left_out["pair/seed3"]


def test_a_run_cannot_hide_behind_that_file(tmp_path):
    side_by_side_folder(tmp_path, '{"processes": 2}', metrics=True)
    data = load(tmp_path)
    assert "pair" in data.left_out  # a run that is none, and named
    assert set(data.runs["mode"]) == {"ppo_linen"}


def test_a_failure_that_was_made_good_is_none(tmp_path):
    side_by_side_folder(tmp_path, '{"processes": 2}')
    event = {"event": "end", "run": "pair", "completed": "no", "reason": "exit status 1"}
    (tmp_path / "benchmark.jsonl").write_text(json.dumps(event) + "\n")
    assert not load(tmp_path).left_out
    (tmp_path / "pair/run.json").unlink()
    assert load(tmp_path).left_out == {"pair": "exit status 1"}


# === One scan ===================================================================================
def test_one_scan_computes_what_vmap_does(tmp_path, monkeypatch):
    import jax

    import ppo_linen_vmap
    from studies.agents import one_scan

    made: dict[str, Any] = {
        "num_agents": 3,
        "seed": 5,
        "runs_dir": str(tmp_path),
        "env_id": "CartPole-v1",
    }
    made |= {"num_envs": 4, "num_steps": 32, "hidden_sizes": (8,), "num_minibatches": 2}
    made |= {"update_epochs": 2, "total_timesteps": 4 * 128}
    for name, train in (("vmap", ppo_linen_vmap.train), ("scan", one_scan.train)):
        train(ppo_linen_vmap.Args(**made, run_name=name))
        jax.clear_caches()
    logs = {}
    for name in ("vmap", "scan"):
        paths = sorted((tmp_path / name).glob("*/metrics.jsonl"))
        assert len(paths) == 3
        logs[name] = [
            pd.read_json(x, lines=True) for x in [tmp_path / name / "metrics.jsonl", *paths]
        ]
        assert [json.loads((x.parent / "run.json").read_text())["agent"] for x in paths] == [
            0,
            1,
            2,
        ]
    for one, other in zip(logs["vmap"], logs["scan"], strict=True):
        same = [x for x in one if not x.startswith("time/") and x != "charts/SPS"]
        assert len(same) == 16 and len(other) == 4
        # equal but for rounding: a program compiled as a whole adds up in another order
        np.testing.assert_allclose(
            other[same].astype(float), one[same].astype(float), rtol=1e-3, atol=1e-4
        )
        seconds = other["time/iteration"].to_numpy()
        assert seconds[0] > 5 * seconds[1] and seconds[1:] == pytest.approx(seconds[1])
    info = json.loads((tmp_path / "scan/run.json").read_text())
    assert info["script"] == "one_scan" and info["compile_seconds"] > 0.1
    data = load(tmp_path)
    assert not data.left_out and set(data.runs["mode"]) == {"one_scan", "ppo_linen_vmap"}
    assert set(data.runs["algorithm"]) == {"ppo"} and data.runs["settings"].nunique() == 1
    import evaluate

    [folder] = [x.parent for x in (tmp_path / "scan").glob("*/run.json") if "6" in x.parent.name]
    assert evaluate.load_run(str(folder), ()).args.seed == 6


@pytest.mark.parametrize("flag", ["--no-jit", "--sync-for-timing", "--save-every=5", "--resume=x"])
def test_one_scan_has_nothing_within(flag, tmp_path, capsys):
    import tyro

    from studies.agents import one_scan

    words = [flag, "--runs-dir", str(tmp_path / "new"), "--run-name", "x"]
    with pytest.raises(SystemExit, match="2"):
        one_scan.check(tyro.cli(one_scan.Args, args=words))
    assert "has no such thing" in capsys.readouterr().err and not (tmp_path / "new").exists()
