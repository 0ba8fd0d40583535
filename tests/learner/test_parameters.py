"""Reading and writing fragments of real models, however they are wrapped."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from hf_diloco.core.fragments import FragmentLayout
from hf_diloco.errors import DiLoCoWarning, NoTrainableParametersError, UnsupportedError
from hf_diloco.learner.optimizer_state import optimizer_state
from hf_diloco.learner.parameters import ModelParameters

pytestmark = pytest.mark.fast


def llama(*, tied=False):
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32))


def bert():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(vocab_size=64, max_position_embeddings=32, **sizes))


def t5():
    return T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2))


def vit():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, **sizes))


MODELS = {"llama": llama, "llama-tied": lambda: llama(tied=True), "gpt2": gpt2, "bert": bert, "t5": t5, "vit": vit}


def split(parameters, num_fragments=4):
    return FragmentLayout.build(parameters.shapes, num_fragments, parameters.averaged).fragments


def by_hand(model, fragment):
    tensors = dict(model.named_parameters())
    pieces = [(tensors[p.name][p.first_row : p.last_row] if p.shape else tensors[p.name]) for p in fragment.slices]
    return torch.cat([piece.detach().float().reshape(-1) for piece in pieces])


@pytest.mark.parametrize("name", MODELS)
def test_reads_and_writes_each_value_of_a_real_model_once(name):
    model = MODELS[name]()
    parameters = ModelParameters(model)
    assert sum(torch.Size(shape).numel() for shape in parameters.shapes.values()) == model.num_parameters()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for fragment in split(parameters):
        values = parameters.read(fragment).result()
        assert values.dtype == torch.float32
        assert torch.equal(values, by_hand(model, fragment))
        parameters.add_(fragment, torch.ones(fragment.num_parameters))
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, before[key] + 1)


@pytest.mark.parametrize(
    ("name", "averaged"),
    [
        ("llama", ["lm_head.weight", "model.embed_tokens.weight"]),
        ("llama-tied", ["model.embed_tokens.weight"]),
        ("gpt2", ["transformer.wte.weight"]),
        ("bert", ["bert.embeddings.word_embeddings.weight"]),
        ("t5", ["shared.weight"]),
        ("vit", []),
    ],
)
def test_embeddings_are_found_by_identity(name, averaged):
    assert sorted(ModelParameters(MODELS[name]()).averaged) == averaged


def test_frozen_embeddings_are_not_averaged():
    model = gpt2()
    model.get_input_embeddings().requires_grad_(False)
    assert ModelParameters(model).averaged == ()


def test_a_snapshot_is_a_copy():
    model = llama()
    parameters = ModelParameters(model)
    fragment = split(parameters)[0]
    expected = by_hand(model, fragment)
    snapshot = parameters.read(fragment)
    parameters.write_(fragment, torch.zeros(fragment.num_parameters))
    seen = []
    thread = threading.Thread(target=lambda: seen.append(snapshot.result()))
    thread.start()
    thread.join()
    assert torch.equal(seen[0], expected)
    assert not by_hand(model, fragment).any()


def test_what_is_written_is_not_an_alias_of_what_was_given():
    model = llama()
    parameters = ModelParameters(model)
    fragment = split(parameters, 1)[0]
    value = torch.randn(fragment.num_parameters)
    parameters.write_(fragment, value)
    expected = value.clone()
    value.zero_()
    assert torch.equal(by_hand(model, fragment), expected)


def test_writing_keeps_objects_addresses_ties_and_gradients():
    model = llama(tied=True)
    parameters = ModelParameters(model)
    held = {name: (parameter, parameter.data_ptr()) for name, parameter in model.named_parameters()}
    model(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    for fragment in split(parameters):
        parameters.add_(fragment, torch.randn(fragment.num_parameters))
        parameters.write_(fragment, torch.randn(fragment.num_parameters), 0.5)
        parameters.write_(fragment, torch.randn(fragment.num_parameters))
    for name, parameter in model.named_parameters():
        assert parameter is held[name][0]
        assert parameter.data_ptr() == held[name][1]
        assert parameter.requires_grad
        assert parameter.is_leaf
        assert torch.equal(parameter.grad, gradients[name])
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_optimizer_goes_on_with_what_was_written():
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    parameters = ModelParameters(model)
    fragment = split(parameters, 1)[0]
    value = torch.randn(fragment.num_parameters)
    parameters.write_(fragment, value)
    model(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
    optimizer.step()
    assert torch.equal(parameters.read(fragment).result(), value)


@given(local_mix=st.floats(0, 0.99), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_local_mix_keeps_that_share_of_the_local_value(local_mix, seed):
    torch.manual_seed(seed)
    model = nn.Linear(7, 5)
    parameters = ModelParameters(model)
    fragment = split(parameters, 2)[0]
    local, value = by_hand(model, fragment), torch.randn(fragment.num_parameters)
    parameters.write_(fragment, value, local_mix)
    torch.testing.assert_close(by_hand(model, fragment), local_mix * local + (1 - local_mix) * value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_arithmetic_is_fp32_whatever_the_weights_are(dtype):
    model = nn.Linear(33, 9).to(dtype)
    if dtype == torch.float64:
        parameters = ModelParameters(model)
    else:
        with pytest.warns(DiLoCoWarning, match=r"2 of 2 trainable tensors are .*dtype=torch.float32"):
            parameters = ModelParameters(model)
    fragment = split(parameters, 1)[0]
    local = by_hand(model, fragment)
    change = torch.randn(fragment.num_parameters) * 1e-2
    parameters.add_(fragment, change)
    expected = (local.double() + change.double()).float() if dtype == torch.float64 else local + change
    torch.testing.assert_close(by_hand(model, fragment), expected.to(dtype).float(), rtol=0, atol=1e-7)
    local = by_hand(model, fragment)
    parameters.write_(fragment, change, 0.25)
    torch.testing.assert_close(by_hand(model, fragment), torch.lerp(local, change, 0.75).to(dtype).float())


def test_small_updates_of_bf16_weights_are_kept_in_the_fp32_anchor():
    """50 updates of 1e-5 to weights of about 0.02, whose bf16 neighbours are 1e-4 apart."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    nn.init.normal_(model.weight, std=0.02)
    start, alone = model.weight.detach().float(), model.weight.detach().clone()
    with pytest.warns(DiLoCoWarning, match="rounded away"):
        parameters = ModelParameters(model)
    fragment = split(parameters, 1)[0]
    anchor = parameters.read(fragment).result()
    for _ in range(50):
        shipped = anchor - parameters.read(fragment).result()
        published = anchor + 1e-5
        parameters.add_(fragment, published - anchor + shipped)  # what `carry` does when the update was merged
        anchor = published
        alone.add_(1e-5)
    moved = ((model.weight.float() - start).mean() / 50e-5).item()
    moved_alone = ((alone.float() - start).mean() / 50e-5).item()
    assert moved == pytest.approx(1.0, abs=0.02)
    assert moved_alone < 0.4
    assert torch.equal(model.weight.float().view(-1), anchor.bfloat16().float())


