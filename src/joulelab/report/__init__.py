"""Records in; tables, comparisons, verdicts and one offline HTML file out. Nothing here measures."""

from __future__ import annotations

from pathlib import Path

from joulelab import lookup


def report_line(folder: Path) -> str:
    """Write the page of a finished run or group and state where it is; without the extra `report`, how to get one."""
    if lookup.absent_packages(*lookup.EXTRAS["report"]):
        return f"report: not written; {lookup.install_hint('report')}, then: joulelab report {folder}"
    try:
        from joulelab.report.page import write_report

        return f"report: {write_report(folder)}"
    except Exception as problem:  # the run has ended well, and its page can be written later
        return f"report: not written: {problem or type(problem).__name__}; try again: joulelab report {folder}"
