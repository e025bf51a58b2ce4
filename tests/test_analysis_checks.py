"""What is odd about runs is named, and a study with faults is packed only if asked."""

import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fake_runs import metrics_rows, run_info, write_grid, write_run
from made_up import LINEN, TORCH, data_of, grid, logs

from analysis import __main__, checks
from analysis.runs import load

ENVS = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0")


# === Of the runs ================================================================================
def odd(frame, iterations, **more):
    return checks.odd(data_of(frame, iterations, **more))


def test_of_clean_runs_nothing_is_said_however_wide_their_intervals():
    frame = grid({LINEN: (6.0, 0.1), TORCH: (8.0, 2.0)}, ENVS, repeats=2, noise=0.3)
    assert odd(frame, logs(frame)) == []
    assert odd(frame, logs(frame.head(0))) == []


def test_every_kind_of_oddity_is_named():
    frame = grid({LINEN: (6.0, 0.1), TORCH: (8.0, 2.0)}, repeats=4)
    iterations = logs(frame)
    names = frame["run"].tolist()

    def of(i, first=0):
        return (iterations["run"] == names[i]) & (iterations["iteration"] >= first)

    frame.loc[0, ["load", "cores"]] = 9.5, 2
    frame.loc[1, "steady"] = 0.2
    frame.loc[2, "commit"] = "b" * 40 + "-dirty"
    iterations.loc[of(4, 7), "losses/entropy"] = np.nan
    iterations.loc[of(7), "losses/entropy"] = np.nan  # from the start on
    iterations.loc[of(5, 5) & (iterations["iteration"] == 5), "time/iteration"] = 60.0
    iterations.loc[of(6, 9), "time/iteration"] = 3.0
    found = odd(frame, iterations, left_out={"broken": "no run.json"}, notes=("A note",))
    assert found == [
        "1 run left out: broken (no run.json).",
        "2 runs diverged, with losses that are no numbers to the end: "
        f"{names[4]} from iteration 7 on and {names[7]} from iteration 0 on.",
        "1 run compiling again, perhaps, with a slow iteration after the first: "
        f"{names[5]} (iteration 5: 60.0 s).",
        f"1 run 1.5 times their cell's median or more in an iteration, or as much less: {names[1]} "
        "(2.00).",
        f"1 run made while others used the machine too: {names[0]}.",
        f"1 run made with files changed since the commit: {names[2]}.",
        "A note.",
    ]


@pytest.mark.parametrize(("steady", "named"), [(0.1501, True), (0.1499, False), (0.0666, True)])
def test_an_outlier_takes_one_and_a_half_times_its_cells_median_or_as_much_less(steady, named):
    frame = grid({LINEN: (6.0, 0.1)}, repeats=3)
    frame.loc[1, "steady"] = steady
    assert (len(odd(frame, logs(frame))) == 1) == named
    assert odd(frame.head(2), logs(frame)) == []  # a cell of two has none
    frame["resumed"] = frame["steady"] != 0.1  # nor has a run without durations of its own
    assert odd(frame, logs(frame)) == []


def test_runs_of_a_library_that_logs_no_losses_did_not_diverge():
    frame = grid({LINEN: (6.0, 0.1), "sb3": (8.0, 2.0)}, repeats=2)
    iterations = logs(frame, loss=lambda run, i: np.nan if run["mode"] == "sb3" else 0.5)
    assert odd(frame, iterations) == []


# === Of a study =================================================================================
def pack(*arguments):
    """Run the command in this process; return its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["analysis", "pack", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            __main__.main()
    return end.value.code


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "several commits": ({"git_commit": "b" * 40}, "2 commits"),
    "changed files": ({"git_commit": "a" * 40 + "-dirty"}, "not committed"),
    "another machine": ({"machine": "3fa9"}, "2 machines, where a study has one"),
    "other versions": ({"versions": {"torch": "1", "jax": "2", "flax": "3"}}, "different versions"),
    "a busy machine": ({"load": 9.0}, "1 run made while others used the machine"),
    "a resumed run": ({"resumed": [3]}, "1 run stopped and resumed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_reader_would_hold_against_a_study_is_named(tmp_path, fault):
    changes, words = FAULTS[fault]
    write_grid(tmp_path, repeats=1, envs=("CartPole-v1",))
    assert checks.problems(load(tmp_path)) == []
    for mode in ("linen jit", "nnx cached_partial", "torch compile"):
        info = run_info(mode, seed=2, **(changes if mode == "linen jit" else {}))
        write_run(tmp_path, info, metrics_rows(info, np.full(12, 0.1), np.arange(12.0)))
    found = checks.problems(load(tmp_path))
    assert words in found[-1]
    assert len(found) == 1 + (fault == "changed files")  # which are another commit, too


def test_a_study_of_a_machine_that_differs_since_its_last_start_is_of_two():
    first = grid({LINEN: (6.0, 0.1)}, repeats=5, noise=0.01, boot="a", commit="c")
    second = grid({LINEN: (6.0, 0.2)}, repeats=5, noise=0.01, boot="b", commit="c", seed=1)
    second["repeat"] += 5
    both = data_of(pd.concat([first, second]))
    assert checks.problems(both) == ["2 machines, where a study has one"]
    assert checks.problems(data_of(first)) == []


def test_a_peer_lacks_packages_and_the_study_is_sound():
    runs = grid(dict.fromkeys(("ppo_linen", "sb3"), (5.0, 0.1)), commit="a" * 40, torch="2.13.0")
    runs["jax"] = ["0.10.2", ""]
    assert checks.problems(data_of(runs)) == []
    runs.loc[runs["mode"] == "sb3", "torch"] = "2.12.0"
    assert "different versions" in checks.problems(data_of(runs))[0]


def test_a_packed_study_is_the_same_runs_and_one_with_faults_is_packed_if_asked(tmp_path, capsys):
    grid = write_grid(tmp_path / "runs")
    assert pack(grid, tmp_path / "study") == 0
    assert "12 runs" in capsys.readouterr().out
    ours, packed = load(grid), load(tmp_path / "study")
    pd.testing.assert_frame_equal(ours.runs.assign(source=""), packed.runs)
    pd.testing.assert_frame_equal(ours.iterations, packed.iterations)
    assert pack("--check", tmp_path / "study") == 0
    broken = next(grid.glob("*linen*"))
    (broken / "run.json").unlink()
    assert pack(grid, tmp_path / "again") == 1
    said = capsys.readouterr().err
    assert "1 run left out" in said
    assert "ppo_linen lacks 1 run that others have" in said
    assert not (tmp_path / "again").exists()
    assert pack(grid, tmp_path / "again", "--anyway") == 0
    assert broken.name in load(tmp_path / "again").left_out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["runs"], "pack needs a folder to write, or --check"),
        (["runs", "runs"], "must be a folder for a study, without runs in it"),
        (["nothing", "out"], "nothing is not a folder of runs"),
        (["runs", "file"], "exists: 'file'"),
    ],
)
def test_bad_usage_is_one_sentence(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    write_grid(tmp_path / "runs", repeats=1)
    assert pack(*arguments) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
