"""Trainers that read leased shards: who reads what, when learners come and go, and where one goes on."""

import json
import threading
from collections import Counter
from pathlib import Path

import datasets
import pytest
from test_transformers_run import Run
from tokenizers import Tokenizer, models, pre_tokenizers
from trainers import callback, make_data, make_model, plugin
from transformers import PreTrainedTokenizerFast, TrainerCallback

from hf_diloco.core import leases
from hf_diloco.integrations.transformers import DiLoCoCallback
from hf_diloco.learner.data import shard_dataset
from hf_diloco.learner.lease import lease_of
from hf_diloco.syncer.tape import read_tape

pytestmark = [
    pytest.mark.fast,
    pytest.mark.filterwarnings("ignore:training ended early:hf_diloco.errors.DiLoCoWarning"),
    pytest.mark.filterwarnings("ignore:learners 0 and 1 read the same:hf_diloco.errors.DiLoCoWarning"),
]

ROWS, BATCH = 16, 4  # of a shard: four steps a pass


@pytest.fixture
def run(tmp_path, request):
    def make(*, name="one", **settings):
        (tmp_path / name).mkdir()
        run = DataRun(tmp_path / name, **settings)
        request.addfinalizer(run.end)
        return run

    return make


class DataRun(Run):
    """Learners that read ``num_shards`` files; each row has its own number as its tokens."""

    def __init__(self, tmp_path, *, num_shards=6, **settings):
        super().__init__(tmp_path, **settings)
        self.num_shards, self.files = num_shards, []
        for shard in range(num_shards):
            path = tmp_path / f"{shard}.jsonl"
            rows = [[3 + shard, 3 + row, 3 + row // 2] for row in range(ROWS)]
            path.write_text("".join(json.dumps({"input_ids": ids, "labels": ids}) + "\n" for ids in rows))
            self.files.append(str(path))

    def reader(self, learner_id, *callbacks, **arguments):
        """A Trainer, and what it reads: lists of (shard, row), one a step."""
        reads = Reads()
        trainer = self.trainer(learner_id, reads, *callbacks, **{"per_device_train_batch_size": BATCH, **arguments})
        trainer.train_dataset = shard_dataset(self.stream(), num_shards=self.num_shards, plugin=plugin(learner_id))
        return trainer, reads.steps

    def stream(self):
        return datasets.load_dataset("json", data_files=self.files, split="train", streaming=True)


class Reads(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.hook = model.register_forward_pre_hook(self.see, with_kwargs=True)

    def see(self, module, args, kwargs):
        self.steps.append([(int(row[0]) - 3, int(row[1]) - 3) for row in kwargs["input_ids"]])

    def on_train_end(self, args, state, control, **kwargs):
        self.hook.remove()


class When(TrainerCallback):
    """Does something at a step, then waits a little at each: learners take turns on the processor."""

    def __init__(self, step=-1, action=None):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action(control)
        threading.Event().wait(0.002)


def die(control):
    raise RuntimeError("killed")


def stop(control):
    control.should_training_stop = True


def passes(steps):
    """The shard of each pass; each must be of one shard, whole, in order."""
    rows = [row for step in steps for row in step]
    found = [rows[first : first + ROWS] for first in range(0, len(rows), ROWS)]
    for one in found:
        assert one == [(one[0][0], row) for row in range(len(one))]
    assert all(len(one) == ROWS for one in found[:-1])
    return [one[0][0] for one in found]


def check_leases(lines):
    """By the tape, nobody was given a shard that another one had; returns how often each was given."""
    held, given = {}, Counter()
    for line in lines:
        if line["kind"] == "leave" and line["for_good"]:
            held.pop(line["learner_id"], None)
        elif line["kind"] == "lease":
            held[line["learner_id"]] = line["shard"]
            given[line["shard"]] += 1
            assert len(set(held.values())) == len(held), line
    return given


def come_and_go(run, passes, *, max_steps, leaves_at):
    """Of two learners one leaves and a third comes, and all shards are read in turn; returns what each read."""
    late = threading.Event()
    stays, stays_read = run.reader(0, When(20, lambda control: late.set()), max_steps=max_steps)
    leaves, leaves_read = run.reader(1, When(leaves_at, stop), max_steps=max_steps)
    comes, comes_read = run.reader(2, When(), max_steps=max_steps)
    train = comes.train
    comes.train = lambda: late.wait(60) and train()
    run.train(stays, leaves, comes)
    assert [passes(read)[0] for read in (stays_read, leaves_read)] == [0, 1]
    given = check_leases(read_tape(run.directory.tape))
    assert set(given) == set(range(6))
    read = Counter(passes(stays_read) + passes(leaves_read) + passes(comes_read))
    assert max(read.values()) - min(read[shard] for shard in range(6)) <= 3
    assert not run.lines("warning")
    return stays_read, leaves_read, comes_read


def goes_on(run, passes, saved_at, dies_at, accumulate):
    """Killed and resumed, a learner reads what it would have read."""
    arguments = {
        "max_steps": 200, "save_strategy": "steps", "save_steps": saved_at, "gradient_accumulation_steps": accumulate,
        "per_device_train_batch_size": BATCH // accumulate,
    }  # fmt: skip
    first, first_read = run.reader(0, When(dies_at, die), **arguments)
    again, again_read = run.reader(0, When(saved_at + 9, stop), **{**arguments, "save_strategy": "no"})
    run.thread.start()
    with pytest.raises(RuntimeError, match="killed"):
        first.train()
    callback(first)._end()
    lease_of(plugin(0)).move(1)  # as in a new process, it is not where it was
    again.train(resume_from_checkpoint=f"{again.args.output_dir}/checkpoint-{saved_at}")
    run.syncer.stop()
    run.thread.join(60)
    assert passes(first_read[: saved_at * accumulate] + again_read) == [0, 1, 0, 1, 0][: (saved_at + 9 + 3) // 4]
    assert again.args.ignore_data_skip is False


INTERRUPTIONS = pytest.mark.parametrize(
    ("saved_at", "dies_at", "accumulate"),
    [(3, 4, 1), (6, 7, 1), (6, 7, 2), (8, 9, 1)],
    ids=["first pass", "second", "second, gradients accumulated", "its end"],
)


def test_learners_come_and_go_and_all_shards_are_read_in_turn(run):
    steps = come_and_go(run(expected_learners=2), passes, max_steps=120, leaves_at=40)
    assert not any(len({shard for shard, _ in step}) > 1 for read in steps for step in read)


@INTERRUPTIONS
def test_a_resumed_learner_goes_on_where_it_was(run, saved_at, dies_at, accumulate):
    goes_on(run(num_shards=2), passes, saved_at, dies_at, accumulate)


def test_a_resumed_pass_has_the_order_that_it_had(run):
    """Shards of three files, whose order depends on the epoch: after an interruption all is as it would have been."""

    whole, parts = run(num_shards=6, name="whole"), run(num_shards=6, name="parts")
    whole.num_shards = parts.num_shards = 2
    trainer, read = whole.reader(0, When(45, stop), max_steps=400)  # 12 steps a pass
    whole.train(trainer)

    lease_of(plugin(0)).move(0)
    first, first_read = parts.reader(0, When(16, die), max_steps=400, save_strategy="steps", save_steps=15)
    again, again_read = parts.reader(0, When(45, stop), max_steps=400)
    parts.thread.start()
    with pytest.raises(RuntimeError, match="killed"):
        first.train()
    callback(first)._end()
    dies_again, _ = parts.reader(0, When(17, die), max_steps=400, save_strategy="no")
    with pytest.raises(RuntimeError, match="killed"):
        dies_again.train(resume_from_checkpoint=f"{again.args.output_dir}/checkpoint-15")
    callback(dies_again)._end()
    assert not dies_again.args.ignore_data_skip, "as the user gave it"
    again.train(resume_from_checkpoint=f"{again.args.output_dir}/checkpoint-15")
    parts.thread.join(60)
    assert first_read[:15] + again_read == read
    assert sorted(read[:12]) == sorted(read[24:36])
    assert read[:12] != read[24:36], "another pass, another order"


def test_a_shard_that_another_one_took_meanwhile_is_not_read_twice(run, monkeypatch):
    """Learner 0 is away for too long and learner 2, of the same home, is in its first pass when it comes back."""
    monkeypatch.setattr(leases, "ABSENT_SECONDS", -1.0)
    run = run(num_shards=2)
    reads_on, over = threading.Event(), threading.Event()

    def stay(control):
        reads_on.set()
        over.wait(60)
        stop(control)

    first, _ = run.reader(0, When(3, die), max_steps=200, save_strategy="steps", save_steps=2)
    other, other_read = run.reader(2, When(1, stay), max_steps=200)
    again, again_read = run.reader(0, When(2 + 5, stop), max_steps=200)
    run.thread.start()
    with pytest.raises(RuntimeError, match="killed"):
        first.train()
    callback(first)._end()
    thread = threading.Thread(target=other.train)
    thread.start()
    assert reads_on.wait(60)
    again.train(resume_from_checkpoint=f"{again.args.output_dir}/checkpoint-2")
    over.set()
    for one in (thread, run.thread):
        one.join(60)
        assert not one.is_alive()
    assert other_read[0][0] == (0, 0)
    assert passes(again_read) == [1, 1]  # from its beginning, though the checkpoint was of step 2


@pytest.mark.long  # TRL takes its time to import
@pytest.mark.filterwarnings("default")  # TRL's own
def test_sft_trainer_prepares_a_stream_and_reads_the_leased_shards(run, tmp_path):
    from trl import SFTConfig, SFTTrainer

    run = run(num_shards=3)
    for shard, file in enumerate(run.files):
        Path(file).write_text("".join(json.dumps({"text": f"w{shard} w{row}"}) + "\n" for row in range(8)))
    vocabulary = {"<pad>": 0, "<unk>": 1, "<eos>": 2, **{f"w{number}": number + 3 for number in range(8)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    reads = Reads()
    trainer = SFTTrainer(
        model=make_model(),
        args=SFTConfig(
            output_dir=str(tmp_path / "out"), max_steps=8, per_device_train_batch_size=BATCH, use_cpu=True, bf16=False,
            report_to="none", save_strategy="no", disable_tqdm=True,
        ),
        train_dataset=shard_dataset(run.stream(), num_shards=3, plugin=plugin(0)),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
        callbacks=[DiLoCoCallback(plugin(0), link=lambda: run.hub.connect(0)), reads],
    )  # fmt: skip
    run.train(trainer)
    assert [{shard for shard, _ in step} for step in reads.steps] == [{0}, {0}, {1}, {1}, {2}, {2}, {0}, {0}]


@pytest.mark.parametrize("forgets", [True, False])
def test_who_forgets_to_split_the_data_is_told_though_the_order_differs(run, forgets):
    run = run(expected_learners=2)
    trainers = []
    for learner_id in (0, 1):
        trainer = run.trainer(learner_id, When(), max_steps=48)
        data = make_data(160 if forgets else 320)
        trainer.train_dataset = data if forgets else shard_dataset(data, num_shards=2, plugin=plugin(learner_id))
        trainers.append(trainer)
    run.train(*trainers)
    said = run.lines("warning")
    assert [line["learner_ids"] for line in said] == ([[0, 1]] if forgets else [])
    assert all("shard_dataset" in line["text"] for line in said)
