"""Trainers that read leased shards of map-style data sets: who reads what, and where one goes on."""

import json
import threading
from pathlib import Path

import datasets
import pytest
from test_transformers_data import BATCH, INTERRUPTIONS, DataRun, Reads, When, come_and_go, die, goes_on, stop
from tokenizers import Tokenizer, models, pre_tokenizers
from trainers import callback, make_model, plugin
from transformers import PreTrainedTokenizerFast

from hf_diloco.core import leases
from hf_diloco.errors import DiLoCoWarning
from hf_diloco.integrations.transformers import DiLoCoCallback
from hf_diloco.learner.data import shard_dataset

pytestmark = [
    pytest.mark.fast,
    pytest.mark.filterwarnings("ignore:training ended early:hf_diloco.errors.DiLoCoWarning"),
]

ROWS = 16  # of a shard: four steps a pass


class MapStyleRun(DataRun):
    """Learners that read ``num_shards`` shards of one table, or of one list; each row has its own number as tokens."""

    is_table = True

    def stream(self):
        ids = [[3 + shard, 3 + row, 3 + row // 2] for shard in range(self.num_shards) for row in range(ROWS)]
        rows = [{"input_ids": one, "labels": one, "unused": 0} for one in ids]
        return datasets.Dataset.from_list(rows) if self.is_table else [{**row, "unused": [0]} for row in rows]


@pytest.fixture
def run(tmp_path, request):
    def make(**settings):
        run = MapStyleRun(tmp_path, **settings)
        request.addfinalizer(run.end)
        return run

    return make


def passes(steps):
    """The shard of each pass; each must be of one shard, whole, and no two in the same order."""
    rows = [row for step in steps for row in step]
    found = [rows[first : first + ROWS] for first in range(0, len(rows), ROWS)]
    for one in found[:-1]:
        assert sorted(one) == [(one[0][0], row) for row in range(ROWS)]
    assert len({shard for shard, _ in found[-1]}) == 1
    assert len(set(found[-1])) == len(found[-1])
    assert len({tuple(row for _, row in one) for one in found}) == len(found)
    return [one[0][0] for one in found]


def test_learners_come_and_go_and_all_shards_are_read_in_turn(run):
    run = run(expected_learners=2)
    run.is_table = False
    come_and_go(run, passes, max_steps=72, leaves_at=20)


@INTERRUPTIONS
def test_a_resumed_learner_goes_on_where_it_was(run, saved_at, dies_at, accumulate):
    goes_on(run(num_shards=2), passes, saved_at, dies_at, accumulate)


def test_a_checkpoint_that_says_nothing_of_shards_is_gone_on_from_as_trainer_does(run):
    run = run(num_shards=2)
    first, first_read = run.reader(0, When(4, die), max_steps=200, save_strategy="steps", save_steps=3)
    again, again_read = run.reader(0, When(11, stop), max_steps=200)
    run.thread.start()
    with pytest.raises(RuntimeError, match="killed"):
        first.train()
    callback(first)._end()
    checkpoint = Path(first.args.output_dir, "checkpoint-3")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    del state["stateful_callbacks"]["hf-diloco shard"]
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    again.train(resume_from_checkpoint=str(checkpoint))
    run.thread.join(60)
    assert passes(first_read[:3] + again_read) == [0, 1, 0]


def test_a_shard_that_another_one_took_meanwhile_is_not_read_twice(run, monkeypatch):
    """Then a pass begins where Trainer does not expect it: a second interruption must find its place, too."""
    monkeypatch.setattr(leases, "ABSENT_SECONDS", -1.0)
    run = run(num_shards=2)
    reads_on, over = threading.Event(), threading.Event()

    def stay(control):
        reads_on.set()
        over.wait(60)
        stop(control)

    save = {"max_steps": 200, "save_strategy": "steps", "save_steps": 3}
    first, _ = run.reader(0, When(4, die), **save)
    other, other_read = run.reader(2, When(1, stay), max_steps=200)
    again, again_read = run.reader(0, When(10, die), **save)
    third, third_read = run.reader(0, When(9 + 8, stop), max_steps=200)
    run.thread.start()
    with pytest.raises(RuntimeError, match="killed"):
        first.train()
    callback(first)._end()
    thread = threading.Thread(target=other.train)
    thread.start()
    assert reads_on.wait(60)
    with pytest.raises(RuntimeError, match="killed"):
        again.train(resume_from_checkpoint=f"{again.args.output_dir}/checkpoint-3")
    callback(again)._end()
    third.train(resume_from_checkpoint=f"{again.args.output_dir}/checkpoint-9")
    over.set()
    for one in (thread, run.thread):
        one.join(60)
        assert not one.is_alive()
    assert {shard for shard, _ in other_read[0]} == {0}
    assert passes(again_read[: 9 - 3] + third_read) == [1, 1, 1, 1]  # from its beginning, though it was at step 3
    assert third.args.ignore_data_skip is False


def test_a_selection_of_the_shard_is_kept_for_good_and_that_is_said(run):
    run = run(num_shards=3)
    trainer, read = run.reader(1, max_steps=8)
    whole, trainer.train_dataset = trainer.train_dataset, trainer.train_dataset.shuffle(seed=0)
    with pytest.warns(DiLoCoWarning, match="Call shard_dataset last"):
        run.train(trainer)
    assert passes(read) == [1, 1]
    assert not run.lines("lease")
    assert len(whole) == ROWS


@pytest.mark.long  # TRL takes its time to import
@pytest.mark.filterwarnings("default")  # TRL's own
@pytest.mark.parametrize("packing", [False, True])
def test_sft_trainer_prepares_all_shards_and_reads_those_that_are_leased(run, tmp_path, packing):
    from trl import SFTConfig, SFTTrainer

    run = run(num_shards=3)
    vocabulary = {"<pad>": 0, "<unk>": 1, "<eos>": 2, **{f"w{number}": number + 3 for number in range(24)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    texts = datasets.Dataset.from_dict({"text": [f"w{row // 8} w{row}" for row in range(24)]})
    reads = Reads()
    trainer = SFTTrainer(
        model=make_model(),
        args=SFTConfig(
            output_dir=str(tmp_path / "out"), max_steps=8, per_device_train_batch_size=BATCH, use_cpu=True, bf16=False,
            report_to="none", save_strategy="no", disable_tqdm=True, packing=packing, packing_strategy="wrapped",
            max_length=3, eval_packing=False,
        ),
        train_dataset=shard_dataset(texts, num_shards=3, plugin=plugin(0)),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
        callbacks=[DiLoCoCallback(plugin(0), link=lambda: run.hub.connect(0)), reads],
    )  # fmt: skip
    run.train(trainer)
    assert [{shard for shard, _ in step} for step in reads.steps] == [{0}, {0}, {1}, {1}, {2}, {2}, {0}, {0}]
    assert len({row for step in reads.steps[:6] for row in step}) == 24
