"""site/: the content of the page, and its behavior in a browser, if one is installed."""

import html
import importlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from importlib.resources import files

import equinox as eqx
import jax
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ROOT
from flax import linen as nn
from flax import nnx
from sections import CONTINUOUS_SECTIONS, ROWS, SECTIONS, read, sections

from analysis import runs, stats
from analysis.schema import SourceError

spec = importlib.util.spec_from_file_location("site_build", ROOT / "site/build.py")
assert spec and spec.loader
site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site)
sys.path.append(str(ROOT / "site/idioms"))


# === Scripts ====================================================================================
def test_the_page_contains_every_script_verbatim():
    scripts, lines = site.read_scripts(ROOT)
    texts = ["".join(x[1:] for x in line.split(site.BETWEEN)) for line in lines]
    assert set(scripts) == set(ROWS)
    for script in scripts.values():
        file = (ROOT / script["file"]).read_text().splitlines()
        end = 0
        for section in script["sections"]:
            start = section["start"] - 1
            assert set(file[end:start]) <= {"", *filter(site.BANNER.match, file)}
            end = start + len(section["lines"])
            assert [texts[x] for x in section["lines"]] == file[start:end]
        assert end == len(file)
    titles = [x["title"] for x in scripts["ppo_linen"]["sections"]]
    assert titles == [site.HEAD, *SECTIONS] and scripts["ppo_rnn_nnx"]["framework"] == "nnx"


def test_every_section_has_a_note_about_its_framework():
    scripts, _ = site.read_scripts(ROOT)
    site.add_notes(ROOT, scripts)
    for script in scripts.values():
        notes = {x["title"]: x["note"] for x in script["sections"]}
        assert all(notes[x] for x in notes if x in CONTINUOUS_SECTIONS[2:-1])


# === Idioms =====================================================================================
def test_a_missing_excerpt_is_an_error(tmp_path):
    source = {"file": "ppo_linen.py", "name": "update", "from": "loss_fn =", "to": "jax.grad"}
    code = read("ppo_linen")
    found, start, end = site.excerpt(ROOT, source)
    assert found.startswith("loss_fn = ") and end == start + 1
    assert found.splitlines()[1].strip() == code.splitlines()[end - 1].strip()
    for gone in ("update", "loss_fn", "grad"):
        (tmp_path / "ppo_linen.py").write_text(code.replace(gone, "other"))
        with pytest.raises(SourceError):
            site.excerpt(tmp_path, source)


def small_agent(framework):
    """Return an agent with 8 parameters or, in Linen, its parameters."""
    if framework == "torch":
        return torch.nn.Linear(3, 2)
    if framework == "linen":
        return nn.Dense(2).init(jax.random.key(0), np.ones((1, 3), "f"))
    if framework == "nnx":
        return nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    return eqx.nn.Linear(3, 2, key=jax.random.key(0))


@pytest.mark.parametrize("framework", site.FRAMEWORKS)
def test_the_idioms_that_appear_in_no_script(framework, capsys):
    idioms = importlib.import_module(f"in_{framework}")
    assert idioms.count_parameters(small_agent(framework)) == 8
    batch = np.arange(6, dtype="f").reshape(2, 3)
    on_device = idioms.to_device(batch)
    np.testing.assert_array_equal(idioms.to_host(on_device), batch)
    capsys.readouterr()
    for _ in range(2):
        assert float(idioms.mean_square(on_device)) == pytest.approx((batch**2).mean())
    jax.effects_barrier()
    shapes = [x for x in capsys.readouterr().out.splitlines() if "2, 3" in x]
    assert len(shapes) == (2 if framework == "torch" else 1)


def test_equinox_idioms_for_many_agents_and_for_replacing_a_leaf():
    idioms = importlib.import_module("in_equinox")
    keys = jax.random.split(jax.random.key(0), 5)
    agents = idioms.make_many(lambda key: eqx.nn.Linear(3, 2, key=key), keys)
    assert idioms.call_many(agents, np.ones(3, "f")).shape == (5, 2)
    linear = small_agent("equinox")
    assert (idioms.with_bias(linear, np.ones(2)).bias == 1).all() and (linear.bias != 1).all()


