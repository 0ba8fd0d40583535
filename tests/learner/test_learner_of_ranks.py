"""Learners of two processes read and write the same as a learner of one, however they hold their model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "learner_of_ranks.py"
DEADLINE_SECONDS = 280

pytestmark = pytest.mark.distributed


def assert_equal_to_one_process(directory, kinds, num_ranks=2):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    logs = [directory / f"rank-{rank}.log" for rank in range(num_ranks)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, str(SCRIPT), str(directory / "store"), str(rank), str(num_ranks), *kinds]
            with log.open("wb") as output:
                processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment))
        codes = [process.wait(timeout=DEADLINE_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = "\n".join(log.read_text() for log in logs)
    assert codes == [0] * num_ranks, said
    for kind in kinds:
        assert all(f"rank {rank}: {kind} is equal" in said for rank in range(num_ranks)), said


def test_ddp_and_fsdp2(tmp_path):
    assert_equal_to_one_process(tmp_path, ["ddp", "fsdp2", "hsdp"])


@pytest.mark.long
def test_two_replicas_of_two_shards(tmp_path):
    assert_equal_to_one_process(tmp_path, ["hsdp"], num_ranks=4)


@pytest.mark.long
def test_compiled_models_and_adapters(tmp_path):
    assert_equal_to_one_process(
        tmp_path, ["compile", "fsdp2-compile", "accelerate-fsdp2", "lora-ddp", "lora-ddp-bf16", "lora-fsdp2"]
    )


@pytest.mark.long
@pytest.mark.timeout(600)  # DeepSpeed compiles a part of itself (with g++) when it is first used
def test_deepspeed(tmp_path):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install -e '.[dev-long]'")
    assert_equal_to_one_process(tmp_path, ["zero-1", "zero-2", "zero-3", "masters-1", "masters-2", "masters-3"])
