"""Train by a script, and add the most memory that its process had to what it leaves.

    python -m studies.agents.peak more/ppo_linen_vmap.py --seed 1 --runs-dir runs --run-name mine
    python -m studies.agents.peak -m studies.agents.one_scan --runs-dir runs --run-name mine

Each run.json in the run's folder gets peak_host_bytes: of many agents, that of their program. Flags
are the script's.
"""

import argparse
import json
import resource
import runpy
import sys
from pathlib import Path


def main() -> None:
    del sys.argv[0]  # as if the script had been called
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
        info = json.loads(path.read_text())
        info["peak_host_bytes"] = 1024 * kilobytes
        part = path.with_name("run.partial")  # run.json is there as a whole, or not at all
        part.write_text(json.dumps(info, indent=2))
        part.replace(path)


if __name__ == "__main__":
    main()
