"""Train builtin:spoken-digits and builtin:spoken-digits-draft: digits spoken in four languages to words.

Needs torch, transformers, tokenizers and the program espeak-ng, which speaks what the models learn from:

    python -m tools.train_digits -o edgespec/builtin --minutes 5

The target is a small Whisper for windows of 6 seconds: languages, transcription and translation to English,
timestamps, prompts and silence have the tokens and the places that Whisper gives them.  The draft has the same
encoder and a decoder of one layer, distilled from the target's (as distil-whisper, arXiv 2311.00430).  Voices of
``HELD_OUT_VOICES`` (``tools/spoken.py``) and the accent en-gb-x-rp are not trained on.  A report is printed as JSON at
the end.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

from tools.spoken import MELS, RATE_HZ, SAMPLES, WINDOW_S, WORDS, Features, Scene, Sounds, Spoken, spoken
from tools.train_loop import Plan, ahead, distilled_loss, error_rate, optimise, save, spread_loss

BATCH, LONGEST, STEP_S = 128, 64, 0.02
ROWS = 50 * WINDOW_S  # of the encoder
SHAPE = {
    "d_model": 128,
    "encoder_layers": 3,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 384,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 384,
}
SPECIAL = ("<|endoftext|>", "<|startoftranscript|>", *(f"<|{name}|>" for name in WORDS), "<|translate|>",
           "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")  # fmt: skip
TIMES = tuple(f"<|{index * STEP_S:.2f}|>" for index in range(ROWS + 1))
SETTINGS = {
    "tokenizer_class": "WhisperTokenizer",
    "model_max_length": LONGEST,
    "bos_token": "<|endoftext|>",
    "eos_token": "<|endoftext|>",
    "pad_token": "<|endoftext|>",
    "unk_token": "<|endoftext|>",
    "additional_special_tokens": list(SPECIAL[1:]),  # transformers finds timestamps by their place after the last one
    "clean_up_tokenization_spaces": False,
}


def train_tokenizer() -> Tokenizer:
    """Make a byte-level BPE tokenizer as Whisper's: words, then special tokens, then times."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=512, show_progress=False, initial_alphabet=alphabet, special_tokens=[])
    tokenizer.train_from_iterator([f" {words}" for words in WORDS.values() for _ in range(10)], trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in TIMES])
    start = [(name, tokenizer.token_to_id(name)) for name in (SPECIAL[1], "<|notimestamps|>", SPECIAL[0])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start[0][0]} {start[1][0]} $A {start[2][0]}",
        pair=f"{start[0][0]} {start[1][0]} $A $B {start[2][0]}",
        special_tokens=start,
    )
    return tokenizer


def ids_of(tokenizer: Tokenizer) -> dict[str, int]:
    """List the special tokens and times."""
    vocabulary = tokenizer.get_vocab()
    return {name: vocabulary[name] for name in (*SPECIAL, *TIMES)}


