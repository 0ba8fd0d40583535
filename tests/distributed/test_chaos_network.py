"""A learner behind a real network (veth, nftables, tbf): it can only call out, is cut off, has a thin line."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from processes import SCRIPT, Process, Run, wait_until

NEEDED = ("ip", "nft", "tc")
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.alone,
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="takes root"),
    pytest.mark.skipif(not all(map(shutil.which, NEEDED)), reason=f"takes {', '.join(NEEDED)} (iproute2, nftables)"),
]

FIREWALL = """
table inet hfd {
  chain input { type filter hook input priority 0; policy drop; iif lo accept; ct state established,related accept; }
}"""
CUT = """
table inet cut {
  chain input { type filter hook input priority -10; policy drop; iif lo accept; }
  chain output { type filter hook output priority -10; policy drop; oif lo accept; }
}"""


class Network:
    """A namespace with one line to the outside; ``host`` is this side's address."""

    def __init__(self) -> None:
        name = uuid.uuid4().hex[:6]
        self.namespace, self.outside, self.inside = f"hfd-{name}", f"hfdo{name}", f"hfdi{name}"
        subnet = f"10.213.{int(name[:2], 16)}"
        self.host, self.learner = f"{subnet}.1", f"{subnet}.2"
        run("ip", "netns", "add", self.namespace)
        run("ip", "link", "add", self.outside, "type", "veth", "peer", "name", self.inside, "netns", self.namespace)
        run("ip", "addr", "add", f"{self.host}/24", "dev", self.outside)
        run("ip", "link", "set", self.outside, "up")
        self.run("ip", "addr", "add", f"{self.learner}/24", "dev", self.inside)
        for device in ("lo", self.inside):
            self.run("ip", "link", "set", device, "up")

    def run(self, *command: str, given: str | None = None) -> None:
        run("ip", "netns", "exec", self.namespace, *command, given=given)

    def firewall(self, rules: str) -> None:
        self.run("nft", "-f", "-", given=rules)

    def end(self) -> None:
        run("ip", "netns", "del", self.namespace)  # the line goes with it


def run(*command: str, given: str | None = None) -> None:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode and "Operation not permitted" in done.stderr:
        pytest.skip(f"not allowed here: {' '.join(command)}")
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    yield made
    made.end()


def start_learner(run: Run, network: Network, learner_id: int) -> Process:
    """As ``Run.start_learner``, in the namespace."""
    status = wait_until(lambda: run.status().get("address"), "the syncer's address")
    environment = {
        "HF_DILOCO_TEST_RUN": str(run.path),
        "HF_DILOCO_SYNCER": f"{network.host}:{status.rpartition(':')[2]}",
        "HF_DILOCO_LEARNER_ID": str(learner_id),
        "HF_DILOCO_TOKEN_FILE": str(run.directory / "token"),
    }
    command = ["ip", "netns", "exec", network.namespace, sys.executable, str(SCRIPT), "--data_seed", str(learner_id)]
    command += ["--output_dir", str(run.path / "out"), "--result", str(run.path / f"learner-{learner_id}.json")]
    learner = Process(
        [*command, "--step_seconds", "0.15", "--max_steps", "4000"],
        run.path / f"learner-{learner_id}.log",
        environment,
    )
    run.learners[learner_id] = learner
    run._all.append(learner)
    return learner


def merges(run: Run, start: int, learner_id: int) -> int:
    return sum(any(who["learner_id"] == learner_id for who in line["participants"]) for line in run.rounds()[start:])


def until_merged(run: Run, learner_id: int, count: int = 3) -> None:
    start = len(run.rounds())
    wait_until(lambda: merges(run, start, learner_id) >= count, f"merges of learner {learner_id}")


def test_a_real_network_fails(start_run: Any, network: Network) -> None:
    network.firewall(FIREWALL)
    run = start_run(
        expected_learners=2, num_fragments=6, sync_every=24, link_timeout_seconds=4, listen=f"{network.host}:0"
    )
    run.start_learner(0, step_seconds=0.15, max_steps=4000)
    learner = start_learner(run, network, 1)
    until_merged(run, 1)
    assert merges(run, 0, 0)
    (join,) = (line for line in run.tape() if line["kind"] == "join" and line["learner_id"] == 1)

    start = len(run.tape())
    network.firewall(CUT)
    wait_until(lambda: any(line["kind"] == "leave" for line in run.tape()[start:]), "the syncer to notice", 30)
    until_merged(run, 0)
    network.run("nft", "delete", "table", "inet", "cut")
    until_merged(run, 1)

    for command in ("add", "del"):  # a line of 50 kB/s with up to 400 ms of queue, then a good one again
        limit = ("tbf", "rate", "400kbit", "burst", "4kb", "latency", "400ms") if command == "add" else ()
        network.run("tc", "qdisc", command, "dev", network.inside, "root", *limit)
        until_merged(run, 1)
        until_merged(run, 0)
    incarnations = {line["incarnation"] for line in run.tape() if line["kind"] == "join" and line["learner_id"] == 1}
    assert incarnations == {join["incarnation"]}, "the learner was lost"
    assert learner.running()
    for process in (*run.learners.values(), run.syncer):
        process.signal(signal.SIGKILL)


def test_one_who_is_only_called_is_no_learner(network: Network) -> None:
    """What the firewall of the test above keeps out: nobody calls in (its own control)."""
    listener = subprocess.Popen(
        ["ip", "netns", "exec", network.namespace, sys.executable, "-c",
         "import socket; s = socket.create_server(('0.0.0.0', 4711)); print('here', flush=True); s.accept()"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "here\n"
        network.firewall(FIREWALL)
        call = f"import socket; socket.create_connection(('{network.learner}', 4711), 2)"
        done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=False)
        assert "timed out" in done.stderr
        network.run("nft", "delete", "table", "inet", "hfd")
        assert subprocess.run([sys.executable, "-c", call], capture_output=True, check=False).returncode == 0
    finally:
        listener.kill()
        listener.wait()
        assert listener.stdout is not None
        listener.stdout.close()
