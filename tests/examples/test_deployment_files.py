"""Files for schedulers and for `accelerate launch`: their syntax, and that what they call exists by now."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from hf_diloco import DiLoCoPlugin, SyncerConfig
from hf_diloco.cli.launchers import plan_launchers
from hf_diloco.cli.main import app

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CLUSTER_FILES = sorted(path for path in (EXAMPLES / "cluster").rglob("*") if path.is_file())
CONFIGS = sorted((EXAMPLES / "configs").glob("*.yaml"))
DOCUMENTS = [ROOT / "docs" / "launch.md"]
PLACEHOLDERS = {"train.py"}  # the user's script


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# ------------------------------------------------------------------------------------------------- finding the commands


def words_of_lines(text: str) -> Iterator[list[str]]:
    """Each simple command of a shell script, as words."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.replace("$(", " ; ").strip(), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:
            continue  # prose
        command: list[str] = []
        for word in [*words, ";"]:
            if set(word) <= set("();<>|&"):
                yield command
                command = []
            else:
                command.append(word)


def words_of_yaml(value: Any) -> Iterator[list[str]]:
    """Every list of words, and every command of a shell script, in a YAML document."""
    if isinstance(value, dict):
        for item in value.values():
            yield from words_of_yaml(item)
    elif isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from words_of_yaml(item)
    elif isinstance(value, str) and "\n" in value:
        yield from words_of_lines(value)


def commands_in(path: Path) -> list[list[str]]:
    """What a file calls of ours, from `hf-diloco` or `accelerate launch` on."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml":
        found = [words for document in yaml.safe_load_all(text) for words in words_of_yaml(document)]
        found += words_of_lines("\n".join(re.findall(r"^# +(.*)", text, re.MULTILINE)))
    elif path.suffix == ".md":
        found = list(words_of_lines("\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))))
    else:
        found = list(words_of_lines(text))
    calls = []
    for words in found:
        for index, word in enumerate(words):
            if word == "hf-diloco" or words[index : index + 2] == ["accelerate", "launch"]:
                if words[index + 1 :][:1] not in ([], ["..."]):
                    calls.append([item for item in words[index:] if item != "..."])
                break
    return calls


def check_call(words: list[str], tmp_path: Path) -> None:
    """That these words are understood by the program that they call."""
    if words[0] == "accelerate":
        check_accelerate(words[2:])
        return
    for placeholder in PLACEHOLDERS & set(words):
        (tmp_path / placeholder).touch()
    command = typer.main.get_command(app)
    with command.make_context("hf-diloco", words[1:]) as context:
        name, found, rest = command.resolve_command(context, words[1:])
        with found.make_context(name, list(rest), parent=context) as inner:
            given = dict(inner.params)
    if "command" in given:
        check_call(list(given["command"]), tmp_path)
    settings = {field.name: given.get(field.name) for field in dataclasses.fields(SyncerConfig)}
    SyncerConfig(**{name: value for name, value in settings.items() if value is not None})


def check_accelerate(words: list[str]) -> None:
    args = launch_command_parser().parse_args(words)
    if args.config_file and "/" in args.config_file:
        assert (ROOT / args.config_file).exists(), args.config_file
    if args.training_script not in PLACEHOLDERS:
        assert (ROOT / args.training_script).exists(), args.training_script


# ----------------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("path", [*CLUSTER_FILES, *CONFIGS, *DOCUMENTS], ids=name_of)
def test_what_files_call_exists(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLES)  # they are called from the root of the repository
    calls = commands_in(path)
    assert calls or path.name == "README.md", f"{path} calls nothing of ours; or it is not found by this test"
    for words in calls:
        check_call(words, tmp_path)


def test_a_call_that_does_not_exist_is_found(tmp_path):
    for call in ("hf-diloco launhc train.py", "hf-diloco syncer --listen a:1 --run-dir b --min-quorm 1",
                 "hf-diloco guard accelerate launch --config_fiel a train.py", "accelerate launch no_such_script.py",
                 "hf-diloco syncer --listen a:1 --run-dir b --min-quorum -3"):  # fmt: skip
        (words,) = [words for words in words_of_lines(call) if words]
        with pytest.raises((Exception, SystemExit)):
            check_call(words, tmp_path)


@pytest.mark.parametrize("path", [path for path in CLUSTER_FILES if path.suffix == ".sbatch"], ids=name_of)
def test_shell_scripts_parse(path):
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    options = re.findall(r"^#SBATCH --([\w-]+)", path.read_text(), re.MULTILINE)
    assert {"job-name", "requeue", "signal", "output"} <= set(options)


@pytest.mark.parametrize("path", [*CLUSTER_FILES, *DOCUMENTS], ids=name_of)
def test_learners_settings_exist(path):
    fields = {f"HF_DILOCO_{field.name.upper()}" for field in dataclasses.fields(DiLoCoPlugin)}
    assert set(re.findall(r"HF_DILOCO_[A-Z_]+[A-Z]", path.read_text())) <= fields | {"HF_DILOCO_LOG_LEVEL"}


def test_kubernetes_learners_by_number():
    text = (EXAMPLES / "cluster" / "kubernetes" / "learner.yaml").read_text()
    job = yaml.safe_load(re.sub("(?m)NUMBER", "3", text))
    assert job["metadata"]["name"] == "diloco-learner-3"
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    values = {item["name"]: item.get("value") for item in container["env"]}
    assert values["HF_DILOCO_LEARNER_ID"] == "3"
    (grace,) = [word.split("=")[1] for word in container["command"] if word.startswith("--grace-seconds")]
    assert float(values["HF_DILOCO_DRAIN_SECONDS"]) < float(grace) < pod["terminationGracePeriodSeconds"]
    code = [word.split("=")[1] for word in container["command"] if word.startswith("--stopped-exit-code")]
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert [str(value) for rule in rules for value in rule.get("onExitCodes", {}).get("values", [])] == code
    service, _, syncer = yaml.safe_load_all((EXAMPLES / "cluster" / "kubernetes" / "syncer.yaml").read_text())
    assert values["HF_DILOCO_SYNCER"] == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert service["spec"]["selector"].items() <= syncer["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_accelerate_takes_its_files(path):
    config = load_config_from_file(str(path))
    assert isinstance(config, ClusterConfig)
    (launcher,) = plan_launchers(1, [path], None, [str(gpu) for gpu in range(8)])
    args = launch_command_parser().parse_args([*launcher.words, "train.py"])
    known = {name.removeprefix("fsdp_") for name in vars(args)}
    for key in [*config.fsdp_config, *config.deepspeed_config]:
        assert key.removeprefix("fsdp_") in known, key
    args, _, _ = _validate_launch_command(args)
    assert args.num_processes == config.num_processes == launcher.num_processes
    assert args.use_fsdp == path.name.startswith("fsdp2")
    assert args.use_deepspeed == path.name.startswith("deepspeed")
    assert args.multi_gpu == path.name.startswith("multi_gpu")
