"""What the notebooks of this folder show: sections of the report."""

from typing import Any

from analysis import learning, page, report, tables
from analysis.measures import benches
from analysis.page import Section, Text
from analysis.runs import load


def show(source: Any, *names: str, baseline: str | None = None) -> None:
    """Show sections of the report, by their names in report.SECTIONS or "platforms".

    source is what runs.load() takes: one, or several.
    """
    data = load(source)
    several = benches(data, baseline)
    request = report.Request(learning.load_environments(), baseline)
    lines = [tables.scope(data.runs)]
    lines += [f"Left out: {name}: {reason}." for name, reason in list(data.left_out.items())[:10]]
    page.show(Section("", [Text(" ".join(lines))]))
    if "platforms" in names:
        section = report.platform_section(several, request)
        page.show(section or Section("", [Text("All runs are from one platform.")]))
        return
    for bench in several:
        if len(several) > 1:
            page.show(Section(bench.title, []))
        for name in names:
            absent = Section("", [Text(f"These runs have nothing on {name}.")])
            page.show(report.section(name, bench, request) or absent)
