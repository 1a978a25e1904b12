"""Small random encoders of texts, as transformers saves them, with the files of sentence-transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

WORDS = re.findall(
    "[a-z]+",
    """good night the a king speak is sweet sorrow parting such that i shall say till it be morrow love hate what light
    through yonder window breaks east sun moon envious sick pale grief who art more fair than she""",
)
TEXTS = ["Good night, good night!", "Parting is such sweet sorrow that I shall say good night till it be morrow.",
         "But soft, what light through yonder window breaks? It is the east, and Juliet is the sun. Arise, fair sun, "
         "and kill the envious moon, who is already sick and pale with grief.", "speak"]  # fmt: skip
SIZES = {"vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
         "intermediate_size": 96, "max_position_embeddings": 128}  # fmt: skip
DISTIL = {"vocab_size": 200, "dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96, "max_position_embeddings": 128}
CONFIGS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", SIZES),
    "roberta": ("Roberta", SIZES | {"max_position_embeddings": 130, "type_vocab_size": 1, "pad_token_id": 1}),
    "xlm-roberta": ("XLMRoberta", SIZES | {"max_position_embeddings": 130, "type_vocab_size": 1, "pad_token_id": 1}),
    "camembert": ("Camembert", SIZES | {"max_position_embeddings": 130, "type_vocab_size": 1, "pad_token_id": 1}),
    "distilbert": ("DistilBert", DISTIL),
    "mpnet": ("MPNet", SIZES | {"max_position_embeddings": 130, "pad_token_id": 1}),
    "modernbert": ("ModernBert", SIZES | {"local_attention": 8, "num_hidden_layers": 4, "pad_token_id": 0}),
    "gte": ("Gte", SIZES | {"type_vocab_size": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}),
    "nomic_bert": ("NomicBert", SIZES | {"type_vocab_size": 2}),
    "eurobert": ("EuroBert", SIZES | {"num_key_value_heads": 2, "pad_token_id": 0}),
    "gemma3_text": ("Gemma3Text", SIZES | {"head_dim": 16, "num_key_value_heads": 1, "sliding_window": 8,
                                           "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
                                           "use_bidirectional_attention": True, "query_pre_attn_scalar": 16}),
}  # fmt: skip
"""transformers' name and the configuration of a small encoder, by model type."""


def torch_model(kind: str, head: str = "Model", seed: int = 0, **more: Any) -> Any:
    """Make a random model in float32 of transformers."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'edgespec[train]'")
    import transformers

    name, sizes = CONFIGS[kind]
    config = getattr(transformers, f"{name}Config")(**{**sizes, **more})
    torch.manual_seed(seed)
    owner = "Gemma3" if kind == "gemma3_text" and head != "Model" else name
    model = getattr(transformers, f"{owner}{head}")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # initial ones say too little: biases of zero, norms of one
            parameter.add_(torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.1))
    return model


def word_piece() -> Tokenizer:
    """Make BERT's kind of tokenizer over a few words, whose pairs have types."""
    characters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, *characters, *(f"##{one}" for one in characters), *",.!?;'"]
    vocab = {name: number for number, name in enumerate(dict.fromkeys(names))}
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    return made


def unigram() -> Tokenizer:
    """Make XLM-R's kind of tokenizer: pieces with a probability each, and pairs without types."""
    characters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces = [*(f"▁{word}" for word in WORDS), "▁", *characters, *(one.upper() for one in characters), *",.!?;'"]
    special = [(name, 0.0) for name in ("<s>", "<pad>", "</s>", "<unk>")]
    vocab = [*special, *((piece, -1.0 - 0.2 * at**0.5) for at, piece in enumerate(pieces))]
    made = Tokenizer(models.Unigram(vocab, unk_id=3))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    made.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    return made


def save(model: Any, folder: Path, tokenizer: Tokenizer | None = None) -> Path:
    """Save a model with its tokenizer."""
    model.save_pretrained(folder)
    (tokenizer or word_piece()).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}", "utf-8")
    return folder


def add_sentences(
    folder: Path, mode: str = "mean_tokens", modules: Sequence[str] = ("Normalize",), **prompts: str
) -> None:
    """Add the files of sentence-transformers; ``Dense`` modules must have their folders already."""
    names = ["Transformer", "Pooling", *modules]
    listed = [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{name}" if at else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for at, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(listed), "utf-8")
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{one}": one == mode for one in
             ("cls_token", "mean_tokens", "max_tokens", "lasttoken", "weightedmean_tokens")}  # fmt: skip
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}), "utf-8")
    told = {"prompts": prompts, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(told), "utf-8")