def test_scalars_empty_and_non_contiguous_tensors():
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(3.0))
    model.none = nn.Parameter(torch.empty(0, 4))
    model.turned = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
    parameters = ModelParameters(model)
    assert parameters.shapes == {"scale": (), "none": (0, 4), "turned": (4, 3)}
    for fragment in split(parameters, 3):
        parameters.add_(fragment, torch.full((fragment.num_parameters,), 0.5))
        assert torch.equal(parameters.read(fragment).result(), by_hand(model, fragment))
    assert model.scale.item() == 3.5
    assert torch.equal(model.turned, torch.arange(12.0).reshape(3, 4).t() + 0.5)


# ------------------------------------------------------------------------------------------------------- wrapped models


def test_names_do_not_depend_on_wrappers(tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    plain = ModelParameters(llama()).shapes
    model = llama()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_parameters())
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = torch.compile(DistributedDataParallel(model), backend="eager")
        parameters = ModelParameters(wrapped)
        assert parameters.shapes == plain
        assert parameters.averaged == ModelParameters(llama()).averaged
    finally:
        torch.distributed.destroy_process_group()


def test_a_layer_may_be_called_module():
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    assert sorted(ModelParameters(model).shapes) == ["module.bias", "module.weight"]


def test_what_cannot_be_served_is_refused(tmp_path):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model = nn.Linear(4, 4)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(1)]))
        with pytest.raises(UnsupportedError, match=r"'weight' is placed as .*tensor and pipeline parallelism.*FSDP2"):
            ModelParameters(model)
        fsdp1 = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # cannot be made without an accelerator
        nn.Module.__init__(fsdp1)
        with pytest.raises(UnsupportedError, match=r"FSDP version 1.*fsdp_version: 2"):
            ModelParameters(nn.Sequential(fsdp1))
    finally:
        torch.distributed.destroy_process_group()


