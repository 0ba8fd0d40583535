"""Rates and latencies of the RPC links on this machine: ``python tests/links/measure_links.py``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from links_world import TOKEN, forks_of, payload_of, until

from hf_diloco.core.messages import Notice
from hf_diloco.links.base import LinkDown, LinkUp, Received
from hf_diloco.links.rpc import RpcLearnerLink, RpcSyncerLinks


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    syncer = RpcSyncerLinks("127.0.0.1", 0, TOKEN)
    print(f"syncer opens in {timed(syncer.open):.2f} s")
    link = RpcLearnerLink("127.0.0.1", int(syncer.address.rpartition(":")[2]), TOKEN, 0, "a")
    link.open()
    print(f"first link in {timed(lambda: until(link, LinkUp)):.2f} s")
    until(syncer, LinkUp)
    note = Notice(text="x")
    up, down = (lambda payload=None: link.send(note, payload)), (lambda payload=None: syncer.send([0], note, payload))
    for size in (0, 1, 1 << 20, 8 << 20, 100 << 20):
        payload = payload_of(size)
        for name, send, end in (("up", up, syncer), ("down", down, link)):
            seconds = []
            for _ in range(6):
                seconds.append(timed(lambda: (send(payload), until(end, Received).release())))  # noqa: B023
            first, best, median = seconds[0], min(seconds), statistics.median(seconds[1:])
            rate = f" = {size / median / 1e6:.0f} MB/s" if size >= 1 << 20 else ""
            print(
                f"{name} {size} bytes: first {first * 1e3:.1f}, best {best * 1e3:.1f}, "
                f"median {median * 1e3:.1f} ms{rate}"
            )
    for name, trip in (
        ("one way up", lambda: (up(), until(syncer, Received))),
        ("one way down", lambda: (down(), until(link, Received))),
        ("round trip", lambda: (up(), until(syncer, Received), down(), until(link, Received))),
    ):
        seconds = sorted(timed(trip) for _ in range(200))
        print(f"{name}, no payload: median {seconds[100] * 1e3:.2f}, worst of 200 {seconds[-1] * 1e3:.2f} ms")
    for role in ("courier", "gateway"):
        time.sleep(5.5)  # a link that lived 5 s is retried at once
        forks_of(role)[0].kill()
        seen = timed(lambda: until(link, LinkDown))
        again = timed(lambda: until(link, LinkUp))
        print(f"kill -9 {role}: seen in {seen * 1e3:.0f} ms, up again in {again * 1e3:.0f} more")
    print(f"learner closes in {timed(link.close) * 1e3:.0f} ms, syncer in {timed(syncer.close) * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
