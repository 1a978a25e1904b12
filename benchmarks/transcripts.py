"""Compare transcripts with faster-whisper's of the same model: sentences, silence, noise and long recordings.

    python -m benchmarks.transcripts MODEL BUNDLE --rival VENV/bin/python --voices VENV/bin/python

``MODEL`` is a folder of CTranslate2, ``BUNDLE`` was exported from it, and the Python of ``--rival`` has faster-whisper.
40 sentences in five languages are spoken by SVOX Pico, which the Python of ``--voices`` has (py-nanotts), else by
Spoken are 40 sentences in five languages, by SVOX Pico, which the Python of ``--voices`` has (py-nanotts), or otherwise
by espeak-ng.  Both programs have 2 threads, one beam, one sample per temperature, no VAD filter and the usual
thresholds; faster-whisper computes in ``--compute-type``.  They alternate, and times are medians of ``--turns``.  Word
error rates are of words in lower case without punctuation, over all words; with sampled texts each turn has its rate.

Long recordings are English with pauses of .4 s, up to ``--minutes``: ``long`` has a new sentence each time, ``repeats``
the same eight repeatedly.  There the previous text can replace the recording as the model's source.
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
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from statistics import median
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
WHO = """My sister|The old teacher|Our neighbor|A young doctor|The farmer from the valley|Her brother|The captain
One of the students|My grandfather|The woman next door|A friend of mine""".replace("\n", "|").split("|")
DID = """bought a new bicycle|lost the key to the garden|wrote a long letter|found an old map|cooked soup for everybody
waited for the last bus|read a book about the sea|repaired the broken window|sold the small boat|planted three trees
took pictures of the bridge|carried the heavy boxes|heard a strange noise""".replace("\n", "|").split("|")
WHEN = """on Monday morning|before the storm began|after the concert|during the summer holidays|early in the morning
while the children were asleep|near the railway station|without telling anybody|at the end of the month|last winter
when the market was closed|in front of the museum|as soon as the rain stopped|two days ago|for the first time in years
because nobody else had time|on the other side of the river""".replace("\n", "|").split("|")
VOICES = {"en": "en-US", "de": "de-DE", "fr": "fr-FR", "es": "es-ES", "it": "it-IT"}
PICO = """
import json, sys, wave
from py_nanotts import NanoTTS
for file, voice, text in json.load(sys.stdin):
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16000)
        sound.writeframes(NanoTTS().speak(text, voice=voice))
