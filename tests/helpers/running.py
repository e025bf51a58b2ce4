"""Call train() in the scripts, and check files, compilations and transfers."""

import importlib
import json
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import images
import jax
import numpy as np
import probes  # noqa: F401  (registers the environments)
import pytest
import scripted  # noqa: F401  (registers the environments)
import torch
from flax.serialization import msgpack_restore, msgpack_serialize
from sections import CONTINUOUS_SCRIPTS, IMAGE_SCRIPTS, path_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SMALL = "--num-envs 4 --num-steps 32 --num-minibatches 2 --update-epochs 2 --hidden-sizes 8 8"
BATCH = 128
# With SMALL and AIM, agents learn the best continuous actions in 80 iterations. Without the entropy
# bonus, they do not.
AIM = "--env-id Aim-v0 --learning-rate 1e-2 --no-anneal-lr --gamma 0.5 --gae-lambda 0.5"
AIM += " --ent-coef 0.01"


def command(name, run_name, iterations, *flags):
    sizes = [*SMALL.split(), "--total-timesteps", BATCH * iterations]
    return [sys.executable, path_of(name), *sizes, "--run-name", run_name, *flags]


def parse(name, *flags):
    """Return the arguments of a script from a command line."""
    script = importlib.import_module(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script.__file__, *map(str, flags)])
        return script.parse_args()


def main(name, *flags):
    """Run a script as from a command line, but in this process. Return its exit status."""
    try:
        importlib.import_module(name).train(parse(name, *flags))
    except SystemExit as stopped:
        return stopped.code
    return 0


def stop(log):
    """Call the SIGTERM handler of a run log directly, since imported scripts do not install it."""
    handler = signal.getsignal(signal.SIGTERM)
    getattr(log, "run", log).stop(signal.SIGTERM, None)
    signal.signal(signal.SIGTERM, handler)


def train(name, runs_dir, run_name, *flags, iterations=6):
    """Train to the end. Return the run folder."""
    own = ["--runs-dir", runs_dir, "--run-name", run_name]
    assert main(name, *command(name, run_name, iterations)[2:], *own, *flags) == 0
    return Path(runs_dir, run_name)


# === Files of a run =============================================================================
def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def metrics(folder):
    """Return the rows of metrics.jsonl without durations and speeds, which vary."""
    return [
        {key: x for key, x in row.items() if not key.startswith("time/") and key != "charts/SPS"}
        for row in rows(folder)
    ]


def assert_close(rows, expected):
    """Assert equality up to rounding, with null in the same places."""
    for row, other in zip(rows, expected, strict=True):
        row = {key: np.nan if x is None else x for key, x in row.items()}
        other = {key: np.nan if x is None else x for key, x in other.items()}
        assert row == pytest.approx(other, rel=1e-3, abs=1e-5, nan_ok=True)


def assert_tensorboard_agrees(folder):
    """Assert that TensorBoard has exactly the values of metrics.jsonl."""
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    found = set()
    for tag in events.Tags()["tensors"]:
        for event in events.Tensors(tag):
            (value,) = event.tensor_proto.float_val
            found.add((tag, event.step, value))
        assert len(events.Tensors(tag)) == len({x.step for x in events.Tensors(tag)})
    logged = rows(folder)
    curves = [(key, row["global_step"], row[key]) for row in logged for key in row if "/" in key]
    assert found == {(key, step, np.float32(x)) for key, step, x in curves if x is not None}


def checkpoints(folder) -> list[Path]:
    """Return a list with the path of the checkpoint, or an empty list. Ignore checkpoint.new."""
    return [path for path in folder.glob("checkpoint.*") if path.suffix != ".new"]


def arrays(folder) -> dict[str, Any]:
    """Return the arrays of a checkpoint, keyed by path (a/b/c) or, in Equinox, by number."""
    (path,) = checkpoints(folder)
    if path.suffix == ".msgpack":
        return dict(flat(msgpack_restore(path.read_bytes())))
    if path.suffix == ".pt":
        return dict(flat(torch.load(path, map_location="cpu", weights_only=True)))
    found = {}
    with open(path, "rb") as file:
        while file.tell() < path.stat().st_size:
            found[str(len(found))] = np.load(file)
    return found


