"""What the studies' grids list: as much as they say, and commands that the scripts take."""

import importlib
import re
import shlex

import pytest
import tyro
from test_driver import ROOT, cell_of, environment, succeed

RUNS = {"quick": 15, "async": 108, "sync": 96 + 24, "full": 231, "dqn": 24, "doors": 140}
RUNS |= {"agents": 3 * 46, "minatar": 10 + 15 + 4, "peers": 90 + 45, "cpu": 300}


def test_help_says_what_a_study_has_and_how_long_it_takes(tmp_path):
    """What a grid's first line says is what its other lines come to."""
    env, minutes = environment(tmp_path), {"hours": 60, "minutes": 1}
    line = re.compile(r"^  (\w+) .*: (\d+) runs, ([\d.]+) (hours|minutes)$", re.MULTILINE)
    said = line.findall(succeed(ROOT, "--help", env=env))
    assert {name: int(runs) for name, runs, *_ in said} == RUNS
    for name, runs, number, unit in said:
        flags = (name, "--runs-dir", str(tmp_path), "--dry-run")
        words = succeed(ROOT, *flags, env=env).splitlines()[-1].split()
        assert words[2:5] == [runs, "of", f"{runs},"]
        estimate = float(words[6]) * minutes[words[7]]
        assert float(number) * minutes[unit] == pytest.approx(estimate, rel=0.3)


# === The grid ===================================================================================
@pytest.mark.parametrize("study", ["full", "dqn", "doors", "agents", "minatar"])
def test_commands_are_what_their_scripts_take(study, tmp_path):
    """As representatives of the scripts parse them, they say what the names of the runs do."""
    lines = succeed(ROOT, study, "--repeats", "2", "--list", env=environment(tmp_path)).splitlines()
    sizes = {"small": (64,) * 2, "medium": (256,) * 3, "large": (1024,) * 6}
    for line in lines:
        _, *words = shlex.split(line)
        cell = cell_of(words[-1])
        script, label, env = cell["script"], cell["label"], cell["env"]
        if words[0] == "-m":
            assert (ROOT / f"{words[1].replace('.', '/')}.py").is_file()
            words = words[2:]
        if script != "one_scan":
            assert words.pop(0) == f"{'' if 'dqn_' in script else 'ppo_'}{script}.py".replace(
                "-none", ""
            )
        names = {"dqn_": script, "vmap": "ppo_linen_vmap", "scan": "ppo_linen_vmap"}
        names |= {"torch": "ppo_torch", "": "ppo_linen"}
        module = importlib.import_module(next(y for x, y in names.items() if x in script))
        kind = {"minatar": "MinAtar", "doors": "Doors"}.get(env.split("-")[0], "Args")
        args = tyro.cli(getattr(module, kind), args=words[kind != "Args" :])
        assert (args.num_iterations, args.seed) == (cell["iterations"], cell["seed"])
        assert kind != "Args" or args.env_id == env
        assert args.hidden_sizes == sizes.get(cell["size"], args.hidden_sizes)
        assert getattr(args, "sync_for_timing", False) == label.startswith("sync")
        compiled = getattr(args, "jit", True) and getattr(args, "jit_env", True)
        assert compiled == (not script.endswith("-none"))
        assert "agents" not in label or label == f"agents-{args.num_agents}"
        assert (args.save_every == 20) == (env == "minatar" and args.num_iterations > 20)
        if kind == "Doors":
            assert args.num_envs == (1024 if "1024" in env else 64)
            short = "Short" in args.env_id or getattr(args, "max_episode_steps", 0) == 15
            assert short == env.startswith("doors-public")
