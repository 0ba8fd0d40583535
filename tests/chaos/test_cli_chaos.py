"""``hf-diloco chaos``: wrong use."""

from __future__ import annotations

import sys

import pytest

from hf_diloco.cli.main import main

pytestmark = pytest.mark.fast


def chaos(monkeypatch, capsys, *words: object) -> tuple[object, str]:
    monkeypatch.setattr(sys, "argv", ["hf-diloco", "chaos", *map(str, words)])
    with pytest.raises(SystemExit) as exit_:
        main()
    return exit_.value.code, capsys.readouterr().err


def test_a_fault_that_is_none(monkeypatch, capsys, tmp_path):
    code, text = chaos(monkeypatch, capsys, "--run-dir", tmp_path / "x", "--kinds", "kill:learner,flood")
    assert code == 2
    assert "there is no fault 'flood'; there are kill:learner, kill:courier" in text
    assert not (tmp_path / "x").exists()


def test_a_setting_out_of_range(monkeypatch, capsys, tmp_path):
    code, text = chaos(monkeypatch, capsys, "--run-dir", tmp_path / "x", "--min-quorum", 9)
    assert code == 2
    assert "min_quorum=9 is above expected_learners=3" in text


def test_a_directory_that_is_in_use(monkeypatch, capsys, tmp_path):
    (tmp_path / "report.json").write_text("{}")
    code, text = chaos(monkeypatch, capsys, "--run-dir", tmp_path)
    assert code == 2
    assert "is not empty. Give another --run-dir." in text
