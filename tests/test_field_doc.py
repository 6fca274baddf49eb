"""docs/field-cases.md and the tests it names agree."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
DOC = TESTS.parent / "docs" / "field-cases.md"
ROWS = """
W1 W2 W3 W4 W5 W7 W8 W10 W11 W13 W14 H1 H2 H4 H5 H6 H8 H9 H10 H11 H13 H14 P1 P2 P3 P5 P7
P8 P10 P11 G1 G2 G3 G4 G5 G7 G9 G10 G11 G13 G14 G15 G16 G17 G18 G19 G20 I1 I2 I3 I4 I8 I9
I10 I12 I13 I14 T1 T2 T4 T5 T6 T9 T10 T11 M1 M2 M4 M5 R2 R3 R4 R5 R7 R8 R9 R11 R12 R13 C1
C3 C4 C5 C6 C7 C8 C10 C12 C13 O1 O2 O3 O4 O5 O6 O7
""".split()  # noqa: SIM905 - a list of 96 literals is no easier to read
"""Every reported fault, by its row."""


def test_field_cases_name_tests_that_exist() -> None:
    sources = "\n".join(p.read_text() for p in TESTS.rglob("test_*.py"))
    defined = set(re.findall(r"def (test_\w+)", sources))
    named = set(re.findall(r"`(test_\w+)`", DOC.read_text()))
    assert named
    assert named <= defined


def test_field_rows_are_all_accounted_for() -> None:
    listed: list[str] = []
    for line in DOC.read_text().splitlines():
        cells = [c.strip() for c in line.strip("|").split("|")]
        if len(cells) == 3 and re.fullmatch(r"[A-Z]+\d+(, [A-Z]+\d+)*", cells[0]):
            assert len(cells[2]) > 20, line
            listed += cells[0].split(", ")
    assert len(ROWS) == 96
    assert sorted(listed) == sorted(ROWS)


def test_field_tests_are_listed_under_their_rows() -> None:
    lines = DOC.read_text().splitlines()
    for path in TESTS.glob("test_field_*.py"):
        if path.name == "test_field_doc.py":
            continue
        text = path.read_text()
        for match in re.finditer(r'def (test_field_\w+)\(.*?"""(.*?)"""', text, re.S):
            rows = re.findall(r"\b[A-Z]\d+\b", match[2].split(":")[0])
            assert rows, match[1]
            for row in rows:
                line = next(x for x in lines if re.match(rf"\| [^|]*\b{row}\b", x))
                assert f"`{match[1]}`" in line, (row, match[1])
