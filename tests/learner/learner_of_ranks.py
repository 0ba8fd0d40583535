"""One rank of a learner: trains, reads and writes the same as a learner of one process, in each of these kinds.

    python learner_of_ranks.py STORE RANK WORLD_SIZE KIND...

Both train the same model on the same batches (each rank on the same one, so that averaging over two ranks is exact);
after each stage rank 0 compares all fragments with those of the single process, bit for bit.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hf_diloco.core.fragments import FragmentLayout
from hf_diloco.learner.optimizer_state import optimizer_state
from hf_diloco.learner.parameters import ModelParameters

NUM_FRAGMENTS = 8  # the embedding is larger than an eighth: split by rows
ZERO_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.0,
    "steps_per_print": 10**9,
}


class ScaledNorm(nn.Module):
    """Has a tensor of one row."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.scale = norm, nn.Parameter(torch.ones(1, 9))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden) * self.scale


def llama() -> nn.Module:
    """Sizes that two ranks cannot share evenly; a layer of one row, so that a rank has nothing; something frozen."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=37, hidden_size=9, intermediate_size=15, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=4, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.model.layers[0].mlp.down_proj.weight.requires_grad_(False)
    model.model.norm = ScaledNorm(model.model.norm)
    model.register_buffer("kept", torch.arange(5.0))
    return model


class Chain(nn.Module):
    """One layer after the other. ZeRO-3 adds nodes to the graph of autograd, and where a tensor is used three times
    (Llama's attention), its gradients are then summed in another order, which rounds differently.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(37, 9), nn.Linear(9, 37)
        self.layers = nn.Sequential(nn.Linear(9, 15), nn.Tanh(), nn.Linear(15, 9), ScaledNorm(nn.LayerNorm(9)))
        self.layers[2].weight.requires_grad_(False)
        self.register_buffer("kept", torch.arange(5.0))

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> CausalLMOutput:
        logits = self.head(self.layers(self.embed(input_ids)))
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return CausalLMOutput(loss=loss, logits=logits)


def lora(dtype: torch.dtype = torch.float32) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=3, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    return get_peft_model(llama().to(dtype), config)


class Trained:
    """A model in training, and its parameters."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None, *, engine: bool = False) -> None:
        self.model, self.engine = model, engine
        if not engine:
            self.optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.parameters = ModelParameters(model, group)
        self.layout = FragmentLayout.build(self.parameters.shapes, NUM_FRAGMENTS, self.parameters.averaged)
        self.num_steps = 0

    def train(self) -> None:
        batch = (torch.arange(2 * 7).reshape(2, 7) * (self.num_steps + 3)) % 37
        self.num_steps += 1
        loss = self.model(input_ids=batch, labels=batch).loss
        if self.engine:
            self.model.backward(loss)
            self.model.step()
        else:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def values(self, rank: int) -> list[torch.Tensor]:
        """All fragments, as a background thread of rank 0 gets them; the model changes before that."""
        snapshots = [self.parameters.read(fragment) for fragment in self.layout.fragments]
        found: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: found.extend(snapshot.result() for snapshot in snapshots))
        if rank == 0:
            thread.start()
            thread.join(timeout=120)
        elif snapshots:
            try:
                snapshots[0].result()
            except AssertionError as error:
                assert "rank 0 only" in str(error)  # noqa: PT017
            else:
                raise AssertionError("another rank than 0 got something")
        return found


def stages(trained: Trained) -> Iterator[str]:
    yield "at first"
    trained.train()
    trained.train()
    yield "after two steps"
    generator = torch.Generator().manual_seed(1)
    for index, fragment in enumerate(trained.layout.fragments):
        value = 0.05 * torch.randn(fragment.num_parameters, generator=generator)
        if index % 3 == 0:
            trained.parameters.add_(fragment, value)
        else:
            trained.parameters.write_(fragment, value, local_mix=0.25 * (index % 3 - 1))
            assert index % 3 == 2 or trained.parameters.holds(fragment, value)
    zeros = [torch.zeros(fragment.num_parameters) for fragment in trained.layout.fragments]
    assert not all(map(trained.parameters.holds, trained.layout.fragments, zeros))  # a rank may hold nothing of some
    yield "after writing"
    trained.train()
    trained.train()
    yield "after two more steps"
    trained.model.eval()
    with torch.no_grad():  # leaves FSDP2 modules unsharded
        trained.model(input_ids=torch.ones(1, 3, dtype=torch.long))
    for fragment in trained.layout.fragments:
        trained.parameters.write_(fragment, torch.full((fragment.num_parameters,), 0.125))
    with torch.no_grad():
        logits = trained.model(input_ids=torch.ones(1, 3, dtype=torch.long)).logits
    assert torch.allclose(logits, logits[..., :1]), "an evaluation does not see what was written"
    trained.model.train()
    trained.train()
    yield "after an evaluation and a step"


# --------------------------------------------------------------------------------------------------------------- kinds


def sharded(model: nn.Module, mesh_shape: tuple[int, ...], **settings) -> nn.Module:
    names = ("replicas", "shards")[-len(mesh_shape) :]
    mesh = dist.init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    for layer in list(model.modules()):
        if isinstance(layer, LlamaDecoderLayer):
            fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def accelerated(model: nn.Module) -> nn.Module:
    """FSDP2 as accelerate sets it up: embedding and head in units of their own, activation checkpointing."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    PartialState(cpu=True)
    # accelerate ignores FSDP on the CPU otherwise.
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        activation_checkpointing=True, cpu_ram_efficient_loading=False,
    )  # fmt: skip
    accelerator = Accelerator(fsdp_plugin=plugin)
    assert accelerator.is_fsdp2
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))[0]


