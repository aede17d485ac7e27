"""Text -> windows: rows, joins, splits, draws, BOS, errors, cache. Expected values: by hand or by plain Python."""

import base64
import bz2
import gzip
import hashlib
import json
import math
import os
import random
import re
import zipfile
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from tests.tokenizers_for_tests import tok, tok_eos, tok_nobos
from utils.data import corpora, tokens, wheels, wiki_markup
from utils.data.corpora import CORPORA, Corpus, corpora_table, load_text
from utils.data.tokens import token_stream, tokenizer_sha256
from utils.data.wheels import Member
from utils.data.windows import calibration_windows, describe, evaluation_windows
from utils.errors import UserError, WorkError

REAL_DATA = Path(os.environ.get("LINEARPATCH_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")
MACHINE_CACHE = os.environ.get("LINEARPATCH_CACHE")
needs_real_data = pytest.mark.skipif(not REAL_DATA.is_dir(), reason="no data folder: set LINEARPATCH_DATA")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Every test writes its own cache, and none reads the data folder or the hub of the machine."""
    monkeypatch.setenv("LINEARPATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LINEARPATCH_DATA", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def words(count, start=0):
    return " ".join(f"w{(start + index) % 124}" for index in range(count))


def word_ids(text):
    """Ids of w0..w123 by hand: wK is 4 + K."""
    return [4 + int(word[1:]) for word in text.split()]


def counting(count):
    """A tokenizer and a text in which token k has id k, so that a window shows where it was cut."""
    backend = Tokenizer(WordLevel({f"n{index}": index for index in range(count)}, unk_token="n0"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend), " ".join(f"n{index}" for index in range(count))


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(packed) if path.suffix == ".gz" else packed)
    return str(path)


def write_documents(path, documents):
    return write(path, "".join(json.dumps({"text": text}) + "\n" for text in documents))


# --- evaluation windows of a stream


def test_counts_of_windows_scored_and_dropped_tokens(tmp_path):
    path = write(tmp_path / "w.txt", words(1000))
    result = evaluation_windows(path, tok_nobos(), 256)
    assert result.ids.dtype == torch.int64
    assert result.ids.tolist() == [word_ids(words(1000))[start : start + 256] for start in (0, 256, 512)]
    assert "windows=3 seq_len=256 scored=765 dropped=232" in describe(result.info)
    assert result.info["tokens"] == 1000 and result.info["windows_available"] == 3


def test_text_shorter_than_one_window_is_refused(tmp_path):
    path = write(tmp_path / "w.txt", words(1000))
    with pytest.raises(UserError, match=r"1000 tokens < one window \(--seq-len 1024\)"):
        evaluation_windows(path, tok_nobos(), 1024)
    assert len(evaluation_windows(path, tok_nobos(), 1000).ids) == 1


def test_limit_takes_the_first_windows_and_says_how_many_there_are(tmp_path):
    path = write(tmp_path / "w.txt", words(1000))
    everything, limited = (evaluation_windows(path, tok_nobos(), 100, limit=limit) for limit in (None, 3))
    assert torch.equal(limited.ids, everything.ids[:3])
    assert (limited.info["windows"], limited.info["windows_available"]) == (3, 10)
    assert limited.info["scored_tokens"] == 3 * 99
    assert "the first of 10 windows" in describe(limited.info)


def test_bos_once_in_the_stream_or_in_every_window(tmp_path):
    text = words(20)
    path = write(tmp_path / "w.txt", text)
    stream = evaluation_windows(path, tok(), 8)
    assert stream.ids.flatten().tolist() == ([1] + word_ids(text))[:16]
    assert stream.info["bos"] == "stream: once, id 1"
    assert (stream.info["scored_tokens"], stream.info["dropped_tokens"]) == (14, 5)
    for tokenizer in (tok(), tok_nobos()):
        each = evaluation_windows(path, tokenizer, 8, bos="window")
        assert each.ids.tolist() == [[1] + word_ids(text)[:7], [1] + word_ids(text)[7:14]]
        assert each.info["bos"] == "window: id 1 in each"
        assert (each.info["scored_tokens"], each.info["dropped_tokens"]) == (14, 6)
    assert 1 not in evaluation_windows(path, tok_nobos(), 8).ids


@pytest.mark.parametrize("literals", ["<s> ", "<s> <s> "])
def test_bos_written_in_the_text_does_not_come_twice(literals):
    ids, info = token_stream(literals + words(5), tok())
    assert ids.tolist() == [1] + word_ids(words(5))
    assert info["bos"] == "stream: once, id 1"
    assert token_stream("<s> w1", tok_nobos())[0].tolist() == [1, 5]
    assert token_stream("w1", tok_nobos())[1]["bos"] == "stream: tokenizer adds none"


def test_eos_of_the_template_is_removed_and_eos_in_the_text_kept():
    ids, info = token_stream("w1 </s> w2 </s>", tok_eos())
    assert ids.tolist() == [1, 5, 2, 6, 2]
    assert info["eos"] == "id 2 of the tokenizer's template removed"
    assert token_stream("w1", tok())[1]["eos"] == "none added"


def test_bos_in_every_window_needs_a_bos_token(tmp_path):
    tokenizer, text = counting(50)
    with pytest.raises(UserError, match="no BOS token"):
        evaluation_windows(write(tmp_path / "n.txt", text), tokenizer, 8, bos="window")


# --- the corpora of the paper, from a data folder


def test_wikitext_rows_are_joined_by_two_newlines_with_the_empty_ones(tmp_path):
    write(tmp_path / "wikitext2/wiki.test.raw", " \n = w1 = \n \n w2 w3 \n")
    rows = ["", " = w1 = \n", "", " w2 w3 \n"]
    text = load_text("wikitext2", "evaluation", tmp_path)
    assert text.rows == rows and text.text() == "\n\n".join(rows)
    assert (text.split, text.source) == ("test", "wikitext2/wiki.test.raw")
    ids = token_stream(text.text(), tok_nobos())[0].tolist()
    assert ids == [3, 5, 3, 6, 7]  # "=" is unknown to the tokenizer


def test_wikitext_calibration_takes_train_and_says_when_it_is_only_its_head(tmp_path):
    write(tmp_path / "wikitext2/wiki.train.head.raw", " = w1 = \n")
    assert load_text("wikitext2", "calibration", tmp_path).source == (
        "wikitext2/wiki.train.head.raw (only the first part of the train split)"
    )
    write(tmp_path / "wikitext2/wiki.train.raw.gz", " = w2 = \n")
    whole = load_text("wikitext2", "calibration", tmp_path)
    assert (whole.source, whole.split, whole.rows) == ("wikitext2/wiki.train.raw.gz", "train", [" = w2 = \n"])


def test_ptb_variants_and_unk_literals(tmp_path):
    write(tmp_path / "ptb/ptb.valid.txt", " w1 <unk> N \n w2 w3 \n <unk> w4 \n w5 N <unk> \n")
    write(tmp_path / "ptb/ptb.test.txt.gz", " w6 <unk> \n w7 \n")
    sentences = ["w1 <unk> N", "w2 w3", "<unk> w4", "w5 N <unk>"]
    assert load_text("ptb", "evaluation", tmp_path).text() == "\n\n".join(sentences)
    assert load_text("ptb-new", "evaluation", tmp_path).text() == "w6 <unk> w7"
    assert load_text("ptb-new:validation", "evaluation", tmp_path).text() == " ".join(sentences)
    special = evaluation_windows("ptb", tok(), 11, data_dir=tmp_path)
    assert special.ids.tolist() == [[1, 5, 3, 3, 6, 7, 3, 8, 9, 3, 3]]  # "N" is unknown, too
    assert "ptb validation" in describe(special.info) and r"4 rows joined by '\n\n'" in describe(special.info)
    assert "unk literals: 3, encoded as special id 3" in describe(special.info)


def test_unk_literals_as_plain_text(tmp_path):
    text = "ab <unk> c"
    special, plain = (token_stream(text, ByT5Tokenizer(), unk) for unk in ("special", "text"))
    assert plain[0].tolist() == [3 + byte for byte in text.encode()]  # ByT5: byte + 3, and "<unk>" is id 2
    assert 2 in special[0] and special[1]["unk_encoded_as"] == "special id 2"
    assert plain[1]["unk_encoded_as"] == "text" and plain[1]["unk_literals"] == 1
    fast = tok()
    before = token_stream("w1 <unk> w2", fast)[0].tolist()
    assert token_stream("w1 <unk> w2", fast, "text")[0].tolist() == [1, 5, 3, 3, 3, 6]  # "<", "unk" and ">"
    assert fast("w1 <unk> w2")["input_ids"] == before == [1, 5, 3, 6]  # the tokenizer is left as it was
    assert fast.backend_tokenizer.encode("w1 <unk> w2").ids == before
    with pytest.raises(UserError, match="--ptb-unk"):
        token_stream("w1", fast, "drop")


def test_c4_draws_are_those_of_the_released_loader(tmp_path):
    generator = random.Random(5)
    documents = [words(generator.choice([5, 20, 33, 34, 60])) for _ in range(40)]
    write_documents(tmp_path / "c4/c4-validation.00000-of-00008.json.gz", documents)
    for tokenizer, bos in ((tok_nobos(), []), (tok(), [1])):
        random.seed(0)
        expected = []
        for _ in range(256):
            while True:
                ids = bos + word_ids(documents[random.randint(0, len(documents) - 1)])
                if len(ids) > 32:
                    break
            start = random.randint(0, len(ids) - 32 - 1)
            expected.append(ids[start : start + 32])
        result = evaluation_windows("c4", tokenizer, 32, data_dir=tmp_path)
        assert result.ids.tolist() == expected
        assert result.info["documents_long_enough"] == sum(len(bos) + len(d.split()) > 32 for d in documents)
        each = evaluation_windows("c4", tokenizer, 32, data_dir=tmp_path, bos="window")
        assert each.ids.tolist() == [row if row[0] == 1 else [1] + row[:-1] for row in expected]
    assert torch.equal(evaluation_windows("c4", tok(), 32, data_dir=tmp_path, limit=7).ids, result.ids[:7])


def test_drawing_leaves_the_global_generator_alone(tmp_path):
    write_documents(tmp_path / "c4/train_sample.jsonl.gz", [words(50)] * 3)
    random.seed(3)
    expected = random.Random(3).random()
    evaluation_windows("c4", tok(), 8, data_dir=tmp_path)
    assert random.random() == expected


def test_c4_new_joins_the_first_1100_documents_by_a_space(tmp_path):
    documents = [words(3, start) for start in range(1200)]
    write_documents(tmp_path / "c4/train_sample.jsonl", documents)
    result = evaluation_windows("c4-new", tok_nobos(), 8, data_dir=tmp_path)
    stream = word_ids(" ".join(documents[:1100]))
    assert result.ids.flatten().tolist() == stream[: 256 * 8]
    assert result.info["tokens"] == 3300 and result.info["dropped_tokens"] == 3300 - 256 * 8
    assert result.info["source"] == "c4/train_sample.jsonl (a sample of whole documents, not the paper's shard)"


def test_c4_calibration_from_whole_documents_or_from_excerpts(tmp_path):
    excerpts = [words(20, start) for start in range(10)]
    write_documents(tmp_path / "c4/excerpts.jsonl.gz", excerpts)
    text = load_text("c4", "calibration", tmp_path)
    assert text.text() == "\n\n".join(excerpts) and "cut short" in text.source
    write_documents(tmp_path / "c4/c4-train.00000-of-01024.json.gz", excerpts)
    assert load_text("c4", "calibration", tmp_path).kind == "documents"
    with pytest.raises(UserError, match="'test' is no split of c4; use one of train, validation"):
        load_text("c4:test", "evaluation", tmp_path)


def test_a_named_split_is_used_and_an_unknown_one_refused(tmp_path):
    write(tmp_path / "wikitext2/wiki.valid.raw", "w1\n")
    for purpose in ("calibration", "evaluation"):
        assert load_text("wikitext2:validation", purpose, tmp_path).split == "validation"
    with pytest.raises(UserError, match="'dev' is no split"):
        load_text("wikitext2:dev", "evaluation", tmp_path)


def test_a_row_of_the_registry_is_all_that_a_corpus_needs(tmp_path, monkeypatch):
    poems = corpora.Files({"train": (corpora.File("poems/all.txt", "old ones"),)}, {}, "nobody/poems", clean=sorted)
    monkeypatch.setitem(CORPORA, "poems", Corpus("poems, line by line", "train", poems, join="/", rows=2, windows=1))
    write(tmp_path / "poems/all.txt.gz", "w3\nw1\nw2\n")
    text = load_text("poems", "evaluation", tmp_path)
    assert (text.kind, text.split, text.text()) == ("stream", "train", "w1\n/w2\n")
    assert text.source == "poems/all.txt.gz (old ones)"
    assert load_text("poems", "calibration", tmp_path).rows == ["w1\n", "w2\n", "w3\n"]
    assert len(evaluation_windows("poems", tok_nobos(), 2, data_dir=tmp_path).ids) == 1
    assert corpora_table()[-1] == ("`poems`", "poems, line by line", "train", "train: `poems/all.txt` (old ones)")
    with pytest.raises(UserError, match="'test' is no split of poems; use one of train"):
        load_text("poems:test", "evaluation", tmp_path)


@pytest.mark.parametrize("corpus, path", [("wikitext2", "wikitext2/wiki.test.raw"), ("ptb", "ptb/ptb.valid.txt"),
                                          ("c4", "c4/c4-validation.00000-of-00008.json.gz")])
def test_a_missing_file_is_named_and_the_hub_not_tried(tmp_path, monkeypatch, corpus, path):
    monkeypatch.setattr(corpora, "hub_file", lambda *_: pytest.fail("the hub was tried"))
    with pytest.raises(UserError) as error:
        load_text(corpus, "evaluation", tmp_path)
    assert str(tmp_path / path) in str(error.value) and 'README, section "Data"' in str(error.value)
    monkeypatch.setenv("LINEARPATCH_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(UserError, match="elsewhere"):
        load_text(corpus, "evaluation")


# --- the corpora of the paper, from the hub's local cache


def put_into_hub_cache(hub, repository, revision, filename):
    """Path of a file in a made-up hub cache, in the layout that the hub's own client writes."""
    folder = hub / f"datasets--{repository.replace('/', '--')}"
    write(folder / "refs" / revision, "c0ffee")
    path = folder / "snapshots" / "c0ffee" / filename
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_hub_files_are_read_from_its_cache_without_a_network(tmp_path):
    hub, rows = tmp_path / "hub", ["", " = w1 = \n", " w2 \n"]
    name = "wikitext-2-raw-v1/test-00000-of-00001.parquet"
    Dataset.from_dict({"text": rows}).to_parquet(put_into_hub_cache(hub, "Salesforce/wikitext", "main", name))
    text = load_text("wikitext2", "evaluation")
    assert text.text() == "\n\n".join(rows) and type(text.rows) is list
    assert text.source == f"Salesforce/wikitext@c0ffee/{name}"

    name = "penn_treebank/validation/0000.parquet"
    path = put_into_hub_cache(hub, "ptb-text-only/ptb_text_only", "refs/convert/parquet", name)
    Dataset.from_dict({"sentence": [" w1 N ", "w2"]}).to_parquet(path)
    assert load_text("ptb", "evaluation").text() == "w1 N\n\nw2"

    name = "en/c4-validation.00000-of-00008.json.gz"
    write_documents(put_into_hub_cache(hub, "allenai/c4", "main", name), ["w1 w2", "w3"])
    assert load_text("c4", "evaluation").rows == ["w1 w2", "w3"]


@pytest.mark.parametrize("corpus, local", [("wikitext2", "wikitext2/wiki.test.raw"), ("ptb", "ptb/ptb.valid.txt"),
                                           ("c4", "c4/c4-validation.00000-of-00008.json.gz")])
def test_an_unreachable_hub_gives_two_lines_with_the_remedy(corpus, local):
    with pytest.raises(UserError) as error:
        load_text(corpus, "evaluation")
    lines = str(error.value).splitlines()
    assert len(lines) == 2 and local in lines[1] and "--data-dir" in lines[1] and "wiki" in lines[1]


# --- files


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz", "a.jsonl.gz", "a.parquet", "list.json"])
def test_records_of_every_format(tmp_path, name):
    rows = ["w1 w2", "w3 \u2028 é", "w4\nw5"]
    path = tmp_path / name
    if name == "a.parquet":
        Dataset.from_dict({"text": rows}).to_parquet(path)
    elif name == "list.json":
        write(path, "\n" + json.dumps([{"text": row} for row in rows], indent=1))
    else:
        write_documents(path, rows)
    evaluation, calibration = (load_text(str(path), purpose) for purpose in ("evaluation", "calibration"))
    assert evaluation.kind == "stream" and evaluation.text() == "\n\n".join(rows)
    assert calibration.kind == "documents" and calibration.rows == rows


@pytest.mark.parametrize("name", ["a.txt", "a.raw", "a.txt.gz"])
def test_plain_text_is_taken_as_it_is(tmp_path, name):
    content = " w1\r\n\n\u2028w2\t"
    path = write(tmp_path / name, content)
    assert load_text(path, "evaluation").text() == load_text(path, "calibration").text() == content


@pytest.mark.parametrize("name, content, message", [
    ("a.jsonl", b'{"text": "w1"}\n\n{"page": "w2"}\n', r'a.jsonl: line 3 has no "text"'),
    ("a.jsonl", b'{"text": "w1"}\n{"text": 2}\n', r'a.jsonl: line 2 has no "text"'),
    ("a.jsonl", b'{"text": "w1"}\n{"text"\n', r"a.jsonl: line 2 is not JSON"),
    ("a.jsonl", b'{"text": "\xff"}\n', r"a.jsonl: line 1 is not UTF-8"),
    ("a.jsonl", b'{"text": "\\ud800"}\n', r"a.jsonl: line 1 holds half of a surrogate"),
    ("a.json", b'[{"text": "w1"}, "w2"]', r'a.json: record 2 has no "text"'),
    ("a.jsonl", b"\n \n", r"a.jsonl: no records"),
    ("a.json", b"[]", r"a.json: no records"),
    ("a.txt", b"", r"a.txt: the file is empty"),
    ("a.txt", b"w1 \xff", r"a.txt: not UTF-8 text \(byte 3\)"),
    ("model.safetensors", b"x", r"model.safetensors: unknown kind of file"),
    ("a.parquet.gz", b"x", r"a.parquet.gz: unknown kind of file"),
    ("a.parquet", b"no parquet", r"a.parquet: not a readable parquet file"),
])
def test_malformed_files_are_named_with_the_place(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(UserError, match=message):
        load_text(path, "evaluation")


def test_other_unusable_paths(tmp_path):
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "broken.txt.gz").write_bytes(gzip.compress(b"w1 " * 1000)[:-20])
    (tmp_path / "other.txt.gz").write_bytes(b"w1 w2")
    Dataset.from_dict({"page": ["w1"]}).to_parquet(tmp_path / "pages.parquet")
    messages = {
        "folder.txt": "a folder",
        "broken.txt.gz": "cannot be read",
        "other.txt.gz": "cannot be read",
        "absent.txt": "nor an existing file",
        "pages.parquet": "no column 'text'; it has page",
    }
    for name, message in messages.items():
        with pytest.raises(UserError, match=message):
            load_text(str(tmp_path / name), "evaluation")


# --- calibration windows


def test_random_windows_start_where_the_released_formula_says(tmp_path):
    tokenizer, text = counting(1000)
    path = write(tmp_path / "n.txt", text)
    for seed in range(5):
        result = calibration_windows(path, tokenizer, 20, 30, seed=seed)
        generator = random.Random(seed)
        starts = [generator.randint(0, int(1000 * 0.9) - 30 - 1) for _ in range(20)]
        assert result.ids.tolist() == [list(range(start, start + 30)) for start in starts]


def test_validation_windows_never_meet_training_windows(tmp_path):
    for count in (997, 1000, 1003):
        tokenizer, text = counting(count)
        path = write(tmp_path / f"{count}.txt", text)
        for seed in range(20):
            train = calibration_windows(path, tokenizer, 40, 90, seed=seed).ids
            validation = calibration_windows(path, tokenizer, 40, 90, seed=seed, part="validation").ids
            assert train.max() < math.floor(0.9 * count) <= validation.min()
    first = calibration_windows(path, tokenizer, 2, 40, sampling="first", part="validation").ids
    assert first.tolist() == [list(range(902, 942)), list(range(942, 982))]


def test_first_windows_are_consecutive_from_the_start(tmp_path):
    tokenizer, text = counting(1000)
    path = write(tmp_path / "n.txt", text)
    result = calibration_windows(path, tokenizer, 10, 100, sampling="first")
    assert result.ids.flatten().tolist() == list(range(1000)) and result.info["seed"] is None
    with pytest.raises(UserError, match="only 10 windows of 100 tokens fit, 11 asked for; lower --calib-samples"):
        calibration_windows(path, tokenizer, 11, 100, sampling="first")


def test_too_little_text_to_calibrate_on(tmp_path):
    path = write(tmp_path / "W.txt", words(1000))
    with pytest.raises(UserError, match=r"W.txt: 1000 tokens < one window of 2048"):
        calibration_windows(path, tok_nobos(), 4, 2048, sampling="first")
    with pytest.raises(UserError, match=r"W.txt: 900 tokens \(the train part of 1000\) < one window of 900"):
        calibration_windows(path, tok_nobos(), 4, 900)
    assert calibration_windows(path, tok_nobos(), 4, 899).ids.shape == (4, 899)


def test_documents_that_are_too_short_are_counted_not_searched_forever(tmp_path):
    path = write_documents(tmp_path / "d.jsonl", [words(40)] * 5)
    with pytest.raises(UserError, match="0 of 5 documents have >= 2049 tokens"):
        calibration_windows(path, tok_nobos(), 4, 2048)
    with pytest.raises(UserError, match="0 of 5 documents have >= 41 tokens"):  # exactly one window long: no offset
        calibration_windows(path, tok_nobos(), 4, 40)
    only_last = write_documents(tmp_path / "e.jsonl", [words(10)] * 9 + [words(90)])
    with pytest.raises(UserError, match="1 of 10 documents have >= 51 tokens, but none of the 9 in the train part"):
        calibration_windows(only_last, tok_nobos(), 4, 50)
    assert calibration_windows(only_last, tok_nobos(), 4, 50, part="validation").ids.shape == (4, 50)


def test_windows_from_documents_follow_the_released_draws(tmp_path):
    generator = random.Random(1)
    documents = [words(generator.choice([10, 21, 50]), index) for index in range(60)]
    path = write_documents(tmp_path / "d.jsonl", documents)
    ids = [word_ids(document) for document in documents]
    for part, lo, hi in (("train", 0, 54), ("validation", 54, 60)):
        draw, expected = random.Random(7), []
        while len(expected) < 30:
            chosen = ids[draw.randint(lo, hi - 1)]
            if len(chosen) >= 20 + 1:
                start = draw.randint(0, len(chosen) - 20 - 1)
                expected.append(chosen[start : start + 20])
        assert calibration_windows(path, tok_nobos(), 30, 20, seed=7, part=part).ids.tolist() == expected
    long_ones = [document[:20] for document in ids if len(document) > 20]
    first = calibration_windows(path, tok_nobos(), len(long_ones), 20, sampling="first")
    assert first.ids.tolist() == long_ones


def test_seed_decides_the_windows_and_the_record_says_all(tmp_path):
    path = write(tmp_path / "w.txt", words(1000))
    first, again, other = (calibration_windows(path, tok(), 8, 64, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.ids, again.ids) and first.info == again.info
    assert not torch.equal(first.ids, other.ids)
    assert first.info["token_ids_sha256"] != other.info["token_ids_sha256"]
    info = json.loads(json.dumps(first.info))
    assert (info["samples"], info["seq_len"], info["seed"]) == (8, 64, 0)
    assert (info["sampling"], info["part"]) == ("random", "train")
    assert info["text_sha256"] == hashlib.sha256(words(1000).encode()).hexdigest()
    little_endian = b"".join(value.to_bytes(8, "little") for row in first.ids.tolist() for value in row)
    assert info["token_ids_sha256"] == hashlib.sha256(little_endian).hexdigest()
    assert "drawn at random with seed 0" in describe(info)


@pytest.mark.parametrize("change", [{"seq_len": 1}, {"samples": 0}, {"sampling": "last"}, {"part": "test"}])
def test_senseless_requests_are_refused(tmp_path, change):
    path = write(tmp_path / "w.txt", words(100))
    with pytest.raises(UserError):
        calibration_windows(path, tok(), **{"samples": 2, "seq_len": 8, **change})


# --- cache of tokens


@pytest.fixture
def calls(monkeypatch):
    """List that grows by one with every tokenisation of a whole text."""
    made, real = [], tokens.tokenise
    monkeypatch.setattr(tokens, "tokenise", lambda *arguments: made.append(1) or real(*arguments))
    return made


def test_a_text_is_tokenised_once_for_one_tokenizer_and_policy(calls):
    first = token_stream(words(50), tok())
    second = token_stream(words(50), tok())
    assert len(calls) == 1 and torch.equal(first[0], second[0]) and first[1] == second[1]
    token_stream(words(51), tok())
    token_stream(words(50), tok_nobos())
    token_stream(words(50), tok(), "text")
    assert len(calls) == 4


@pytest.mark.parametrize("damage", [lambda old: b"", lambda old: old[:-9], lambda old: old[:-1] + b"\x55"])
def test_a_damaged_cache_file_is_made_anew(tmp_path, calls, capsys, damage):
    expected = token_stream(words(50), tok())[0]
    (path,) = (tmp_path / "cache" / "tokens").iterdir()
    path.write_bytes(damage(path.read_bytes()))
    for _ in range(2):
        assert torch.equal(token_stream(words(50), tok())[0], expected)
    assert len(calls) == 2 and "damaged cache file" in capsys.readouterr().err


def test_without_a_usable_cache_folder_all_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("LINEARPATCH_CACHE", write(tmp_path / "a_file", "x"))
    assert token_stream(words(5), tok())[0].tolist() == [1] + word_ids(words(5))
    monkeypatch.setenv("LINEARPATCH_CACHE", str(tmp_path / "half"))
    write(tmp_path / "half" / "tokens", "a file where the folder should be")
    assert token_stream(words(5), tok())[0].tolist() == [1] + word_ids(words(5))


def test_tokenizer_hash_sees_what_changes_ids_and_nothing_else():
    tokenizer = tok()
    before = tokenizer_sha256(tokenizer)
    tokenizer(["w1", "w2 w3"], padding=True, truncation=True, max_length=2)
    assert tokenizer_sha256(tokenizer) == before == tokenizer_sha256(tok())
    assert len({before, tokenizer_sha256(tok_nobos()), tokenizer_sha256(tok_eos())}) == 3
    assert tokenizer_sha256(ByT5Tokenizer()) == tokenizer_sha256(ByT5Tokenizer())


# --- real data


@needs_real_data
def test_rows_of_the_real_wikitext_and_ptb():
    text = load_text("wikitext2", "evaluation", REAL_DATA)
    assert len(text.rows) == 4358  # rows of wikitext-2-raw-v1, test
    assert sum(len(row.split()) for row in text.rows) == 241_211
    content = (REAL_DATA / "wikitext2/wiki.test.raw").read_bytes().decode()
    blank = content.split("\n").count(" ")
    assert sum(row == "" for row in text.rows) == blank > 1000
    assert len(text.text()) == len(content) - 2 * blank + 2 * 4357
    assert len(load_text("wikitext2:validation", "evaluation", REAL_DATA).rows) == 3760
    for split, count in {"train": 42068, "validation": 3370, "test": 3761}.items():
        assert len(load_text(f"ptb:{split}", "evaluation", REAL_DATA).rows) == count
    assert load_text("ptb", "evaluation", REAL_DATA).rows[0].startswith("consumers may want to move")


@needs_real_data
def test_calibration_and_evaluation_text_of_c4_are_apart():
    calibration = load_text("c4", "calibration", REAL_DATA)
    evaluation = load_text("c4", "evaluation", REAL_DATA)
    assert not set(calibration.rows) & set(evaluation.rows)
    windows = evaluation_windows("c4", tok_nobos(), 512, data_dir=REAL_DATA)
    assert windows.ids.shape == (256, 512) and windows.info["documents"] == len(evaluation.rows)


# --- embedded text


MARKUP = """{{Infobox person | name = X }}
'''Aa''' ({{IPAc-en|a}}; born May) is a [[river|big river]]<ref name="a">A ''book'' [[x]]</ref> of {{convert|12|km|mi}}.
[[File:Aa.jpg|thumb|A caption with a [[link]]]]
{| class="wikitable"
| cell || other
|}
== History ==
It has {{lang|fr|des eaux}} and &amp; more.
=== Empty ===
{{main|Other}}
== References ==
* A book
=== Deeper ===
Another book
== Uses ==
Used &nbsp;a lot.
[[Category:Rivers]]
"""


def test_stripped_markup():
    assert wiki_markup.article_text("Aa", MARKUP).split("\n\n") == [
        " = Aa = ",
        "Aa (born May) is a big river of 12 km.",
        " = = History = = ",
        "It has des eaux and & more.",
        " = = Uses = = ",
        "Used a lot.",
    ]


def test_only_articles_are_taken_from_a_dump(tmp_path):
    page = "<page><title>{}</title><ns>{}</ns>{}<revision><text>{}</text></revision></page>"
    pages = [("A", 0, "", "text"), ("B", 0, '<redirect title="A"/>', "x"), ("C", 4, "", "x"),
             ("D", 0, "", "x {{Disambiguation}}")]
    dump = "<mediawiki xmlns='http://www.mediawiki.org/xml/export-0.10/'>{}</mediawiki>".format(
        "".join(page.format(*each) for each in pages)
    )
    (tmp_path / "dump.bz2").write_bytes(bz2.compress(dump.encode()))
    assert list(wiki_markup._pages(tmp_path / "dump.bz2")) == [("A", "text")]


def embedded_or_skip(monkeypatch, load):
    """What `load` returns with the machine's own cache, where wheels and stripped articles are kept between runs."""
    monkeypatch.delenv("LINEARPATCH_CACHE")
    if MACHINE_CACHE:
        monkeypatch.setenv("LINEARPATCH_CACHE", MACHINE_CACHE)
    try:
        return load()
    except UserError as error:
        pytest.skip(f"embedded text is not at hand: {error}")


def passages(text, length=12):
    """All runs of 12 words."""
    words_of_text = text.split()
    return {tuple(words_of_text[start : start + length]) for start in range(len(words_of_text) - length + 1)}


@pytest.mark.parametrize("name, counts", [("wiki", (80, 10, 9)), ("news", (232, 29, 28))])
def test_splits_of_embedded_text_share_nothing(monkeypatch, name, counts):
    splits = embedded_or_skip(
        monkeypatch, lambda: [load_text(f"{name}:{split}", "evaluation") for split in ("train", "validation", "test")]
    )
    assert tuple(len(text.rows) for text in splits) == counts
    train, validation, test = ({passage for row in text.rows for passage in passages(row)} for text in splits)
    assert len(train & test) < 0.01 * len(test) and len(train & validation) < 0.01 * len(validation)
    assert [load_text(name, purpose).split for purpose in ("calibration", "evaluation")] == ["train", "test"]
    assert splits[0].text() == "\n\n".join(splits[0].rows)


def test_embedded_articles_are_readable(monkeypatch):
    articles = embedded_or_skip(monkeypatch, wiki_markup.wiki_articles)
    assert sum(map(len, articles)) > 2_500_000
    by_title = {re.match(" = (.+) = \n\n", text)[1]: text for text in articles}
    assert len(by_title) == len(articles) == 99
    for title, text in by_title.items():
        for leftover in ("[[", "]]", "{{", "}}", "{|", "|}", "<ref", "Category:", "thumb|"):
            assert leftover not in text, title
    assert by_title["Anarchism"].split("\n\n")[1].startswith("Anarchism is a political philosophy that advocates")


# --- files out of wheels


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel that pip finds without a network; returns the content of its member tiny/data.txt."""
    content = b"real text"
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    info = "tiny_wheel-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "tiny_wheel-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("tiny/data.txt", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-wheel\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"tiny/data.txt,sha256={digest},{len(content)}\n")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return content


def test_a_member_of_a_wheel_is_unpacked_once(wheel, monkeypatch):
    member = Member("tiny-wheel", "1.0", "tiny/data.txt", hashlib.sha256(wheel).hexdigest())
    path = member.unpacked()
    assert path.read_bytes() == wheel and [each.name for each in path.parent.iterdir()] == ["data.txt"]
    monkeypatch.setattr(wheels, "_download", lambda *_: pytest.fail("fetched again"))
    assert member.unpacked() == path


def test_a_wrong_or_absent_wheel_leaves_nothing(wheel, tmp_path):
    with pytest.raises(WorkError, match="has not the expected sha256"):
        Member("tiny-wheel", "1.0", "tiny/data.txt", "0" * 64).unpacked()
    with pytest.raises(UserError) as error:
        Member("tiny-wheel", "2.0", "tiny/data.txt", "0" * 64).unpacked()
    assert len(str(error.value).splitlines()) == 2 and "tiny-wheel==2.0" in str(error.value)
    write(tmp_path / "cache" / "other-1.0", "a file where the folder should be")
    with pytest.raises(UserError, match="cannot be written"):
        Member("other", "1.0", "tiny/data.txt", "0" * 64).unpacked()
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == ["other-1.0"]


def test_json_too_deep_to_read_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": ' + b"[" * 100000)
    with pytest.raises(UserError, match="a.jsonl: line 1 is not JSON"):
        load_text(str(tmp_path / "a.jsonl"), "evaluation")
