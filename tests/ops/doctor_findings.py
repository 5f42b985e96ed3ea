"""What is said of a finding in the tests of `quiesce doctor`."""

from __future__ import annotations

from typing import Any

from quiesce.ops.doctor_finding import Finding


def said(finding: Finding, status: str, *words: str) -> None:
    assert finding.status == status, finding
    assert status == "ok" or finding.fix, "what is not ok says what to change"
    for word in words:
        assert word in finding.found + finding.fix, finding


def by_name(findings: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}
