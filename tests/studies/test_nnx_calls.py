"""The code of the nnx_calls study, its figure, and the excerpts in docs/nnx.md.

The study measures the cost of a call in Flax NNX. test_docs.py compares its table with its data.
"""

import re
import textwrap

import numpy as np
import pytest
from conftest import ROOT
from running import BATCH, SMALL, main, metrics

from studies.nnx_calls import measure, policy, study


def test_all_variants_train_identically():
    """The losses in the fourth call depend on the updates in the first three."""
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


def test_all_policy_calls_give_the_same_metrics(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    flags = [*SMALL.split(), "--total-timesteps", 2 * BATCH, "--runs-dir", tmp_path]
    logged = []
    for number, way in enumerate(policy.WAYS):
        name = f"policy_call_{number}"
        (tmp_path / f"{name}.py").write_text(policy.variant(way))
        assert main(name, *flags, "--run-name", name) == 0
        logged.append(metrics(tmp_path / name))
    assert len({policy.variant(way) for way in policy.WAYS}) == len(logged) == 4
    assert all(rows == logged[0] for rows in logged)


def test_a_policy_call_that_the_script_no_longer_makes_is_an_error(tmp_path, monkeypatch):
    """Otherwise, a race could compare the script with itself."""
    path = tmp_path / "changed.py"
    path.write_text(policy.SCRIPT.read_text().replace(policy.CALL, "= collect("))
    monkeypatch.setattr(policy, "SCRIPT", path)
    with pytest.raises(ValueError, match="update WAYS"):
        policy.variant("split_and_merge")


def test_the_figure_is_drawn(tmp_path):
    study.update(ROOT / "studies/nnx_calls", tmp_path)
    assert (tmp_path / "calls.png").read_bytes().startswith(b"\x89PNG")


# === docs/nnx.md ================================================================================
def test_excerpts_match_the_scripts():
    """The line above each Python block names the script that contains the excerpt.

    Only the program that converts a checkpoint is not an excerpt; test_recipes.py runs it.
    """
    page = (ROOT / "docs/nnx.md").read_text()
    blocks = re.findall(r"From ([\w/]+\.py):\n\n```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == page.count("```python") - 1 > 0
    for name, block in blocks:
        text = "\n" + (ROOT / name).read_text()
        indented = [textwrap.indent(block, " " * n) for n in range(0, 16, 4)]
        assert any("\n" + x in text for x in indented), block
