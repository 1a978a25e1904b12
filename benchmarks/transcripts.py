"""Transcripts of spoken sentences, silence, noise and a long recording, beside faster-whisper's of the same model.

    python -m benchmarks.transcripts MODEL BUNDLE --rival VENV/bin/python

``MODEL`` is a folder of CTranslate2, ``BUNDLE`` was exported from it, and the Python of ``--rival`` has faster-whisper.
40 sentences in five languages are spoken by espeak-ng at 16,000 samples a second.  Both programs have 2 threads, one
beam, one sample a temperature, no VAD filter and the usual thresholds; faster-whisper computes in ``--compute-type``.
Word error rates are of words in lower case without punctuation, over all words.  The long recording is the sentences,
with pauses of .4 s, up to ``--minutes``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import time
import unicodedata
import wave
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import edgespec
from benchmarks.common import conditions, show
from edgespec.runtimes.audio.reading import RATE, pieces

SENTENCES = {
    "en": """The train to the coast leaves at half past seven in the morning.
My sister has painted her kitchen a bright yellow.
We could not see the mountain because of the clouds.|Please bring three bottles of water and some bread.
The old bridge was closed for repairs last winter.|He reads the newspaper every day before breakfast.
Nobody knew why the lights went out in the library.|The children played football behind the school until dark.""",
    "de": """Der Zug nach Hamburg fährt um halb acht vom Bahnhof ab.|Meine Schwester hat ihre Küche gelb gestrichen.
Wir konnten den Berg wegen der Wolken nicht sehen.|Bitte bring drei Flaschen Wasser und etwas Brot mit.
Die alte Brücke war im letzten Winter gesperrt.|Er liest jeden Tag vor dem Frühstück die Zeitung.
Niemand wusste, warum das Licht in der Bibliothek ausging.|Die Kinder spielten bis zum Abend hinter der Schule.""",
    "fr": """Le train pour la côte part à sept heures du matin.|Ma sœur a peint sa cuisine en jaune clair.
Nous ne pouvions pas voir la montagne à cause des nuages.|Apportez trois bouteilles d'eau et un peu de pain.
Le vieux pont était fermé pendant tout l'hiver.|Il lit le journal tous les jours avant le petit déjeuner.
Personne ne savait pourquoi la lumière était éteinte.|Les enfants jouaient derrière l'école jusqu'au soir.""",
    "es": """El tren para la costa sale a las siete de la mañana.|Mi hermana ha pintado su cocina de amarillo.
No podíamos ver la montaña por las nubes.|Por favor, trae tres botellas de agua y un poco de pan.
El viejo puente estuvo cerrado todo el invierno.|Lee el periódico todos los días antes del desayuno.
Nadie sabía por qué se apagó la luz en la biblioteca.|Los niños jugaron detrás de la escuela hasta la noche.""",
    "it": """Il treno per la costa parte alle sette di mattina.|Mia sorella ha dipinto la sua cucina di giallo.
Non potevamo vedere la montagna per le nuvole.|Per favore porta tre bottiglie di acqua e un po' di pane.
Il vecchio ponte era chiuso per tutto l'inverno.|Legge il giornale tutti i giorni prima della colazione.
Nessuno sapeva perché la luce si era spenta.|I bambini giocavano dietro la scuola fino a sera.""",
}
RIVAL = """
import json, sys, time
from faster_whisper import WhisperModel
asked = json.load(sys.stdin)
model = WhisperModel(asked["model"], device="cpu", compute_type=asked["type"], cpu_threads=2)
for file, language in asked["files"]:
    begun, worked = time.perf_counter(), time.process_time()
    segments, info = model.transcribe(file, language=language, beam_size=1, best_of=1)
    text = "".join(one.text for one in segments)
    print(json.dumps([text, info.language, time.perf_counter() - begun, time.process_time() - worked]), flush=True)
"""
Samples = NDArray[np.float32]
Found = list[tuple[str, str, float, float]]  # text, language, seconds of the clock, and of processors


def spoken(folder: Path) -> list[tuple[Path, str, str]]:
    """Speak the sentences -> file, language and words of each."""
    found = []
    for language, lines in SENTENCES.items():
        for number, text in enumerate(re.split(r"[|\n]", lines)):
            raw, file = folder / "raw.wav", folder / f"{language}{number}.wav"
            subprocess.run(["espeak-ng", "-v", language, "-s", "150", "-w", raw, text], check=True)
            write(file, np.concatenate(list(pieces(raw))))
            found.append((file, language, text))
    return found


def write(file: Path, samples: Samples) -> Path:
    """Write a WAV file of 16 bits."""
    with wave.open(str(file), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(RATE)
        sound.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return file


def wordless(folder: Path) -> dict[str, Path]:
    """Make minutes in which nobody speaks."""
    rng, count = np.random.default_rng(0), 60 * RATE
    noise = rng.standard_normal(count).astype(np.float32)
    at = np.arange(count) / RATE
    chords = sum(np.sin(2 * np.pi * 220 * step * at) for step in (1, 1.26, 1.5, 2)) * np.exp(-3 * (at % 0.5))
    made = {
        "silence": np.zeros(count, np.float32), "rounding": noise * np.float32(1 / 32768),
        "hiss": noise * np.float32(.001),
        "noise": noise * np.float32(.05), "hum": (.1 * np.sin(2 * np.pi * 50 * at)).astype(np.float32),
        "music": (.1 * chords).astype(np.float32),
    }  # fmt: skip
    return {name: write(folder / f"{name}.wav", samples) for name, samples in made.items()}


def words(text: str) -> list[str]:
    """Split a text into words in lower case, without punctuation."""
    return re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", text).lower())


def errors(wanted: list[str], got: list[str]) -> int:
    """Count the words to change, leave out or add (Levenshtein's distance)."""
    row = list(range(len(got) + 1))
    for number, word in enumerate(wanted, 1):
        last, row[0] = row[0], number
        for at, other in enumerate(got, 1):
            last, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, last + (word != other))
    return row[-1]


