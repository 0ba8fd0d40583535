"""Any model: two learners train it, and what is exported loads with its public class, bit for bit the syncer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import train_models
import transformers as hf
from processes import Run
from test_ranks import SECONDS, TORCHRUN

from hf_diloco.cli.export import export
from hf_diloco.core.codec import encoded_size
from hf_diloco.syncer.run_directory import RunDirectory
from hf_diloco.syncer.saved_run import SavedRun, latest_run

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT's
]
long = pytest.mark.long


@pytest.fixture
def train(start_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trains a kind of model with two learners, and checks what holds for all of them."""

    def run_to_the_end(kind: str, num_processes: int = 1, **options: Any) -> tuple[Run, SavedRun]:
        monkeypatch.setenv("HF_DILOCO_NUM_SHARDS", "2")
        run = start_run(script=Path(train_models.__file__), expected_learners=2, num_fragments=4, sync_every=4)
        for learner_id, launcher in enumerate(((), TORCHRUN if num_processes == 2 else ())):
            run.start_learner(learner_id, launcher=launcher, kind=kind, **options)
        for learner_id in (0, 1):
            assert run.learners[learner_id].wait(SECONDS) == 0, run.learners[learner_id].tail()
        assert run.syncer.wait() == 0, run.syncer.tail()
        saved = latest_run(RunDirectory(run.directory, create=False))
        check_learners(run, saved, kind, {0: 1, 1: num_processes})
        check_export(run, saved, tmp_path / "exported")
        return run, saved

    return run_to_the_end


def check_learners(run: Run, saved: SavedRun, kind: str, num_processes: dict[int, int]) -> None:
    """Both were merged, both hold the global values, and their tokens were counted as this kind counts them."""
    values = saved.tensors()
    for learner_id in (0, 1):
        merged = [line for line in run.rounds() if learner_id in (who["learner_id"] for who in line["participants"])]
        assert {line["fragment_index"] for line in merged} == {0, 1, 2, 3}
        held = torch.load(run.path / f"learner-{learner_id}.pt")
        assert held.keys() == values.keys()
        dtype = torch.bfloat16 if kind == "lora-quantised" else torch.float32  # TRL's choice for quantised models
        assert all(torch.equal(held[name], values[name].to(dtype)) for name in values)
    for learner in run.accounts().values():
        tokens = train_models.TOKENS.get(kind, train_models.NUM_TOKENS)
        batch_size = train_models.BATCH_SIZE * num_processes[learner["learner_id"]]
        assert learner["tokens_trained"] == learner["steps"] * batch_size * tokens


def check_export(run: Run, saved: SavedRun, out: Path) -> None:
    """`hf-diloco export` writes the same as the syncer did at the end."""
    export(run.directory, out)
    model = run.directory / "model"
    assert {path.name for path in out.iterdir()} == {path.name for path in model.iterdir()}
    for path in out.iterdir():  # a learner's last report of its tokens may come after the last checkpoint
        if path.name != "README.md":
            assert path.read_bytes() == (model / path.name).read_bytes(), path.name
    card = (model / "README.md").read_text()
    tokens = sum(learner["tokens_trained"] for learner in run.status()["learners"])
    for line in ("learners: 2", "outer steps: 30 of 30", f"of {tokens:,} trained", "wire format: bf16"):
        assert line in card, (line, card)


def check_statistics(run: Run, values: dict[str, torch.Tensor]) -> None:
    """Of batch norms: an average over the learners, not what the model began with."""
    held = [torch.load(run.path / f"learner-{learner_id}.buffers.pt") for learner_id in (0, 1)]
    names = [name for name in held[0] if name.endswith("running_mean")]
    assert names
    for name in names:  # whatever the weights were: the last reports of tokens may have come later
        low, high = (which(held[0][name], held[1][name]) for which in (torch.minimum, torch.maximum))
        assert bool(((values[name] >= low - 1e-6) & (values[name] <= high + 1e-6)).all())
        assert bool(values[name].any()), "the model began with zeros"
    counters = [name for name in held[0] if name.endswith("num_batches_tracked")]
    assert counters
    assert all(int(values[name]) in {int(buffers[name]) for buffers in held} for name in counters)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=long) for kind in train_models.WHOLE])
