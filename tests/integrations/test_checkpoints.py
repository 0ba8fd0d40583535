"""The checkpoint that a learner goes on from is one that was written to its end."""

import pytest
from trainers import make_trainer

from hf_diloco import last_checkpoint

pytestmark = pytest.mark.fast


def test_the_newest_whole_one(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=10, save_strategy="steps", save_steps=2)
    output_dir = trainer.args.output_dir
    assert last_checkpoint(output_dir) is None, "not even the directory is there"
    trainer.train()
    out = tmp_path / "out"
    (out / "checkpoint-x").mkdir()
    assert last_checkpoint(output_dir) == str(out / "checkpoint-10"), "by number, not by name"
    (out / "checkpoint-10" / "trainer_state.json").unlink()
    assert last_checkpoint(output_dir) == str(out / "checkpoint-8")
    whole = (out / "checkpoint-8" / "trainer_state.json").read_bytes()
    (out / "checkpoint-8" / "trainer_state.json").write_bytes(whole[: len(whole) // 2])
    assert last_checkpoint(output_dir) == str(out / "checkpoint-6")
    again = make_trainer(tmp_path, max_steps=10)
    again.train(resume_from_checkpoint=last_checkpoint(output_dir))
    assert again.state.global_step == 10
