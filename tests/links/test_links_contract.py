"""What every implementation of the links must do, whatever is below it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from links_world import TOKEN, checksum, collect, eventually, is_whole, number_of, payload_of, signed, until

from hf_diloco.core.messages import Goodbye, Hello, NeedFull, Notice, Start, Supplied
from hf_diloco.errors import LearnerRefusedError
from hf_diloco.links.base import LearnerLink, LinkDown, LinkUp, Received, SyncerLinks
from hf_diloco.links.in_process import InProcessHub

SIZES = [0, 1, (8 << 20) - 1, 8 << 20, (8 << 20) + 1, 100 << 20]


class World:
    """A syncer's end, and as many learners' ends as a test wants."""

    def __init__(
        self, syncer: SyncerLinks, make: Callable[[int, str], LearnerLink], close: Callable[[], None] = lambda: None
    ) -> None:
        self.syncer, self._make, self.learners, self.close = syncer, make, [], close

    def learner(self, learner_id: int = 0, incarnation: str = "a") -> LearnerLink:
        link = self._make(learner_id, incarnation)
        self.learners.append(link)
        link.open()
        return link

    def linked(self, learner_id: int = 0, incarnation: str = "a") -> LearnerLink:
        link = self.learner(learner_id, incarnation)
        until(link, LinkUp)
        until(self.syncer, lambda event: event == LinkUp(learner_id))
        return link


def _in_process(_path: Path) -> World:
    hub = InProcessHub(seed=0)
    return World(hub, hub.connect)


def _rpc(_path: Path) -> World:
    from hf_diloco.links.rpc import RpcLearnerLink, RpcSyncerLinks

    syncer = RpcSyncerLinks("127.0.0.1", 0, TOKEN)
    return World(
        syncer,
        lambda number, incarnation: RpcLearnerLink(
            "127.0.0.1", int(syncer.address.rpartition(":")[2]), TOKEN, number, incarnation
        ),
    )


def _tls(path: Path) -> World:
    """Learners in another network: all they say goes through the door, in TLS."""
    from elsewhere import DistantLearnerLink, Network
    from links_world import syncer_with_tls

    network = Network()
    syncer, token = syncer_with_tls(path)

    def make(number: int, incarnation: str) -> LearnerLink:
        link = DistantLearnerLink(network.address, int(syncer.address.rpartition(":")[2]), token, number, incarnation)
        link.network = network
        return link

    return World(syncer, make, network.close)


@pytest.fixture(
    params=[
        pytest.param(_in_process, id="in_process", marks=pytest.mark.fast),
        pytest.param(_rpc, id="rpc", marks=pytest.mark.distributed),
        pytest.param(_tls, id="tls", marks=[pytest.mark.distributed, pytest.mark.long]),
    ]
)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    world = request.param(tmp_path)
    world.syncer.open()
    yield world
    for link in world.learners:
        link.close()
    world.syncer.close()
    world.close()


def test_links_and_takes_leave(world: World) -> None:
    link = world.learner()
    assert until(link, LinkUp) == LinkUp(0)
    assert until(world.syncer, LinkUp) == LinkUp(0)
    assert link.last_error() is None
    link.close()
    down = until(world.syncer, LinkDown)
    assert isinstance(down, LinkDown)
    assert down.fatal is None
    link.close()


@pytest.mark.parametrize("size", SIZES)
def test_payload_arrives_bit_for_bit(world: World, size: int) -> None:
    link, payload = world.linked(), payload_of(size)
    for _ in range(2):  # the second time in memory that has been used
        link.send(signed(payload), payload)
        up = until(world.syncer, Received)
        assert up.payload.dtype == torch.uint8
        assert torch.equal(up.payload, payload)
        up.release()
        world.syncer.send([0], signed(payload), payload)
        down = until(link, Received)
        assert torch.equal(down.payload, payload)
        down.release()
        del up, down
    eventually(lambda: world.syncer.bytes_moved(0) == (2 * size, 2 * size), "all bytes are counted")


def _send_many(send: Callable, sizes: list[int]) -> None:
    for number, size in enumerate(sizes):
        payload = payload_of(size, seed=number)
        send(NeedFull(fragment_index=number))
        send(signed(payload, number), payload)
        payload.zero_()  # it was copied: the sender may go on
    send(Supplied(), payload_of(0))


def _check_many(events: list, sizes: list[int]) -> None:
    messages = [event for event in events if isinstance(event, Received)]
    lane = [event for event in messages if event.payload is not None][:-1]
    assert all(is_whole(event) for event in lane)
    assert [number_of(event) for event in lane] == list(range(len(sizes))), "in order, nothing lost, nothing twice"
    free = [event.message.fragment_index for event in messages if isinstance(event.message, NeedFull)]
    assert sorted(free) == list(range(len(sizes)))
    place = {id(event): index for index, event in enumerate(messages)}
    for event in messages:
        if isinstance(event.message, NeedFull):  # may overtake payloads, is not overtaken by them
            later = lane[event.message.fragment_index]
            assert place[id(event)] < place[id(later)]
    for event in messages:
        event.release()


def test_payloads_keep_their_order_and_messages_are_not_overtaken(world: World) -> None:
    sizes = [0, 9 << 20, 0, 1, 3 << 20, 17 << 20, 0, 5, 100_000, 8 << 20]
    link = world.linked()
    _send_many(link.send, sizes)
    is_last = lambda event: isinstance(event, Received) and isinstance(event.message, Supplied)  # noqa: E731
    _check_many(collect(world.syncer, is_last), sizes)
    _send_many(lambda message, payload=None: world.syncer.send([0], message, payload), sizes)
    _check_many(collect(link, is_last), sizes)


def test_broadcast(world: World) -> None:
    links, payload = [world.linked(number) for number in range(3)], payload_of(20 << 20)
    world.syncer.send([0, 1, 2, 7], signed(payload), payload)
    world.syncer.send([1], Start(outer_step=3))
    for link in links:
        received = until(link, lambda event: isinstance(event, Received) and event.payload is not None)
        assert torch.equal(received.payload, payload)
        received.release()
    assert links[0].receive(0.0) is None
    links[2].send(Supplied(), payload_of(1))
    assert until(world.syncer, Received).learner_id == 2


def test_a_dropped_link_comes_back_and_old_messages_do_not(world: World) -> None:
    link = world.linked()
    world.syncer.drop(0, "for the test")
    assert until(world.syncer, LinkDown).reason == "for the test"
    assert until(link, LinkDown).reason == "for the test"
    link.send(Notice(text="lost"))  # down, or up again but the learner does not know yet
    world.syncer.send([0], Notice(text="lost"))
    until(link, LinkUp)
    until(world.syncer, LinkUp)
    link.send(Notice(text="new"))
    world.syncer.send([0], Notice(text="new"))
    assert until(world.syncer, Received).message == Notice(text="new")
    assert until(link, Received).message == Notice(text="new")


def test_nothing_is_sent_before_link_up_was_received(world: World) -> None:
    link = world.learner()
    until(world.syncer, LinkUp)
    link.send(Notice(text="too early"))
    until(link, LinkUp)
    link.send(Notice(text="first"))
    assert until(world.syncer, Received).message == Notice(text="first")


def test_close_drains(world: World) -> None:
    link = world.linked()
    for number in range(5):
        payload = payload_of(5 << 20, number)
        link.send(signed(payload, number), payload)
    link.send(Goodbye(reason="done"), payload_of(0))
    link.close(drain_seconds=30)
    events = collect(world.syncer, LinkDown)
    lane = [event for event in events if isinstance(event, Received)]
    assert [number_of(event) for event in lane[:-1]] == [0, 1, 2, 3, 4]
    assert all(is_whole(event) for event in lane[:-1])
    assert lane[-1].message == Goodbye(reason="done")


def test_syncer_close_drains(world: World) -> None:
    link, payload = world.linked(), payload_of(30 << 20)
    world.syncer.send([0], signed(payload), payload)
    world.syncer.send([0], Notice(text="bye"))
    world.syncer.close(drain_seconds=30)
    events = collect(link, LinkDown)
    assert any(isinstance(event, Received) and event.message == Notice(text="bye") for event in events)
    assert any(is_whole(event) for event in events if isinstance(event, Received) and event.payload is not None)
    world.syncer.close()


def test_a_new_link_of_the_same_incarnation_replaces_the_old(world: World) -> None:
    world.linked()
    second = world.learner()
    until(second, LinkUp)
    until(world.syncer, LinkDown)
    until(world.syncer, LinkUp)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_another_learner_with_the_same_id_is_refused(world: World) -> None:
    first = world.linked()
    second = world.learner(0, "b")
    down = until(second, LinkDown)
    assert isinstance(down.fatal, LearnerRefusedError)
    assert "HF_DILOCO_LEARNER_ID" in str(down.fatal)
    first.send(Notice(text="still here"))
    assert until(world.syncer, Received).message == Notice(text="still here")
    second.close()


def test_a_hello_of_a_big_model(world: World) -> None:
    link = world.linked()
    shapes = tuple((f"model.layers.{index}.mlp.experts.down_proj.weight", (4096, 4096)) for index in range(60_000))
    hello = Hello(
        incarnation="a", host="here", shapes=shapes, averaged=(), constants_digest="", total_steps=None,
        num_shards=None, library_version="", global_step=0, held=(),
    )  # fmt: skip
    link.send(hello)
    assert until(world.syncer, Received).message == hello


def test_release_from_any_thread_and_more_than_once(world: World) -> None:
    link, payload = world.linked(), payload_of(1 << 20)
    link.send(signed(payload), payload)
    received = until(world.syncer, Received)
    assert checksum(received.payload) == checksum(payload)
    threads = [threading.Thread(target=received.release) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    received.release()


@pytest.mark.parametrize("payload", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.uint8)])
def test_a_payload_of_another_kind_is_refused(world: World, payload: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="a payload is"):
        world.syncer.send([0], Supplied(), payload)
    with pytest.raises(TypeError, match="a payload is"):
        world.learner().send(Supplied(), payload)


def test_close_without_open(world: World) -> None:
    link = world._make(5, "a")
    link.close()
    link.close()
