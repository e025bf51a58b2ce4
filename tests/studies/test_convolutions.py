"""Code of the convolutions study, which compares convolutions in JAX on a CPU."""

import json
import re
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest
from conftest import ROOT

from studies.convolutions import measure, study

FLAGS: dict[str, Any] = {"conv_channels": (4, 8), "conv_kernels": (4, 3), "conv_strides": (2, 1)}
FLAGS |= {"hidden_sizes": (16,)}
SHAPE = (4, 13, 13)
REFERENCE = "Linen, nn.Conv, Python loop"


@cache
def losses_of(way):
    """Return the losses in two epochs; in the second, they depend on all earlier gradients."""
    batches = measure.make_batches(SHAPE, 16)
    epoch, _ = measure.WAYS[way](batches, measure.make_params(SHAPE, FLAGS), FLAGS)
    return np.concatenate([epoch(), epoch()])


@pytest.mark.parametrize("way", [x for x in measure.WAYS if x != REFERENCE])
def test_all_variants_train_identically(way):
    expected = losses_of(REFERENCE)
    assert abs(expected[4:] / expected[:4] - 1).min() > 1e-3  # training changes the losses
    tolerance = 2e-3 if "bfloat16" in way else 1e-5
    np.testing.assert_allclose(losses_of(way), expected, rtol=tolerance)


def test_a_wrong_gradient_is_found_before_measuring(monkeypatch):
    monkeypatch.setattr(measure, "SHAPE", (4, 36, 36))
    monkeypatch.setattr(measure, "ROWS", 16)
    right = measure.linen.convolve

    def wrong(images, kernel, *args, **kwargs):
        return right(images, jax.lax.stop_gradient(kernel) + 0.5 * kernel, *args, **kwargs)

    monkeypatch.setattr(measure.linen, "convolve", wrong)
    assert measure.gradient_error() > 0.1


def test_ratios_are_computed_within_a_round(tmp_path):
    """The machine slows down in each round, and the slow variant did not run in the last one."""
    rows: list[dict[str, Any]] = [{"versions": {}}]
    for number in range(3):
        speed = 1 + number
        rows.append({"way": study.BASELINE, "round": number, "seconds": 0.2 * speed})
        if number < 2:
            rows.append({"way": "Linen, slow, looped", "round": number, "seconds": 4 * speed})
            rows[-1]["compile_seconds"] = 3.0
    path = tmp_path / "measured.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    cells = study.steps(path).cells
    assert cells["variant"].tolist() == ["slow, looped", "channels_last"]
    assert cells.iloc[:, 3].tolist() == ["20.0× [20.0, 20.0]", "1.00× [1.00, 1.00]"]
    assert cells.iloc[:, 4].tolist() == ["3.00", "-"]


# === The page ===================================================================================
def code_on_the_page():
    page = (ROOT / "studies/convolutions/README.md").read_text()
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def test_excerpts_match_the_script():
    """Whitespace may differ, because the script indents methods more deeply."""
    lines, chunks, method, _ = code_on_the_page()
    script = (ROOT / "more/ppo_cnn_linen_gymnasium.py").read_text()
    assert "defvjp" in lines and f"\n{lines}" in script
    assert "nn.scan" in chunks and "checkpoint_name" in method
    for excerpt in (chunks, method):
        assert "".join(excerpt.split()) in "".join(script.split())


@pytest.mark.parametrize("convolution", ["plain", "convolve"])
def test_the_check_on_the_page_finds_the_slow_convolutions(convolution, capsys):
    def loss(kernel, images):
        if convolution == "plain":
            convolve = partial(jax.lax.conv_general_dilated, dimension_numbers=measure.linen.AXES)
        else:
            convolve = measure.linen.convolve
        return (convolve(images, kernel, (2, 2), "VALID") ** 2).sum()

    def update(kernel, batch):
        return jax.lax.scan(lambda kernel, x: (jax.grad(loss)(kernel, x), None), kernel, batch)

    inputs = (np.ones((3, 3, 4, 8), "f"), np.ones((2, 16, 9, 9, 4), "f"))
    exec(code_on_the_page()[3], {"jax": jax, "update": update, "inputs": inputs})
    printed = capsys.readouterr().out
    assert "b01f_01io->b01f" in printed
    assert ("f01b_i01o->01bf" in printed) == (convolution == "plain")
