import dataclasses
import json
import logging
import signal
import socket
import sys

import pytest
import torch

import hf_diloco as library
from hf_diloco.cli.main import main
from hf_diloco.cli.syncer import is_loopback, join_lines, parse_listen
from hf_diloco.config import SyncerConfig, config_to_dict
from hf_diloco.core.messages import Hello
from hf_diloco.errors import ConfigError
from hf_diloco.syncer.roster import Terms
from hf_diloco.syncer.run_directory import RunDirectory
from hf_diloco.syncer.saved_run import Facts, save_run
from hf_diloco.syncer.state import GlobalState
from hf_diloco.syncer.supply import Supply

pytestmark = pytest.mark.fast


@pytest.fixture
def hf_diloco(monkeypatch, capsys):
    """Runs the command line in this process: exit code, standard output, standard error."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hf-diloco", *map(str, words)])
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code or 0
        else:
            code = 0
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def untouched_process():
    """What the syncer command changes in its process is set back."""
    root, handlers = (
        logging.getLogger(),
        {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)},
    )
    before, levels = list(root.handlers), (root.level, logging.getLogger("hf_diloco").level)
    yield
    for handler in [handler for handler in root.handlers if handler not in before]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(levels[0])
    logging.getLogger("hf_diloco").setLevel(levels[1])
    logging.captureWarnings(False)
    for number, action in handlers.items():
        signal.signal(number, action)


# ------------------------------------------------------------------------------------------------------ help, wrong use


def test_help_names_the_commands(hf_diloco):
    code, out, _ = hf_diloco("--help")
    assert code == 0
    for command in ("launch", "syncer", "export", "chaos"):
        assert command in out


def test_version(hf_diloco):
    assert hf_diloco("--version") == (0, "hf-diloco 0.1.0\n", "")


@pytest.mark.parametrize("command", ["launch", "syncer", "chaos"])
def test_every_setting_has_a_flag_with_its_own_help(hf_diloco, command):
    code, out, _ = hf_diloco(command, "--help")
    assert code == 0
    for field in dataclasses.fields(SyncerConfig):
        assert f"--{field.name.replace('_', '-')}" in out
        assert field.metadata["help"].split()[0] in out
    assert "(24)" in out  # defaults are shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launch"], "Usage"),
        (["nonsense"], "nonsense"),
        (["launch", "--num-learners", "0", "SCRIPT"], "--num-learners"),
        (["launch", "--num-learners", "2", "missing.py"], "missing.py"),
        (["launch", "--num-learners", "2", "--min-quorum", "3", "SCRIPT"], "min_quorum=3 is above expected_learners=2"),
        (["launch", "--num-learners", "2", "--wire-format", "fp8", "SCRIPT"], "wire_format='fp8'"),
        (["launch", "--num-learners", "2", "--outer-lr", "fast", "SCRIPT"], "--outer-lr"),
        (["launch", "--num-learners", "2", "--run-dir", "USED", "SCRIPT"], "choose another --run-dir"),
        (["launch", "--num-learners", "2", "--expected-learners", "3", "SCRIPT"], "--expected-learners 3 is above"),
        (["launch", "--num-learners", "2", "--run-dir", "train.py", "SCRIPT"], "is no directory"),
        (["launch", "--num-learners", "2", "--resume", "SCRIPT"], "give its --run-dir"),
        (["launch", "--num-learners", "2", "--resume", "--run-dir", "new", "SCRIPT"], "holds no run to go on with"),
        (["launch", "--num-learners", "2", "--resume", "--run-dir", "BEGUN", "--outer-lr", "1", "SCRIPT"], "not 1.0"),
        (["launch", "--num-learners", "2", "--max-restarts", "-1", "SCRIPT"], "--max-restarts"),
        (["launch", "--num-learners", "2", "--nproc-per-learner", "0", "SCRIPT"], "--nproc-per-learner"),
        (["launch", "--num-learners", "2", "--accelerate-config", "missing.yaml", "SCRIPT"], "missing.yaml"),
        (
            ["launch", "--num-learners", "2", "--accelerate-config", "SCRIPT", "SCRIPT"],
            "no file of `accelerate config`",
        ),
        (["guard"], "Usage"),
        (["guard", "no-such-program", "train.py"], "there is no program 'no-such-program'"),
        (["syncer", "--run-dir", "a"], "--listen"),
        (["syncer", "--listen", "here", "--run-dir", "a"], "'here' is not an address"),
        (["syncer", "--listen", "127.0.0.1:99999", "--run-dir", "a"], "not an address"),
        (["syncer", "--listen", "192.0.2.1:0", "--run-dir", "a"], "cannot listen at 192.0.2.1:0"),
        (["syncer", "--listen", "no-such-host.invalid:0", "--run-dir", "a"], "cannot listen at no-such-host.invalid:0"),
        (["syncer", "--listen", "127.0.0.1:0", "--run-dir", "a", "--min-quorum", "0"], "min_quorum=0 is out of range"),
        (["syncer", "--listen", "127.0.0.1:0", "--run-dir", "USED"], "choose another --run-dir"),
        (["syncer", "--listen", "127.0.0.1:0", "--run-dir", "BEGUN", "--outer-lr", "0.5"], "outer_lr=0.7, not 0.5"),
    ],
)
def test_wrong_use_is_said_and_exits_with_2(hf_diloco, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    for name in ("used", "begun"):
        RunDirectory(name).tape.write_text('{"kind": "values"}\n')
        (RunDirectory(name).checkpoints / "step-00000001").mkdir()
    RunDirectory("begun").config.write_text(json.dumps(config_to_dict(SyncerConfig())))
    names = {"SCRIPT": "train.py", "USED": "used", "BEGUN": "begun"}
    code, out, err = hf_diloco(*(names.get(word, word) for word in words))
    assert code == 2
    assert said in out + err
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--listen", "127.0.0.1:0", "--go-back-to", "3"], "no checkpoint of the whole run at step 3"),
        (["--listen", "127.0.0.1:TAKEN"], "cannot listen at 127.0.0.1"),
        (["--listen", "203.0.113.1:0"], "cannot listen at 203.0.113.1"),
        (["--listen", "127.0.0.1:0", "--outer-lr", "-1"], "outer_lr"),
        (["--listen", "127.0.0.1:0", "--outer-lr", "inf"], "outer_lr"),
        (["--listen", "127.0.0.1:0", "--start-timeout-seconds", "inf"], "start_timeout_seconds"),
    ],
)
def test_a_first_start_that_fails_leaves_nothing(hf_diloco, untouched_process, tmp_path, words, said):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [word.replace("TAKEN", str(taken.getsockname()[1])) for word in words]
        code, _, err = hf_diloco("syncer", "--run-dir", tmp_path / "new", *words)
    assert code == 2
    assert said in err
    assert not any(tmp_path.iterdir())


def test_a_restart_that_fails_keeps_the_port(hf_diloco, untouched_process, tmp_path):
    with RunDirectory(tmp_path) as directory:
        directory.tape.write_text('{"kind": "start", "incarnation": 1, "seconds": 0.0}\n')
        directory.config.write_text(json.dumps(config_to_dict(SyncerConfig())))
        directory.status.write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        directory.write_address(address)
        for words in (["--go-back-to", "3"], []):
            code, _, err = hf_diloco("syncer", "--run-dir", tmp_path, "--listen", "127.0.0.1:0", *words)
            assert code == 2
        assert f"cannot listen at {address}" in err, "it looked for another port"
    assert directory.read_address() == address


def test_an_unwritable_run_directory_exits_with_1(hf_diloco):
    code, _, err = hf_diloco("syncer", "--listen", "127.0.0.1:0", "--run-dir", "/proc/a")
    assert code == 1
    assert "cannot be written" in err
    assert "Traceback" not in err


# -------------------------------------------------------------------------------------------------------------- export


def checkpoint(directory: RunDirectory, step: int) -> None:
    hello = Hello(
        incarnation="a", host="here", shapes=(("weight", (2,)),), averaged=(), constants_digest="", total_steps=10,
        num_shards=None, library_version=library.__version__, global_step=0, held=(),
    )  # fmt: skip
    terms = Terms.from_first(SyncerConfig(), 0, hello)
    state, supply = GlobalState(terms.layout, terms.config), Supply()
    for index, fragment in enumerate(terms.layout.fragments):
        state.set_initial(index, torch.full((fragment.num_parameters,), float(step)))
    supply.restore({}, {"vocab.txt": b"a"}, [])
    facts = Facts(
        incarnation=1, outer_step=step, started=True, known_learners=[0], accounts=[], num_merges=0,
        num_participants=0, tape_bytes=0, learner_checkpoints={},
    )  # fmt: skip
    save_run(directory.checkpoints, terms, state, supply, facts)


def exported(out) -> float:
    from safetensors.torch import load_file

    return load_file(out / "model.safetensors")["weight"][0].item()


def test_export_without_a_checkpoint_is_an_error(hf_diloco, tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.tape.write_text("{}\n")
    code, _, err = hf_diloco("export", tmp_path / "run", tmp_path / "out")
    assert code == 1
    assert "holds no checkpoint yet" in err


def test_export_of_no_run_is_wrong_use(hf_diloco, tmp_path):
    code, _, err = hf_diloco("export", tmp_path / "run", tmp_path / "out")
    assert code == 2
    assert "there is no run directory" in err
    assert not (tmp_path / "run").exists()
    (tmp_path / "data").mkdir()
    code, _, err = hf_diloco("export", tmp_path / "data", tmp_path / "out")
    assert code == 2
    assert "is no run directory: it has no event tape (tape.jsonl)" in " ".join(err.split())


@pytest.mark.filterwarnings("ignore:the architecture")
def test_export_takes_the_newest_or_the_one_named(hf_diloco, tmp_path):
    directory = RunDirectory(tmp_path / "run")
    for step in (7, 9):
        checkpoint(directory, step)
    code, out, _ = hf_diloco("export", tmp_path / "run", tmp_path / "out")
    assert code == 0
    assert "outer step 9" in out
    assert exported(tmp_path / "out") == 9
    assert hf_diloco("export", tmp_path / "run", tmp_path / "seven", "--checkpoint", 7)[0] == 0
    assert exported(tmp_path / "seven") == 7
    code, _, err = hf_diloco("export", tmp_path / "run", tmp_path / "eight", "--checkpoint", 8)
    assert code == 2
    assert "there are: 7, 9" in err


@pytest.mark.filterwarnings("ignore:the architecture")
def test_export_overwrites_only_with_force(hf_diloco, tmp_path):
    checkpoint(RunDirectory(tmp_path / "run"), 9)
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    code, _, err = hf_diloco("export", tmp_path / "run", out)
    assert code == 2
    assert "is not empty" in err
    code, _, err = hf_diloco("export", tmp_path / "run", out, "--force")
    assert code == 2
    assert "was not written by hf-diloco" in err
    (out / "mine.txt").unlink()
    assert hf_diloco("export", tmp_path / "run", out)[0] == 0
    assert hf_diloco("export", tmp_path / "run", out, "--force")[0] == 0
    assert exported(out) == 9
    code, _, err = hf_diloco("export", tmp_path / "run", out / "model.safetensors", "--force")
    assert code == 2
    assert "is a file" in err


@pytest.mark.filterwarnings("ignore:the architecture")
def test_export_replaces_nothing_but_an_exported_model(hf_diloco, tmp_path):
    directory = RunDirectory(tmp_path / "box" / "run")
    checkpoint(directory, 9)
    (tmp_path / "box" / "notes.txt").write_text("mine")
    for out in (directory.path, directory.checkpoints, directory.path / "new", tmp_path / "box"):
        code, _, err = hf_diloco("export", directory.path, out, "--force")
        assert code == 2, out
        assert "is, holds or lies in the run directory" in err
    assert hf_diloco("export", directory.path, directory.model)[0] == 0
    (tmp_path / "mine" / "sub").mkdir(parents=True)
    code, _, err = hf_diloco("export", directory.path, tmp_path / "mine", "--force")
    assert code == 2
    assert "holds sub: --force replaces exported models only" in err
    assert (tmp_path / "box" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "mine" / "sub").is_dir()


def test_export_says_which_file_is_broken(hf_diloco, tmp_path):
    directory = RunDirectory(tmp_path / "run")
    checkpoint(directory, 9)
    (directory.checkpoints / "step-00000009" / "fragment-0000.safetensors").write_bytes(b"")
    code, _, err = hf_diloco("export", tmp_path / "run", tmp_path / "out", "--checkpoint", 9)
    assert code == 1
    assert "fragment-0000.safetensors is broken" in err


# ----------------------------------------------------------------------------------------------- what the syncer prints


@pytest.mark.parametrize(
    ("listen", "expected"),
    [("127.0.0.1:0", ("127.0.0.1", 0)), ("[::1]:29600", ("::1", 29600)), ("host.example:1", ("host.example", 1))],
)
def test_listen_addresses(listen, expected):
    assert parse_listen(listen) == expected


@pytest.mark.parametrize("listen", ["", "host", ":1", "host:", "host:-1", "host:x", "host:65536"])
def test_what_is_no_address(listen):
    with pytest.raises(ConfigError, match="not an address"):
        parse_listen(listen)


def test_what_only_this_machine_can_reach():
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "10.0.0.1", "::", "host.example"))


def test_join_lines_hold_all_but_the_token(tmp_path):
    directory = RunDirectory(tmp_path / "a run")
    token = directory.read_or_make_token()
    text = join_lines("127.0.0.1:29600", directory, SyncerConfig(expected_learners=2))
    assert token not in text
    for learner_id in (0, 1):
        assert (
            f"HF_DILOCO_SYNCER=127.0.0.1:29600 HF_DILOCO_LEARNER_ID={learner_id} "
            f"HF_DILOCO_TOKEN_FILE='{directory.token}' HF_DILOCO_NUM_SHARDS=2 "
            "accelerate launch --num_processes 1 train.py"
        ) in text
    remote = join_lines("0.0.0.0:29600", directory, SyncerConfig())
    assert "HF_DILOCO_SYNCER=0.0.0.0" not in remote
    assert "scp " in remote
    assert token not in remote
    assert "up to" not in remote
    assert "HF_DILOCO_NUM_SHARDS=1 accelerate" in remote  # shard_dataset needs it even then
    assert "and so on to HF_DILOCO_LEARNER_ID=99" in join_lines(
        "[::1]:1", directory, SyncerConfig(expected_learners=100)
    )
