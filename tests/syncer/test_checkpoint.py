import json
import resource

import pytest
import torch

from hf_diloco.errors import DiLoCoError, DiLoCoWarning
from hf_diloco.syncer.checkpoint import (
    checkpoint_paths,
    latest_checkpoint,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)

pytestmark = pytest.mark.fast


def groups(value: float = 1.0):
    flat = torch.arange(20.0) * value
    return {
        "global": {"a.weight": flat[:8].view(2, 4), "b": flat[8:], "again": flat[8:]},
        "constants": {
            "mask": torch.tensor([True, False]),
            "step": torch.tensor(3),
            "half": torch.ones(3, dtype=torch.bfloat16),
            "none": torch.empty(0, 4),
        },
        "empty": {},
    }


META, FILES = {"note": [1, None]}, {"config.json": b"{}", "x.txt": b"\0"}


def save(directory, step, value=1.0):
    return save_checkpoint(directory, step, groups(value).items(), META, FILES)


def assert_whole(checkpoint, step, value=1.0):
    assert checkpoint.outer_step == step
    assert checkpoint.meta == META
    assert checkpoint.files == FILES
    for group, tensors in groups(value).items():
        loaded = checkpoint.load(group)
        assert loaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            found = loaded[name]
            assert found.dtype == tensor.dtype
            assert found.shape == tensor.shape
            assert torch.equal(found, tensor)


def test_what_is_saved_is_loaded(tmp_path):
    path = save(tmp_path, 123)
    assert path == tmp_path / "step-00000123"
    assert_whole(load_checkpoint(path), 123)
    assert [item.name for item in tmp_path.iterdir()] == ["step-00000123"]


def test_latest_is_the_newest_by_number(tmp_path):
    assert latest_checkpoint(tmp_path / "missing") is None
    for step in (5, 123456789, 40):
        save(tmp_path, step, value=step)
    assert_whole(latest_checkpoint(tmp_path), 123456789, value=123456789)
    assert [path.name for path in checkpoint_paths(tmp_path)] == ["step-00000005", "step-00000040", "step-123456789"]


def test_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 7, value=1)
    save(tmp_path, 7, value=2)
    assert_whole(latest_checkpoint(tmp_path), 7, value=2)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", ["global.safetensors", "constants.safetensors", "files/config.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_is_named_and_the_previous_one_used(tmp_path, name, damage):
    save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    if damage == "flip":
        file.write_bytes(content)
    elif damage == "cut":
        file.write_bytes(content[:-1])
    else:
        file.unlink()
    with pytest.raises(DiLoCoError, match=name):
        load_checkpoint(tmp_path / "step-00000002")
    with pytest.warns(DiLoCoWarning, match=name):
        assert_whole(latest_checkpoint(tmp_path), 1)


@pytest.mark.parametrize("index", [None, "", "[]", "{}", '{"format": 99, "outer_step": 1, "files": {}, "meta": {}}'])
def test_a_broken_index_is_named(tmp_path, index):
    file = save(tmp_path, 2) / "checkpoint.json"
    file.unlink() if index is None else file.write_text(index)
    with pytest.raises(DiLoCoError, match=r"checkpoint\.json"):
        load_checkpoint(tmp_path / "step-00000002")
    with pytest.raises(DiLoCoError, match=r"no whole checkpoint.*new run in another --run-dir"):
        latest_checkpoint(tmp_path)  # without a warning: there is none before it to fall back to


def test_an_unwritable_directory_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiLoCoError, match="could not be written"):
        save(tmp_path / "file", 1)


def test_when_the_disk_is_full_the_previous_one_stays_whole(tmp_path):
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = [("global", {"a": torch.zeros(1_000_000)})]
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))  # a write beyond it fails, as on a full disk
    try:
        for step in (1, 2):
            with pytest.raises(DiLoCoError, match="could not be written"):
                save_checkpoint(tmp_path, step, big, {}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert_whole(latest_checkpoint(tmp_path), 1)


def test_what_a_killed_process_left_is_tidied(tmp_path):
    save(tmp_path, 1)
    (tmp_path / ".step-00000002.99").mkdir()
    (tmp_path / "step-00000001").rename(tmp_path / ".step-00000001.old.99")  # killed between the two moves
    save(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]
    assert_whole(load_checkpoint(tmp_path / "step-00000001"), 1)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "..", ".hidden", "a\\b", "/etc/passwd", "x" * 300])
def test_names_cannot_lead_out_of_the_directory(tmp_path, name):
    with pytest.raises(DiLoCoError, match="plain file name"):
        save_checkpoint(tmp_path, 1, [], {}, {name: b""})
    with pytest.raises(DiLoCoError, match="plain file name"):
        save_checkpoint(tmp_path, 1, [(name, {})], {}, {})


def test_meta_is_readable_json(tmp_path):
    index = json.loads((save(tmp_path, 2) / "checkpoint.json").read_text())
    assert index["outer_step"] == 2
    assert set(index["files"]["global.safetensors"]) == {"sha256", "size_bytes"}


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, value=step)
    prune_checkpoints(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    assert_whole(latest_checkpoint(tmp_path), 4, value=4)


def test_what_has_not_changed_is_not_written_again(tmp_path):
    first = save(tmp_path, 1)
    changing = [(name, tensors) for name, tensors in groups().items() if name != "constants"]
    second = save_checkpoint(
        tmp_path,
        2,
        changing,
        {"note": [1, None]},
        {"config.json": b"{}", "x.txt": b"\0"},
        unchanged={"constants": first},
    )
    assert (second / "constants.safetensors").samefile(first / "constants.safetensors")
    prune_checkpoints(tmp_path, keep=1)
    assert_whole(latest_checkpoint(tmp_path), 2)
