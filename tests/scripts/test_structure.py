"""The source of the scripts: identical sections, small diffs, simple code.

A diff must not exceed its budget: to add lines to a diff, remove others.
"""

import ast
import os
import re
import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT
from sections import (
    CONTINUOUS_SCRIPTS,
    CONTINUOUS_SECTIONS,
    DQN_SCRIPTS,
    IMAGE_SCRIPTS,
    PPO_SCRIPTS,
    ROWS,
    SAC_SCRIPTS,
    SECTIONS,
    VMAP_SECTIONS,
    but,
    changed_lines,
    differences,
    function,
    path_of,
    read,
    scripts,
    sections,
)

from analysis import catalog

OFF_POLICY = (*DQN_SCRIPTS, *SAC_SCRIPTS)
EACH = pytest.mark.parametrize("name", [*PPO_SCRIPTS, *OFF_POLICY])
MAIN = """


if __name__ == "__main__":
    train(parse_args())
"""


def test_scripts_toml_lists_every_script():
    files = [*ROOT.glob("ppo_*.py"), *ROOT.glob("more/*.py")]
    assert sorted(files) == sorted(map(path_of, ROWS))
    for name, row in ROWS.items():
        assert set(row) == set(catalog.FIELDS)
        assert name.startswith(f"{row['algorithm']}_")
        # The first class of a script contains its arguments.
        num_envs = re.search(r"^    num_envs: int = (\d+)", read(name), re.M)
        num_steps = re.search(r"^    num_steps: int = (\d+)", read(name), re.M)
        assert num_envs and num_steps and row["steps"] == int(num_envs[1]) * int(num_steps[1])


# === Identical sections =========================================================================
@pytest.mark.parametrize("name", PPO_SCRIPTS)
def test_sections_and_main(name):
    expected = SECTIONS
    if "vmap" in name:
        expected = VMAP_SECTIONS
    if name in CONTINUOUS_SCRIPTS:
        expected = CONTINUOUS_SECTIONS
    assert list(sections(read(name))) == expected


@EACH
def test_main(name):
    assert read(name).endswith(MAIN)


@pytest.mark.parametrize("name", [x for x in ROWS if x.endswith("_gymnasium")])
def test_a_resumed_run_starts_different_episodes(name):
    """Seeds depend on the iteration; otherwise episodes would repeat after a resume."""
    assert "env.reset(iteration)" in sections(read(name))["Training"]


@pytest.mark.parametrize("name", [x for x in ROWS if x.endswith("_gymnasium")])
def test_a_run_is_complete_before_its_environments_are_closed(name):
    """Closing them can fail, for example if a simulator has ended."""
    lines = "    try:\n        log.close()\n    finally:\n        env.envs.close()\n"
    assert lines in sections(read(name))["Training"]


def test_shared_sections_are_identical():
    """To give a script a different section, exclude it with but() in tools/sections.py."""
    assert not differences(), "python -m tools.sections shows where; see CONTRIBUTING.md, step 5"


@pytest.mark.parametrize("name", [x for x in PPO_SCRIPTS if ROWS[x]["framework"] != "torch"])
def test_every_iteration_in_jax_has_a_separate_key(name):
    """Keys depend only on the iteration number, so a resumed run uses the same ones."""
    assert "fold_in(key, iteration)" in sections(read(name))["Training"]


def having(wanted, *words):
    """Return the scripts that match all words and contain the function or class `wanted`."""
    definition = re.compile(rf"^(def|class) {wanted}\(", re.M)
    return [name for name in scripts(*words) if definition.search(read(name))]


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("load_checkpoint", scripts("torch")),
        ("compile_graph", having("compile_graph")),
        ("capture", having("capture")),
        ("Adam", but(having("Adam"), "ppo_torch_vmap")),  # its Adam trains many agents
        ("epoch", but(having("epoch", "torch"), "ppo_torch_vmap")),
        ("learning_rate_after", having("learning_rate_after")),
        ("make_schedule", having("make_schedule", "ppo")),
        ("learning_rate_factor", having("learning_rate_factor", "ppo")),
        ("image_size_of", having("image_size_of")),
        ("check_image_size", having("check_image_size")),
        ("shuffle", having("shuffle")),
        ("episode_statistics", but(scripts("ppo", "linen"), "ppo_cnn_linen_gymnasium")),
        ("QuietLog", ("ppo_linen_sharded", "ppo_nnx_sharded")),
        ("to_bounds", having("to_bounds")),
    ],
)
def test_functions_are_identical_in_all_scripts(wanted, names):
    assert len(names) > 1 and len({function(name, wanted) for name in names}) == 1


