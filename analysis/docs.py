"""Write the numbers of README.md and docs/ from the studies in results/.

    python -m analysis.docs            # write every block anew
    python -m analysis.docs --check    # say which are not what the results give

A block begins with a comment such as <!-- answer of results/cpu in CartPole-v1 --> and ends with
<!-- end -->: what lies between comes from the results, and is not written by hand.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pandas as pd

from analysis import (
    agents,
    doors,
    learning,
    others,
    readings,
    render,
    report,
    schema,
    tuned,
    vectorization,
)
from analysis.bench import Bench, benches
from analysis.learning import Environment
from analysis.render import Table
from analysis.runs import load
from analysis.schema import SourceError

ROOT = Path(__file__).parent.parent
FILES = (
    "README.md",
    "docs/results.md",
    "docs/benchmark.md",
    "docs/dqn.md",
    "docs/minatar.md",
    "docs/doors.md",
    "docs/agents.md",
    "docs/tuning.md",
    "docs/peers.md",
    "analysis/README.md",
)
BLOCK = re.compile(
    r"(<!-- (?P<name>\w+) of (?P<source>\S+)(?: in (?P<where>.+?))?"
    r"(?: over (?P<baseline>\S+))? -->\n).*?(<!-- end -->)",
    re.DOTALL,
)
Known = dict[str, Environment]
TABLES: dict[str, Callable[[Bench, Known], Table]] = {
    "answer": report.answer_table,
    "decisions": lambda bench, known: report.decision_table(bench),
    "break_even": lambda bench, known: report.crossing_table(bench),
    "startup": lambda bench, known: report.startup_table(bench),
    "phases": lambda bench, known: report.phase_table(bench),
    "compile_modes": lambda bench, known: report.compile_table(bench),
    "returns": report.return_table,
    "targets": report.target_table,
    "scores": report.score_table,
    "cells": report.cell_table,
    "last_returns": report.last_return_table,
    "pace": report.pace_table,
    "peers": lambda bench, known: others.peer_table(bench),
}
SENTENCES: dict[str, Callable[[Bench, Known], list[str]]] = {
    "sentences": report.answer_lines,
    "startups": lambda bench, known: [readings.startup(bench)],
    "learning": lambda bench, known: [readings.learned(learning.returns(bench, known), bench)],
    "peer_targets": lambda bench, known: others.target_lines(bench),
    "spent": lambda bench, known: [readings.spent(bench.runs)],
}
DOORS = {
    "doors": doors.learning_table,
    "doors_seconds": doors.seconds_table,
    "doors_contrasts": doors.contrasts_table,
}
AGENTS = {
    "agents": agents.seconds_table,
    "agents_ratios": agents.ratio_table,
    "agents_rates": agents.rate_table,
    "agents_memory": agents.memory_table,
}
TUNING = {
    "verdicts": tuned.verdict_table,
    "settings": tuned.settings_table,
}


@cache
def bench_of(source: str, where: str | None, baseline: str | None) -> Bench:
    """Return the largest bench of a source, where each word is an environment, size or length.

    A length is so many iterations, as 100it.
    """
    data = load(ROOT / source)
    for word in (where or "").split():
        here = (data.runs["env_id"] == word) | (data.runs["size"] == word)
        here |= data.runs["num_iterations"].map("{:g}it".format) == word
        data = data._replace(runs=data.runs[here])
    if data.runs.empty:
        raise SourceError(f"{source} has no run in {where}")
    return benches(data, baseline)[0]


def block(name: str, source: str, where: str | None, baseline: str | None) -> str:
    """Return what belongs into a block, in Markdown."""
    if name == "columns":
        return schema.dictionary(schema.RUNS if source == "runs" else schema.ITERATIONS)
    if name == "environments":
        table = pd.read_csv(ROOT / source, dtype="str", keep_default_na=False)
        return render.markdown_table(table)
    if name in DOORS:
        return render.markdown_table(DOORS[name](pd.read_csv(ROOT / source)).cells)
    if name in AGENTS:
        return render.markdown_table(AGENTS[name](agents.study(load(ROOT / source))).cells)
    if name == "agents_sentences":
        return listed(agents.sentences(agents.study(load(ROOT / source))))
    if name in TUNING:
        return render.markdown_table(TUNING[name](ROOT / source))
    if name == "vectorization":
        return render.markdown_table(vectorization.table(ROOT / source).cells)
    if name == "against" and baseline:
        section = report.against_section(load(ROOT / source).runs, load(ROOT / baseline).runs)
        tables = [x for x in section.blocks if isinstance(x, Table)]
        return render.markdown_table(tables[0].cells)
    known, bench = learning.load_environments(), bench_of(source, where, baseline)
    if name in TABLES:
        return render.markdown_table(TABLES[name](bench, known).cells)
    if name in SENTENCES:
        return listed(SENTENCES[name](bench, known))
    raise SourceError(f"no block is called {name}")


def listed(lines: Sequence[str]) -> str:
    return "\n".join(f"- {render.markdown_value(x)}" for x in lines)


def renewed(text: str) -> str:
    """Return a document with its blocks as the results give them."""
    names = ("name", "source", "where", "baseline")
    return BLOCK.sub(lambda x: f"{x[1]}{block(*(x[y] for y in names))}\n{x[6]}", text)


def main() -> None:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="python -m analysis.docs", description=lines[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it would")
    check, stale = parser.parse_args().check, []
    try:
        for path in [ROOT / name for name in FILES]:
            text = path.read_text()
            new = renewed(text)
            if new != text:
                stale.append(str(path.relative_to(ROOT)))
                if not check:
                    path.write_text(new)
    except (SourceError, OSError) as error:
        print(f"analysis.docs: {error}", file=sys.stderr)
        sys.exit(2)
    words = "not what the results give" if check else "written"
    print(f"{readings.join(stale)}: {words}" if stale else "All blocks are what the results give.")
    sys.exit(1 if stale and check else 0)


if __name__ == "__main__":
    main()
