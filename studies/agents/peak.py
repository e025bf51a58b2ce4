"""Run a training script, and record the peak memory of its process in the run folder.

    python -m studies.agents.peak more/ppo_linen_vmap.py --seed 1 --runs-dir runs --run-name mine
    python -m studies.agents.peak -m studies.agents.one_scan --runs-dir runs --run-name mine

Adds peak_host_bytes to each run.json in the run folder. With many agents, this is the peak memory
of the program that trains all of them. All flags are passed to the script.
"""

import argparse
import json
import resource
import runpy
import sys
from pathlib import Path


def main() -> None:
    del sys.argv[0]  # as if the script had been called directly
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--runs-dir", type=Path, required=True)
    parser.add_argument("--run-name", required=True)
    args, _ = parser.parse_known_args()
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for path in (args.runs_dir / args.run_name).rglob("run.json"):
        info = json.loads(path.read_text(encoding="utf-8"))
        info["peak_host_bytes"] = 1024 * kilobytes
        part = path.with_name("run.partial")  # write run.json atomically
        part.write_text(json.dumps(info, indent=2))
        part.replace(path)


if __name__ == "__main__":
    main()
