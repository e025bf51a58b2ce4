"""A script alone in an empty folder trains, is stopped and goes on, by uv as a new user would."""

import os
import shlex
import shutil
import signal
import subprocess

from conftest import ROOT
from running import rows

SIZES = "--num-envs 4 --num-steps 32 --hidden-sizes 8 --update-epochs 1 --run-name one"


def test_by_uv_it_trains_is_stopped_and_goes_on(tmp_path, compiled):
    shutil.copy(ROOT / "ppo_linen.py", tmp_path)
    runner = ["uv", "run"] if shutil.which("uv") else ["python"]
    words = [*runner, "ppo_linen.py", *SIZES.split(), "--total-timesteps", str(128 * 400)]
    env = {name: x for name, x in os.environ.items() if name != "VIRTUAL_ENV"} | compiled
    process = subprocess.Popen(words, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE)
    assert process.stdout
    while not process.stdout.readline().startswith("iteration"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    told = output.splitlines()[-1]
    assert told == f"To go on: {' '.join(runner)} ppo_linen.py --resume runs/one"
    command = shlex.split(told.removeprefix("To go on: "))
    subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True)
    assert [row["iteration"] for row in rows(tmp_path / "runs/one")] == list(range(400))