def ours(bundle: str, files: list[tuple[Path, str | None]], method: str | None) -> Found:
    found = []
    with edgespec.load(bundle, threads=2) as engine:
        for file, language in files:
            begun, worked = time.perf_counter(), time.process_time()
            made = engine.transcribe(file, language=language, settings=edgespec.Settings(method=method))
            took = time.perf_counter() - begun, time.process_time() - worked
            found.append((made.text, made.language or "", *took))
    return found


def theirs(python: str, model: str, kind: str, files: list[tuple[Path, str | None]]) -> Found:
    asked = {"model": model, "type": kind, "files": [(str(file), language) for file, language in files]}
    done = subprocess.run([python, "-c", RIVAL], input=json.dumps(asked), capture_output=True, text=True, check=True)
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("bundle")
    parser.add_argument("--rival", required=True)
    parser.add_argument("--compute-type", default="int8")
    parser.add_argument("--method")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--only", choices=("given", "detected", "wordless", "long"))
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"conditions": conditions(threads=2, bundle=arguments.bundle)}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        said = spoken(folder)

        def both(files: list[tuple[Path, str | None]]) -> dict[str, Found]:
            warm = [files[0], *files]  # loading is not timed
            mine = ours(arguments.bundle, warm, arguments.method)[1:]
            rival = theirs(arguments.rival, arguments.model, arguments.compute_type, warm)[1:]
            return {"edgespec": mine, "faster-whisper": rival}

        for told in ("given", "detected"):
            if arguments.only in (None, told):
                found = both([(file, language if told == "given" else None) for file, language, _ in said])
                figures[f"sentences, language {told}"] = {who: rates(said, texts) for who, texts in found.items()}
        if arguments.only in (None, "wordless"):
            quiet = wordless(folder)
            found = both([(file, None) for file in quiet.values()])
            figures["wordless"] = {
                who: {name: {"text": text[:60], "seconds": round(took, 2), "processor seconds": round(worked, 2)}
                      for name, (text, _, took, worked) in zip(quiet, texts, strict=True)}
                for who, texts in found.items()
            }  # fmt: skip
        if arguments.only in (None, "long"):
            english = [(file, text) for file, language, text in said if language == "en"]
            pause = np.zeros(int(0.4 * RATE), np.float32)
            parts: list[Samples] = []
            listed: list[str] = []
            while sum(map(len, parts)) < 60 * arguments.minutes * RATE:
                file, text = english[len(listed) % len(english)]
                parts += [np.concatenate(list(pieces(file))), pause]
                listed.append(text)
            whole = write(folder / "long.wav", np.concatenate(parts))
            wanted = words(" ".join(listed))
            with_short = [(english[0][0], "en"), (whole, "en")]
            figures["long"] = {
                who: {"wer": round(100 * errors(wanted, words(texts[-1][0])) / len(wanted), 2), "words": len(wanted),
                      "seconds": round(texts[-1][2], 1), "processor seconds": round(texts[-1][3], 1)}
                for who, texts in both(list(with_short)).items()
            }  # fmt: skip
    show(figures)


def rates(said: list[tuple[Path, str, str]], texts: Found) -> dict[str, Any]:
    """Count word errors in per cent, right languages and seconds."""
    wrong = [errors(words(text), words(found)) for (_, _, text), (found, *_) in zip(said, texts, strict=True)]
    each = {
        language: round(100 * sum(one for one, (_, its, _) in zip(wrong, said, strict=True) if its == language)
                        / sum(len(words(text)) for _, its, text in said if its == language), 1)
        for language in SENTENCES
    }  # fmt: skip
    count = sum(len(words(text)) for _, _, text in said)
    right = sum(found == language for (_, language, _), (_, found, *_) in zip(said, texts, strict=True))
    return {"wer": round(100 * sum(wrong) / count, 2), "words": count, "by language": each, "languages right": right,
            "seconds": round(sum(took for *_, took, _ in texts), 1),
            "processor seconds": round(sum(worked for *_, worked in texts), 1)}  # fmt: skip


if __name__ == "__main__":
    main()
