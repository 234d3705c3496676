"""What the Python files of a package define, read without importing it: by module, classes and other names."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

BRANCHES = (ast.If, ast.Try, ast.With, ast.For, ast.While)


@dataclass(frozen=True)
class Names:
    """This is what one module defines, on any of its branches."""

    classes: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)

    @property
    def all(self) -> set[str]:
        return self.classes | self.others


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, of all branches, not of functions."""
    for statement in body:
        yield statement
        if isinstance(statement, BRANCHES):
            for part in ("body", "orelse", "finalbody"):
                yield from statements(getattr(statement, part, []))
            for handler in getattr(statement, "handlers", []):
                yield from statements(handler.body)


def module_of(path: str) -> str:
    """Return the module's name of a file in a wheel."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def names_of(sources: Mapping[str, str]) -> dict[str, Names]:
    """Return the names of every module.

    Args:
        sources: The text of each file, by its path in the wheel.
    """
    trees = {module_of(path): (ast.parse(text), path.endswith("__init__.py")) for path, text in sources.items()}
    found: dict[str, Names] = {}

    def of(module: str) -> Names:
        if module in found:
            return found[module]
        found[module] = names = Names()  # a circle of imports sees what was there before
        tree, is_package = trees[module]
        for statement in statements(tree.body):
            if isinstance(statement, ast.ClassDef):
                names.classes.add(statement.name)
            elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                names.others.add(statement.name)
            elif isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                names.others.update(node.id for t in targets for node in ast.walk(t) if isinstance(node, ast.Name))
            elif isinstance(statement, ast.Import):
                names.others.update(a.asname or a.name.partition(".")[0] for a in statement.names)
            elif isinstance(statement, ast.ImportFrom):
                _imported(statement, module if is_package else module.rpartition(".")[0], names)
        return names

    def _imported(statement: ast.ImportFrom, package: str, names: Names) -> None:
        source = statement.module or ""
        if statement.level:
            base = package.split(".")[: len(package.split(".")) - statement.level + 1]
            source = ".".join([*base, *([statement.module] if statement.module else [])])
        theirs = of(source) if source in trees else Names()
        for alias in statement.names:
            if alias.name == "*":
                names.classes.update(name for name in theirs.classes if name[0] != "_")
                names.others.update(name for name in theirs.others if name[0] != "_")
            else:
                kind = names.classes if alias.name in theirs.classes else names.others
                kind.add(alias.asname or alias.name)

    for module in trees:
        of(module)
    return {module: found[module] for module in sorted(trees)}


def asked(sources: Mapping[str, str], package: str) -> dict[tuple[str, str], str]:
    """Return what files import of a package or reach through its modules: (module, name) -> the first place.

    An attribute of a module counts as far as its chain of names goes through modules.
    """
    found: dict[tuple[str, str], str] = {}
    for path, text in sources.items():
        if package not in text:
            continue
        tree, aliases = ast.parse(text), dict[str, str]()
        for node in ast.walk(tree):
            place = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ImportFrom) and not node.level and within(node.module or "", package):
                for alias in node.names:
                    found.setdefault((node.module or "", alias.name), place)
                    aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            for alias in node.names if isinstance(node, ast.Import) else ():
                if within(alias.name, package):
                    aliases[alias.asname or alias.name] = alias.name
                    found.setdefault((alias.name, ""), place)
        for node in ast.walk(tree):
            if chain := _chain(node):
                for length in range(len(chain) - 1, 0, -1):
                    if module := aliases.get(".".join(chain[:length])):
                        for step in range(length, len(chain)):
                            name = ".".join([module, *chain[length:step]])
                            found.setdefault((name, chain[step]), f"{path}:{getattr(node, 'lineno', 0)}")
                        break
    return found


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _chain(node: ast.AST) -> list[str]:
    """`a.b.c` as a list; empty for what is no chain of names."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) and names else []


def missing(wanted: Mapping[tuple[str, str], str], names: Mapping[str, Names]) -> dict[str, str]:
    """Return `module.name` -> where it is asked for, of what no module has. What follows a class is not looked at."""
    lacks = {}
    for (module, name), place in wanted.items():
        if module in names:
            if name and name != "*" and name not in names[module].all and f"{module}.{name}" not in names:
                lacks[f"{module}.{name}"] = place
        elif module.rpartition(".")[0] not in names or not name:
            lacks[module] = place
    return lacks
