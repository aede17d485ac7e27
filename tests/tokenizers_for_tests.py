"""Word-level tokenizers of 128 tokens: <pad>=0 <s>=1 </s>=2 <unk>=3, then w0..w123 = 4..127."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

SPECIAL = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}


def tok():
    """Adds BOS <s> before every text, like LLaMA."""
    return _word_level("<s> $A")


def tok_nobos():
    """Adds nothing, like SmolLM and Qwen."""
    return _word_level(None)


def tok_eos():
    """Adds <s> before and </s> after every text."""
    return _word_level("<s> $A </s>")


def _word_level(template):
    vocabulary = {**SPECIAL, **{f"w{i}": 4 + i for i in range(124)}}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    if template:
        backend.post_processor = TemplateProcessing(single=template, special_tokens=list(SPECIAL.items()))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
