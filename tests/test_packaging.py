"""An installed trainer has what it runs on: all configuration files and scripts, by the rules of pyproject.toml."""

import fnmatch
import tomllib
from pathlib import Path

import yaml

from trainer import __version__

ROOT = Path(__file__).resolve().parent.parent


def test_a_wheel_holds_every_configuration_file_and_script():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    finding, patterns = tool["packages"]["find"], tool["package-data"]["*"]
    assert finding["namespaces"]  # folders without Python count as packages
    for folder in ("configs", "scripts", "trainer", "scalify_core"):
        files = [p for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        assert files
        for path in files:
            package = ".".join(path.relative_to(ROOT).parent.parts)
            assert any(fnmatch.fnmatchcase(package, include) for include in finding["include"]), path
            assert path.suffix in (".py", ".typed") or any(fnmatch.fnmatch(path.name, p) for p in patterns), path


def test_the_version_is_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert project["version"] == __version__ == citation["version"]
    assert project["license"] == citation["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