def test_a_whole_model(train: Any, kind: str) -> None:
    run, saved = train(kind)
    model, info = train_models.WHOLE[kind][1].from_pretrained(run.directory / "model", output_loading_info=True)
    assert not any(info.values()), info
    values, found = {**saved.tensors(), **saved.constants}, model.state_dict()
    assert len(values) > 10
    for name, value in values.items():
        assert torch.equal(found[name], value), name
    own = {id(tensor) for name, tensor in model.state_dict(keep_vars=True).items() if name in values}
    rest = [name for name, tensor in model.state_dict(keep_vars=True).items() if id(tensor) not in own]
    assert not rest, "tensors of the model that the run did not have"
    if kind == "resnet":
        check_statistics(run, values)
    files = {path.name for path in (run.directory / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"} <= files
    assert ("generation_config.json" in files) == model.can_generate()
    if kind == "llava":
        assert isinstance(hf.AutoProcessor.from_pretrained(run.directory / "model"), hf.LlavaProcessor)


LONG_ADAPTERS = ("lora-dpo", "lora-grpo", "lora-head", "lora-quantised")


@pytest.mark.parametrize("kind", ["lora-sft", *(pytest.param(kind, marks=long) for kind in LONG_ADAPTERS)])
def test_an_adapter(train: Any, kind: str, tmp_path: Path) -> None:
    if kind == "lora-quantised":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install -e '.[dev-long]'")
    check_adapter(train, kind, tmp_path / "base")


@long
def test_an_adapter_that_two_processes_of_a_learner_train(train: Any, tmp_path: Path) -> None:
    check_adapter(train, "lora-sft", tmp_path / "base", num_processes=2)


def check_adapter(train: Any, kind: str, base: Path, num_processes: int = 1) -> None:
    """It is what the run has, as PEFT loads it; and nothing else was sent."""
    train_models.save_base(base)
    run, saved = train(kind, num_processes, base=base)
    model = peft.AutoPeftModelForCausalLM.from_pretrained(run.directory / "model")
    values, found = saved.tensors(), dict(model.named_parameters())
    adapter = {name for name in found if ".lora_" in name or ".modules_to_save." in name}
    assert adapter == values.keys(), "exactly the adapter is trained and exported"
    for name, value in values.items():
        assert torch.equal(found[name].detach(), value), name
    moved = [name for name in values if "lora_B" in name and bool(values[name].any())]
    assert moved, "lora_B starts at zero"

    assert not saved.constants, "nothing of the base model is kept"
    check_bytes(run, saved)


def check_bytes(run: Run, saved: SavedRun) -> None:
    """To the byte what the merges and publications of these fragments take."""
    sizes = [fragment.num_parameters for fragment in saved.terms.layout.fragments]
    assert sum(sizes) == sum(value.numel() for value in saved.tensors().values())
    tape, status = run.tape(), run.status()
    full, bf16 = [encoded_size(size, "fp32") for size in sizes], [encoded_size(size, "bf16") for size in sizes]
    assert sum(line["kind"] == "join" for line in tape) == 2, "a link was lost, and with it what was on its way"

    sent = 0
    made: list[list[list[int]]] = [[[1, 0]] for _ in sizes]
    for line in run.rounds():
        made[line["fragment_index"]].append(line["version"])
    held: dict[tuple[int, int], list[int]] = {}
    for line in tape:
        if line["kind"] == "applied":
            who, index, version = line["learner_id"], line["fragment_index"], line["version"]
            number = made[index].index(version)
            fits = number > 0 and held.get((who, index)) == made[index][number - 1]
            sent += bf16[index] if fits else full[index]
            held[who, index] = version
    assert list(held.values()) == [made[index][-1] for _, index in held], "the run has ended with all at the end"
    assert status["bytes_sent"] == sent

    files = sum(path.stat().st_size for path in (saved.checkpoint.path / "files").iterdir())
    merged = sum(len(line["participants"]) * bf16[line["fragment_index"]] for line in run.rounds())
    num_late = sum(row["updates_late"] for row in run.accounts().values())
    assert 0 <= status["bytes_received"] - (sum(full) + files + merged) <= num_late * max(bf16)