def test_the_text_of_an_idiom_is_escaped():
    text = """<b title="x">'&lt;"""
    own = {"lines": [site.line_of(x) for x in site.highlight(text)], "link": text, "place": text}
    idiom = {"title": text, "note": site.prose(f"{text} `{text}`"), "cells": {text: [own]}}
    shown = site.templates().get_template("idioms.html").render(idioms=[idiom])
    assert "<b" not in shown
    assert html.unescape(re.sub("<[^<>]*>", "", shown)).count(text) == 6
    assert html.unescape(re.findall('href="(.*?)"', shown)[0]) == text


# === Studies ====================================================================================
def test_a_study_of_another_machine_is_added_and_its_text_is_escaped(tmp_path):
    folder = tmp_path / "studies/<b>mine"
    folder.mkdir(parents=True)
    table = pd.read_csv(ROOT / "studies/quick/runs.csv", dtype="str", keep_default_na=False)
    table = table.assign(platform="<img src=x onerror=alert(1)> H100", device="NVIDIA H100")
    beside = table.assign(mode="ppo_nnx, 2 side by side", run="beside " + table["run"])
    loaded = table.assign(load="99", cores="2", run="loaded " + table["run"])
    loaded["repeat"] = (loaded["repeat"].astype(float) + 3).astype(str)
    pd.concat([table, beside, loaded]).to_csv(folder / "runs.csv", index=False)
    # Runs that wait for the device after each rollout are slower, so they are ignored.
    (tmp_path / "studies/waited").mkdir()
    table.assign(sync="True", process="99").to_csv(
        tmp_path / "studies/waited/runs.csv", index=False
    )
    [cell] = site.read_cells(tmp_path)
    packed = site.pack(cell, "..")
    assert packed["on_gpu"] and packed["iterations"] == 25
    assert [len(x["runs"]) for x in packed["modes"]] == [3] * 5
    assert "H100" in packed["device"] and "<" not in packed["device"] + packed["study"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    path = tmp_path_factory.mktemp("site") / "site.html"
    path.write_text(site.build(ROOT, ".."))
    return path


def test_the_page_is_smaller_than_a_megabyte(built):
    """The build also fails if an excerpt is missing, or a section that notes.toml mentions."""
    assert built.stat().st_size < 1_000_000


def test_a_missing_package_is_a_one_line_error():
    command = [sys.executable, "-IS", ROOT / "site/build.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    how = "Run: ./setup.sh && source .venv/bin/activate"
    assert (done.returncode, done.stderr) == (2, f"site: No module named 'pandas'. {how}\n")


def test_the_page_shows_code_verbatim(built):
    """The page shows each line of an excerpt in a separate HTML element."""
    page = built.read_text()
    excerpts = re.findall("<pre>(.*?)</pre>", page, re.DOTALL)
    shown = [html.unescape(re.sub("</?(span|wbr)[^<>]*>", "", x)) for x in excerpts]
    idioms = site.read_idioms(ROOT)
    sources = [y for x in idioms for name in site.FRAMEWORKS for y in x[name]]
    codes = [site.excerpt(ROOT, x).code.replace("\n", "") for x in sources]
    assert shown == codes
    [data] = re.findall('<script type="application/json" id="data">(.*?)</script>', page)
    assert json.loads(data)["lines"] == site.read_scripts(ROOT)[1]


# === In a browser ===============================================================================
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="needs requirements-test.txt")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not found:
        pytest.skip(f"no browser on PATH: {', '.join(BROWSERS)}")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, built):
    """Return a function that opens the page. A console message or a request fails the test."""
    complaints = []

    def note(request):
        if not request.is_navigation_request():
            complaints.append(request.url)

    def visit(address="", width=1300, scheme="light"):
        size = {"width": width, "height": 900}
        permissions = ["clipboard-read", "clipboard-write"]
        page = browser.new_page(viewport=size, color_scheme=scheme, permissions=permissions)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", note)
        page.goto(built.as_uri() + address)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        return page

    yield visit
    for context in browser.contexts:
        context.close()
    assert not complaints


