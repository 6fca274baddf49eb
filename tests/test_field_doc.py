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


def test_field_tests_of_the_core_are_listed_under_their_rows() -> None:
    lines = DOC.read_text().splitlines()
    for name in ("test_field_pure.py", "test_field_wire.py"):
        text = (TESTS / name).read_text()
        for match in re.finditer(r'def (test_field_\w+)\(.*?"""(.*?)"""', text, re.S):
            rows = re.findall(r"\b[A-Z]\d+\b", match[2].split(":")[0])
            assert rows, match[1]
            for row in rows:
                line = next(x for x in lines if re.match(rf"\| [^|]*\b{row}\b", x))
                assert f"`{match[1]}`" in line, (row, match[1])
