"""Prints the size of this checkout: what everyone who reads it pays.

    python -m benchmarks.measure [ROOT] [--json]

Counted are files that git tracks. Settings are counted for the checkout that this file belongs to alone.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
from collections import Counter
from dataclasses import MISSING, dataclass, fields, is_dataclass
from itertools import chain
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
SUBJECTLESS = re.compile(r"(Of|The same|As|With|Where|Whether|What|How|Who|Which|May|In|For|From|On|By|At|To)\b")
"""What a docstring begins with that is no sentence."""
PICTURE = re.compile(r"!\[|<img|<picture")


@dataclass(frozen=True)
class Source:
    """What is counted of one Python file."""

    module: str
    lines: int
    code_lines: int
    comment_lines: int
    classes: int
    functions: int
    long_functions: int
    numbers: int
    docstrings: tuple[str, ...]
    subjectless: int
    imports: frozenset[str]  # modules, and names in modules: an import does not say which of them it means

    @classmethod
    def read(cls, file: Path, root: Path) -> Source:
        text = file.read_text()
        nodes = list(ast.walk(tree := ast.parse(text)))
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        documented = [(node, doc) for node in (tree, *classes, *functions) if (doc := ast.get_docstring(node))]
        prose = {n for node, _ in documented for n in range(node.body[0].lineno, _end(node.body[0]) + 1)}
        lines = {n: line.strip() for n, line in enumerate(text.splitlines(), 1)}
        froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
        return cls(
            module=".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"),
            lines=len(lines),
            code_lines=sum(bool(line) and line[0] != "#" and n not in prose for n, line in lines.items()),
            comment_lines=sum(line.startswith("#") for line in lines.values()),
            classes=len(classes),
            functions=len(functions),
            long_functions=sum(_end(node) - node.lineno > 50 for node in functions),
            numbers=sum(isinstance(node, ast.Assign | ast.AnnAssign) and _is_number(node.value) for node in tree.body),
            docstrings=tuple(doc for _, doc in documented),
            subjectless=sum(node is not tree and bool(SUBJECTLESS.match(doc)) for node, doc in documented),
            imports=frozenset(chain.from_iterable((str(n.module), *_members(n)) for n in froms)),
        )


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _is_number(value: ast.expr | None) -> bool:
    value = value.operand if isinstance(value, ast.UnaryOp) else value
    return isinstance(value, ast.Constant) and type(value.value) in (int, float)


def _members(node: ast.ImportFrom) -> list[str]:
    return [f"{node.module}.{alias.name}" for alias in node.names]


def tracked(root: Path, folder: str, suffix: str) -> list[Path]:
    """Files below a folder that git knows."""
    names = subprocess.run(
        ["git", "-C", str(root), "ls-files", "--", folder], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [root / name for name in names if name.endswith(suffix) and (root / name).exists()]


def measure(root: Path) -> dict[str, float]:
    """The measures of the checkout at `root`, by name."""
    sources = [Source.read(file, root) for file in tracked(root, "specactor", ".py")]
    importers = Counter(name for source in sources for name in source.imports - {source.module})
    packages = {".".join(file.relative_to(root).parts[:-1]) for file in tracked(root, "specactor", "__init__.py")}
    docstrings = [doc for source in sources for doc in source.docstrings]
    subjectless = sum(source.subjectless for source in sources)
    readme = "".join(file.read_text() for file in tracked(root, "README.md", "README.md"))
    return {
        "library files": len(sources),
        "library lines": sum(source.lines for source in sources),
        "library code lines": sum(source.code_lines for source in sources),
        "median code lines per file": median([source.code_lines for source in sources] or [0]),
        "files of 4-60 code lines": sum(4 <= source.code_lines <= 60 for source in sources),
        "modules with one importer": sum(
            importers[source.module] == 1 for source in sources if source.module not in packages
        ),
        "classes": sum(source.classes for source in sources),
        "functions": sum(source.functions for source in sources),
        "functions over 50 lines": sum(source.long_functions for source in sources),
        "module-level numbers": sum(source.numbers for source in sources),
        "docstring words": sum(len(doc.split()) for doc in docstrings),
        "docstrings without a subject, share": round(subjectless / max(1, len(docstrings)), 3),
        "comment lines": sum(source.comment_lines for source in sources),
        "test lines": _lines(tracked(root, "tests", ".py")),
        "benchmark lines": _lines(tracked(root, "benchmarks", ".py")),
        "README words": len(readme.split()),
        "README table rows": sum(line.startswith("|") for line in readme.splitlines()),
        "README pictures": len(PICTURE.findall(readme)),
        "docs words": _words([file for file in tracked(root, "docs", ".md") if "results" not in file.parts]),
        "results words": _words(tracked(root, "docs/results", ".md")),
    }


def _lines(files: list[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def _words(files: list[Path]) -> int:
    return sum(len(file.read_text().split()) for file in files)


def measure_settings() -> dict[str, float]:
    """How many settings a run has, and how many of them every recipe leaves at their default."""
    from specactor.recipes import load, recipes

    changed: Counter[str] = Counter()
    for name in recipes():
        for setting, is_changed in changed_settings(load([name])).items():
            changed[setting] += is_changed
    for section in [name for name in changed if any(other.startswith(f"{name}.") for other in changed)]:
        del changed[section]  # which some recipes have and others leave out
    unset = sum(not count for count in changed.values())
    return {"settings": len(changed), "settings that every recipe leaves at their default": unset}


def changed_settings(tree: object, prefix: str = "") -> dict[str, bool]:
    """Each setting of a config, and whether it differs from its default, or has none."""
    assert is_dataclass(tree)
    found: dict[str, bool] = {}
    for item in fields(tree):
        value = getattr(tree, item.name)
        if is_dataclass(value):
            found |= changed_settings(value, f"{prefix}{item.name}.")
        else:
            default = item.default_factory() if item.default_factory is not MISSING else item.default
            found[f"{prefix}{item.name}"] = value is not default and value != default
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measure", description="Prints the size of a checkout.")
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="a git checkout; this one, if none is named")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args()
    found = measure(options.root)
    if options.root.resolve() == ROOT:
        found |= measure_settings()
    if options.json:
        print(json.dumps(found, indent=1))
        return
    print("\n".join(f"{value:>8}  {name}" for name, value in found.items()))


if __name__ == "__main__":
    main()
