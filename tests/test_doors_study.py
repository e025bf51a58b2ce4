"""The study of Doors: agents judged on all layouts as they learn, and the tables made of that."""

import importlib
import json
import sys

import numpy as np
import pandas as pd
import pytest

from analysis import doors
from envs import doors_gymnasium as rules
from studies.doors import run as doors_run

SMALL = "--total-timesteps 1536 --num-envs 4 --num-steps 32 --learning-starts 128 --hidden-sizes 8"
SMALL += " --buffer-size 512 --batch-size 8"


# === Judging ====================================================================================
def best_values(obs):
    """1 for the action after which the fewest steps are left, by a search; obs (B, 45)."""
    left = {}

    def steps_left(row, column, goal):
        if goal not in left:
            found, edge = {(rules.GOAL_ROW, goal): 0}, [(rules.GOAL_ROW, goal)]
            for square in edge:
                for near in rules.NEXT[square].tolist():  # a move back is a move, too
                    if tuple(near) not in found:
                        found[tuple(near)] = found[square] + 1
                        edge.append(tuple(near))
            left[goal] = found
        return left[goal][row, column]

    places = obs.reshape(-1, 3, rules.SIZE).argmax(-1).tolist()
    after = [[steps_left(*x, goal) for x in rules.NEXT[i, j].tolist()] for i, j, goal in places]
    return -np.array(after, float)


def test_the_best_agent_is_perfect():
    fewest = int(rules.optimal_steps(*rules.all_layouts().T).sum())
    assert doors_run.judge(best_values) == {"solved": 225, "steps": fewest, "optimal": fewest}


def test_steps_too_many_are_counted_and_one_who_stays_solves_nothing():
    waited = [False]

    def after_a_rest(obs):
        values = best_values(obs)
        values[:, 0] += 1000 * (not waited[0])  # stay, once
        waited[0] = True
        return values

    found = doors_run.judge(after_a_rest)
    assert found["solved"] == 225 and found["steps"] == found["optimal"] + 225
    nothing = {"solved": 0, "steps": 0, "optimal": 0}
    assert doors_run.judge(lambda obs: np.eye(5)[np.zeros(len(obs), int)]) == nothing


@pytest.mark.parametrize("name", doors_run.SCRIPTS)
def test_a_run_is_judged_as_it_learns(name, tmp_path, monkeypatch):
    """By the network that it saves, every five iterations and at the end, off the clock."""
    script = importlib.import_module(name)
    monkeypatch.setattr(script, "RunLog", script.RunLog)
    seen, judge = [], doors_run.judge

    def spy(get_values):
        seen.append(get_values(np.eye(45, dtype=np.float32)))
        return judge(get_values)

    monkeypatch.setattr(doors_run, "judge", spy)
    words = [*SMALL.split(), "--runs-dir", str(tmp_path), "--run-name", "doors-4__own__it"]
    monkeypatch.setattr(sys, "argv", ["doors_run", f"{name}.py", "doors", *words])
    doors_run.main()
    folder = tmp_path / "doors-4__own__it"
    rows = [json.loads(x) for x in (folder / "layouts.jsonl").read_text().splitlines()]
    assert [x["iteration"] for x in rows] == [5, 10, 12]
    assert [x["global_step"] for x in rows] == [640, 1280, 1536]
    info = json.loads((folder / "run.json").read_text())
    seconds = info["durations"]["imports"] + info["durations"]["total"]
    assert 0 < rows[0]["seconds"] < rows[1]["seconds"] < rows[2]["seconds"] <= seconds
    assert not np.array_equal(seen[0], seen[1]) and seen[0].shape == (45, 5)
    import evaluate

    env_id = info["args"]["env_id"]
    run = evaluate.load_run(str(folder), (env_id,))
    np.testing.assert_allclose(run.get_logits(np.eye(45, dtype=np.float32)), seen[2], atol=1e-6)
    gathered = list(doors.gather(tmp_path))
    table = doors.learning_table(pd.DataFrame(gathered))
    assert table.cells["script"].tolist() == [name] and table.cells["cell"].tolist() == ["doors-4"]
    log = pd.read_json(folder / "metrics.jsonl", lines=True)
    for row, part in zip(gathered, (log[:5], log[5:10], log[10:]), strict=True):
        assert row["iteration_seconds"] == pytest.approx(part["time/iteration"].median(), abs=1e-4)
        episodes, returns = part["charts/episodes"], part["charts/episodic_return"]
        mean = (episodes * returns).sum() / episodes.sum()
        assert row["episodic_return"] == pytest.approx(mean, abs=1e-4)
        rate = (episodes * returns).sum() / (episodes * part["charts/episodic_length"]).sum()
        assert row["return_per_step"] == pytest.approx(rate, abs=1e-4)
        startup = info["durations"]["imports"] + log["time/elapsed"][0]
        assert row["startup"] == pytest.approx(startup, abs=1e-4) and startup < rows[0]["seconds"]


