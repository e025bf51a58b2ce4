"""The study of what a call costs in Flax NNX, and the page about PPO in NNX."""

import json
import re
import textwrap

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT

from studies.nnx_calls import measure, study


# === Six ways ===================================================================================
def test_six_ways_train_alike():
    """The losses of the fourth call depend on what the first three wrote."""
    batches = measure.make_batches(20)[:4]
    losses = {}
    for way, bind in measure.WAYS.items():
        call = bind(*measure.make_objects(4))
        losses[way] = np.concatenate([call(batch) for batch in batches])
    expected = losses["jax.jit, plain arrays"]
    assert expected.shape == (16,)
    assert len(set(expected.tolist())) == 16
    for way, values in losses.items():
        np.testing.assert_allclose(values, expected, rtol=1e-5, err_msg=way)


@pytest.mark.parametrize("calls", [1, 10, 80])
def test_an_iteration_has_the_same_minibatches_in_however_many_calls(calls):
    batches = measure.make_batches(calls)
    assert len(batches) == calls
    joined = np.concatenate([np.stack(batch, axis=1) for batch in batches])
    whole = np.stack(measure.make_batches(1)[0], axis=1)
    assert whole.shape == (measure.STEPS, 2, measure.SIZE, measure.SIZE)
    np.testing.assert_array_equal(joined, whole)


def test_a_measurement_is_the_median_of_the_iterations_after_the_warm_up(monkeypatch, capsys):
    """Of each way, two slow iterations come first; the ways differ, and are not mixed up."""
    seen = {way: [] for way in measure.WAYS}
    values = [100, 100, 1, 5, 3]

    def seconds_of(call, batches):
        assert len(batches) == 80
        seen[call].append(values[len(seen[call])] + list(seen).index(call))
        return seen[call][-1]

    ways = {way: lambda network, optimizer, way=way: way for way in measure.WAYS}
    monkeypatch.setattr(measure, "WAYS", ways)
    monkeypatch.setattr(measure, "seconds_of", seconds_of)
    measure.measure([(4, 80)], iterations=3)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {x["way"]: x["seconds"] for x in rows} == {way: 3 + i for i, way in enumerate(ways)}
    assert {(x["arrays"], x["calls"]) for x in rows} == {(4, 80)}


# === Table and figure ===========================================================================
def test_the_table_and_the_figure(tmp_path):
    """Two processes, of which the second takes 1.21 times as long: the mean is 1.1 times."""
    rows = [
        {"flax": flax, "way": way, "arrays": arrays, "calls": calls, "seconds": noise * seconds}
        for flax in ("0.12.8", "0.12.12")
        for way in measure.WAYS
        for arrays, calls, seconds in [(2, 80, 0.008), (12, 80, 0.016), (12, 1, 0.01)]
        for noise in (1, 1.21)
    ]
    path = tmp_path / "measured.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"versions": {}}, *rows]))
    assert set(study.HUES) == set(measure.WAYS)

    found = study.iterations(path).cells
    assert list(found["way"]) == list(study.HUES)  # of the first Flax alone
    assert list(found.columns[1:]) == ["1 call (ms)", "80 calls (ms)"]
    numbers = [found[name].iloc[0].split()[0] for name in found.columns[1:]]
    assert pd.to_numeric(numbers).tolist() == pytest.approx([11, 17.6])
    study.update(tmp_path, tmp_path)
    assert (tmp_path / "calls.png").read_bytes().startswith(b"\x89PNG")


# === docs/nnx.md ================================================================================
def test_excerpts_are_what_the_scripts_have():
    """Above a block of Python stands the file that has its lines, at some indentation."""
    page = (ROOT / "docs/nnx.md").read_text()
    blocks = re.findall(r"From (ppo_\w+\.py):\n\n```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == page.count("```python") > 0
    for name, block in blocks:
        text = "\n" + (ROOT / name).read_text()
        indented = [textwrap.indent(block, " " * n) for n in range(0, 16, 4)]
        assert any("\n" + x in text for x in indented), block
