"""The report of every kind of result set: sections, files, and what strangers' text does."""

import io
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from html.parser import HTMLParser
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from fake_runs import MODES, metrics_rows, run_info, write_grid, write_run

from analysis import learning, report
from analysis.bench import benches
from analysis.notebooks import execute
from analysis.render import Plot, Table
from analysis.runs import load

mpl.use("agg")
ENVS = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0")
WHOLE = [
    *("The answer", "Which script is done first", "By environment", "Startup"),
    *("Rollout and update", "Compile modes", "Learning", "The runs", "Anomalies"),
    *("What these data cannot say", "Final returns", "Memory", "Every cell"),
]


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """Two model sizes and three modes without forced sync, and eight modes with it."""
    folder = tmp_path_factory.mktemp("grid")
    write_grid(folder / "async", envs=ENVS, sizes=("small", "medium"), repeats=3)
    write_grid(folder / "sync", envs=ENVS, modes=tuple(MODES), sync=True)
    return folder


def run_report(*arguments):
    """Run the command in this process: importing matplotlib again takes seconds."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["report", *map(str, arguments)])
        try:
            report.main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def report_of(*arguments):
    """Return report.md of a report that must succeed; --out comes last."""
    done = run_report(*arguments)
    assert done.returncode == 0, done.stderr
    folder = arguments[-1] if "--out" in arguments else arguments[0] / "report"
    return (folder / "report.md").read_text()


def titles(text, level=2):
    return re.findall(rf"^{'#' * level} (.*)", text, flags=re.MULTILINE)


def section(text, title, level=2):
    return re.split(r"^##+ ", text.split(f"\n{'#' * level} {title}\n")[1], flags=re.MULTILINE)[0]


class Markup(HTMLParser):
    """Collects what a browser would act on."""

    def __init__(self):
        super().__init__()
        self.elements, self.links = set(), []

    def handle_starttag(self, tag, attrs):
        self.elements.add(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        assert not [name for name, _ in attrs if name.startswith("on")]


# === What a reader gets =========================================================================
def test_a_grid_gives_every_section_and_a_page_without_other_files(grid, tmp_path):
    command = [sys.executable, "-m", "analysis.report", grid, "--out", tmp_path / "out"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "times as long as ppo_linen" in done.stdout
    text, html = (tmp_path / "out" / f"report.{x}" for x in ("md", "html"))
    assert titles(text.read_text()) == WHOLE
    files = re.findall(r"\]\(([^)]*)\)", text.read_text())
    assert len(files) == len(set(files)) > 20
    assert all((tmp_path / "out" / file).stat().st_size > 20 for file in files)
    page = Markup()
    page.feed(html.read_text())
    images = [link for link in page.links if not link.startswith("#")]
    assert all(link.startswith("data:image/svg+xml;base64,") for link in images)
    assert len(images) == len(re.findall(r"^!\[", text.read_text(), flags=re.MULTILINE))
    assert "script" not in page.elements
    assert "nan" not in text.read_text().lower()


def test_the_first_thing_is_the_table_and_then_the_figure(grid, tmp_path):
    text = report_of(grid / "async", "--out", tmp_path)
    answer = section(text, "The answer")
    table, figure, sentence = (answer.index(x) for x in ("| network", "answer.png", "Relative to"))
    assert table < figure < sentence
    assert "| script | startup (s) | iteration (ms) | times as long as ppo_linen |" in answer


def test_the_quick_benchmark_s_page_has_bars_and_curves_first(tmp_path):
    modes = ("linen jit", "nnx jit", "nnx cached_partial", "torch compile", "torch env.jit")
    write_grid(tmp_path, modes, ("CartPole-v1",), repeats=3)
    answer = section(report_of(tmp_path), "The answer")
    images = re.findall(r"figures/(\w+)\.png", answer)
    assert images == ["trainings", "learning_seconds_1", "answer"]
    for name in ("ppo_linen", "ppo_nnx", "ppo_nnx_cached", "ppo_torch_compile", "ppo_torch"):
        assert re.search(rf"^\| {name} \|", answer, flags=re.MULTILINE)
    assert "12 iterations (s)" in answer
    assert "Of runs of one script" in answer


def test_a_single_run_is_reported_without_claims(tmp_path):
    info = run_info()
    write_run(tmp_path, info, metrics_rows(info, np.full(12, 0.1), np.arange(12.0)))
    text = report_of(tmp_path)
    assert "no interval and no claim" in section(text, "The answer")
    assert "Relative to" not in text
    assert "Each cell ran once" in section(text, "What these data cannot say")
    assert "nan" not in text.lower()


@pytest.mark.parametrize(("iterations", "sync"), [(1, True), (4, False)])
def test_runs_too_short_for_a_steady_state_are_reported(tmp_path, iterations, sync):
    modes = ("linen jit", "linen none", "torch compile", "torch none")
    write_grid(tmp_path, modes, iterations=iterations, repeats=1, sync=sync)
    text = report_of(tmp_path)
    assert "no steady state" in text
    assert "nan" not in text.lower()
    assert "Which script is done first" not in titles(text)
    limits = section(text, "What these data cannot say")
    assert ("too short for steady times of the phases" in limits) == sync
    assert ("No run has --sync-for-timing" in limits) != sync


def test_runs_in_which_no_episode_ended_are_reported(tmp_path):
    info = run_info(env_id="Freeway-MinAtar")
    rows = metrics_rows(info, np.full(12, 0.1), np.full(12, np.nan))
    write_run(tmp_path, info, [row | {"charts/episodes": 0.0} for row in rows])
    assert "No episode ended in Freeway-MinAtar" in section(report_of(tmp_path), "Learning")


def test_resumed_runs_count_for_learning_and_not_for_durations(tmp_path):
    write_grid(tmp_path / "runs", ("linen jit", "torch env.jit"), ENVS[:1], repeats=4)
    before = report_of(tmp_path / "runs", "--out", tmp_path / "report")
    info = run_info("nnx jit", seed=9, resumed=[5], load=99.0)
    name = write_run(tmp_path / "runs", info, metrics_rows(info, np.full(12, 50.0), np.ones(12)))
    after = report_of(tmp_path / "runs", "--out", tmp_path / "report")
    for title in ("Which script is done first", "Startup", "Memory", "Anomalies"):
        assert section(after, title) == section(before, title)
    assert "1 run was stopped and resumed" in section(after, "The runs")
    assert name.name in section(after, "The runs")
    assert "| ppo_nnx |" in section(after, "Final returns")


def test_resumed_runs_alone_are_a_report_on_learning(tmp_path):
    for mode in ("linen jit", "linen none"):
        for seed in range(6):
            info = run_info(mode, seed=seed, resumed=[5])
            write_run(tmp_path, info, metrics_rows(info, np.full(12, 50.0), 36.0 * np.arange(12)))
    text = report_of(tmp_path)
    assert "12 runs were stopped and resumed" in text
    assert " and 2 more." in section(text, "The runs")
    assert "Learning" in titles(text)
    assert "Startup" not in titles(text)
    assert "nan" not in text.lower()


# === Platforms, baselines, older results ========================================================
@pytest.fixture(scope="module")
def two_platforms(tmp_path_factory):
    folder = tmp_path_factory.mktemp("platforms")
    write_grid(folder / "a", envs=ENVS[:2], repeats=3)
    wsl2 = "Linux-6.6-microsoft-standard-WSL2-x86_64"
    write_grid(folder / "b", envs=ENVS[:2], repeats=3, os=wsl2, slowdown=3.0)
    return folder


def test_each_platform_has_a_chapter_and_they_are_compared_script_by_script(
    two_platforms, tmp_path
):
    text = report_of(two_platforms, "--out", tmp_path)
    assert titles(text)[:3] == ["Platforms", "Linux, Fast, 2 cores", "WSL2, Fast, 2 cores"]
    assert titles(text, 3).count("The answer") == 2
    table = pd.read_csv(tmp_path / "tables" / "platforms.csv")
    steady = table[table["value"] == "steady"]
    assert list(steady["mode"]) == ["ppo_linen", "ppo_nnx_cached", "ppo_torch_compile"]
    assert steady["estimate"].to_numpy() == pytest.approx(3, rel=0.1)
    assert set(table["value"]) == {"startup", "steady", "process"}
    first, second = (pd.read_csv(tmp_path / f"tables/part{i}_answer.csv") for i in (1, 2))
    assert second["steady"].to_numpy() == pytest.approx(3 * first["steady"].to_numpy(), rel=0.1)


def test_several_sources_are_one_report(two_platforms, tmp_path):
    both = report_of(two_platforms / "a", two_platforms / "b", "--out", tmp_path / "x")
    one = report_of(two_platforms, "--out", tmp_path / "y")
    assert section(both, "Platforms") == section(one, "Platforms")


def test_the_baselines_can_be_chosen(two_platforms, tmp_path):
    names = ("--baseline", "ppo_torch_compile", "--baseline-platform", "WSL2")
    text = report_of(two_platforms, *names, "--out", tmp_path)
    assert "times as long as ppo_torch_compile" in text
    assert "times as long as ppo_linen" not in text
    table = pd.read_csv(tmp_path / "tables" / "platforms.csv")
    steady = table.loc[table["value"] == "steady", "estimate"]
    assert steady.to_numpy() == pytest.approx(1 / 3, rel=0.1)


def test_runs_with_other_hyperparameters_have_a_chapter_of_their_own(tmp_path):
    write_grid(tmp_path, envs=ENVS[:1], repeats=2)
    info = run_info(seed=7)
    info["args"] |= {"learning_rate": 0.5}
    write_run(tmp_path, info, metrics_rows(info, np.full(12, 9.0), np.arange(12.0)))
    text = report_of(tmp_path)
    wanted = [f"Linux, Fast, 2 cores, learning_rate {x}" for x in (0.00025, 0.5)]
    assert titles(text)[:2] == wanted
    assert "never compared" in section(text, "What these data cannot say")


def test_of_two_results_the_slower_one_is_found(tmp_path):
    write_grid(tmp_path / "old", repeats=4)
    write_grid(tmp_path / "new", repeats=4, slowdown=2.0, cores=64)  # on another machine, too
    text = report_of(tmp_path / "new", "--against", tmp_path / "old", "--out", tmp_path / "out")
    against = section(text, "Against the other results")
    assert "slower in" in against
    table = pd.read_csv(tmp_path / "out" / "tables" / "against.csv")
    steady = table[table["value"] == "steady"]
    assert steady["estimate"].to_numpy() == pytest.approx(2, rel=0.1)
    assert (steady["low"] > 1).all()


def test_results_without_a_cell_in_common_are_not_compared(tmp_path):
    write_grid(tmp_path / "old", envs=("CartPole-v1",))
    write_grid(tmp_path / "new", envs=("Acrobot-v1",))
    text = report_of(tmp_path / "new", "--against", tmp_path / "old", "--out", tmp_path / "out")
    assert "No cell with the same settings is in both." in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--baseline", "ppo_x"], "--baseline must be one of ppo_linen, ppo_nnx_cached or"),
        (["--baseline-platform", "H100"], "--baseline-platform must be part of Linux, Fast"),
        (["--environments", "nothing.csv"], "is not a CSV file with the columns env_id"),
        (["--against", "nowhere"], "nowhere is not a folder of runs"),
        (["--out", "/proc/report"], "--out must be a folder to write to"),
    ],
)
def test_bad_usage_is_one_sentence(two_platforms, tmp_path, arguments, words):
    extra = [] if "--out" in arguments else ["--out", tmp_path]
    done = run_report(two_platforms, *arguments, *extra)
    assert done.returncode == 2
    assert done.stderr.startswith(f"analysis.report: {words}") or words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_report_goes_beside_a_table_and_else_here(tmp_path):
    (tmp_path / "mine.csv").touch()
    assert report.default_out([str(tmp_path)]) == tmp_path / "report"
    assert report.default_out([str(tmp_path / "mine.csv")]) == tmp_path / "mine-report"
    assert str(report.default_out(["wandb:a/b"])) == "report"
    assert str(report.default_out([str(tmp_path), str(tmp_path)])) == "report"


# === Strangers' text ============================================================================
HOSTILE = (
    "<script>alert(1)</script>",
    'x<img src="../secret.png">',
    r"a$\undefined$b",
    "a|b\n\n# c",
    "![x](../secret.png)",
    "\x1b[2J\u202e=1+1",
)


def test_text_from_runs_is_data_everywhere(tmp_path):
    """Also in figures, whose labels matplotlib would read as mathematics."""
    (tmp_path / "secret.png").write_bytes(b"secret")
    for i, text in enumerate(HOSTILE):
        for mode in ("linen jit", "torch env.jit"):
            for seed in (1, 2):
                info = run_info(mode, env_id=text, seed=seed, iterations=9, cpu=text, os=text)
                info |= {"framework": text, "script": text + info["script"]}
                info["args"]["run_name"] = f"{i}{mode}{seed}"
                rows = metrics_rows(info, np.full(9, 0.1 + i), np.arange(9.0))
                write_run(tmp_path / "runs", info, rows)
    out = tmp_path / "runs" / "report"
    report_of(tmp_path / "runs")
    page = Markup()
    page.feed((out / "report.html").read_text())
    known = {"html", "head", "meta", "title", "style", "body", "main", "header", "nav", "ol", "li"}
    known |= {"a", "section", "h1", "h2", "h3", "p", "ul", "div", "figure", "figcaption", "img"}
    known |= {"table", "thead", "tbody", "tr", "th", "td", "details", "summary", "span"}
    assert page.elements <= known
    assert all(link.startswith(("data:image/svg+xml;base64,", "#s")) for link in page.links)
    text = (out / "report.md").read_text()
    assert not re.search(r"<(script|img)|(?<!\\)\|b|(?<!\\)\]\(\.\./|\x1b|\u202e", text)
    assert set(re.findall(r"(?<!\\)\]\((\w+)/", text)) == {"figures", "tables"}
    for svg in out.glob("figures/*.svg"):
        assert "<script" not in svg.read_text()
    for table in out.glob("tables/*.csv"):
        assert not re.search(r"(^|,)[=+@]", table.read_text(), flags=re.MULTILINE)


# === A table of somebody else's =================================================================
def foreign_table():
    """Two platforms, three sizes, 12 environments, no seeds: only documented columns."""
    rng, rows = np.random.default_rng(0), []
    for platform, speed in (("A100", 1.0), ("H100", 0.5)):
        for size, cost in (("small", 1.0), ("medium", 2.0), ("large", 9.0)):
            for i in range(12):
                for mode, factor in (("jit", 1.0), ("eager", 3.0)):
                    for _ in range(2):
                        steady = 0.1 * speed * cost * factor * (1 + i) * rng.lognormal(0, 0.05)
                        row: dict[str, Any] = {"framework": "mine", "compile_mode": mode}
                        row |= {
                            "env_id": f"Env{i}-v0",
                            "size": size,
                            "platform": platform,
                            "num_iterations": 50,
                        }
                        row |= {"first": 5.0 / factor, "steady": steady, "batch_size": 8192}
                        row |= {"total": 5.0 / factor + 49 * steady, "final_return": 10.0 * i}
                        rows.append(row)
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    path = tmp_path_factory.mktemp("foreign") / "mine.csv"
    foreign_table().to_csv(path, index=False)
    return path


def test_a_foreign_table_gives_the_whole_report(foreign):
    text = report_of(foreign, "--out", foreign.parent / "out")
    assert titles(text)[:3] == ["Platforms", "A100", "H100"]
    assert "were numbered" in section(text, "The runs")
    for part in (1, 2):
        table = pd.read_csv(foreign.parent / f"out/tables/part{part}_answer.csv")
        assert list(table["size"].unique()) == ["small", "medium", "large"]
        eager = table[table["mode"] == "mine eager"]
        assert eager["steady_estimate"].to_numpy() == pytest.approx(3, rel=0.1)
        assert (eager["steady_low"] > 2).all()
        assert (table["environments"] == 12).all()
        even = pd.read_csv(foreign.parent / f"out/tables/part{part}_break_even.csv")
        assert set(even["sooner"]) == {"mine eager"}
    steady = pd.read_csv(foreign.parent / "out/tables/platforms.csv").query("value == 'steady'")
    assert steady["estimate"].to_numpy() == pytest.approx(0.5, rel=0.1)
    assert "No margin was fixed for Env0-v0" in text


@pytest.mark.parametrize("name", ["overall", "platforms", "learning"])
def test_a_foreign_table_gives_the_notebooks(foreign, name):
    cells = [x for x in execute(name, str(foreign)).cells if x.cell_type == "code"]
    html = "".join(o.data.get("text/html", "") for x in cells for o in x.outputs if "data" in o)
    assert ">A100</h2>" in html
    assert ">H100</h2>" in html


def test_sections_have_files_of_their_own_and_whole_tables(grid):
    [bench] = benches(load(grid))
    names: list[str] = []
    for name, make in report.SECTIONS.items():
        made = make(bench, learning.load_environments())
        if name == "pace":  # of DQN alone
            assert made is None
            continue
        assert made is not None
        names += [x.name for x in made.blocks if isinstance(x, Plot)]
        for table in [x for x in made.blocks if isinstance(x, Table)]:
            assert len(table.frame) >= len(table.cells) > 0
    assert len(names) == len(set(names))
