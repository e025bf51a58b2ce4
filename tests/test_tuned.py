"""The tables of studies of tune.py, from made-up verdicts."""

import json

import pytest

from analysis import docs, tuned
from analysis.schema import SourceError

PART = {"iqm": 15.212, "interval": [15.1, 15.3], "returns": [15.2, 15.224]}
VERDICT = {
    "trials": {"complete": 9, "pruned": 30, "failed": 1},
    **{"best_trial": 17, "value_in_study": 15.5, "own_value_in_study": 10.0},
    "space": {"learning_rate": "1e-5:1e-2:log", "double_q": "True,False"},
    "own_settings": {"learning_rate": 0.00025, "double_q": False},
    "best_settings": {"learning_rate": 0.003296191, "double_q": True},
    **{"best": PART, "own": PART | {"interval": None}, "best_minus_own": PART},
}


def write(folder, **changes):
    (folder / "one").mkdir(exist_ok=True)
    (folder / "one" / "best.json").write_text(json.dumps(VERDICT | changes))


def test_rows_say_what_was_claimed_and_what_fresh_seeds_give(tmp_path):
    write(tmp_path)
    mean = ["15.21 [15.06, 15.36]", "0.02", "15.20", "15.22"]  # 15.212 +- 12.706 * 0.012
    assert tuned.verdict_table(tmp_path).values.tolist() == [
        ["one", "the script's own", "10.00", "15.21", *mean],
        ["one", "trial 17", "15.50", "15.21 [15.10, 15.30]", *mean],
        ["one", "difference, by seed", "5.50", "15.21 [15.10, 15.30]", *mean],
    ]
    write(tmp_path, own_value_in_study=None)  # the script's own settings were no trial's, or pruned
    assert list(tuned.verdict_table(tmp_path)["value in the study"]) == ["-", "15.50", "-"]


def test_settings_are_shown_beside_the_scripts_own(tmp_path):
    write(tmp_path)
    table = tuned.settings_table(tmp_path / "one")
    assert table.values.tolist() == [
        ["learning_rate", "1e-5:1e-2:log", "0.00025", "0.003296"],
        ["double_q", "True, False", "False", "True"],
    ]


@pytest.mark.parametrize(
    "changes", [{"best": None}, {"own": PART | {"iqm": float("nan")}}, {"value_in_study": "x"}]
)
def test_a_file_that_is_none_is_named(tmp_path, changes):
    write(tmp_path, **changes)
    with pytest.raises(SourceError, match=r"has no best\.json of tune\.py"):
        tuned.verdict_table(tmp_path)


def test_the_figure_is_drawn_and_no_study_is_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tuned", str(tmp_path), str(tmp_path / "f.png")])
    with pytest.raises(SystemExit) as ended:
        tuned.main()
    said = capsys.readouterr().err.splitlines()
    assert (ended.value.code, said) == (2, [f"analysis.tuned: {tmp_path} has no study of tune.py"])
    write(tmp_path, own_value_in_study=None)
    tuned.main()
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


def test_text_of_a_study_is_no_markup(tmp_path, monkeypatch):
    write(tmp_path, space={"<b>": "1"}, own_settings={"<b>": "|"}, best_settings={"<b>": "`x`"})
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    text = docs.block("settings", "one", None, None)
    assert "<b>" not in text and r"\|" in text and r"\`x\`" in text
