import json

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from torch import nn

from hf_diloco.core.model_notes import NOTES_FILE, ModelNotes
from hf_diloco.errors import DiLoCoError, DiLoCoWarning
from hf_diloco.syncer.export import export_model

pytestmark = pytest.mark.fast

SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def tiny(kind: str):
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32)
        return transformers.GPT2LMHeadModel(config), transformers.AutoModelForCausalLM
    if kind == "bert":
        config = transformers.BertConfig(**SMALL, intermediate_size=32, max_position_embeddings=32)
        return transformers.BertForMaskedLM(config), transformers.AutoModelForMaskedLM
    if kind == "mixtral":
        config = transformers.MixtralConfig(
            **SMALL, intermediate_size=32, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2
        )
        return transformers.MixtralForCausalLM(config), transformers.AutoModelForCausalLM
    config = transformers.LlamaConfig(
        **SMALL, intermediate_size=32, num_key_value_heads=1, tie_word_embeddings=kind == "llama tied"
    )
    return transformers.LlamaForCausalLM(config), transformers.AutoModelForCausalLM


def parts(model, directory):
    """What a learner supplies: parameters once, other tensors, files."""
    for parameter in model.parameters():
        nn.init.normal_(parameter)  # also biases and norms: no two tensors alike
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    known = {id(parameter) for parameter in model.parameters()}
    constants = {
        name: tensor.clone() for name, tensor in model.state_dict(keep_vars=True).items() if id(tensor) not in known
    }
    model.config.architectures = [type(model).__name__]
    files = {"config.json": model.config.to_json_string(use_diff=False).encode(), "tokenizer.json": b"{}"}
    return values, constants, files


def assert_equal(loaded, model):
    expected, found = model.state_dict(), loaded.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("kind", ["llama tied", "llama untied", "gpt2", "mixtral", "bert"])
def test_from_pretrained_loads_exactly_the_values(tmp_path, kind):
    model, auto_class = tiny(kind)
    export_model(*parts(model, tmp_path), tmp_path / "model", {"learners": 2})
    loaded, info = auto_class.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info.values()), info
    assert_equal(loaded, model)
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == b"{}"
    assert "- learners: 2" in (tmp_path / "model" / "README.md").read_text()
    assert [item.name for item in tmp_path.iterdir()] == ["model"]


def test_the_card_names_the_base_model_and_the_notes_are_not_written(tmp_path):
    values, constants, files = parts(tiny("gpt2")[0], tmp_path)
    files[NOTES_FILE] = ModelNotes(base_model="some/model").to_bytes()
    export_model(values, constants, files, tmp_path / "model")
    assert ModelCard.load(tmp_path / "model" / "README.md").data.base_model == "some/model"
    assert not (tmp_path / "model" / NOTES_FILE).exists()


def test_mixtral_gets_the_names_of_the_hub(tmp_path):
    from safetensors import safe_open

    export_model(*parts(tiny("mixtral")[0], tmp_path), tmp_path / "model")
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in file.keys()  # noqa: SIM118


def test_a_bf16_run_is_written_in_fp32(tmp_path):
    model, auto_class = tiny("llama tied")
    values, constants, files = parts(model, tmp_path)
    config = json.loads(files["config.json"])
    files["config.json"] = json.dumps({**config, "dtype": "bfloat16"}).encode()
    constants["model.norm.weight"] = values.pop("model.norm.weight").to(torch.bfloat16)  # a frozen one
    export_model(values, constants, files, tmp_path / "model")
    loaded = auto_class.from_pretrained(tmp_path / "model")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert torch.equal(loaded.model.norm.weight, constants["model.norm.weight"].float())
    assert torch.equal(loaded.lm_head.weight, values["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"architectures": ["MyModel"]}, "MyModel"),
        ({"architectures": ["AutoConfig"]}, "AutoConfig"),
        ({}, "none named"),
        (None, "none named"),
        ({"architectures": ["LlamaForCausalLM"], **SMALL, "intermediate_size": 32}, "not there here"),
        ({"architectures": ["LlamaForCausalLM"], "hidden_size": -1}, "cannot be made"),
    ],
)
def test_a_foreign_model_keeps_its_names_and_says_so(tmp_path, config, why):
    from safetensors.torch import load_file

    values = {"body.weight": torch.randn(3, 4)}
    files = {} if config is None else {"config.json": json.dumps(config).encode()}
    with pytest.warns(DiLoCoWarning, match=why):
        export_model(values, {"count": torch.tensor(3)}, files, tmp_path / "model")
    loaded = load_file(tmp_path / "model" / "model.safetensors")
    assert torch.equal(loaded["body.weight"], values["body.weight"])
    assert loaded["count"] == 3


def test_another_shape_is_named(tmp_path):
    values, constants, files = parts(tiny("llama tied")[0], tmp_path)
    values["model.norm.weight"] = torch.ones(17)
    with pytest.warns(DiLoCoWarning, match=r"model\.norm\.weight is of shape \[17\] here and of shape \[16\]"):
        export_model(values, constants, files, tmp_path / "model")


def test_an_existing_model_is_replaced_whole(tmp_path):
    out = tmp_path / "model"
    out.mkdir()
    (out / "old.txt").write_text("old")
    model, auto_class = tiny("llama untied")
    export_model(*parts(model, tmp_path), out)
    assert not (out / "old.txt").exists()
    assert_equal(auto_class.from_pretrained(out), model)


def test_when_it_cannot_be_written_nothing_changes(tmp_path):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(DiLoCoError, match="could not be written"):
        export_model(*parts(tiny("gpt2")[0], tmp_path), tmp_path / "file" / "model")
    assert (tmp_path / "file").read_text() == "kept"


def test_files_of_weights_are_left_out_and_names_checked(tmp_path):
    values, constants, files = parts(tiny("gpt2")[0], tmp_path)
    export_model(values, constants, {**files, "pytorch_model.bin": b"evil", "README.md": b"x"}, tmp_path / "model")
    assert not (tmp_path / "model" / "pytorch_model.bin").exists()
    assert "hf-diloco" in (tmp_path / "model" / "README.md").read_text()
    with pytest.raises(DiLoCoError, match="plain file name"):
        export_model(values, constants, {"../evil": b""}, tmp_path / "model")


@pytest.mark.parametrize("config", [b"{", b"[]", b"\xff"])
def test_a_broken_config_is_an_error(tmp_path, config):
    with pytest.raises(DiLoCoError, match=r"config\.json"):
        export_model({}, {}, {"config.json": config}, tmp_path / "model")