def test_judging_changes_nothing_that_pytorch_draws():
    import torch

    script = importlib.import_module("dqn_torch_gymnasium")
    network = script.QNetwork((45,), (8,), 5)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    state = {"tensors": {"q_network": network.state_dict()}}
    doors_run.values_of(script, script.Doors(hidden_sizes=(8,)), state)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["ppo_linen.py", "doors"],
        ["dqn_linen.py"],
        ["dqn_linen.py", "minatar"],
        ["dqn_linen.py", "doors", "--resume", "runs/x"],
    ],
)
def test_another_word_is_one_sentence(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["doors_run", *words])
    with pytest.raises(SystemExit, match="2"):
        doors_run.main()
    assert capsys.readouterr().err.count("\n") == 1


# === Tables =====================================================================================
def rows_of(cell, script, seed, solved, steps, seconds):
    """Rows of a run that was judged after iterations 20, 40, ..."""
    own = {"run": f"{cell}__{script}__seed{seed}", "script": script, "cell": cell, "seed": seed}
    return [
        own
        | {"iteration": 20 * (i + 1), "global_step": (i + 1) * 1000, "solved": x, "steps": y}
        | {"optimal": 10 * x, "seconds": z, "startup": z / 4, "episodic_return": float(x)}
        | {"iteration_seconds": z / 10, "return_per_step": x / 225}
        for i, (x, y, z) in enumerate(zip(solved, steps, seconds, strict=True))
    ]


def test_the_summary():
    rows = rows_of("doors-64", "dqn_linen", 1, [0, 214, 225], [0, 2140, 2250], [5, 10, 15])
    rows += rows_of("doors-64", "dqn_linen", 2, [0, 213, 225], [0, 2130, 2300], [5, 10, 40])
    rows += rows_of("doors-64", "dqn_torch", 1, [0, 10, 100], [0, 100, 1000], [5, 10, 15])
    linen, torch = doors.summary(pd.DataFrame(rows)).to_dict("records")
    assert (linen["seeds"], linen["perfect"]) == (2, 1)
    assert linen["over_optimum"] == pytest.approx(4550 / 4500)
    assert linen["steps_to"] == 2500 and linen["seconds_to"] == pytest.approx(25)
    assert np.isnan(linen["seconds_to_low"])  # of two values a median has no interval
    assert linen["solved"] == 1 and torch["solved"] == pytest.approx(100 / 225)
    assert linen["whole"] == pytest.approx(np.sqrt(15 * 40)) and linen["whole_low"] < 15
    assert torch["seconds_to"] == np.inf and torch["perfect"] == 0
    # of the rows after iteration 25 the median: the mean of 1 and 1.5, and of 1 and 4
    assert linen["pace"] == pytest.approx(np.sqrt(1.25 * 2.5))
    assert linen["rate"] == 1 and torch["rate"] == pytest.approx(100 / 225)
    assert linen["startup"] == pytest.approx(np.sqrt(15 * 40) / 4)
    cells = doors.seconds_table(pd.DataFrame(rows)).cells
    assert cells["to 95% of the layouts"].tolist() == ["25", "never"]
    cells = doors.learning_table(pd.DataFrame(rows)).cells
    assert cells["perfect"].tolist() == ["1 of 2", "0 of 1"]


def test_a_seed_that_never_gets_there_is_the_latest():
    rows = []
    for seed in range(1, 11):
        solved = [0, 225] if seed < 10 else [0, 100]
        rows += rows_of("doors-64", "dqn_linen", seed, solved, [0, 2250], [5, 10 + seed])
    (row,) = doors.summary(pd.DataFrame(rows)).to_dict("records")
    assert row["seconds_to"] == 15.5 and row["perfect"] == 9 and row["solved_low"] == 100 / 225
    assert row["seconds_to_low"] == 12 and row["seconds_to_high"] == 19
    cells = doors.learning_table(pd.DataFrame(rows)).cells
    assert cells["layouts solved (least, most)"].tolist() == ["0.944 [0.444, 1.000]"]


