"""Imports point one way, and what must stay light or free of torch and Ray does. `make check` runs this file."""

from __future__ import annotations

import ast
import json
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import setuptools

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT: dict[str, set[str]] = {
    "kernels": set(),
    "engine": {"kernels"},
    "serving": {"engine"},
    "deployments": {"engine", "serving"},
}
# Paths that end in / are folders.
TORCH_IN = (
    "kernels/",
    "engine/worker/",
    "engine/layers/",
    "engine/models/",
    "engine/grammar/table.py",  # through xgrammar: of workers and of the compiler's own process
    "engine/grammar/build.py",
)
NO_TORCH = ("engine/models/spec.py",)  # weighs more than TORCH_IN
RAY_IN = ("deployments/",)
ENVIRONMENT_IN = ("engine/config.py",)
ENVIRONMENT_SET_IN = ("deployments/",)  # hands all of it to load_config and sets variables that Ray reads
VAGUE_NAMES = {"utils", "util", "common", "helpers", "misc", "manager", "managers"}


def source_files() -> list[Path]:
    return [path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]


def module_name(relative: str) -> str:
    parts = relative.removesuffix(".py").split("/")
    return ".".join(["pagedray", *(parts[:-1] if parts[-1] == "__init__" else parts)])


def is_torch_free(relative: str) -> bool:
    return relative in NO_TORCH or not relative.startswith(TORCH_IN)


