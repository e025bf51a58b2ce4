"""The code of the nnx_calls study, its figure, and the excerpts in docs/nnx.md.

The study measures the cost of a call in Flax NNX. test_docs.py compares its table with its data.
"""

import re
import textwrap

import numpy as np
from conftest import ROOT

from studies.nnx_calls import measure, study


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


def test_the_figure_is_drawn(tmp_path):
    study.update(ROOT / "studies/nnx_calls", tmp_path)
    assert (tmp_path / "calls.png").read_bytes().startswith(b"\x89PNG")


# === docs/nnx.md ================================================================================
def test_excerpts_match_the_scripts():
    """The line above each Python block names the script that contains the excerpt."""
    page = (ROOT / "docs/nnx.md").read_text()
    blocks = re.findall(r"From (ppo_\w+\.py):\n\n```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == page.count("```python") > 0
    for name, block in blocks:
        text = "\n" + (ROOT / name).read_text()
        indented = [textwrap.indent(block, " " * n) for n in range(0, 16, 4)]
        assert any("\n" + x in text for x in indented), block