def test_the_contrasts():
    """A run takes base * framework * library * number seconds, times a factor of its seed."""
    rows = []
    for seed in (1, 2, 3):
        for script, factor in (("dqn_torch_gymnasium", 6), ("dqn_torch", 3)):
            rows += rows_of("doors-64", script, seed, [0, 225], [0, 9], [1, 40 * factor * seed])
        for script, factor in (("dqn_linen_gymnasium", 2), ("dqn_linen", 1)):
            rows += rows_of("doors-64", script, seed, [0, 225], [0, 9], [1, 40 * factor * seed])
        if seed < 3:
            rows += rows_of("doors-1024", "dqn_linen", seed, [0, 225], [0, 9], [1, 10 * seed**2])
    rows += rows_of("doors-slow_target", "dqn_linen", 1, [0, 225], [0, 9], [1, 7])
    script = "dqn_torch_gymnasium"
    compiled = rows_of("doors-compiled-64", script, 1, [0, 225], [0, 9], [1, 40 * 4])
    table = doors.contrasts(pd.DataFrame(rows))
    found = {(x["factor"], x["slower"].library): x["whole"] for x in table.to_dict("records")}
    assert found["framework", "gymnasium"] == found["framework", "gymnax"] == pytest.approx(3)
    with_compiled = doors.contrasts(pd.DataFrame(rows + compiled))
    frameworks = with_compiled[with_compiled["factor"] == "framework"]["whole"]
    assert sorted(frameworks.round(6)) == [1.5, 2, 3, 3]  # to and from 4
    assert len(with_compiled) == len(table) + 3  # and from it to linen's 1,024 in gymnax
    number = table[table["factor"] == "environments"].iloc[0]
    assert number["whole"] == pytest.approx(np.sqrt(4 * 2))  # of seeds 1 and 2, which both have
    assert number["pace"] == pytest.approx(number["whole"]) and number["pace_low"] < 4
    library_torch, library_linen = table[table["factor"] == "library"].to_dict("records")
    assert library_torch["slower"] == ("torch", "gymnasium", 64)
    assert library_torch["whole"] == library_linen["whole"] == pytest.approx(2)
    last = table.iloc[-1]
    assert last["factor"] == "framework, library, environments"
    assert last["whole"] == pytest.approx(6 * np.sqrt(4 * 2)) and len(table) == 6
    assert last["slower"] == ("torch", "gymnasium", 64)
    assert last["faster"] == ("linen", "gymnax", 1024)
    cells = doors.contrasts_table(pd.DataFrame(rows)).cells
    assert cells["first"].iloc[-1] == "torch, gymnasium, 64"


def run_folder(tmp_path, name, lines, complete=True, resumed=()):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "layouts.jsonl").write_text(lines)
    row = {"time/iteration": 0.5, "time/elapsed": 1.25}
    log = [
        json.dumps(row | {"charts/episodes": episodes, "charts/episodic_return": mean} | length)
        for episodes, mean in ((0, None), (1, 5.0), (3, 1.0))
        for length in [{"charts/episodic_length": 10 if episodes else None}]
    ]
    (folder / "metrics.jsonl").write_text("\n".join(log))
    if complete:
        info = {"script": "dqn_linen", "args": {"seed": 1}, "resumed": [*resumed]}
        info["durations"] = {"imports": 0.5}
        (folder / "run.json").write_text(json.dumps(info))


LINE = {"iteration": 5, "global_step": 10, "solved": 225, "steps": 9, "optimal": 9, "seconds": 1.5}


def test_what_is_gathered(tmp_path, monkeypatch, capsys):
    run_folder(tmp_path, "doors-64__a", json.dumps(LINE) + "\n")
    run_folder(tmp_path, "doors-64__b", json.dumps(LINE) + "\n", complete=False)
    out = tmp_path / "layouts.csv"
    monkeypatch.setattr(sys, "argv", ["doors", str(tmp_path), str(out)])
    doors.main()
    table = pd.read_csv(out)
    assert table["run"].tolist() == ["doors-64__a"] and table["cell"].tolist() == ["doors-64"]
    assert table["startup"].tolist() == [1.75] and table["episodic_return"].tolist() == [2]
    assert table["return_per_step"].tolist() == [0.2]
    for figure in (out.with_suffix(".png"), out.with_name("returns.png")):
        assert figure.read_bytes().startswith(b"\x89PNG")
    run_folder(tmp_path, "doors-64__b_again", json.dumps(LINE), resumed=[40])
    capsys.readouterr()
    doors.main()
    assert "b_again went on without a judge" in capsys.readouterr().err
    assert pd.read_csv(out)["run"].tolist() == ["doors-64__a"]
    run_folder(tmp_path, "doors-64__c", "")
    for line in (json.dumps(LINE | {"solved": "many"}), "[" * 100_000, '{"iteration": Infinity}'):
        (tmp_path / "doors-64__c" / "layouts.jsonl").write_text(line)
        with pytest.raises(SystemExit, match="2"):
            doors.main()
        assert "doors-64__c is no run of Doors" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["x.png", "returns.csv"])
def test_where_a_figure_would_go_there_goes_no_table(name, tmp_path, monkeypatch, capsys):
    run_folder(tmp_path, "doors-64__a", json.dumps(LINE))
    monkeypatch.setattr(sys, "argv", ["doors", str(tmp_path), str(tmp_path / name)])
    with pytest.raises(SystemExit, match="2"):
        doors.main()
    assert "must end in .csv" in capsys.readouterr().err


def test_another_environment_is_not_judged(tmp_path, monkeypatch, capsys):
    words = ["dqn_torch_gymnasium.py", "doors", "--env-id", "CartPole-v1"]
    monkeypatch.setattr(sys, "argv", ["doors_run", *words, "--runs-dir", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        doors_run.main()
    assert "CartPole-v1 is not Doors" in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_of_other_cells_there_is_a_table_and_no_figure(tmp_path, monkeypatch):
    run_folder(tmp_path, "doors-public-64__a", json.dumps(LINE))
    out = tmp_path / "layouts.csv"
    monkeypatch.setattr(sys, "argv", ["doors", str(tmp_path), str(out)])
    doors.main()
    assert out.exists() and not out.with_suffix(".png").exists()
