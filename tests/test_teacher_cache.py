"""The teacher's cache: its bytes and its indices."""

import torch

from utils.teacher_cache import TeacherCache, cache_bytes, index_dtype


def test_the_cache_of_the_papers_run_has_the_stated_bytes():
    assert cache_bytes(5000, 2048, 100, 32000) == 4_096_000_000
    assert cache_bytes(5000, 2048, 100, 128256) == 6_144_000_000
    assert 5000 * 2048 * 100 * (2 + 8) == 10_240_000_000  # as published, with 8-byte indices
    assert index_dtype(1 << 16) == torch.uint16 and index_dtype((1 << 16) + 1) == torch.int32


def test_indices_beyond_32767_survive_the_cache(tmp_path):
    cache = TeacherCache(tmp_path, {"a": 1}, 1)
    index = torch.tensor([[[0, 40000, 65535]]])
    cache.write(0, torch.zeros(1, 1, 3), index, torch.zeros(1, 1, 4), vocab_size=65536, dtype=torch.float32)
    assert torch.equal(cache.window(0)[1], index[0])