def flat(tree, place=""):
    """Yield the path and the array of each leaf of nested dicts and lists."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, x in pairs:
        if isinstance(x, dict | list | tuple):
            yield from flat(x, f"{place}{key}/")
        else:
            yield f"{place}{key}", np.array(x)


def rewrite(folder, changed):
    """Replace each array x in a checkpoint with changed(x)."""
    (path,) = folder.glob("checkpoint.*")
    if path.suffix == ".msgpack":
        tree = jax.tree.map(changed, msgpack_restore(path.read_bytes()))
        path.write_bytes(msgpack_serialize(tree))
    elif path.suffix == ".pt":
        tree = torch.load(path, map_location="cpu", weights_only=True)
        torch.save(jax.tree.map(lambda x: changed(x) if torch.is_tensor(x) else x, tree), path)
    else:
        found = arrays(folder).values()
        with open(path, "wb") as file:
            for x in found:
                np.save(file, changed(x))


def assert_same_checkpoints(folder, other):
    """Assert that two checkpoints are exactly equal."""
    ours, theirs = arrays(folder), arrays(other)
    assert ours.keys() == theirs.keys()
    for place, x in ours.items():
        np.testing.assert_array_equal(x, theirs[place], err_msg=place, strict=True)


def change(folder, args=(), **others):
    """Change arguments and other entries of run.json."""
    said = info(folder)
    said["args"] |= dict(args)
    (folder / "run.json").write_text(json.dumps(said | others))


def info(folder):
    return json.loads((folder / "run.json").read_text())


def content(folder):
    """Return the paths, modification times and contents of all files in a folder."""
    paths = sorted(Path(folder).rglob("*"))
    return [(x, x.lstat().st_mtime_ns, x.is_file() and x.read_bytes()) for x in paths]


# === Compilations and transfers =================================================================
class Counts:
    """Count compilations and transfers to the host between two calls of RunLog.write."""

    def __init__(self, monkeypatch):
        self.now, self.per_iteration = Counter(), []
        jax.monitoring.register_event_duration_secs_listener(self.on_event)
        array: Any = type(jax.numpy.zeros(1))
        monkeypatch.setattr(array, "_value", property(self.counted("transfers", array._value.fget)))
        # numpy() is not counted, because it returns a view on a CPU and fails on a GPU.
        for method in ("tolist", "item", "cpu", "__bool__", "__float__", "__int__"):
            original = getattr(torch.Tensor, method)
            monkeypatch.setattr(torch.Tensor, method, self.counted("transfers", original))

    def counted(self, what, function):
        def wrapped(*args, **kwargs):
            self.now[what] += 1
            return function(*args, **kwargs)

        return wrapped

    def on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.now["compilations"] += 1
            self.now[str(kwargs.get("fun_name"))] += 1

    def watch(self, monkeypatch, script):
        log = getattr(script, "RunLogs", script.RunLog)  # RunLogs writes the logs of many agents
        write = log.write

        def watched(log, *args):
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            self.per_iteration.append({**self.now, "graphs": graphs})
            write(log, *args)
            self.now.clear()

        monkeypatch.setattr(log, "write", watched)


# === Reference run ==============================================================================
AGENTS, SEED = 3, 2**32 - 1  # the last agent has the largest valid seed


class WholeRun(NamedTuple):
    """A run of five iterations, with checkpoints after the second, fourth and fifth."""

    folder: Path
    saved: Path  # the checkpoints after iterations 2, 4 and 5, in subfolders 2, 4 and 5
    counts: list[dict[str, int]]  # per iteration


def flags_of(name):
    own = ["--seed", SEED]
    if "vmap" in name:
        own = ["--num-agents", AGENTS, "--seed", SEED - AGENTS + 1]
    if name in CONTINUOUS_SCRIPTS:
        own += AIM.split()
    if name in IMAGE_SCRIPTS:
        own += f"--env-id ImageConstant-v0 {images.SMALL_CONVS}".split()
    elif "gymnasium" in name:  # resuming starts new episodes, which must be the same
        own += ["--env-id", "AimAlike-v0" if name in CONTINUOUS_SCRIPTS else "Constant-v0"]
    return (*own, "--save-every", 2, "--sync-for-timing")


def op_by_op(monkeypatch, script):
    """Skip torch.compile, which is slow, and pass arrays to JAX by DLPack as on a GPU.

    JAX compiles separately for arrays from DLPack, because they are committed to a device. On a
    GPU, such arrays must be aligned to 16 bytes. Complete tensors are aligned; views may not be.
    """

    def to_jax(tensor):
        assert tensor.storage_offset() == 0
        return jax.dlpack.from_dlpack(tensor)

    if hasattr(script, "compile_graph"):
        monkeypatch.setattr(script, "compile_graph", lambda function, device: function)
    if hasattr(script, "to_jax"):
        monkeypatch.setattr(script, "to_jax", to_jax)


def make_whole_run(name, runs_dir, begin=None):
    """Train in runs_dir and return a WholeRun, which read_whole_run can also read later.

    begin(folder) starts the training. By default, the script trains for five iterations.
    """
    script = importlib.import_module(name)
    save = script.save_checkpoint
    whole = runs_dir / "whole"

    def keep(folder, *what):
        save(folder, *what)
        if folder == whole:  # ignore the subfolders of individual agents
            (path,) = folder.glob("checkpoint.*")
            place = runs_dir / f"saved/{len(rows(folder))}"
            place.mkdir(parents=True)
            shutil.copy(path, place)

    with pytest.MonkeyPatch.context() as patch:
        counts = Counts(patch)
        counts.watch(patch, script)
        op_by_op(patch, script)
        patch.setattr(script, "save_checkpoint", keep)
        if begin:
            begin(whole)
        else:
            train(name, runs_dir, "whole", *flags_of(name), iterations=5)
    (runs_dir / "counts.json").write_text(json.dumps(counts.per_iteration))
    return read_whole_run(runs_dir)


def read_whole_run(runs_dir):
    counts = json.loads((runs_dir / "counts.json").read_text())
    return WholeRun(runs_dir / "whole", runs_dir / "saved", counts)


def rewind(run, folder):
    """Return a copy of a run as it is after a kill, with the checkpoint of iteration 2."""
    shutil.copytree(run.folder, folder)
    (path,) = (run.saved / "2").iterdir()
    shutil.copy(path, folder)
    for path in folder.rglob("run.json"):
        change(path.parent, status="running", iteration=2)
    return folder