def test_fsdp2_on_one_process_is_served(tmp_path):
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = fully_shard(llama(), mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        torch.manual_seed(0)
        parameters, plain = ModelParameters(model), ModelParameters(llama())
        assert (parameters.shapes, parameters.averaged) == (plain.shapes, plain.averaged)
        for fragment in split(parameters):
            assert torch.equal(parameters.read(fragment).result(), plain.read(fragment).result())
            parameters.write_(fragment, torch.ones(fragment.num_parameters))
            assert parameters.holds(fragment, torch.ones(fragment.num_parameters))
    finally:
        torch.distributed.destroy_process_group()


def test_what_deepspeed_keeps_out_of_reach_is_refused():
    def engine(name, model):
        made = type(name, (nn.Module,), {"__module__": "deepspeed.runtime.engine"})()
        made.module = model
        return made

    with pytest.raises(UnsupportedError, match=r"zero_optimization\.stage to 1, 2 or 3"):
        ModelParameters(engine("DeepSpeedEngine", nn.Linear(2, 2).bfloat16()))
    optimizer = type("FP16_Optimizer", (), {"__module__": "deepspeed.runtime.fp16.fused_optimizer"})()
    with pytest.raises(UnsupportedError, match=r"zero_optimization\.stage to 1, 2 or 3"):  # Trainer unwraps the engine
        optimizer_state(dict(nn.Linear(2, 2).half().named_parameters()), optimizer)
    assert optimizer_state(dict(nn.Linear(2, 2).named_parameters()), optimizer)[0] is None
    with pytest.raises(UnsupportedError, match="pipeline"):
        ModelParameters(engine("PipelineEngine", nn.Linear(2, 2)))
    assert ModelParameters(engine("DeepSpeedEngine", nn.Linear(2, 2))).shapes.keys() == {"weight", "bias"}
    model = nn.Linear(2, 2)
    model.weight._hp_mapping, model.weight.allreduce = None, False
    with pytest.raises(UnsupportedError, match="'weight' is an expert of DeepSpeed-MoE"):
        ModelParameters(model)
    model = nn.Linear(2, 2)
    model.bias.ds_id, model.bias.ds_shape = 0, (2,)
    with pytest.raises(UnsupportedError, match=r"'bias' is partitioned .*deepspeed\.initialize"):
        ModelParameters(model)


def test_models_without_values_or_with_strange_ones_are_refused():
    with pytest.raises(UnsupportedError, match="meta device"):
        ModelParameters(nn.Linear(2, 2, device="meta"))
    with pytest.raises(UnsupportedError, match="complex64"):
        ModelParameters(nn.Linear(2, 2, dtype=torch.complex64))


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(NoTrainableParametersError, match=r"Linear .* none of its 2 parameters .*Unfreeze"):
        ModelParameters(nn.Linear(2, 2).requires_grad_(False))


# ------------------------------------------------------------------------------------------------------------ constants


def test_constants_are_frozen_parameters_and_persistent_buffers():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].weight.requires_grad_(False)
    model.register_buffer("kept", torch.tensor([1, 2]))
    model.register_buffer("dropped", torch.tensor([1, 2]), persistent=False)
    constants = dict(ModelParameters(model).constants())
    assert list(constants) == ["0.weight", "1.num_batches_tracked", "1.running_mean", "1.running_var", "kept"]
    assert torch.equal(constants["0.weight"], model[0].weight)
    constants["0.weight"].zero_()
    assert model[0].weight.any()


def test_statistics_are_those_of_batch_norms_and_what_training_has_changed():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for name in ("counter", "same", "grows", "breaks"):
        model.register_buffer(name, torch.zeros(2))
    model.register_buffer("dropped", torch.zeros(2), persistent=False)
    parameters = ModelParameters(model)
    assert parameters.running() == {"1.num_batches_tracked", "1.running_mean", "1.running_var"}
    parameters.constants_digest()
    assert [name for name, _ in parameters.statistics()] == sorted(parameters.running())
    model.counter = model.counter + 1  # another tensor under the name, as code often has it
    model.dropped += 1
    model.grows = torch.zeros(3)
    model.breaks[0] = torch.nan
    model.register_buffer("new", torch.zeros(1))
    with pytest.warns(DiLoCoWarning, match="3 buffers hold NaN.*'breaks'"):
        found = dict(parameters.statistics())
    assert found.keys() == parameters.running() | {"counter"}
    assert torch.equal(found["counter"], torch.ones(2))


def test_trainable_and_constant_tensors_make_a_state_dict():
    for make in MODELS.values():
        model = make()
        for parameter in list(model.parameters())[:3]:
            parameter.requires_grad_(False)
        parameters = ModelParameters(model)
        names = parameters.shapes.keys() | dict(parameters.constants()).keys()
        tied = set(model._tied_weights_keys or ())
        assert names <= model.state_dict().keys()
        assert model.state_dict().keys() - names <= tied


def test_the_digest_notices_another_base_model_but_not_training():
    def make(fill=1.0, dtype=torch.float32):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model[0].weight.requires_grad_(False).fill_(fill)
        model[0].weight.data = model[0].weight.data.to(dtype)
        return model

    digest = ModelParameters(make()).constants_digest()
    trained = make()
    trained[0].bias.data += 1
    trained.double()(torch.randn(4, 2).double())
    trained.float()
    assert trained[1].num_batches_tracked == 1
    assert ModelParameters(trained).constants_digest() == digest
    assert ModelParameters(make(fill=2.0)).constants_digest() != digest
    assert len(digest) == 32
    # A bf16 checkpoint may be held in fp32, as FSDP2 does; but what bf16 rounds is another model.
    assert ModelParameters(make(dtype=torch.bfloat16)).constants_digest() == digest
    tenth = ModelParameters(make(fill=0.1)).constants_digest()
    assert ModelParameters(make(fill=0.1, dtype=torch.bfloat16)).constants_digest() != tenth
