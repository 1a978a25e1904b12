"""Run onnxruntime-genai for the Whisper benchmark: its own builder's Whisper, in a Python environment that has it.

Its encoder makes the memory and the first token; the text follows.  Run as a script, this file is the process that does
so, and reads lines ``encoder`` and ``text``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def runs(
    python: Path, source: Path, folder: Path, form: str, threads: int, features: Any, asked: tuple[list[int], int]
) -> dict[str, Callable[[], None]]:
    """Build its model, and return the timed functions: ``encoder``, ``text`` after it, and ``ready``, a second encoder.

    Turns go forwards and backwards, so that a text needs an encoder on either side.

    Args:
        python: of an environment with onnxruntime-genai, torch and transformers.
        source: a checkpoint, which gets a tokenizer without words.
        folder: new, for its files.
        form: weight format of its matrices.
        threads: of its passes.
        features: float32 [frames, bands].
        asked: what a text begins with, and its tokens beyond that.
    """
    import numpy as np
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(51_866)}, "w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w50257", bos_token="w50257").save_pretrained(source)
    quiet = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"ORT_DISABLE_TELEMETRY": "1"}
    build: list[str | Path] = [
        python,
        "-m",
        "onnxruntime_genai.models.builder",
        "-i",
        source,
        "-o",
        folder,
        "-p",
        form,
        "-e",
        "cpu",
    ]
    built = subprocess.run([*build, "-c", folder.with_name("cache")], capture_output=True, text=True, env=quiet)
    if built.returncode:
        sys.exit(built.stderr)
    described = json.loads((folder / "genai_config.json").read_text("utf-8"))
    for side in ("encoder", "decoder"):
        described["model"][side]["session_options"]["intra_op_num_threads"] = threads
    (folder / "genai_config.json").write_text(json.dumps(described), "utf-8")
    np.save(folder / "features.npy", features.T[None])
    command: list[str | Path] = [python, __file__, folder, json.dumps(asked[0]), str(asked[1])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=quiet)
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None

    def ask(what: str) -> None:
        stdin.write(f"{what}\n")
        stdin.flush()
        while (line := stdout.readline()) != f"{what}\n":
            assert line, "onnxruntime-genai ended"

    ask("encoder")
    return {"encoder": lambda: ask("encoder"), "text": lambda: ask("text"), "ready": lambda: ask("encoder")}


def main() -> None:
    import numpy as np
    import onnxruntime_genai  # type: ignore[import-not-found,unused-ignore]

    folder, begin, written = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    model, longest = onnxruntime_genai.Model(folder), len(begin) + written + 2
    given = {"audio_features": np.load(f"{folder}/features.npy"), "input_ids": np.array([begin], np.int32)}
    generator: Any = None
    for line in sys.stdin:
        if line == "encoder\n":
            settings = onnxruntime_genai.GeneratorParams(model)
            settings.set_search_options(max_length=longest, min_length=longest - 1)
            generator, inputs = onnxruntime_genai.Generator(model, settings), onnxruntime_genai.NamedTensors()
            for name, value in given.items():
                inputs[name] = value
            generator.set_inputs(inputs)
        for _ in range(1 if line == "encoder\n" else written):
            generator.generate_next_token()
        print(line, end="", flush=True)


if __name__ == "__main__":
    main()