"""
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
Files = list[tuple[Path, str | None]]
Found = list[tuple[str, str, float, float]]  # text, language, seconds of the clock, and of processors


def speak(asked: list[tuple[Path, str, str]], python: str | None) -> None:
    """Speak texts into WAV files of 16,000 samples per second: file, language and text of each."""
    if python is not None:
        jobs = [(str(file), VOICES[language], text) for file, language, text in asked]
        subprocess.run([python, "-c", PICO], input=json.dumps(jobs), text=True, check=True)
        return
    for file, language, text in asked:
        raw = file.with_name("raw.wav")
        subprocess.run(["espeak-ng", "-v", language, "-s", "150", "-w", raw, text], check=True)
        write(file, np.concatenate(list(pieces(raw))))


def spoken(folder: Path, python: str | None) -> list[tuple[Path, str, str]]:
    """Speak the sentences -> file, language and words of each."""
    asked = [
        (folder / f"{language}{number}.wav", language, text)
        for language, lines in SENTENCES.items()
        for number, text in enumerate(re.split(r"[|\n]", lines))
    ]
    speak(asked, python)
    return asked


def fresh() -> Iterator[str]:
    """Make 2,431 sentences, all different: parts go round in lists whose lengths have no common divisor."""
    for at in range(len(WHO) * len(DID) * len(WHEN)):
        yield f"{WHO[at % len(WHO)]} {DID[at % len(DID)]} {WHEN[at % len(WHEN)]}."


def long(folder: Path, texts: Iterator[str], minutes: float, python: str | None) -> tuple[Path, list[str]]:
    """Speak texts one after the other up to a length -> the recording and its words."""
    folder.mkdir()
    pause = np.zeros(int(0.4 * RATE), np.float32)
    parts: list[Samples] = []
    listed: list[str] = []
    while sum(map(len, parts)) < 60 * minutes * RATE:
        asked = [(folder / f"{len(listed) + at}.wav", "en", text) for at, text in enumerate(islice(texts, 40))]
        speak(asked, python)
        for file, _, text in asked:
            parts += [np.concatenate(list(pieces(file))), pause]
            listed.append(text)
            if sum(map(len, parts)) >= 60 * minutes * RATE:
                break
    return write(folder / "whole.wav", np.concatenate(parts)), words(" ".join(listed))


def write(file: Path, samples: Samples) -> Path:
    """Write a WAV file of 16 bits."""
    with wave.open(str(file), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(RATE)
        sound.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return file


def wordless(folder: Path) -> dict[str, Path]:
    """Make minutes without speech."""
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


def ours(bundle: str, files: Files, method: str | None) -> Found:
    found = []
    with edgespec.load(bundle, threads=2) as engine:
        for file, language in files:
            begun, worked = time.perf_counter(), time.process_time()
            made = engine.transcribe(file, language=language, settings=edgespec.Settings(method=method))
            took = time.perf_counter() - begun, time.process_time() - worked
            found.append((made.text, made.language or "", *took))
    return found


def theirs(python: str, model: str, kind: str, files: Files) -> Found:
    asked = {"model": model, "type": kind, "files": [(str(file), language) for file, language in files]}
    done = subprocess.run([python, "-c", RIVAL], input=json.dumps(asked), capture_output=True, text=True, check=True)
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("bundle")
    parser.add_argument("--rival", required=True)
    parser.add_argument("--voices", help="Python that has py-nanotts; without it espeak-ng speaks")
    parser.add_argument("--compute-type", default="int8")
    parser.add_argument("--method")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--only", choices=("given", "detected", "wordless", "long", "repeats"))
    arguments = parser.parse_args()
    figures: dict[str, Any] = {
        "conditions": conditions(threads=2, bundle=arguments.bundle, turns=arguments.turns,
                                 voices="SVOX Pico" if arguments.voices else "espeak-ng")
    }  # fmt: skip
    chosen = (arguments.only,) if arguments.only else ("given", "detected", "wordless", "long", "repeats")

    def both(files: Files) -> dict[str, list[Found]]:
        """Transcribe with both programs, alternating -> the results of each turn."""
        warm = [files[0], *files]  # loading is not timed
        runs: dict[str, Callable[[], Found]] = {
            "edgespec": lambda: ours(arguments.bundle, warm, arguments.method)[1:],
            "faster-whisper": lambda: theirs(arguments.rival, arguments.model, arguments.compute_type, warm)[1:],
        }
        found: dict[str, list[Found]] = {who: [] for who in runs}
        for turn in range(arguments.turns):
            for who in list(runs)[:: 1 if turn % 2 else -1]:
                found[who].append(runs[who]())
        return found

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        said = spoken(folder, arguments.voices)
        for told in ("given", "detected"):
            if told in chosen:
                found = both([(file, language if told == "given" else None) for file, language, _ in said])
                figures[f"sentences, language {told}"] = {who: rates(said, turns) for who, turns in found.items()}
        if "wordless" in chosen:
            quiet = wordless(folder)
            found = both([(file, None) for file in quiet.values()])
            figures["wordless"] = {
                who: {name: {"text": turns[0][at][0][:60], **times([turn[at : at + 1] for turn in turns])}
                      for at, name in enumerate(quiet)}
                for who, turns in found.items()
            }  # fmt: skip
        english = [text for _, language, text in said if language == "en"]
        for name, texts in (("long", fresh()), ("repeats", cycle(english))):
            if name in chosen:
                whole, wanted = long(folder / name, texts, arguments.minutes, arguments.voices)
                found = both([(said[0][0], "en"), (whole, "en")])
                figures[name] = {
                    who: {"wer": [percent(errors(wanted, words(turn[-1][0])), len(wanted)) for turn in turns],
                          "words": len(wanted), **times([turn[-1:] for turn in turns])}
                    for who, turns in found.items()
                }  # fmt: skip
    show(figures)


def percent(wrong: int, count: int) -> float:
    return round(100 * wrong / count, 2)


def times(turns: list[Found]) -> dict[str, float]:
    """Add up the median seconds of the clock and of processors of each recording."""
    each = list(zip(*turns, strict=True))
    return {name: round(sum(median(one[at] for one in turns) for turns in each), 2)
            for name, at in (("seconds", 2), ("processor seconds", 3))}  # fmt: skip


def rates(said: list[tuple[Path, str, str]], turns: list[Found]) -> dict[str, Any]:
    """Count word errors in per cent, right languages and seconds."""
    wrong = [
        [errors(words(text), words(found)) for (_, _, text), (found, *_) in zip(said, texts, strict=True)]
        for texts in turns
    ]
    each = {
        language: percent(sum(one for one, (_, its, _) in zip(wrong[0], said, strict=True) if its == language),
                          sum(len(words(text)) for _, its, text in said if its == language))
        for language in SENTENCES
    }  # fmt: skip
    count = sum(len(words(text)) for _, _, text in said)
    right = sum(found == language for (_, language, _), (_, found, *_) in zip(said, turns[0], strict=True))
    return {"wer": [percent(sum(one), count) for one in wrong], "words": count, "by language": each,
            "languages right": right, **times(turns)}  # fmt: skip


if __name__ == "__main__":
    main()
