"""Token counts of real models, compared with counts by hand."""

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from hf_diloco.core.data_digest import NUM_HASHES, overlap
from hf_diloco.learner.examples import example_numbers
from hf_diloco.learner.tokens import TokenCounter

pytestmark = pytest.mark.fast

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
IDS = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0], [9, 0, 0, 0]])
MASK = IDS.ne(0).long()


@pytest.fixture
def llama():
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **SMALL)).train()


def count(model, *args, **inputs):
    counter = TokenCounter(model)
    counter.attach()
    model(*args, **inputs)
    counter.detach()
    return counter.take()


def test_the_attention_mask_tells_padding_from_tokens(llama):
    assert count(llama, input_ids=IDS, attention_mask=MASK) == 7
    assert count(llama, input_ids=IDS, attention_mask=MASK.bool()) == 7


def test_without_a_mask_every_position_counts(llama):
    assert count(llama, input_ids=IDS) == 12
    assert count(llama, IDS) == 12
    causal = torch.zeros(3, 1, 4, 4)
    assert count(llama, input_ids=IDS, attention_mask=causal) == 12
    assert count(llama, inputs_embeds=torch.randn(3, 4, 16)) == 12


def test_an_encoder_decoder_reads_its_labels_too():
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).train()
    labels = torch.tensor([[1, 2, -100], [3, -100, -100], [4, 5, 6]])
    assert count(model, input_ids=IDS, attention_mask=MASK, labels=labels) == 7 + 6
    assert count(model, input_ids=IDS, attention_mask=MASK, decoder_input_ids=IDS[:, :2]) == 7 + 6


def test_a_classifier_counts_what_it_reads_and_not_its_labels():
    model = BertForSequenceClassification(BertConfig(vocab_size=64, max_position_embeddings=32, **SMALL)).train()
    assert count(model, input_ids=IDS, attention_mask=MASK, labels=torch.tensor([0, 1, 1])) == 7


def test_images_are_counted_as_samples():
    model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, **SMALL)).train()
    assert count(model, pixel_values=torch.randn(5, 3, 16, 16), labels=torch.zeros(5, dtype=torch.long)) == 5


def test_scalars_are_not_samples():
    class Model(nn.Module):
        def forward(self, num_items_in_batch, x):
            return x

    assert count(Model(), num_items_in_batch=torch.tensor(9), x=torch.randn(3, 2)) == 3


def test_evaluation_is_not_training(llama):
    with torch.no_grad():
        assert count(llama, input_ids=IDS) == 0
        llama.eval()
        assert count(llama, input_ids=IDS) == 0


def test_a_model_left_in_evaluation_mode_is_trained_all_the_same(llama):
    assert count(llama.eval(), input_ids=IDS) == 12


def test_tokens_add_up_until_they_are_taken(llama):
    counter = TokenCounter(llama)
    counter.attach()
    counter.attach()
    llama(input_ids=IDS, attention_mask=MASK)
    llama(input_ids=IDS)
    assert counter.take() == 19
    assert counter.take() == 0
    llama(input_ids=IDS, attention_mask=MASK)
    assert counter.take(wait=True) == 7
    counter.detach()
    counter.detach()
    llama(input_ids=IDS)
    assert counter.take() == 0
    assert not llama._forward_pre_hooks


def test_a_compiled_model_is_counted_and_stays_one_graph(llama):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    counter = TokenCounter(llama)
    counter.attach()
    compiled = torch.compile(llama, backend=backend)
    for _ in range(3):
        compiled(input_ids=IDS, attention_mask=MASK)
    assert counter.take() == 21
    assert len(graphs) == 1


class SlowReading:
    """Stands for a copy from an accelerator that is under way until the next boundary."""

    def __init__(self, value):
        self.value, self.here, self.waited = value, False, False

    def is_here(self):
        return self.here

    def tokens(self):
        self.waited = True
        return self.value


def test_on_an_accelerator_the_newest_count_is_not_waited_for(monkeypatch):
    readings = [SlowReading(10), SlowReading(20), SlowReading(30)]
    started = iter(readings)
    monkeypatch.setattr("hf_diloco.learner.tokens._Reading.start", lambda total: next(started))
    counter = TokenCounter(nn.Identity())
    counter._on_device[torch.device("meta")] = torch.zeros((), dtype=torch.int64, device="meta")
    assert counter.take() == 0
    assert counter.take() == 10
    assert not readings[1].waited
    assert counter.take(wait=True) == 50


def digest(model, batches):
    counter = TokenCounter(model)
    counter.attach()
    for batch in batches:
        model(**batch)
    counter.detach()
    return counter.data_digest()


def test_the_digest_tells_whether_two_learners_read_the_same(llama):
    """In another order, in batches of another size, with other padding: the examples are what counts."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 64, (96, 6), generator=generator)
    lengths = torch.randint(3, 7, (96, 1), generator=generator)
    mask = (torch.arange(6) < lengths).long()
    here = digest(llama, [{"input_ids": ids, "attention_mask": mask}])
    order = torch.randperm(96, generator=generator)
    left = torch.cat([torch.zeros(96, 2, dtype=torch.long), mask.flip(1)], 1)
    ids_left = torch.zeros(96, 8, dtype=torch.long)
    ids_left[left.bool()] = ids[mask.bool()]  # the same tokens in the same order, row by row
    there = [{"input_ids": ids_left[rows], "attention_mask": left[rows]} for rows in order.split(20)]
    assert len(here) == NUM_HASHES
    assert overlap(here, digest(llama, there)) == 1.0
    assert overlap(here, digest(llama, [{"input_ids": ids.flip(1), "attention_mask": mask.flip(1)}])) == 0.0


def test_a_digest_is_told_when_twice_as_many_examples_were_read(llama):
    counter = TokenCounter(llama)
    counter.attach()
    told = []
    for step in range(1, 30):
        llama(input_ids=torch.randint(3, 64, (16, 4)))
        if counter.data_digest() is not None:
            told.append(step)
    assert told == [1, 4, 8, 16]
    counter.forget_examples()
    assert counter.data_digest() == ()  # in the place of what was told last
    assert counter.data_digest() is None
    counter.detach()


def test_examples_that_are_no_tokens_have_numbers_too():
    images = torch.randn(5, 3, 40, 50)
    numbers = example_numbers(images, None)
    assert len(set(numbers.tolist())) == 5
    assert torch.equal(example_numbers(images[[3, 1]], None), numbers[[3, 1]])
    sound, mask = torch.randn(3, 9000), torch.ones(3, 9000)
    assert torch.equal(example_numbers(sound, mask), example_numbers(sound, None))
    assert example_numbers(torch.zeros(2, 0), torch.zeros(2, 0)).shape == (2,)
    assert example_numbers(torch.zeros(2, 0), None).shape == (2,)
    assert example_numbers(torch.tensor([True, False]), None).shape == (2,)
