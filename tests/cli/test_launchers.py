"""How learners are started: words for `accelerate launch`, as accelerate itself understands them; GPUs; environment."""

import json

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from hf_diloco.cli.launchers import plan_launchers
from hf_diloco.cli.processes import clean_environment
from hf_diloco.errors import ConfigError

pytestmark = pytest.mark.fast

OUTER_JOB = [
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PET_NNODES", "PMI_RANK",
    "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID", "SLURM_PROCID", "SLURM_NTASKS", "HF_DILOCO_TOKEN",
]  # fmt: skip


@pytest.fixture
def config(tmp_path):
    def write(name="config.yaml", **values):
        values = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_machines": 1, **values}
        (tmp_path / name).write_text(json.dumps(values))
        return tmp_path / name

    return write


def understood(launcher):
    """What accelerate makes of it."""
    given = launch_command_parser().parse_args([*launcher.words, "train.py", "--lr", "1"])
    args, _, _ = _validate_launch_command(given)
    assert args.main_process_port == 0
    assert (args.training_script, args.training_script_args) == ("train.py", ["--lr", "1"])
    return args


def test_an_outer_job_does_not_leak_into_learners(monkeypatch):
    for name in [*OUTER_JOB, "HF_TOKEN", "SLURM_JOB_ID"]:
        monkeypatch.setenv(name, "1")
    assert not clean_environment().keys() & set(OUTER_JOB)
    assert clean_environment()["HF_TOKEN"] == clean_environment()["SLURM_JOB_ID"] == "1"


@pytest.mark.parametrize(
    ("nproc", "gpus", "environment", "multi_gpu", "cpu"),
    [
        (None, [], {}, False, True),
        (None, ["4"], {"CUDA_VISIBLE_DEVICES": "4"}, False, False),
        (2, [], {"ACCELERATE_USE_CPU": "true"}, True, False),
        (2, ["4", "5"], {"CUDA_VISIBLE_DEVICES": "4,5"}, True, False),
    ],
)
def test_without_a_file(nproc, gpus, environment, multi_gpu, cpu):
    (launcher,) = plan_launchers(1, [], nproc, gpus)
    args = understood(launcher)
    assert launcher.environment == environment
    assert (args.num_processes, args.multi_gpu, args.cpu) == (nproc or 1, multi_gpu, cpu)
    assert launcher.by_hand.startswith(f"accelerate launch --main_process_port 0 --num_processes {nproc or 1}")


def test_the_nth_file_is_for_learner_n_and_the_last_for_the_rest(config):
    first, second = config("a.yaml", num_processes=2), config("b.yaml", distributed_type="NO", use_cpu=True)
    launchers = plan_launchers(4, [first, second], None, ["0", "1"])
    assert [launcher.config_file for launcher in launchers] == [first, second, second, second]
    assert [launcher.num_processes for launcher in launchers] == [2, 1, 1, 1]
    assert [launcher.gpus for launcher in launchers] == [("0", "1"), (), (), ()]
    assert understood(launchers[0]).num_processes == 2
    assert understood(launchers[0]).multi_gpu
    assert understood(launchers[1]).use_cpu
    with pytest.raises(ConfigError, match="3 times for 2 learners"):
        plan_launchers(2, [first] * 3, None, [])


def test_nproc_per_learner_is_above_the_file(config):
    gpu, cpu = config("gpu.yaml", num_processes=8), config("cpu.yaml", distributed_type="NO", use_cpu=True)
    first, second = plan_launchers(2, [gpu, cpu], 2, ["0", "1"])
    assert understood(first).num_processes == understood(second).num_processes == 2
    assert understood(first).multi_gpu
    assert understood(second).multi_gpu  # a file for one process, which accelerate would start as one
    assert second.environment == {"ACCELERATE_USE_CPU": "true"}
    assert understood(plan_launchers(1, [gpu], 1, ["0"])[0]).num_processes == 1


@pytest.mark.parametrize("values", [
    {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}},
    {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}},
])  # fmt: skip
def test_sharded_learners_keep_their_kind(config, values):
    (launcher,) = plan_launchers(1, [config(**values, num_processes=4)], 2, ["0", "1"])
    args = understood(launcher)
    assert (args.num_processes, args.multi_gpu) == (2, False)
    assert args.use_fsdp == (values["distributed_type"] == "FSDP")
    assert args.use_deepspeed == (values["distributed_type"] == "DEEPSPEED")


@pytest.mark.parametrize(
    ("num_learners", "nproc", "gpus", "expected"),
    [
        (2, None, "0 1 2 3", ["0", "1"]),
        (3, None, "0 1", ["0", "1", "0"]),
        (2, 2, "0 1 2 3", ["0 1", "2 3"]),
        (2, 2, "5 7", ["5 7", "5 7"]),
        (3, 2, "0 1 2", ["0 1", "2 0", "1 2"]),
    ],
)
def test_each_learner_has_its_gpus(num_learners, nproc, gpus, expected):
    launchers = plan_launchers(num_learners, [], nproc, gpus.split())
    assert [" ".join(launcher.gpus) for launcher in launchers] == expected


@pytest.mark.parametrize(
    ("values", "nproc", "said"),
    [
        ({"num_processes": 8}, None, "needs as many GPUs; this machine has 2"),
        ({"num_processes": 1}, 3, "needs as many GPUs; this machine has 2"),
        ({}, None, "no usable num_processes"),
        ({"num_processes": -1}, None, "no usable num_processes"),
        ({"num_processes": 16, "num_machines": 2}, None, "num_machines: 2"),
    ],
)
def test_what_cannot_be_started_here(config, values, nproc, said):
    with pytest.raises(ConfigError, match=said):
        plan_launchers(1, [config(**values)], nproc, ["0", "1"])


@pytest.mark.parametrize("text", ["[", "- a", "num_processes: 2", "\x00"])
def test_what_is_no_config(tmp_path, text):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"a\.yaml (cannot be read|is no file)"):
        plan_launchers(1, [tmp_path / "a.yaml"], None, [])
