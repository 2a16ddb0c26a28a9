"""pyproject.toml: `pip install -e .` makes everything importable, from a notebook, say."""

import tomllib

from common import ROOT


def test_every_module_and_package_is_listed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {"toy"}  # it has no __init__.py
    for pattern in ("*/__init__.py", "*/*/__init__.py"):
        packages |= {".".join(path.relative_to(ROOT).parts[:-1]) for path in ROOT.glob(pattern)}
    assert set(settings["packages"]) == packages
    assert set(settings["py-modules"]) == {path.stem for path in ROOT.glob("*.py")}
