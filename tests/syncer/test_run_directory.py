import hashlib
import json
import os
import ssl
import stat
import subprocess
import sys

import pytest

from hf_diloco.config import SyncerConfig, config_from_dict, config_to_dict
from hf_diloco.errors import ConfigError, DiLoCoError
from hf_diloco.links.token import read_token
from hf_diloco.syncer.run_directory import RunDirectory

pytestmark = pytest.mark.fast


def test_it_is_made_with_its_parts(tmp_path):
    directory = RunDirectory(tmp_path / "runs" / "a")
    assert directory.checkpoints.is_dir()
    assert directory.logs.is_dir()
    assert {item.name for item in directory.path.iterdir()} == {"checkpoints", "logs"}


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiLoCoError, match=r"file/a is no directory"):
        RunDirectory(tmp_path / "file" / "a")


def test_without_create_it_must_be_there(tmp_path):
    with pytest.raises(ConfigError, match="there is no run directory"):
        RunDirectory(tmp_path / "a", create=False)
    assert not (tmp_path / "a").exists()


def test_token_and_certificate_are_made_once_and_private(tmp_path):
    directory = RunDirectory(tmp_path)
    token = directory.read_or_make_token()
    secret, fingerprint = read_token(token)
    assert len(bytes.fromhex(secret)) == 32
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory.certificate)  # key and certificate belong together
    pem = directory.certificate.read_text().partition("-----END PRIVATE KEY-----\n")[2]
    assert hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest() == fingerprint
    for path in (directory.token, directory.certificate):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert RunDirectory(tmp_path).read_or_make_token() == token
    assert {item.name for item in tmp_path.iterdir()} == {"checkpoints", "logs", "token", "certificate.pem"}


def test_without_tls_the_token_is_the_secret_alone(tmp_path):
    directory = RunDirectory(tmp_path)
    token = directory.read_or_make_token()
    assert directory.read_or_make_token(tls=False) == token.partition(".")[0]
    assert directory.token.read_text().strip() == token.partition(".")[0]
    assert directory.read_or_make_token() == token


@pytest.mark.parametrize("name", ["token", "certificate.pem"])
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_a_secret_that_others_can_read_is_refused(tmp_path, name, mode):
    RunDirectory(tmp_path).read_or_make_token()
    (tmp_path / name).chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:04o}.*chmod 600 {tmp_path / name}"):
        RunDirectory(tmp_path).read_or_make_token()


@pytest.mark.parametrize("name", ["token", "certificate.pem"])
def test_a_broken_secret_is_named(tmp_path, name):
    RunDirectory(tmp_path).read_or_make_token()
    (tmp_path / name).write_text("")
    with pytest.raises(DiLoCoError, match=rf"{name} is empty or broken"):
        RunDirectory(tmp_path).read_or_make_token()


def test_an_earlier_run_is_gone_on_with_under_its_own_settings(tmp_path):
    directory = RunDirectory(tmp_path)
    assert not directory.has_run
    with directory:
        directory.tape.write_text('{"kind": "start"}\n{"kind": "values"}\n')
        directory.config.write_text(json.dumps(config_to_dict(SyncerConfig(outer_lr=0.5))))
    with directory:
        assert directory.has_run
        assert directory.settings_of_run({"outer_lr": 0.5}) == config_to_dict(SyncerConfig(outer_lr=0.5))
        with pytest.raises(ConfigError, match=r"began with outer_lr=0\.5, not 0\.7\. Leave --outer-lr away"):
            directory.settings_of_run({"outer_lr": 0.7})
        assert directory.settings_of_run({"linger_seconds": 60.0})["linger_seconds"] == 60.0, "this one may differ"
        directory.config.write_text('{"outer_lr": 0.5, "gone": 1}')
        with pytest.raises(ConfigError, match="unknown setting 'gone'"):
            directory.settings_of_run({})


def test_what_the_first_learner_said_is_a_setting_of_the_run(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.config.write_text(json.dumps(config_to_dict(SyncerConfig())))
    told = {"kind": "layout", "num_shards": 3, "num_fragments": 4}
    layout = [json.dumps({**told, "total_steps": steps}) for steps in (40, 100)]
    directory.tape.write_text('{"kind": "start"}\n' + "\n".join(layout) + "\n")
    assert directory.settings_of_run({})["total_steps"] is None, "nobody has supplied the values"
    assert directory.settings_of_run({"total_steps": 500})["total_steps"] == 500, "nothing has begun"
    assert config_from_dict(directory.settings_of_run({})) == SyncerConfig(), "what was not given is still not given"
    with directory.tape.open("a") as tape:
        tape.write('{"kind": "values"}\n')
    assert directory.settings_of_run({"total_steps": 100})["num_shards"] == 3
    with pytest.raises(ConfigError, match=r"began with total_steps=100, not 500\. Leave --total-steps away"):
        directory.settings_of_run({"total_steps": 500})
    with pytest.raises(ConfigError, match=r"began with num_fragments=4, not 24\."):
        directory.settings_of_run({"num_fragments": 24})
    with pytest.raises(ConfigError, match=r"began without save_every, not with 10\."):
        directory.settings_of_run({"save_every": 10})


def fail_to_start(path, tape=""):
    """A start that makes everything, and fails; the token it had."""
    with RunDirectory(path) as directory:
        token = directory.read_or_make_token()
        directory.tape.write_text(tape)
        (directory.logs / "syncer.log").write_text("it failed")
        raise ZeroDivisionError(token)


def test_a_start_that_fails_takes_away_what_it_made(tmp_path):
    with pytest.raises(ZeroDivisionError):
        fail_to_start(tmp_path / "runs" / "a")
    assert not any(tmp_path.iterdir())


def test_a_start_that_fails_takes_away_nothing_else(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "mine").touch()
    with pytest.raises(ZeroDivisionError):
        fail_to_start(tmp_path)
    assert {path.name for path in tmp_path.rglob("*")} == {"logs", "mine", "syncer.log"}
    with pytest.raises(ZeroDivisionError) as failure:
        fail_to_start(tmp_path, tape='{"kind": "start"}\n')
    assert failure.value.args == (RunDirectory(tmp_path).read_or_make_token(),), "a run had begun"


def test_two_syncers_never_share_it(tmp_path):
    claim = f"from hf_diloco.syncer.run_directory import RunDirectory; RunDirectory({str(tmp_path)!r}).claim()"
    with RunDirectory(tmp_path):
        second = subprocess.run([sys.executable, "-c", claim], capture_output=True, text=True)
        assert second.returncode != 0
        assert f"in use by the syncer with pid {os.getpid()} on {os.uname().nodename}" in second.stderr
    assert subprocess.run([sys.executable, "-c", claim]).returncode == 0  # and its death gives it back
    RunDirectory(tmp_path).claim()


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00"])
def test_a_broken_status_reads_as_empty(tmp_path, content):
    directory = RunDirectory(tmp_path)
    assert directory.read_status() == {}
    directory.status.write_text(content)
    assert directory.read_status() == {}
