"""A small Whisper of random weights: its configuration, its tokens, and transformers' model as a listener."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.drafter import Drafter
from edgespec.decoding.loop import DecodeOptions, Round, decode
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafters.plain import Plain
from edgespec.runtimes.files.speech import SpeechPart
from tests.support.reference import FunctionTarget

WORDS, EOS, CONTEXT, FRAMES = 60, 60, 64, 200  # windows of 2 s
SPEECH = SpeechPart(
    bins=80,
    frames=FRAMES,
    start=61,
    languages={"en": 62, "de": 63, "ko": 64},
    tasks={"translate": 65, "transcribe": 66},
    previous=67,
    no_speech=68,
    no_timestamps=69,
    suppressed=[3, 61, 62, 63, 64, 65, 66, 67, 68],
    suppressed_first=[5, EOS],
    latest_first=20,
)
VOCAB = SPEECH.first_time + FRAMES // 2 + 1


def torch_model(seed: int = 0, **changes: Any) -> Any:
    """Make transformers' model with the generation settings that ``SPEECH`` says."""
    import torch
    import transformers

    torch.manual_seed(seed)
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    config = transformers.WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=SPEECH.bins, encoder_attention_heads=4, decoder_attention_heads=4,
        max_source_positions=FRAMES // 2, max_target_positions=CONTEXT, init_std=0.3, pad_token_id=EOS,
        bos_token_id=EOS, eos_token_id=EOS, decoder_start_token_id=SPEECH.start,
        suppress_tokens=None, begin_suppress_tokens=None, **{**sizes, **changes},
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=SPEECH.start, eos_token_id=EOS, pad_token_id=EOS, bos_token_id=EOS, max_length=CONTEXT,
        suppress_tokens=SPEECH.suppressed, begin_suppress_tokens=SPEECH.suppressed_first,
        no_timestamps_token_id=SPEECH.no_timestamps, prev_sot_token_id=SPEECH.previous, is_multilingual=True,
        lang_to_id={f"<|{code}|>": token for code, token in SPEECH.languages.items()}, task_to_id=dict(SPEECH.tasks),
        max_initial_timestamp_index=SPEECH.latest_first, return_timestamps=True, use_cache=True,
    )  # fmt: skip
    return model


class TorchListener:
    """A ``Listener`` of transformers' model, without a cache, through the loop; words are letters."""

    speech, vocab, context, eos = SPEECH, VOCAB, CONTEXT, frozenset({EOS})

    def __init__(self, model: Any, drafter: Drafter | None = None) -> None:
        self.model, self.drafter = model, drafter or Plain()
        self.windows: list[NDArray[np.float32]] = []
        self.prompts: list[list[int]] = []
        self.rounds = 0

    def hear(self, window: NDArray[np.float32]) -> None:
        import torch

        self.windows.append(window)
        with torch.no_grad():
            self.heard = self.model.model.encoder(torch.from_numpy(window.T[None].copy()))
        self.target = FunctionTarget(self._logits, VOCAB, CONTEXT)

    def _logits(self, prefix: tuple[int, ...]) -> NDArray[np.float32]:
        import torch

        with torch.no_grad():
            found = self.model(encoder_outputs=self.heard, decoder_input_ids=torch.tensor([prefix]), use_cache=False)
        return np.asarray(found.logits[0, -1].numpy())

    def row(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        return self._logits(tuple(tokens))

    def write(self, tokens: Sequence[int], sampling: SamplingParams, most: int) -> Iterator[Round]:
        self.prompts.append(list(tokens))
        options = DecodeOptions(most, sampling=sampling, eos=self.eos, logprobs=True)
        for made in decode(self.target, self.drafter, tokens, options):
            self.rounds += 1
            yield made

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 48 for letter in text.strip()]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(48 + token) for token in tokens)
