"""Warnings about runs, and the checks before runs are packed into a study."""

import pytest
from made_up import ENVS, LINEN, TORCH, data_of, grid, logs, run_command, write_grid, write_plain

from analysis import checks, measures
from analysis.catalog import DIVERGED
from analysis.runs import load


# === Runs =======================================================================================
def warnings_of(frame, iterations, **more):
    return checks.run_warnings(data_of(frame, iterations, **more))


def test_clean_runs_give_no_warnings():
    frame = grid({LINEN: (6.0, 0.1), TORCH: (8.0, 2.0)}, ENVS, repeats=2, noise=0.3)
    assert warnings_of(frame, logs(frame)) == []
    assert warnings_of(frame, logs(frame.head(0))) == []


def test_all_kinds_of_warnings():
    frame = grid({LINEN: (6.0, 0.1), TORCH: (8.0, 2.0)}, repeats=4)
    names = frame["run"].tolist()
    frame.loc[0, ["load", "cores"]] = 9.5, 2
    frame.loc[2, "commit"] = "b" * 40 + "-dirty"
    left_out = {"broken": "no run.json", "nan": DIVERGED}
    found = warnings_of(frame, logs(frame), left_out=left_out, notes=("A note",))
    assert found == [
        "1 run diverged (NaN or infinite losses or parameters) and left out: nan.",
        "1 run left out: broken (no run.json).",
        f"1 run started while other processes used the machine: {names[0]}.",
        f"1 run started with uncommitted changes: {names[2]}.",
        "A note.",
    ]


def test_the_load_of_a_previous_run_on_all_cores_is_not_reported():
    frame = grid({LINEN: (6.0, 0.1)}, repeats=2, cores=2, load=[2.5, 2.51])
    assert measures.under_load(frame)["run"].tolist() == frame["run"].tolist()[1:]


# === Studies ====================================================================================
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"git_commit": "b" * 40}, "2 commits"),
        ({"git_commit": "a" * 40 + "-dirty"}, "not committed"),
        ({"machine": "3fa9"}, "2 machines, but a study must have one"),
        # A missing torch version means that the script does not use torch.
        ({"versions": {"jax": "2", "flax": "3"}}, "different versions"),
        ({"load": 9.0}, "1 run started while other processes used the machine"),
        ({"resumed": [3]}, "1 run resumed"),
    ],
)
def test_problems_of_a_study_are_reported(tmp_path, changes, words):
    for mode in ("linen jit", "nnx jit"):
        write_plain(tmp_path, mode=mode)
        write_plain(tmp_path, mode=mode, seed=2, versions={"jax": "0.10.2"})
    assert checks.problems(load(tmp_path)) == []
    write_plain(tmp_path, seed=3)
    write_plain(tmp_path, seed=3, mode="nnx jit", **changes)
    assert words in checks.problems(load(tmp_path))[-1]


def test_a_study_with_problems_is_packed_only_with_anyway(tmp_path):
    grid = write_grid(tmp_path / "runs")
    status, said, _ = run_command("pack", grid, tmp_path / "study")
    assert status == 0
    assert "12 runs" in said
    assert load(tmp_path / "study").runs["source"].tolist() == [""] * 12  # no local path
    broken = next(grid.glob("*linen*"))
    (broken / "run.json").unlink()
    status, _, said = run_command("pack", grid, tmp_path / "again")
    assert status == 1
    assert "1 run left out" in said
    assert "ppo_linen lacks 1 run that others have" in said
    assert not (tmp_path / "again").exists()
    assert run_command("pack", "--check", grid)[0] == 1
    assert run_command("pack", grid, tmp_path / "again", "--anyway")[0] == 0
    assert broken.name in load(tmp_path / "again").left_out


def test_pack_refuses_a_folder_that_contains_runs(tmp_path):
    write_plain(tmp_path)
    status, _, said = run_command("pack", tmp_path, tmp_path)
    assert status == 2
    assert "contains runs; choose another folder" in said