# === Diffs ======================================================================================
@pytest.mark.parametrize(
    ("first", "second", "budget"),
    [
        ("ppo_linen", "ppo_nnx", 107),
        ("ppo_linen", "ppo_nnx_tree", 106),
        ("ppo_nnx", "ppo_nnx_cached", 16),
        ("ppo_nnx", "ppo_nnx_tree", 33),
        ("ppo_linen", "ppo_equinox", 127),
        ("ppo_torch", "ppo_torch_compile", 159),
        ("dqn_torch", "dqn_torch_compile", 117),
        ("ppo_linen", "ppo_torch", 405),
        ("ppo_linen", "ppo_linen_vmap", 128),
        ("ppo_nnx_tree", "ppo_nnx_vmap", 129),
        ("ppo_torch_compile", "ppo_torch_vmap", 266),
        ("ppo_linen", "ppo_linen_sharded", 142),
        ("ppo_linen_sharded", "ppo_nnx_sharded", 189),
        ("ppo_nnx_tree", "ppo_nnx_sharded", 145),
        ("ppo_torch", "ppo_torch_ddp", 182),
        ("ppo_linen", "ppo_linen_gymnasium", 246),
        ("ppo_torch", "ppo_torch_gymnasium", 270),
        ("ppo_linen_gymnasium", "ppo_nnx_gymnasium", 111),
        ("ppo_linen_gymnasium", "ppo_torch_gymnasium", 345),
        ("ppo_linen", "ppo_rnn_linen", 205),
        ("ppo_rnn_linen", "ppo_rnn_nnx", 121),
        ("ppo_rnn_linen", "ppo_rnn_equinox", 143),
        ("ppo_torch", "ppo_rnn_torch", 208),
        ("ppo_linen", "ppo_continuous_linen", 233),
        ("ppo_torch", "ppo_continuous_torch", 234),
        ("ppo_continuous_linen", "ppo_continuous_nnx", 105),
        ("ppo_continuous_linen", "ppo_continuous_equinox", 139),
        ("ppo_continuous_linen", "ppo_continuous_torch", 468),
        ("ppo_linen_gymnasium", "ppo_continuous_linen_gymnasium", 262),
        ("ppo_torch_gymnasium", "ppo_continuous_torch_gymnasium", 247),
        ("ppo_continuous_linen", "ppo_continuous_linen_gymnasium", 277),
        ("ppo_continuous_torch", "ppo_continuous_torch_gymnasium", 299),
        ("ppo_continuous_linen_gymnasium", "ppo_continuous_nnx_gymnasium", 117),
        ("ppo_continuous_linen_gymnasium", "ppo_continuous_torch_gymnasium", 428),
        ("ppo_continuous_torch_gymnasium", "ppo_continuous_torch_compile_gymnasium", 160),
        ("ppo_linen_gymnasium", "ppo_cnn_linen_gymnasium", 387),
        ("ppo_torch_gymnasium", "ppo_cnn_torch_gymnasium", 336),
        ("ppo_cnn_linen_gymnasium", "ppo_cnn_torch_gymnasium", 458),
        ("ppo_cnn_torch_gymnasium", "ppo_cnn_torch_compile_gymnasium", 162),
        ("dqn_linen", "dqn_torch", 507),
        ("dqn_linen", "sac_linen", 440),
        ("sac_linen", "sac_linen_gymnasium", 470),
        ("sac_linen", "sac_torch", 553),
        ("ppo_cnn_linen_gymnasium", "ppo_cnn_nnx_gymnasium", 141),
        ("dqn_linen", "dqn_nnx", 145),
        ("dqn_linen_gymnasium", "dqn_nnx_gymnasium", 127),
        ("sac_linen", "sac_nnx", 192),
        ("sac_linen_gymnasium", "sac_nnx_gymnasium", 171),
    ],
)
def test_diff_budgets(first, second, budget):
    assert changed_lines(first, second) <= budget


# === Plain code =================================================================================
# Constructs that ruff accepts: f(x := 1), a = b = 1, {**a, "b": 1}, f(**{"a": 1}), a == b != c.
TWO_THOUGHTS = re.compile(r":=|^ *[\w.]+ = [\w.]+ = |\{\*\*|\*\*\{| [!=]= \S+ [!=]= ", re.M)


