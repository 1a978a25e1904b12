"""Voxtral (arXiv 2507.13264): Whisper's encoder over windows of 30 s, four of its rows to one of a Mistral decoder."""

from __future__ import annotations

from edgespec.export.architectures.base import AudioEncoderSpec
from edgespec.export.architectures.towers import FIRST, SECOND, MultimodalCheckpoint, Projector
from edgespec.export.architectures.whisper import Whisper
from edgespec.export.source.derived import taken
from edgespec.export.source.source import Checkpoint, ConfigOnly, renamed
from edgespec.runtimes.files.images import ImageWords
from edgespec.runtimes.files.sound import SoundPart, TranscriptPrompt, WhisperFrontend

PROJECTOR = "multi_modal_projector"
WINDOWS = 40  # of 30 s, as far as texts number rows; the model was made for half an hour (section 2.1)
# config.json has the tower's sizes by other names than Whisper's
SIZES = {"d_model": "hidden_size", "encoder_layers": "num_hidden_layers", "encoder_ffn_dim": "intermediate_size",
         "encoder_attention_heads": "num_attention_heads"}  # fmt: skip
ASK = TranscriptPrompt(text="<s>[INST]{sound}[/INST]{language}[TRANSCRIBE]", language="lang:{code}")


class VoxtralTower(Whisper):
    """Whisper's encoder, without its decoder."""

    def __init__(self, source: Checkpoint) -> None:
        super().__init__(source, encodes=True)

    def embedding_at(self, source: Checkpoint) -> str:
        return "model.encoder.conv1.weight"  # the model has no such tensor, and it is never read


def open_hearing(whole: MultimodalCheckpoint) -> AudioEncoderSpec:
    audio = whole.settings.get("audio_config", {})
    config = {"vocab_size": 1, **audio, **{ours: audio[theirs] for ours, theirs in SIZES.items() if theirs in audio}}
    source = whole.below("conv1.weight")
    if not isinstance(source, ConfigOnly):
        inside = {f"model.encoder.{name}": name for name in source.index}
        source = renamed(source, inside)
    source.config = config
    tower = VoxtralTower(source)
    assert tower.sound is not None
    merge = tower.facts.intermediate // tower.facts.hidden
    front = WhisperFrontend(kind="whisper", features=tower.sound, merge=merge)
    beside = whole.below(f"{PROJECTOR}.linear_1.weight")
    tensors = taken(beside, {FIRST: f"{PROJECTOR}.linear_1", SECOND: f"{PROJECTOR}.linear_2"})
    width, rows = whole.text.facts.hidden, front.rows(front.features.frames)
    activation = str(whole.settings.get("projector_hidden_act", "gelu"))
    projector = Projector(beside, (merge * tower.facts.hidden, width, width), rows, tensors, activation=activation)
    words = ImageWords(placeholder="[AUDIO]", token="[AUDIO]", id=whole.settings.integer("audio_token_id", 24),
                       written="[BEGIN_AUDIO][AUDIO]")  # fmt: skip
    sound = SoundPart(front=front, prompt_template=whole.words(words), max_rows=rows * WINDOWS, transcript_prompt=ASK)
    return AudioEncoderSpec(sound, tower, [projector], [])
