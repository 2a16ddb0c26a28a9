"""Check how long each part of the project is, and who imports whom: python .ci/budgets.py [ROOT]

Exits with 1 if a part, or the README, is longer than its budget, if a file imports what it must
not, or if imports form a cycle. Imports inside of functions count, too. Tests may import anything.
"""

import ast
import re
import sys
from pathlib import Path

BUDGETS = {  # lines of Python, docstrings included; of a folder: of the files right in it
    "model.py": 407,
    "kv_cache.py": 100,
    "decode.py": 540,
    "lossless.py": 140,
    "train.py": 410,
    "setup.py": 1,
    "plumbing": 1991,
    "apps": 530,
    "bench": 1765,
    "bench/paper": 1038,
}
PLUMBING_FILE = 190  # lines of any file in plumbing/
README = {"lines": 150, "words": 1400, "tables": 2, "pictures": 1}
WITHOUT_BUDGET = ["toy"]

OURS = {"plumbing", "kv_cache", "model", "lossless", "decode", "train", "toy", "apps", "bench"}
MAY_IMPORT = {  # of ours, except itself
    "plumbing": set(),
    "kv_cache": {"plumbing"},
    "model": {"plumbing"},
    "lossless": {"model", "kv_cache", "plumbing"},
    "decode": {"lossless", "model", "kv_cache", "plumbing"},
    "train": {"model", "plumbing"},
    "toy": {"model", "plumbing"},
    "apps": OURS,
    "bench": OURS,
}


def long_parts(root: Path, paths: list[Path]) -> list[str]:
    lines = dict.fromkeys(BUDGETS, 0)
    budgets = dict(BUDGETS)
    problems = []
    for path in paths:
        name = path.relative_to(root).as_posix()
        folder = path.relative_to(root).parent.as_posix()
        length = path.read_text(encoding="utf-8").count("\n")
        if folder == "plumbing":
            budgets[name] = PLUMBING_FILE
        if name in budgets:
            lines[name] = length
        if folder in budgets:
            lines[folder] += length
        has_budget = name in budgets or folder in budgets
        if not has_budget and folder not in WITHOUT_BUDGET:
            problems.append(f"{name}: has no budget")
    for name, budget in budgets.items():
        print(f"{name:<28}{lines[name]:>5} of {budget}")
        if lines[name] > budget:
            problems.append(f"{name}: {lines[name]} lines, {lines[name] - budget} too many")
    return problems


def long_readme(text: str) -> list[str]:
    found = {
        "lines": text.count("\n"),
        "words": len(text.split()),
        "tables": len(re.findall(r"^\|[-:| ]+\|$", text, re.MULTILINE)),  # their rulers
        "pictures": text.count("!["),
    }
    problems = []
    for name, budget in README.items():
        print(f"README.md, {name:<17}{found[name]:>5} of {budget}")
        if found[name] > budget:
            problems.append(f"README.md: {found[name]} {name}, {found[name] - budget} too many")
    return problems


def imported_by(module: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """Which of our modules a module imports, anywhere in its text."""
    package = module.split(".")  # what the dots of a relative import start from
    if path.name != "__init__.py":
        package.pop()
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            if node.module:
                start = [*start, node.module]
            names += [".".join([*start, alias.name]) for alias in node.names]
    found = set()
    for name in names:
        while name and name not in modules:  # plumbing.files.save is a part of plumbing.files
            name = name.rpartition(".")[0]
        if name:
            found.add(name)
    return found


def wrong_arrows(imports: dict[str, set[str]]) -> list[str]:
    problems = []
    for module, imported in imports.items():
        part = module.partition(".")[0]
        for other in sorted(imported):
            other_part = other.partition(".")[0]
            if other_part not in MAY_IMPORT.get(part, set()) | {part}:
                problems.append(f"{module}: must not import {other}")
    return problems


def cycles(imports: dict[str, set[str]]) -> list[str]:
    """The strongly connected components: modules that import each other, directly or not."""
    reached = {}
    for module in imports:
        reached[module] = set()
        waiting = [module]
        while waiting:
            new = imports[waiting.pop()] - reached[module]
            reached[module] |= new
            waiting += new
    problems = []
    for module in imports:
        component = sorted(other for other in reached[module] if module in reached[other])
        if component[:1] == [module]:
            problems.append(f"{', '.join(component)}: a cycle of imports")
    return problems


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent
    paths = []
    modules = {}
    for path in sorted(root.rglob("*.py")):
        names = path.relative_to(root).with_suffix("").parts
        is_hidden = any(name.startswith(".") for name in names)
        is_installed = (root / names[0] / "pyvenv.cfg").exists()  # a virtual environment
        if names[0] == "tests" or is_hidden or is_installed:
            continue
        if names[-1] == "__init__":
            names = names[:-1]
        paths.append(path)
        modules[".".join(names)] = path
    imports = {module: imported_by(module, path, modules) for module, path in modules.items()}
    problems = long_parts(root, paths) + wrong_arrows(imports) + cycles(imports)
    problems += long_readme((root / "README.md").read_text(encoding="utf-8"))
    for problem in problems:
        print(f"error: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
