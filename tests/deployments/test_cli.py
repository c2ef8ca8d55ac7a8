"""Flags, the configuration they make, and what the command prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from pagedray.deployments.cli import main, parser
from pagedray.deployments.commands.exit_code import CommandError, ExitCode
from pagedray.deployments.commands.serve import address
from pagedray.deployments.commands.settings import read_config
from pagedray.engine.config import Config, leaves, load_config


def config(*args: str, environ: dict[str, str] | None = None) -> Config:
    return read_config(parser().parse_args(["serve", *args]), environ or {})


def test_every_field_has_a_flag() -> None:
    text = next(a for a in parser()._subparsers._group_actions[0].choices.values() if "serve" in a.prog).format_help()  # type: ignore[union-attr, attr-defined]
    for cls in leaves().values():
        for name, field in cls.model_fields.items():
            assert f"--{name.replace('_', '-')}" in text
            assert field.description


def test_every_command_is_listed_with_a_line_and_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for args in ([], ["serve"], ["chat"], ["complete"], ["run-batch"], ["version"]):
        with pytest.raises(SystemExit) as ended:
            main([*args, "--help"])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        if not args:
            for name in ("serve", "chat", "complete", "run-batch", "version"):
                assert re.search(rf"^ +{name}  +\S", text, re.MULTILINE), name


@pytest.mark.parametrize(
    "args",
    [["serve", "--max-num-se", "3"], ["chat", "--temp", "1", "hi"], ["run-batch", "--in", "a", "-o", "b"], ["--hel"]],
)
def test_flags_have_to_be_written_out(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A shortened flag changes its meaning when another one is added."""
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == ExitCode.USAGE


def test_no_flags_are_the_defaults() -> None:
    assert config() == load_config()


def test_flags_are_parsed_by_the_tree() -> None:
    made = config("dir", "--max-num-seqs", "7", "--no-haproxy", "--served-model-name", "a,b", "--step-timeout-s", "1.5")
    assert made.model.model == "dir"
    assert made.model.served_model_name == ("a", "b")
    assert made.scheduler.max_num_seqs == 7
    assert made.server.haproxy is False
    assert made.failure.step_timeout_s == 1.5


def test_flags_beat_variables_beat_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("scheduler: {max_num_seqs: 3}\nblock_size: 8\nport: 1\n")
    made = config("--config", str(file), "--port", "3", environ={"PAGEDRAY_PORT": "2", "PAGEDRAY_BLOCK_SIZE": "32"})
    assert (made.scheduler.max_num_seqs, made.cache.block_size, made.server.port) == (3, 32, 3)


def test_two_different_models_are_refused() -> None:
    assert config("a", "--model", "a").model.model == "a"
    with pytest.raises(CommandError, match="differ") as caught:
        config("a", "--model", "b")
    assert caught.value.code == ExitCode.USAGE


def test_print_config_gives_a_file_that_makes_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["serve", "x", "--print-config", "--dtype", "bfloat16"]) == 0
    file = tmp_path / "c.yaml"
    file.write_text(capsys.readouterr().out)
    assert yaml.safe_load(file.read_text())["model"]["dtype"] == "bfloat16"
    assert config("--config", str(file)) == config("x", "--dtype", "bfloat16")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--max-num-seqs", "many"], "max_num_seqs"),
        (["--max-num-seqs", "100", "--max-num-batched-tokens", "50"], "max_num_batched_tokens (50)"),
    ],
)
def test_wrong_values_are_an_error_of_one_line(args: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *args]) == 1
    error = capsys.readouterr().err
    assert error.startswith("pagedray: ") and text in error and error.count("\n") == 1


def test_a_missing_file_is_named() -> None:
    with pytest.raises(CommandError, match=r"/nowhere\.yaml") as caught:
        config("--config", "/nowhere.yaml")
    assert caught.value.code == ExitCode.USAGE


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.strip()


def test_the_cluster_to_join_is_rays_own_variable() -> None:
    assert address({"RAY_ADDRESS": "1.2.3.4:6379"}) == "1.2.3.4:6379"
    assert address({}) is None