def imported_names(relative: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything imported, at any depth, also by import_module("literal")."""
    module = module_name(relative).split(".")
    package = module if relative.endswith("/__init__.py") else module[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            # Each name may be a submodule: `from pagedray import engine`.
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).rpartition(".")[2]
            first = node.args[0]
            if called in {"import_module", "__import__"} and isinstance(first, ast.Constant):
                yield node.lineno, str(first.value)


def environment_uses(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Line, text and whether one variable is read, of each use of the process environment."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            for alias in node.names:
                if alias.name in {"environ", "environb", "getenv", "getenvb"}:
                    yield node.lineno, f"from os import {alias.name}", True
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.getenv", "os.getenvb"}:
            yield node.lineno, ast.unparse(node), True
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.environ", "os.environb"}:
            parent = parents[node]
            is_item = isinstance(parent, ast.Subscript) and isinstance(parent.ctx, ast.Load)
            is_get = isinstance(parent, ast.Attribute) and parent.attr in {"get", "pop", "items", "values"}
            yield node.lineno, ast.unparse(parent), is_item or is_get or isinstance(parent, ast.Compare)


def violations(relative: str, source: str) -> list[str]:
    """What breaks a rule in this file, one text each; `relative` is its path from the root of the repository."""
    tree = ast.parse(source)
    package = relative.split("/")[0]
    found = []
    for line, name in imported_names(relative, tree):
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if top in MAY_IMPORT:
            found.append(f"{relative}:{line} imports {name}: write pagedray.{name}")
        elif top == "pagedray" and target not in {package, *MAY_IMPORT[package]}:
            found.append(f"{relative}:{line} imports {name}: {package} may import {sorted(MAY_IMPORT[package])} only")
        elif top == "ray" and not relative.startswith(RAY_IN):
            found.append(f"{relative}:{line} imports {name}: Ray belongs to {RAY_IN}")
        elif top in {"torch", "triton"} and is_torch_free(relative):
            found.append(f"{relative}:{line} imports {name}: torch belongs to {TORCH_IN} without {NO_TORCH}")
    for line, text, reads in environment_uses(tree):
        if relative not in ENVIRONMENT_IN and (reads or not relative.startswith(ENVIRONMENT_SET_IN)):
            found.append(f"{relative}:{line} uses {text}: only load_config reads the environment")
    return found


def test_the_tree_keeps_the_rules() -> None:
    files = source_files()
    assert {path.relative_to(ROOT).parts[0] for path in files} >= {"engine", "serving", "deployments"}
    found = [text for path in files for text in violations(path.relative_to(ROOT).as_posix(), path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("relative", "source"),
    [
        ("engine/a.py", "import pagedray.serving"),
        ("engine/a.py", "import pagedray.serving.app as app"),
        ("engine/a.py", "from pagedray import serving"),
        ("engine/a.py", "from pagedray.serving import app"),
        ("engine/a.py", "from pagedray.serving.app import build"),
        ("engine/a.py", "from .. import serving"),
        ("engine/a.py", "from ..serving import app"),
        ("engine/__init__.py", "from .. import serving"),
        ("engine/worker/a.py", "from ...deployments import gang"),
        ("engine/worker/__init__.py", "from ...deployments import gang"),
        ("engine/a.py", "def f():\n    from pagedray.deployments import gang"),
        ("engine/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pagedray.serving import app"),
        ("engine/a.py", "import importlib\nimportlib.import_module('pagedray.serving')"),
        ("engine/a.py", "__import__('pagedray.serving')"),
        ("kernels/a.py", "from pagedray.engine import errors"),
        ("serving/a.py", "from pagedray.kernels import attention"),
        ("serving/a.py", "from pagedray.deployments import gang"),
        ("deployments/a.py", "import pagedray.kernels.attention"),
        ("engine/a.py", "import kernels"),
        ("deployments/a.py", "from engine.config import load_config"),
        ("engine/a.py", "import ray"),
        ("engine/worker/a.py", "from ray import serve"),
        ("serving/a.py", "import ray.serve as serve"),
        ("kernels/a.py", "def f():\n    import ray"),
        ("serving/a.py", "import torch"),
        ("engine/a.py", "from torch import Tensor"),
        ("engine/text/a.py", "import torch.nn.functional as F"),
        ("engine/models/spec.py", "import torch"),
        ("deployments/a.py", "import torch"),
        ("engine/a.py", "import triton.language as tl"),
        ("engine/a.py", "import os\nx = os.environ['A']"),
        ("engine/a.py", "import os\nos.environ['A'] = 'b'"),
        ("serving/a.py", "import os\nx = os.getenv('A')"),
        ("kernels/a.py", "from os import environ"),
        ("deployments/a.py", "import os\nx = os.environ['A']"),
        ("deployments/a.py", "import os\nx = os.environ.get('A')"),
        ("deployments/a.py", "import os\nx = os.getenv('A')"),
        ("deployments/a.py", "import os\nx = 'A' in os.environ"),
    ],
)
def test_a_planted_violation_is_found(relative: str, source: str) -> None:
    assert len(violations(relative, source)) == 1


@pytest.mark.parametrize(
    ("relative", "source"),
    [
        (
            "engine/a.py",
            "import pagedray.engine.errors\nfrom pagedray import kernels\nfrom pagedray.kernels import norm",
        ),
        ("engine/worker/a.py", "from . import rows\nfrom .. import config\nfrom ...kernels import norm\nimport torch"),
        ("engine/models/a.py", "import torch\nimport raytracer, kernelspec\nfrom torchlike import enginery"),
        ("serving/a.py", "from pagedray.engine import messages\nfrom ..engine import errors"),
        ("deployments/a.py", "import ray\nfrom ray import serve\nfrom pagedray import engine, serving"),
        ("deployments/a.py", "import os\nos.environ['A'] = 'b'\nos.environ.setdefault('A', 'b')\nload(os.environ)"),
        ("deployments/a.py", "import os\nrun(env={**os.environ, 'A': 'b'})"),
        ("engine/config.py", "import os\nx = os.environ['A']"),
        ("engine/a.py", "environ = {}\nx = environ['A']\ny = self.environ.get('A')"),
    ],
)
def test_what_is_allowed_is_not_reported(relative: str, source: str) -> None:
    assert violations(relative, source) == []


def loaded_by(modules: list[str]) -> dict[str, list[str]]:
    """Imports the modules in order in a fresh process; for each, the top-level names it newly brought in."""
    code = """
import importlib, json, sys
added = {}
for name in json.loads(sys.argv[1]):
    before = set(sys.modules)
    importlib.import_module(name)
    added[name] = sorted({module.partition(".")[0] for module in set(sys.modules) - before})
print(json.dumps(added))
"""
    command = [sys.executable, "-c", code, json.dumps(modules)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "tests", timeout=120)
    assert done.returncode == 0, done.stderr
    result: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_torch_and_ray_stay_out_at_run_time() -> None:
    """A module that imports nothing heavy by name may still do so through a library."""
    paths = [path.relative_to(ROOT).as_posix() for path in source_files()]
    paths = [path for path in paths if is_torch_free(path)]  # deployments/ last: it loads Ray
    assert {"engine/messages.py", "engine/config.py", "engine/models/spec.py"} <= set(paths)
    added = loaded_by([module_name(path) for path in paths])
    for path in paths:
        barred = {"torch", "triton"} if path.startswith(RAY_IN) else {"torch", "triton", "ray"}
        loaded = barred & set(added[module_name(path)])
        assert not loaded, f"importing {path} loads {loaded}"


def test_importing_the_engine_loads_only_the_standard_library() -> None:
    added = set(loaded_by(["pagedray.engine"])["pagedray.engine"])
    assert added - sys.stdlib_module_names == {"pagedray"}


def test_kernels_is_no_package_of_its_own() -> None:
    # With an __init__.py, `kernels` found from the working directory would shadow or break the library of that name.
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_setup_lists_every_folder_with_code(monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **kwargs: said.update(kwargs))
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    folders = {path.parent.relative_to(ROOT) for path in source_files()} | {Path(package) for package in MAY_IMPORT}
    assert set(said["packages"]) == {".".join(["pagedray", *folder.parts]) for folder in folders}


def test_type_checkers_see_every_package() -> None:
    for package in MAY_IMPORT:
        assert (ROOT / ".types" / "pagedray" / package).resolve() == ROOT / package
        assert (ROOT / package / "py.typed").exists()


def test_files_are_named_after_what_they_own() -> None:
    assert [path for path in source_files() if path.stem in VAGUE_NAMES] == []


def test_checks_stay_strict() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tools["mypy"]["strict"] is True
    assert tools["pytest"]["ini_options"]["xfail_strict"] is True
    assert tools["pytest"]["ini_options"]["filterwarnings"][0] == "error"
    assert tools["ruff"]["line-length"] == 120
    for override in tools["mypy"].get("overrides", []):
        modules = override["module"] if isinstance(override["module"], list) else [override["module"]]
        is_ours = any(module.startswith("pagedray") for module in modules)
        # Ours may be excused from what an untyped library forces on them, never from being checked.
        assert not is_ours or ("ignore_errors" not in override and "follow_imports" not in override)
