"""The documents: references are those of the code, links lead somewhere, commands exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from kvindexd.cli.main import app

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    p
    for pattern in ("*.md", "docs/**/*.md", "deploy/**/*.md", "examples/**/*.md", "benchmarks/*.md")
    for p in ROOT.glob(pattern)
)
LINK = re.compile(r"(?<!`)\[[^\]\[]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub and mkdocs make it."""
    text = re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", ""))
    return text.replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(h) for h in re.findall(r"^#+ +(.*)$", page.read_text(), re.MULTILINE)}


def test_the_references_are_written_from_this_code() -> None:
    command = [sys.executable, "docs/generate.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(page.read_text()):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        gone = not to.exists()
        if gone or (anchor and to.suffix == ".md" and anchor not in anchors(to)):
            broken.append(target)
    assert not broken


def test_every_page_is_in_the_sites_navigation() -> None:
    def names(entry: Any) -> set[str]:
        if isinstance(entry, str):
            return {entry}
        values = entry.values() if isinstance(entry, dict) else entry
        return set().union(*map(names, values))

    listed = names(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    there = {str(p.relative_to(ROOT / "docs")) for p in PAGES if ROOT / "docs" in p.parents}
    assert listed == there


def test_shown_commands_and_their_options_exist() -> None:
    unknown = []
    for page in PAGES:
        for block in FENCE.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("$ kvindexd ") and (problem := wrong(line)):
                    unknown.append(f"{page.relative_to(ROOT)}: {line}: {problem}")
    assert not unknown


def wrong(line: str) -> str:
    """What is wrong with a shown command line, "" = nothing."""
    words = shlex.split(line.removeprefix("$ "), comments=True)[1:]
    command: Any = get_command(app)
    while words and getattr(command, "commands", None):
        if words[0].startswith("-"):
            break
        command = command.commands.get(words.pop(0))
        if command is None:
            return "no such command"
    options = {"--help", *(o for p in command.params for o in (*p.opts, *p.secondary_opts))}
    for word in words:
        name = word.partition("=")[0]
        if word.startswith("--") and name not in options:
            return f"no option {name}"
        if word in ("|", "&&", ">"):
            break
    return ""
