"""Teacher outputs on disk for offline distillation: top-K probabilities and indices, and the states at the interface.

One folder for each recipe (teacher, token ids, K, dtype, ...), in shards written atomically; what is there is used, a
damaged shard is named and rewritten, and nothing made for other inputs is ever read.
"""

import hashlib
from pathlib import Path

import torch

from utils.artifacts import read_entry, read_header, read_tensors, recipe_difference, sha256_json, write_tensors
from utils.errors import UserError

SHARD_WINDOWS = 16


def index_dtype(vocab_size):
    """uint16 where every token id fits, else int32: 2 or 4 bytes."""
    return torch.uint16 if vocab_size <= 1 << 16 else torch.int32


def cache_bytes(windows, seq_len, top_k, vocab_size, probability_bytes=2):
    """Bytes of the probabilities and indices: 4.1e9 for 5000 windows of 2048, K = 100 and 32,000 words."""
    return windows * seq_len * top_k * (probability_bytes + index_dtype(vocab_size).itemsize)


class TeacherCache:
    """Shards of SHARD_WINDOWS windows under folder/<hash of the recipe>/."""

    def __init__(self, folder, recipe, windows):
        self.recipe, self.windows = recipe, windows
        self.folder = Path(folder) / sha256_json(recipe)[:16]

    @property
    def shards(self):
        """[(first window, behind the last window)]"""
        return [(start, min(start + SHARD_WINDOWS, self.windows)) for start in range(0, self.windows, SHARD_WINDOWS)]

    def path(self, shard):
        return self.folder / f"shard-{shard:05d}.safetensors"

    def missing(self):
        """Indices of the shards to write; says which are damaged and, if none is there, which input is new."""
        absent = []
        for shard in range(len(self.shards)):
            path = self.path(shard)
            if not path.is_file():
                absent.append(shard)
                continue
            try:
                self._read(shard)
            except UserError as error:
                print(f"teacher cache: {error}; rewriting it")
                path.unlink()
                absent.append(shard)
        if len(absent) == len(self.shards):
            self._explain_miss()
        elif absent:
            print(f"teacher cache: {len(self.shards) - len(absent)} of {len(self.shards)} shards reused "
                  f"from {self.folder}")
        else:
            print(f"teacher cache: reused from {self.folder}")
        return absent

    def _explain_miss(self):
        others = sorted(self.folder.parent.glob("*/shard-00000.safetensors")) if self.folder.parent.is_dir() else []
        for other in others:
            if other.parent != self.folder:
                try:
                    differing = recipe_difference(read_header(other, "teacher")["recipe"], self.recipe)
                except UserError:
                    continue
                print(f"teacher cache miss: {other.parent.name} was made with another {differing}")
                return
        print("teacher cache miss: nothing cached yet")

    def write(self, shard, log_probabilities, index, states=None, vocab_size=None, dtype=torch.float16):
        """Write one shard: log-probabilities float32 [n, T, K] (kept as probabilities), indices, states [n, T, C]."""
        tensors = {"probability": log_probabilities.exp().to(dtype), "index": index.to(index_dtype(vocab_size))}
        if states is not None:
            tensors["states"] = states
        # uint16 has no isfinite and no view in older readers: its bytes go as int16
        if tensors["index"].dtype == torch.uint16:
            tensors["index"] = tensors["index"].view(torch.int16)
        write_tensors(self.path(shard), "teacher", tensors, {"recipe": self.recipe, "windows": self.shards[shard],
                                                               "sha256": _sha256(tensors)})

    def window(self, number):
        """(log-probabilities float32 [T, K], indices int64 [T, K], states [T, C] or None) of one window.

        Reads that window only, as training draws them at random; `missing` has checked the shards.
        """
        shard, place = divmod(number, SHARD_WINDOWS)
        tensors = read_entry(self.path(shard), place)
        index = tensors["index"].long()
        if tensors["index"].dtype == torch.int16:
            index = index & 0xFFFF
        probability = tensors["probability"]
        floor = 2.0**-25 if probability.dtype == torch.float16 else torch.finfo(torch.float32).tiny
        probability = probability.float().clamp(min=floor)  # what underflowed to zero is below half of float16's least
        return probability.log(), index, tensors.get("states")

    def _read(self, shard):
        header, tensors = read_tensors(self.path(shard), "teacher")
        windows = header["windows"]  # of this folder, but of another shard
        if recipe_difference(header["recipe"], self.recipe) or windows != list(self.shards[shard]) or (
                any(len(tensor) != windows[1] - windows[0] for tensor in tensors.values())):
            raise UserError(f"{self.path(shard)}: made for other inputs")
        if _sha256(tensors) != header["sha256"]:
            raise UserError(f"{self.path(shard)}: damaged")
        return tensors


def _sha256(tensors):
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