class Labels:
    """The decoder's labels for the utterances of a window."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids = ids_of(tokenizer)
        self.word = cache(lambda word: tokenizer.encode(f" {word}", add_special_tokens=False).ids)

    def text(self, text: str) -> list[int]:
        return [token for word in text.split() for token in self.word(word)]

    def time(self, samples: int) -> int:
        return self.ids[TIMES[min(ROWS, round(samples / RATE_HZ / STEP_S))]]

    def of(
        self, said: list[tuple[int, Spoken]], task: str, times: bool, before: Spoken | None = None
    ) -> tuple[list[int], list[int]]:
        """Return (what the decoder is given, what it should answer at each of these tokens; -100 = anything).

        Args:
            said: begin in samples and utterance; the last may reach over the window's end.
            task: "transcribe" or "translate".
            times: whether it writes when each utterance begins and ends.
            before: an utterance whose text is the prompt.
        """
        past = [self.ids["<|startofprev|>"], *self.text(before.text(before.language))] if before else []
        start, end = self.ids["<|startoftranscript|>"], self.ids["<|endoftext|>"]
        if not said:
            return [*past, start], [-100] * len(past) + [self.ids["<|nospeech|>"]]
        language = said[0][1].language
        row = [start, self.ids[f"<|{language}|>"], self.ids[f"<|{task}|>"]]
        row += [] if times else [self.ids["<|notimestamps|>"]]
        free = 2 if times else 3  # tokens after the first two that are given, not chosen
        for begin, one in said:
            if begin + len(one.sound) > SAMPLES:  # it is heard again in the next window
                row += [self.time(begin)] if times else []
                break
            text = self.text(one.text(language if task == "transcribe" else "en"))
            row += [self.time(begin), *text, self.time(begin + len(one.sound))] if times else text
        row.append(end)
        answers = row[1:]
        answers[1:free] = [-100] * (free - 1)
        return past + row[:-1], [-100] * len(past) + answers


Batch = tuple[list[Scene], torch.Tensor, torch.Tensor]  # windows, ids [n, t], labels [n, t]


class Windows:
    """Random windows of utterances, as batches."""

    def __init__(self, said: list[Spoken], labels: Labels, seed: int) -> None:
        self.said, self.labels, self.seed, self.random = said, labels, seed, random.Random(seed)
        self.by_language = {
            name: [(index, one) for index, one in enumerate(said) if one.language == name] for name in WORDS
        }

    def placed(self) -> list[tuple[int, int]]:
        """Utterances of one language, with when they begin: one, or what begins within the window, at most three."""
        if self.random.random() < 0.04:
            return []
        said = self.by_language[self.random.choice(list(WORDS))]
        index, one = self.random.choice(said)
        at = self.random.choice((0, self.random.randint(0, RATE_HZ)))
        if self.random.random() < 0.5:
            return [(min(at, SAMPLES - len(one.sound)), index)]
        found: list[tuple[int, int]] = []
        while at < SAMPLES - RATE_HZ // 4 and len(found) < 3:
            found.append((at, index))
            at += len(one.sound) + self.random.randint(RATE_HZ // 2, 2 * RATE_HZ)
            index, one = self.random.choice(said)
        return found

    def scene(self) -> Scene:
        """Draw a window."""
        said, draw = self.placed(), self.random
        noise = draw.choice((0.0, 10 ** draw.uniform(-4, -1.5)))
        return Scene(said, noise if said else max(noise, 1e-5), draw.random() < 0.5, draw.uniform(0.2, 1.0))

    def batches(self, worker: int) -> Iterator[Batch]:
        """Draw batches without end."""
        self.random.seed(f"{self.seed}.{worker}")
        while True:
            yield self.batch()

    def batch(self) -> Batch:
        """Draw one."""
        scenes = [self.scene() for _ in range(BATCH)]
        rows = []
        for one in scenes:
            said = [(begin, self.said[index]) for begin, index in one.said]
            task = self.random.choice(("transcribe", "transcribe", "translate"))
            partial = bool(said) and said[-1][0] + len(said[-1][1].sound) > SAMPLES
            before = self.random.choice(self.said) if self.random.random() < 0.15 else None
            rows.append(self.labels.of(said, task, partial or self.random.random() < 0.5, before))
        return scenes, *_padded(rows, self.labels.ids["<|endoftext|>"])


def _padded(rows: list[tuple[list[int], list[int]]], filler: int) -> tuple[torch.Tensor, torch.Tensor]:
    size = -(-max(len(ids) for ids, _ in rows) // 8) * 8
    ids = torch.tensor([row + [filler] * (size - len(row)) for row, _ in rows])
    return ids, torch.tensor([row + [-100] * (size - len(row)) for _, row in rows])


def new_model(tokenizer: Tokenizer, shape: dict[str, int], dropout: float) -> WhisperForConditionalGeneration:
    end, start = (tokenizer.token_to_id(name) for name in SPECIAL[:2])
    model = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=tokenizer.get_vocab_size(),
            num_mel_bins=MELS,
            max_source_positions=ROWS,
            max_target_positions=LONGEST,
            dropout=dropout,
            init_std=0.05,
            bos_token_id=end,
            eos_token_id=end,
            pad_token_id=end,
            decoder_start_token_id=start,
            suppress_tokens=None,
            begin_suppress_tokens=None,
            **shape,
        )
    )
    model.generation_config = generation(tokenizer, shape["decoder_layers"])
    return model


def generation(tokenizer: Tokenizer, layers: int) -> GenerationConfig:
    """Say what Whisper's ``generate`` reads: tokens of languages and tasks, and heads that look where it listens."""
    ids = ids_of(tokenizer)
    return GenerationConfig(
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|endoftext|>"],
        pad_token_id=ids["<|endoftext|>"],
        decoder_start_token_id=ids["<|startoftranscript|>"],
        prev_sot_token_id=ids["<|startofprev|>"],
        no_timestamps_token_id=ids["<|notimestamps|>"],
        lang_to_id={f"<|{name}|>": ids[f"<|{name}|>"] for name in WORDS},
        task_to_id={name: ids[f"<|{name}|>"] for name in ("transcribe", "translate")},
        is_multilingual=True,
        begin_suppress_tokens=[tokenizer.token_to_id("Ġ"), ids["<|endoftext|>"]],
        suppress_tokens=[ids[name] for name in SPECIAL[1:-1]],
        max_initial_timestamp_index=50,
        alignment_heads=[[layer, head] for layer in range(layers // 2, layers) for head in range(4)],
        max_length=LONGEST,
        return_timestamps=False,
    )


def written(
    model: WhisperForConditionalGeneration, features: torch.Tensor, tokenizer: Tokenizer, **asked: Any
) -> list[list[str]]:
    """Return the words of the greedy text for each window."""
    with torch.no_grad():
        rows = model.generate(features, do_sample=False, **asked).tolist()
    return [tokenizer.decode(row).split() for row in rows]


def report(models: dict[str, WhisperForConditionalGeneration], windows: Windows, features: Features) -> dict[str, Any]:
    """Word error rates on held-out voices by language, with noise, translated and with times; the draft's agreement."""
    found: dict[str, Any] = {"windows": len(windows.said)}
    said = windows.said
    sounds = Sounds(said, features.device)
    heard = {
        noise: features.of(sounds.mixed([Scene([(RATE_HZ // 4, index)], noise) for index in range(len(said))]))
        for noise in (0.0, 0.01)
    }
    tokenizer = windows.labels.tokenizer
    for name, model in models.items():
        own: dict[str, Any] = {}
        for language in WORDS:
            places = [index for index, _ in windows.by_language[language]]
            for task in ("transcribe", "translate"):
                into = language if task == "transcribe" else "en"
                expected = [said[place].text(into).split() for place in places]
                for noise, rows in heard.items():
                    words = written(model, rows[places], tokenizer, language=language, task=task)
                    own[f"{language} {task} noise {noise}"] = round(error_rate(words, expected), 4)
                    own[f"{language} {task} noise {noise} exact"] = sum(map(list.__eq__, words, expected)) / len(places)
        words = written(model, heard[0.0], tokenizer, task="transcribe")
        expected = [one.text(one.language).split() for one in said]
        own["language detected, transcribed"] = round(error_rate(words, expected), 4)
        found[name] = own
    found["agreement"] = agreement(models, windows, heard[0.0])
    return found


def agreement(
    models: dict[str, WhisperForConditionalGeneration], windows: Windows, heard: torch.Tensor
) -> dict[str, float]:
    """Share of held-out tokens at which each model's likeliest is right; times within .1 s; draft like target."""
    labels = windows.labels
    rows = [labels.of([(RATE_HZ // 4, one)], "transcribe", times=True) for one in windows.said]
    ids, answers = (part.to(heard.device) for part in _padded(rows, labels.ids["<|endoftext|>"]))
    answers[:, 0] = -100
    first, seen = labels.ids[TIMES[0]], answers != -100
    picks = {}
    with torch.no_grad():
        for name, model in models.items():
            picks[name] = model(input_features=heard, decoder_input_ids=ids).logits.argmax(-1)
    at = seen & (answers >= first)
    found = {f"{name} right": ((pick == answers) & seen).sum() / seen.sum() for name, pick in picks.items()}
    for name, pick in picks.items():
        found[f"{name} times within .1 s"] = (((pick - answers).abs() <= 5) & at).sum() / at.sum()
    target, draft = picks.values()
    found["alike"] = ((target == draft) & seen).sum() / seen.sum()
    return {name: round(value.item(), 4) for name, value in found.items()}


def keep(model: WhisperForConditionalGeneration, tokenizer: Tokenizer, folder: Path, features: Features) -> None:
    """Write a Hugging Face folder."""
    save(model, tokenizer, folder, SETTINGS)
    features.extractor.save_pretrained(folder)


def as_draft(target: WhisperForConditionalGeneration, tokenizer: Tokenizer) -> WhisperForConditionalGeneration:
    """Make a model of the target's encoder (which stays as it is), embeddings and last decoder layer."""
    draft = new_model(tokenizer, SHAPE | {"decoder_layers": 1}, 0.0)
    ours, theirs = draft.model, target.model
    ours.encoder.load_state_dict(theirs.encoder.state_dict())
    ours.encoder.requires_grad_(False)
    ours.decoder.embed_tokens.load_state_dict(theirs.decoder.embed_tokens.state_dict())
    ours.decoder.embed_positions.load_state_dict(theirs.decoder.embed_positions.state_dict())
    ours.decoder.layer_norm.load_state_dict(theirs.decoder.layer_norm.state_dict())
    ours.decoder.layers[0].load_state_dict(theirs.decoder.layers[-1].state_dict())
    return draft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of both models")
    parser.add_argument("--minutes", type=float, default=5.0, help="of the target")
    parser.add_argument("--draft-minutes", type=float, default=1.5, help="of the draft")
    parser.add_argument("--utterances", type=int, default=40000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    began = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer, features = train_tokenizer(), Features(device)
    labels = Labels(tokenizer)
    windows = Windows(spoken(args.utterances, args.seed, held_out=False), labels, args.seed)
    held_out = Windows(spoken(max(16, args.utterances // 40), args.seed + 1, held_out=True), labels, args.seed)
    print(
        f"{len(windows.said)} utterances, {len(held_out.said)} held out, {time.monotonic() - began:.0f} s", flush=True
    )

    sounds = {id(one): Sounds(one.said, device) for one in (windows, held_out)}

    def logits(
        model: WhisperForConditionalGeneration, batch: Batch, of: Windows = windows
    ) -> torch.Tensor:  # [n, t, V]
        with torch.no_grad(), torch.autocast(device, enabled=False):
            heard = features.of(sounds[id(of)].mixed(batch[0]))
        return model(input_features=heard, decoder_input_ids=batch[1].to(device)).logits

    few = [held_out.batch() for _ in range(2)]

    def loss(model: WhisperForConditionalGeneration) -> str:
        with torch.no_grad():
            found = [spread_loss(logits(model, one, held_out), one[2].to(device)).item() for one in few]
        return f"{sum(found) / len(found):.4f}"

    target = new_model(tokenizer, SHAPE, 0.1)
    optimise(
        target,
        ahead(windows.batches, device),
        lambda batch: spread_loss(logits(target, batch), batch[2].to(device)),
        lambda: loss(target),
        Plan(args.minutes, args.output / "spoken-digits.pt", device),
    )
    keep(target, tokenizer, args.output / "spoken-digits", features)
    target.to(device)

    draft = as_draft(target, tokenizer)

    def draft_loss(batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            theirs = logits(target, batch)
        return distilled_loss(logits(draft, batch), theirs, batch[2].to(device))

    optimise(
        draft,
        ahead(windows.batches, device),
        draft_loss,
        lambda: loss(draft),
        Plan(args.draft_minutes, args.output / "spoken-digits-draft.pt", device),
    )
    keep(draft, tokenizer, args.output / "spoken-digits-draft", features)
    draft.to(device)
    found = report({"target": target, "draft": draft}, held_out, features)
    (args.output / "spoken-digits.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2), f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
