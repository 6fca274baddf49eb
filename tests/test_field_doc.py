"""docs/field-cases.md and the tests it names agree."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
DOC = TESTS.parent / "docs" / "field-cases.md"


def test_field_cases_name_tests_that_exist() -> None:
    sources = "\n".join(p.read_text() for p in TESTS.rglob("test_*.py"))
    defined = set(re.findall(r"def (test_\w+)", sources))
    named = set(re.findall(r"`(test_\w+)`", DOC.read_text()))
    assert named
    assert named <= defined


def test_field_tests_name_rows_that_are_listed() -> None:
    text = DOC.read_text()
    listed = set(re.findall(r"\b[A-Z]\d+\b", text))
    for path in TESTS.glob("test_field_*.py"):
        for match in re.finditer(r'def (test_field_\w+).*?"""(.*?)"""', path.read_text(), re.S):
            rows = re.findall(r"\b[A-Z]\d+\b", match[2].split(":")[0])
            assert path.name == "test_field_doc.py" or rows, match[1]
            assert set(rows) <= listed, match[1]
            assert path.name == "test_field_doc.py" or f"`{match[1]}`" in text, match[1]