def depth(node):
    """Return how deeply functions are nested in a syntax tree."""
    inner = max(map(depth, ast.iter_child_nodes(node)), default=0)
    return inner + isinstance(node, ast.FunctionDef)


@EACH
def test_style_is_plain(name):
    assert not TWO_THOUGHTS.search(read(name))
    assert depth(ast.parse(read(name))) <= 2


@EACH
def test_every_flag_is_used_and_documented(name):
    text = read(name)
    line = r"^    (\w+): [^=\n]+ = [^\n]*?  # .+$"
    fields = re.findall(line, sections(text)["Arguments"], re.M)
    assert fields == re.findall(r"^    (\w+): ", function(name, "Args"), re.M)
    for field in fields:
        assert re.search(rf"\b(args|self)\.{field}\b", text), field


@EACH
def test_nothing_is_unpickled(name):
    """Flax and Equinox never unpickle, and NumPy does not by default. PyTorch did before 2.6."""
    loads = re.findall(r"torch\.load\(.*", read(name))
    assert all("weights_only=True" in x for x in loads)
    assert "pickle" not in read(name)


# === Imports ====================================================================================
def imports(path):
    """Return the top-level packages that a file imports, including inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    return {name.split(".")[0] for name in names}


@EACH
def test_scripts_import_no_other_file_and_only_portable_packages(name):
    """Modules such as fcntl do not exist on Windows, and external programs may be missing."""
    banned = {"fcntl", "resource", "pwd", "grp", "psutil", "subprocess"}
    banned |= {"analysis", "envs", "tests", "evaluate", "tune", *ROWS}
    assert not imports(path_of(name)) & banned


def test_pytorch_with_environments_in_numpy_needs_no_jax(tmp_path):
    """Neither these scripts nor the packages that they import may import JAX."""
    names = [*scripts("torch", "Gymnasium"), *scripts("torch", "continuous, Gymnasium")]
    names += scripts("torch", "images")
    code = f"import sys, {', '.join(names)}; sys.exit('jax' in sys.modules)"
    env = os.environ | {"PYTHONPATH": str(ROOT / "more")}
    assert len(names) >= 7
    subprocess.run([sys.executable, "-c", code], env=env, check=True)


def requirements(file="requirements.txt"):
    lines = (ROOT / file).read_text().splitlines()
    pinned = [line.split()[0] for line in lines if line[:1].isalpha()]
    return {pin.partition("==")[0]: pin for pin in pinned}


def packages_of(path):
    """Return the imported packages under their names in requirements.txt."""
    packages = imports(path) - sys.stdlib_module_names
    packages |= {"six"} if "gymnax" in packages else set()  # an undeclared dependency of gymnax
    return {"pillow" if package == "PIL" else package for package in packages}


EVALUATE = ROOT / "evaluate.py"


@pytest.mark.parametrize("path", [*map(path_of, ROWS), EVALUATE], ids=lambda path: path.stem)
def test_the_metadata_block_lists_the_imported_packages(path):
    """PEP 723 blocks list exactly the imported packages, in the tested versions.

    The block of evaluate.py also lists the packages of Flax scripts, which it may import.
    """
    block = path.read_text().removeprefix("# /// script\n").partition("# ///\n")[0]
    metadata = tomllib.loads(re.sub("^# ?", "", block, flags=re.M))
    assert metadata["requires-python"] == ">=3.11"
    packages = packages_of(path) - {"minatar"}  # GPL, so not in requirements.txt
    if path == EVALUATE:
        packages |= packages_of(path_of("ppo_linen")) - {"wandb"} | {"gymnasium", "pygame-ce"}
    named = [x.replace("[mujoco]", "") for x in metadata["dependencies"]]  # ignore the extra
    pins = [requirements()[x] for x in packages]
    if path.stem in IMAGE_SCRIPTS:  # Gymnasium imports ale-py
        pins.append(requirements("requirements-test.txt")["ale-py"])
    assert sorted(named) == sorted(pins)


def test_the_installed_analysis_has_the_tested_versions():
    """pyproject.toml lists the packages that `uvx --from . ppo-rosetta` installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *project["optional-dependencies"]["wandb"]]
    assert set(named) <= set(requirements().values())
