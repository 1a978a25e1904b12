"""A small Whisper of random weights: its configuration, its tokens, and transformers' transcripts with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.transcript import Segment
from edgespec.engine.transcription import TranscriptionSettings
from edgespec.runtimes.files.speech import SpeechPart

DIGITS = Path(__file__).parents[1] / "data" / "digits"  # recordings, by language
SAID = {"en": "nine five three one two one", "de": "eins sechs fünf neun", "es": "cinco cuatro siete tres cinco",
        "fr": "trois deux zéro zéro six"}  # fmt: skip
EOS, CONTEXT, FRAMES, BINS = 60, 64, 200, 80  # words are below EOS, windows have 2 s
LETTERS = " " + "".join(chr(48 + token) for token in range(1, EOS))  # the words
SPEECH = SpeechPart(
    start=61,
    languages={"en": 62, "de": 63, "ko": 64},
    tasks={"translate": 65, "transcribe": 66},
    previous=67,
    no_speech=68,
    no_timestamps=69,
    suppress_tokens=[3, 61, 62, 63, 64, 65, 66, 67, 68],
    begin_suppress_tokens=[5, EOS],
    max_initial_timestamp_index=20,
)
GREEDY = TranscriptionSettings(
    language="en",
    temperatures=(0.0,),
    compression_ratio_threshold=None,
    logprob_threshold=None,
    no_speech_threshold=None,
)
VOCAB = SPEECH.first_time + FRAMES // 2 + 1


def torch_model(seed: int = 0, **changes: Any) -> Any:
    """Make transformers' model with the generation settings that ``SPEECH`` says."""
    import torch
    import transformers

    torch.manual_seed(seed)
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    config = transformers.WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=BINS, encoder_attention_heads=4, decoder_attention_heads=4,
        max_source_positions=FRAMES // 2, max_target_positions=CONTEXT, init_std=0.3, pad_token_id=EOS,
        bos_token_id=EOS, eos_token_id=EOS, decoder_start_token_id=SPEECH.start,
        suppress_tokens=None, begin_suppress_tokens=None, **{**sizes, **changes},
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=SPEECH.start, eos_token_id=EOS, pad_token_id=EOS, bos_token_id=EOS, max_length=CONTEXT,
        suppress_tokens=SPEECH.suppress_tokens, begin_suppress_tokens=SPEECH.begin_suppress_tokens,
        no_timestamps_token_id=SPEECH.no_timestamps, prev_sot_token_id=SPEECH.previous, is_multilingual=True,
        lang_to_id={f"<|{code}|>": token for code, token in SPEECH.languages.items()}, task_to_id=dict(SPEECH.tasks),
        max_initial_timestamp_index=SPEECH.max_initial_timestamp_index, return_timestamps=True, use_cache=True,
    )  # fmt: skip
    return model


def write_whisper(folder: Path, model: Any) -> Path:
    """Write a checkpoint of the model, with a tokenizer of letters and the names of Whisper's special tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    model.save_pretrained(folder)
    named: dict[int | None, str] = {
        EOS: "endoftext", SPEECH.start: "startoftranscript", SPEECH.previous: "startofprev",
        SPEECH.no_speech: "nospeech", SPEECH.no_timestamps: "notimestamps",
        **{token: code for code, token in SPEECH.languages.items()},
        **{token: str(task) for task, token in SPEECH.tasks.items()},
        **{SPEECH.first_time + at: f"{at * 0.02:.2f}" for at in range(FRAMES // 2 + 1)},
    }  # fmt: skip
    made = Tokenizer(models.WordLevel({letter: token for token, letter in enumerate(LETTERS)}, LETTERS[1]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    made.add_special_tokens([AddedToken(f"<|{named[token]}|>", special=True) for token in range(EOS, VOCAB)])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "WhisperTokenizer"}', "utf-8")
    return folder


def told(found: Sequence[Segment]) -> list[tuple[float, float, list[int]]]:
    """Tell times and tokens of segments."""
    return [(round(one.start, 3), round(one.end, 3), one.tokens) for one in found]


def expected(model: Any, features: NDArray[np.float32], **options: Any) -> list[tuple[float, float, list[int]]]:
    """Ask transformers, in which the end of a window's last segment is also the beginning of the next one."""
    import torch

    asked = {"language": "en", "task": "transcribe", "temperature": (0.0,), "return_segments": True} | options
    made = model.generate(torch.from_numpy(features.T[None].copy()), **asked)
    found = []
    for one in made["segments"][0]:
        tokens = one["tokens"].tolist()
        twice = len(tokens) > 2 and tokens[-2] >= SPEECH.first_time
        found.append((round(float(one["start"]), 3), round(float(one["end"]), 3), tokens[:-1] if twice else tokens))
    return found