@pytest.mark.browser
@pytest.mark.parametrize(("steps", "cost"), [(819_200, 0.0), (51_200, 2e-5)])
def test_the_page_computes_the_same_intervals_as_the_analysis(visit, steps, cost):
    study, rows = visit().evaluate(
        """([steps, cost]) => {
          const cell = DATA.cells[0];
          const rows = count(cell, (run) => seconds(run, cell, steps, cost));
          const ends = (x) => [x.mean, x.low, x.high];
          return [cell.study, rows.map((x) => [x.mode.name, ...ends(x.time), ...ends(x.ratio)])];
        }""",
        [steps, cost],
    )
    frame = runs.load(ROOT / study).runs
    more = steps / frame["batch_size"] - frame["num_iterations"]
    frame["process"] += more * frame["steady"] + steps * cost
    assert len(rows) == frame["mode"].nunique() > 5
    blocks = stats.blocks(frame, "process")
    for mode, *numbers in rows:
        seconds = stats.geometric_mean(frame.loc[frame["mode"] == mode, "process"].to_numpy())
        ratio = stats.ratio(stats.pair(blocks, rows[0][0], mode))
        assert numbers == pytest.approx([*seconds, *ratio], rel=1e-3)


@pytest.mark.browser
def test_the_answer_follows_the_controls(visit):
    page = visit()
    sentence, computed = page.locator("#sentence"), page.locator("#computed")
    expected = r"819,200 steps of CartPole-v1 take [\d.]+ to [\d.]+ s in JAX, .*PyTorch"
    assert re.match(expected, sentence.inner_text())
    before = computed.inner_text()
    assert "not significant" in before and page.locator("#measured .row").count() == 16
    page.locator("#cost").press("ArrowRight")
    assert "1 µs more than CartPole-v1" in page.locator("#controls").inner_text()
    assert computed.inner_text() != before
    page.locator("[value=medium]").check()
    assert "CartPole-v1: 7 programs, 5 seeds" in page.locator("#cell").inner_text()
    page.locator("#steps").press("End")
    assert "too far to extrapolate" in sentence.inner_text() and not computed.is_visible()
    page.locator("#device").select_option("none")
    assert "only iterations were measured" in sentence.inner_text()
    assert "./benchmark.sh --sizes medium" in sentence.inner_text()


@pytest.mark.browser
def test_times_outside_jax_depend_on_the_duration_of_a_step(visit):
    """The slower the simulator, the smaller the difference between frameworks."""
    page = visit()
    said = page.locator("#outside-sentence")
    assert "819,200 steps of an environment outside JAX with 300 µs per step" in said.inner_text()
    assert "The environment takes 4.10 min of this time." in said.inner_text()

    def seconds():
        rows = page.locator("#outside-bars .row").all_inner_texts()
        found = [re.search(r"([\d.,]+) (s|min|h)\b", row) for row in rows]
        units = {"s": 1, "min": 60, "h": 3600}
        return [float(x[1].replace(",", "")) * units[x[2]] for x in found if x]

    page.locator("#microseconds").fill("0")
    fast = seconds()
    page.locator("#microseconds").fill("10000")
    slow = seconds()
    assert len(fast) == len(slow) == 3
    assert max(fast) / min(fast) > 1.5 > 1.2 > max(slow) / min(slow)
    page.locator("#outside-cell").select_option(index=1)
    assert page.locator("#outside-bars .row").count() == 3
    page.locator("#steps").press("Home")
    assert "51,200 steps of" in said.inner_text()


def test_without_measurements_outside_jax_there_is_no_control_for_them(tmp_path, monkeypatch):
    assert site.read_outside(tmp_path, "..") == []
    monkeypatch.setattr(site, "read_outside", lambda root, link: [])
    assert 'id="microseconds"' not in site.build(ROOT, "..")


def wait_for(page, *names):
    """Wait until the status message and the address show the scripts side by side."""
    page.locator(f"#said:text-is('Side by side: {', '.join(names)}')").wait_for(state="attached")
    assert page.url.endswith("#" + "..".join(names))


