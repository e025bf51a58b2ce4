"""The uses of torch.compile in the limits study, without compiling."""

import json

import pytest
import torch
from running import BATCH, SMALL, assert_close, main, metrics
from test_studies import listed_race

from studies.limits import compiled, study

FLAGS = [*SMALL.split(), "--total-timesteps", 2 * BATCH]
OF_PPO_TORCH = (compiled.EAGER, compiled.COMPILED)
VARIANTS = {x: y for x, y in compiled.VARIANTS.items() if y.script in OF_PPO_TORCH}


@pytest.fixture
def uncompiled(monkeypatch):
    """Replace torch.compile, also as a decorator with options, by the identity."""

    def identity(function=None, **options):
        return function or identity

    monkeypatch.setattr(torch, "compile", identity)


def run(name, tmp_path, monkeypatch, *flags):
    """Train in a variant, and return its metrics."""
    monkeypatch.syspath_prepend(tmp_path)
    module = f"limits_{name}"
    (tmp_path / f"{module}.py").write_text(compiled.text_of(name))
    assert main(module, *FLAGS, *flags, "--runs-dir", tmp_path, "--run-name", name) == 0
    return metrics(tmp_path / name)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_gives_the_metrics_of_the_eager_script(name, tmp_path, monkeypatch, uncompiled):
    assert main("ppo_torch", *FLAGS, "--runs-dir", tmp_path, "--run-name", "eager") == 0
    assert_close(run(name, tmp_path, monkeypatch), metrics(tmp_path / "eager"))


def test_the_gymnasium_variant_gives_the_metrics_of_its_script(tmp_path, monkeypatch, uncompiled):
    script = "ppo_continuous_torch_gymnasium"
    flags = ["--env-id", "Pendulum-v1"]
    assert main(script, *FLAGS, *flags, "--runs-dir", tmp_path, "--run-name", "eager") == 0
    found = run("step_gymnasium", tmp_path, monkeypatch, *flags)
    assert_close(found, metrics(tmp_path / "eager"))


def test_all_variants_differ():
    texts = [compiled.text_of(name) for name in compiled.VARIANTS]
    texts += [x.read_text() for x in {variant.script for variant in compiled.VARIANTS.values()}]
    assert len(set(texts)) == len(texts)


def test_code_that_a_script_no_longer_contains_is_an_error(tmp_path, monkeypatch):
    """Otherwise, a race could compare the script with itself."""
    path = tmp_path / "changed.py"
    path.write_text(compiled.EAGER.read_text().replace(compiled.LOOP, "    while True:\n"))
    monkeypatch.setitem(compiled.VARIANTS, "module", compiled.Variant(path, compiled.MODULE))
    with pytest.raises(ValueError, match="update VARIANTS"):
        compiled.text_of("module")
    with pytest.raises(ValueError, match="update VARIANTS"):
        compiled.excerpt(path, compiled.LOOP, "\n")


def test_tables_compare_uses_with_linen_and_optimizations_with_our_script(tmp_path):
    """A race without a program, as in Gymnasium, leaves its cell empty."""
    path = tmp_path / "races.jsonl"
    for race in study.RACES:
        seconds = dict.fromkeys(study.USES, 4.0) | {"Linen": 1.0, "ours": 2.0}
        if "Gymnasium" not in race:
            seconds |= dict.fromkeys(study.OPTIMIZATIONS, 3.0)
        listed_race(path, race, **seconds)
    uses = study.uses_table(path).cells.set_index("compiled part")
    assert uses.columns.tolist()[-1] == "HalfCheetah-v5, 2 x 64: time / Linen time"
    assert uses.iloc[:, 1].tolist()[0] == "1.00× [1.00, 1.00]"
    assert uses.loc["our compiled script"].tolist()[1:] == ["2.00× [2.00, 2.00]"] * 4
    optimizations = study.optimizations_table(path).cells.set_index("optimization")
    assert optimizations.loc["cpp_wrapper"].tolist() == ["1", *["1.50× [1.50, 1.50]"] * 3]


def test_the_programs_of_the_study_have_names_in_its_tables():
    names = {*study.USES, *study.OPTIMIZATIONS}
    variants = {x for x, y in compiled.VARIANTS.items() if y.script in OF_PPO_TORCH}
    assert variants <= names


def test_the_precise_table_has_a_row_per_race_and_optimization(tmp_path):
    path = tmp_path / "races.jsonl"
    for race in study.PRECISE:
        listed_race(path, race, ours=2.0, python_wrapper=3.0)
    cells = study.precise_table(path).cells
    assert cells["script"].tolist() == list(study.PRECISE.values())
    assert cells.iloc[0].tolist() == ["cpp_wrapper", "ppo_torch_compile", "1.50× [1.50, 1.50]"]


def test_the_startup_table_shows_what_an_optimization_saves(tmp_path):
    path = tmp_path / "startup.jsonl"
    rows = [{"variant": "ours", "seconds": x} for x in (10.0, 11.0)]
    rows += [{"variant": "python_wrapper", "seconds": x} for x in (13.0, 14.0)]
    path.write_text("\n".join(map(json.dumps, [{}, *rows])))
    (row,) = study.startup_table(path).cells.to_numpy().tolist()
    assert row[:2] == ["cpp_wrapper", "10.5"] and row[2].startswith("3.00")
