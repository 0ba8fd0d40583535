"""Of a PEFT model exactly what PEFT itself would save is exported, and nothing of the base model is shipped."""

import copy
import json

import peft
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from hf_diloco.core.model_notes import NOTES_FILE, ModelNotes
from hf_diloco.errors import DiLoCoError, DiLoCoWarning, MessageError, UnsupportedError
from hf_diloco.integrations.model_files import model_files
from hf_diloco.learner.parameters import ModelParameters
from hf_diloco.syncer.export import export_model

pytestmark = [
    pytest.mark.fast,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT's
]

CAUSAL = peft.TaskType.CAUSAL_LM
LINEAR = ["q_proj", "v_proj"]
KINDS = {
    "lora": peft.LoraConfig(task_type=CAUSAL, r=2, target_modules=LINEAR),
    "lora, all of a head": peft.LoraConfig(task_type=CAUSAL, r=2, target_modules=LINEAR, modules_to_save=["lm_head"]),
    "dora, no task": peft.LoraConfig(r=2, target_modules=LINEAR, use_dora=True),
    "lora, a few tokens": peft.LoraConfig(task_type=CAUSAL, r=2, target_modules=LINEAR, trainable_token_indices=[3, 5]),
    "vera": peft.VeraConfig(task_type=CAUSAL, r=2, target_modules=["q_proj"]),  # with two frozen tensors in its file
    "ia3": peft.IA3Config(task_type=CAUSAL, target_modules=["k_proj"], feedforward_modules=[]),
}


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return LlamaForCausalLM.from_pretrained(tmp_path / "base")


def adapted(base, config):
    return peft.get_peft_model(base, copy.deepcopy(config))  # PEFT writes into it


def supplied(model):
    parameters = ModelParameters(model)
    values = {name: tensor.detach().clone() for name, tensor in parameters.trainable.items()}
    return values, dict(parameters.constants()), model_files(parameters)


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_are_those_that_peft_writes(base, tmp_path, kind):
    model = adapted(base, KINDS[kind])
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    values, constants, files = supplied(model)
    export_model(values, constants, files, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")

    ours, theirs = (load_file(tmp_path / which / "adapter_model.safetensors") for which in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    configs = [json.loads((tmp_path / which / "adapter_config.json").read_text()) for which in ("ours", "theirs")]
    assert configs[0] == configs[1]
    assert {path.name for path in (tmp_path / "ours").iterdir()} == {
        "README.md", "adapter_config.json", "adapter_model.safetensors",
    }  # fmt: skip
    assert len(constants) == (2 if kind == "vera" else 0), "no frozen weight of the base model is shipped"
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "ours") if "no task" not in kind else None
    ids = torch.arange(8).unsqueeze(0)
    if loaded is not None:
        assert torch.equal(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


def test_a_sharded_model_has_the_same_files(base, tmp_path):
    model = adapted(base, KINDS["dora, no task"])
    plain = [ModelParameters(base), ModelParameters(model)]
    expected = [{**model_files(parameters), "names": parameters.adapter_names} for parameters in plain]
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        fully_shard(base, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        assert type(base).__name__ == "FSDPLlamaForCausalLM"
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        sharded = [ModelParameters(base), ModelParameters(model)]
        assert [{**model_files(parameters), "names": parameters.adapter_names} for parameters in sharded] == expected
    finally:
        torch.distributed.destroy_process_group()


def test_the_base_model_is_in_the_digest_all_the_same(base):
    config = KINDS["lora"]
    before = ModelParameters(adapted(base, config)).constants_digest()
    with torch.no_grad():
        base.model.norm.weight[0] += 1
    assert ModelParameters(base).constants_digest() != before


def test_the_base_model_is_noted_if_others_can_find_it(base, tmp_path):
    assert ModelNotes.of(model_files(ModelParameters(base))).base_model is None, "a directory of this machine"
    base.config._name_or_path = "some/model"
    values, constants, files = supplied(adapted(base, KINDS["lora"]))
    export_model(values, constants, files, tmp_path / "model", {"learners": 2})
    card = ModelCard.load(tmp_path / "model" / "README.md")
    assert (card.data.base_model, card.data.library_name) == ("some/model", "peft")
    assert "- learners: 2" in card.text


def test_trained_tensors_outside_the_adapter_are_named(base):
    model = adapted(base, KINDS["lora"])
    base.model.norm.weight.requires_grad_(True)
    with pytest.warns(DiLoCoWarning, match=r"1 trained tensors are not part .*model\.norm\.weight"):
        ModelParameters(model)


def test_a_trained_prompt_is_refused(base):
    config = peft.PromptTuningConfig(task_type=CAUSAL, num_virtual_tokens=2)
    with pytest.raises(UnsupportedError, match="PROMPT_TUNING"):
        ModelParameters(adapted(base, config))


def test_an_adapter_inside_a_model_of_transformers_is_refused(base):
    peft.inject_adapter_in_model(copy.deepcopy(KINDS["lora"]), base)
    base._hf_peft_config_loaded = True  # as model.add_adapter does, for which transformers wants a later PEFT
    with pytest.raises(UnsupportedError, match="get_peft_model"):
        ModelParameters(base)


def test_the_second_adapter_is_left_alone(base):
    """As DPO has one that stays as it was."""
    model = adapted(base, KINDS["lora"])
    model.add_adapter("reference", copy.deepcopy(KINDS["lora"]))
    assert not [name for name in ModelParameters(model).adapter_names.values() if "reference" in name]


def test_embeddings_that_are_trained_whole_are_averaged(base):
    config = peft.LoraConfig(task_type=CAUSAL, r=2, target_modules=LINEAR, modules_to_save=["embed_tokens", "lm_head"])
    averaged = ModelParameters(adapted(base, config)).averaged
    assert len(averaged) == 2
    assert all("modules_to_save" in name for name in averaged)


def test_a_missing_tensor_is_an_error(base, tmp_path):
    values, constants, files = supplied(adapted(base, KINDS["lora"]))
    name = sorted(values)[0]
    del values[name]
    with pytest.raises(DiLoCoError, match=name.replace(".", r"\.")):
        export_model(values, constants, files, tmp_path / "model")


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"base_model": 1, "adapter_names": null}',
        b'{"base_model": null, "adapter_names": {"a": 1}}',
    ],
)
def test_broken_notes_are_an_error(content):
    with pytest.raises(MessageError, match=r"hf-diloco\.json"):
        ModelNotes.of({NOTES_FILE: content})


def test_notes_travel_unchanged():
    notes = ModelNotes(base_model="some/model", adapter_names={"a": "b"})
    assert ModelNotes.of({NOTES_FILE: notes.to_bytes()}) == notes
    assert ModelNotes.of({}) == ModelNotes()


def test_an_adapter_in_bf16_gets_a_warning_that_helps(base):
    model = adapted(base, KINDS["lora"]).to(torch.bfloat16)  # as TRL makes that of a quantised model
    with pytest.warns(DiLoCoWarning, match=r"trainable tensors are bfloat16 .*parameter\.data\.float\(\)"):
        ModelParameters(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    ModelParameters(model)  # without a warning: those are errors here