@pytest.mark.browser
def test_selecting_unfolding_copying_and_sharing_scripts(visit):
    page = visit()
    page.get_by_label("Second script").select_option("ppo_nnx")
    wait_for(page, "ppo_torch", "ppo_nnx")
    page.get_by_label("First script").select_option("ppo_linen")
    wait_for(page, "ppo_linen", "ppo_nnx")
    marked = page.locator("#section-Loss td.column1 mark").all_inner_texts()
    assert marked[0] == "agent" and page.locator("#section-Loss td.new").count() == 4

    log = page.locator("#section-Run-log")
    lines = int(re.fullmatch(r"Run log: identical, (\d+) lines", log.inner_text())[1])  # ty: ignore
    log.locator("summary").click()
    log.locator("tbody tr").last.wait_for()  # an event adds the rows after the click
    assert log.locator("tbody tr").count() == lines
    log.get_by_role("button", name="Copy Run log of ppo_linen").click()
    page.get_by_text("Copied", exact=True).wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == sections(read("ppo_linen"))["Run log"].lstrip()

    page.get_by_label("Third script").select_option("ppo_equinox")
    wait_for(page, "ppo_linen", "ppo_nnx", "ppo_equinox")
    assert page.locator("#section-Agent th").count() == 3
    page.get_by_label("Third script").select_option(label="remove")
    wait_for(page, "ppo_linen", "ppo_nnx")
    page.go_back()
    wait_for(page, "ppo_linen", "ppo_nnx", "ppo_equinox")


@pytest.mark.browser
def test_a_url_opens_a_section_and_an_invalid_one_is_ignored(visit):
    page = visit("#ppo_linen..ppo_nnx/GAE")
    assert page.locator("#section-GAE").bounding_box()["y"] < 450
    assert page.locator("#section-GAE tbody tr").count() > 10  # unfolded, although it is identical
    page = visit("#constructor..toString/%")
    assert page.get_by_label("Second script").input_value() == "ppo_linen"


@pytest.mark.browser
def test_the_page_works_with_the_keyboard(visit):
    page = visit()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # follow the link that skips the answer
    page.wait_for_url("**#compare")
    fold = page.locator("#section-Environment .fold").first
    hidden = int(re.search(r"\d+", fold.inner_text())[0])  # ty: ignore
    rows = page.locator("#section-Environment tbody tr")
    before = rows.count()
    fold.press("Enter")
    assert rows.count() == before + hidden - 1
    assert page.evaluate("document.activeElement.tagName") == "TD"  # focus is still in the table


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1600])
def test_idioms_have_no_line_break_within_a_name(visit, width):
    page = visit(width=width)
    broken = page.evaluate(
        r"""() => {
          const broken = [];
          for (const x of document.querySelectorAll(".idioms details")) x.open = true;
          for (const pre of document.querySelectorAll(".idioms pre")) {
            const walker = document.createTreeWalker(pre, NodeFilter.SHOW_TEXT);
            while (walker.nextNode()) {
              for (const name of walker.currentNode.data.matchAll(/\w+/g)) {
                const range = document.createRange();
                range.setStart(walker.currentNode, name.index);
                range.setEnd(walker.currentNode, name.index + name[0].length);
                if (range.getClientRects().length > 1) broken.push(name[0]);
              }
            }
          }
          return broken;
        }"""
    )
    assert not broken


@pytest.mark.browser
def test_a_narrow_page_starts_folded_and_can_be_unfolded(visit):
    page = visit("#ppo_linen..ppo_nnx/Loss", width=390)
    assert page.locator("details[open]").count() == 1
    assert page.locator("#section-Loss tbody tr").first.is_visible()
    page = visit(width=390)
    assert page.locator("details[open]").count() == 0
    assert page.evaluate("document.documentElement.scrollHeight") < 9 * 844  # nine phone screens
    page.locator("#section-Agent summary").click()
    page.locator("#section-Agent tbody tr").last.wait_for()
    page.locator(".idioms summary").first.click()
    assert page.locator(".idioms pre").first.is_visible()


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1100, "light"), (1800, "dark")])
def test_axe_finds_nothing_serious(visit, width, scheme):
    names = ["ppo_nnx", "ppo_nnx_tree", "ppo_nnx_cached"][: 2 + (width > 1200)]
    page = visit(f"#{'..'.join(names)}", width, scheme)
    for part in ("#measured-box", "#section-Agent", ".idioms details:first-child"):
        page.locator(part).evaluate("part => { part.open = true; }")
    page.locator("#section-Agent tbody tr").last.wait_for()
    page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text())
    found = page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
    serious = [x for x in found if x["impact"] in ("serious", "critical")]
    assert not [(x["id"], x["nodes"][0]["html"]) for x in serious]