def checkpointed(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))
    return model


def zero(model: nn.Module, stage: int, *, bf16: bool = False, **settings) -> nn.Module:
    import deepspeed

    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.5)
    config = {**ZERO_CONFIG, "bf16": {"enabled": bf16}, "zero_optimization": {"stage": stage, **settings}}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "ddp": (llama, lambda: DistributedDataParallel(llama())),
    "compile": (llama, lambda: torch.compile(DistributedDataParallel(llama()), backend="eager")),
    "fsdp2": (llama, lambda: sharded(checkpointed(llama()), (2,))),
    "accelerate-fsdp2": (llama, lambda: accelerated(llama())),
    "fsdp2-compile": (llama, lambda: torch.compile(sharded(llama(), (2,)), backend="eager")),
    "hsdp": (llama, lambda: sharded(llama(), (2, dist.get_world_size() // 2))),
    "lora-ddp": (lora, lambda: DistributedDataParallel(lora())),
    "lora-ddp-bf16": (lambda: lora(torch.bfloat16), lambda: DistributedDataParallel(lora(torch.bfloat16))),
    "lora-fsdp2": (lora, lambda: sharded(lora(), (2,))),
    "zero-1": (llama, lambda: zero(llama(), 1)),
    "zero-2": (llama, lambda: zero(llama(), 2)),
    "zero-3": (Chain, lambda: zero(Chain(), 3, stage3_param_persistence_threshold=10)),
}


def compare(kind: str, group: dist.ProcessGroup) -> None:
    make_single, make = KINDS[kind]
    rank = dist.get_rank()
    ours = Trained(make(), group, engine="zero" in kind)
    single = Trained(make_single(), None)
    assert ours.layout.fingerprint == single.layout.fingerprint
    assert any(piece.first_row for fragment in ours.layout.fragments for piece in fragment.slices), "none is split"
    digest = ours.parameters.constants_digest()
    constants = list(ours.parameters.constants())
    if rank == 0:
        assert digest == single.parameters.constants_digest()
        expected = list(single.parameters.constants())
        assert [name for name, _ in constants] == [name for name, _ in expected]
        assert all(torch.equal(a, b) and a.dtype == b.dtype for (_, a), (_, b) in zip(constants, expected, strict=True))
    before = None
    for stage, _ in zip(stages(ours), stages(single), strict=True):
        values, expected = ours.values(rank), single.values(0)
        if rank == 0:
            for index, (value, other) in enumerate(zip(values, expected, strict=True)):
                assert torch.equal(value, other), f"fragment {index} {stage}: {(value - other).abs().max()}"
            moved = before is None or all(not torch.equal(a, b) for a, b in zip(before, values, strict=True))
            assert moved, f"nothing changed {stage}"
            before = values
        for fragment, value in zip(ours.layout.fragments, expected, strict=True):
            assert ours.parameters.holds(fragment, value), f"rank {rank} has another value {stage}"
    if "fsdp" in kind:
        assert optimizer_state(ours.parameters.trainable, ours.optimizer)[0] is None


def compare_with_masters(stage: int, group: dist.ProcessGroup) -> None:
    """bf16 weights of DeepSpeed: what is written is in the fp32 masters whole, and in the weights rounded once."""
    from deepspeed.runtime.zero import GatheredParameters

    trained = Trained(zero(Chain(), stage, bf16=True), group, engine=True)
    trained.train()
    rank, fragments = dist.get_rank(), trained.layout.fragments
    before = trained.values(rank)
    for fragment in fragments:
        trained.parameters.add_(fragment, torch.full((fragment.num_parameters,), 1e-5))
    after = trained.values(rank)  # nothing on other ranks than 0
    assert all(torch.equal(new, old + 1e-5) for old, new in zip(before, after, strict=True))
    pieces = [
        (piece, values[piece.offset : piece.offset + piece.num_parameters].view(piece.shape))
        for fragment, values in zip(fragments, after, strict=False)
        for piece in fragment.slices
    ]
    for name, weight in trained.model.module.named_parameters():
        with GatheredParameters([weight]):
            rows = [(weight.detach()[p.first_row : p.last_row], master) for p, master in pieces if p.name == name]
            assert all(torch.equal(live, master.bfloat16()) for live, master in rows), f"{name} is not its master"
    trained.train()
    assert all(not torch.equal(old, new) for old, new in zip(after, trained.values(rank), strict=True))


def main() -> None:
    store, rank, world_size, *kinds = sys.argv[1:]
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # accelerate asks for them, and does not use them
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world_size))
    group = dist.new_group(backend="gloo")
    for kind in kinds:
        if kind in KINDS:
            compare(kind, group)
        else:
            compare_with_masters(int(kind.removeprefix("masters-")), group)
        print(f"rank {rank}: {kind} is equal", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # FSDP2's process groups may abort an orderly exit


if __name__ == "__main__":
    main()
