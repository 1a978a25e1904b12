"""Models whose text comes in unusual files, or that say how to sample, from the source to a bundle."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from click.testing import CliRunner
from starlette.testclient import TestClient
from tokenizers import Tokenizer

from edgespec.cli.app import cli
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import Settings
from edgespec.engine.loading import load
from edgespec.errors import ExportError
from edgespec.export.bundle.model_part import open_model
from edgespec.export.source.source import resolve
from edgespec.export.tokenizers.facts import GENERATION, sampling_part, tokenizer_facts
from edgespec.export.tokenizers.files import open_codec
from edgespec.export.tokenizers.generation import decoder_rules
from edgespec.reports.proof import make_golden
from edgespec.runtimes.files.manifest import SamplingPart, TokenizerFacts, read_manifest
from edgespec.runtimes.text.codec import TextCodec
from edgespec.server.app import make_app
from edgespec.server.models import Models
from tests.cli.conftest import Command, Outcome, export
from tests.support import hf, spm
from tests.support.chats import FOLDER
from tests.support.checkpoints import write_chain

TEXT = "The harbour lights came on,  one after another \u2014 na\u00efve \u20ac\U0001f600."
SIZE = 400
FP32 = ("--format", "fp32", "--context", 256)


def checkpoint(folder: Path, vocab: int, model_type: str = "llama", **config: Any) -> Path:
    """Make a small model of that many tokens, without tokenizer files."""
    base = hf.CONFIGS["llama_tied_gqa" if model_type == "llama" else "qwen2_tied_gqa7"]
    hf.write_checkpoint(folder, base | {"vocab_size": vocab, **config}, 3)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    return folder


def facts_of(source: Path, codec: TextCodec) -> TokenizerFacts:
    arch = open_model(source, None)
    return tokenizer_facts(source, arch.config, arch.facts.vocab, codec)


def write(file: Path, value: object) -> None:
    file.write_text(json.dumps(value), "utf-8")


def works(command: Command, source: Path, *options: object) -> TextCodec:
    """Export, run and verify; returns the bundle's tokenizer."""
    bundle = export(source.parent / "bundle", str(source), *(options or FP32))
    made = command("run", bundle, "--prompt", TEXT, "--max-new-tokens", 12, "--json").json
    codec = TextCodec(bundle)
    assert made["stats"]["prompt_tokens"] == len(codec.encode(TEXT))
    assert made["text"] == codec.decode([*codec.encode(TEXT), *made["tokens"]])[len(TEXT) :]
    assert command("verify", bundle, "--max-prompts", 2, "--max-new-tokens", 12, "--json").json["passed"]
    return codec


@pytest.mark.parametrize("kind, options", [("llama", FP32), ("unigram_bytes", ("--format", "int4"))])
def test_sentencepiece_alone(command: Command, tmp_path: Path, kind: str, options: Any) -> None:
    model = spm.train(kind, SIZE)
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    source = checkpoint(tmp_path / "model", reference.vocab_size(), bos_token_id=1, eos_token_id=2)
    (source / ("tokenizer.model" if kind == "llama" else "spiece.model")).write_bytes(model)
    codec = works(command, source, *options)
    assert not (source / "tokenizer.json").exists()
    assert open_codec(source).vocabulary_sha256() == codec.vocabulary_sha256()
    assert codec.encode(TEXT) == [1, *reference.encode(TEXT)]
    assert codec.decode(codec.encode(TEXT)) == TEXT


def test_a_store_and_a_draft_of_sentencepiece_models(command: Command, tmp_path: Path) -> None:
    """A draft may come with tokenizer.json and the target without: the tokens are the same."""
    model = spm.train("llama", SIZE)
    vocab = sentencepiece.SentencePieceProcessor(model_proto=model).vocab_size()
    source, draft = (checkpoint(tmp_path / name, vocab, eos_token_id=2) for name in ("model", "draft"))
    (source / "tokenizer.model").write_bytes(model)
    open_codec(source).tokenizer.save(str(draft / "tokenizer.json"))
    bundle = export(tmp_path / "bundle", str(source), *FP32, "--method", "speculative", "--draft", draft)
    assert command("verify", bundle, "--max-prompts", 1, "--max-new-tokens", 8, "--json").json["passed"]
    (tmp_path / "notes.txt").write_text(TEXT * 20, "utf-8")
    store = tmp_path / "notes.store"
    assert command("ngram", "build", tmp_path / "notes.txt", "--tokenizer", source, "-o", store).code == 0
    made = command("run", bundle, "--prompt", TEXT, "--ngram-store", store, "--max-new-tokens", 4, "--json").json
    assert len(made["tokens"]) == 4


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_vocabulary_and_merges_alone(command: Command, tmp_path: Path, model_type: str) -> None:
    tokenizer = hf.make_tokenizer(SIZE, False)
    model = json.loads(tokenizer.to_str())["model"]
    source = checkpoint(tmp_path / "model", tokenizer.get_vocab_size() + 2, model_type)
    write(source / "vocab.json", model["vocab"])
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (source / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", "utf-8")
    write(source / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
    write(source / "added_tokens.json", {"<|turn|>": tokenizer.get_vocab_size()})
    codec = works(command, source)
    if model_type == "llama":
        assert codec.encode(TEXT) == tokenizer.encode(TEXT).ids
    assert codec.decode(codec.encode(TEXT)) == TEXT
    assert codec.encode("a<|turn|>b</s>")[-3:] == [
        tokenizer.get_vocab_size(), *codec.encode("b"), codec.token_id("</s>"),
    ]  # fmt: skip
    twelve = codec.encode("12")
    assert (len(twelve) == 2) or model_type == "llama"  # qwen2 parts digits


def test_the_words_of_qwen2(tmp_path: Path) -> None:
    """Merges do not cross the pre-tokenizer's boundaries, and text is NFC."""
    base = json.loads(hf.make_tokenizer(SIZE, False).to_str())["model"]["vocab"]
    vocab = base | {"12": len(base), "\u0120a": len(base) + 1, "!\u010a": len(base) + 2, "\u00c3\u00a9": len(base) + 3}
    write(tmp_path / "vocab.json", vocab)
    pairs = "1 2\n\u0120 a\n! \u010a\n\u00c3 \u00a9\n"
    (tmp_path / "merges.txt").write_text(pairs, "utf-8")
    write(tmp_path / "config.json", {"model_type": "qwen2"})
    codec = open_codec(tmp_path)
    ids = {name: codec.token_id(name) for name in ("1", "2", "12", "\u0120a", "!\u010a", "\u00c3\u00a9", "b")}
    assert codec.encode("12") == [ids["1"], ids["2"]]
    assert codec.encode("b a!\n") == [ids["b"], ids["\u0120a"], ids["!\u010a"]]
    assert codec.encode("e\u0301") == [ids["\u00c3\u00a9"]]
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": "GPT2TokenizerFast"})
    assert open_codec(tmp_path).encode("12") == [ids["12"]]


@pytest.mark.parametrize(
    "files, message",
    [
        ({"tokenizer_config.json": '{"tokenizer_class": "RobertaTokenizer"}'}, "of a RobertaTokenizer; expected GPT2"),
        ({"merges.txt": "a b c\n"}, "expected two tokens a line, got 'a b c'"),
        ({"vocab.json": "[]"}, "expected an object of token ids"),
        ({"vocab.json": '{"a": "1"}'}, "expected an object of token ids"),
        ({"vocab.json": "{"}, "vocab.json: not readable as JSON"),
        ({"merges.txt": "x y\n"}, "cannot be converted"),
    ],
)
def test_broken_vocabularies(command: Command, tmp_path: Path, files: dict[str, str], message: str) -> None:
    source = checkpoint(tmp_path / "model", SIZE)
    for name, text in ({"vocab.json": '{"a": 0}', "merges.txt": ""} | files).items():
        (source / name).write_text(text, "utf-8")
    command("export", source, "-o", tmp_path / "out").refused(1, message)
    assert not (tmp_path / "out").exists()


def test_no_tokenizer_at_all(command: Command, tmp_path: Path) -> None:
    command("export", checkpoint(tmp_path / "model", SIZE), "-o", tmp_path / "out").refused(1, "has no tokenizer.json")


# -- tokens that begin and end -----------------------------------------------------------------------------------------


@pytest.fixture
def chained(tmp_path: Path) -> Callable[..., Path]:
    """Make a model that continues ``:`` with ``xqzxqz..``; ``change`` gets its folder before the export."""

    def get(eos: Any, change: Callable[[Path], None] = lambda folder: None, vocab: int = 600, **described: Any) -> Path:
        tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
        source = write_chain(tmp_path / "model", tokenizer, vocab, ":xqzx", described, eos)
        change(source)
        return source

    return get


def number(name: str) -> int:
    found = Tokenizer.from_file(str(FOLDER / "tokenizer.json")).token_to_id(name)
    assert isinstance(found, int)
    return found


def answer(command: Command, source: Path) -> tuple[dict[str, Any], list[int]]:
    """Return the model's continuation, and the bundle's EOS ids; the bundle is verified."""
    bundle = export(source.parent / "bundle", str(source), *FP32)
    made = command("run", bundle, "--prompt", "so:", "--max-new-tokens", 7, "--json").json
    assert command("verify", bundle, "--max-prompts", 1, "--max-new-tokens", 8, "--json").json["passed"]
    return made, load(bundle, threads=1).bundle.manifest.tokenizer.eos


def drop_generation(folder: Path) -> None:
    (folder / "generation_config.json").unlink()


def drop_all(folder: Path) -> None:
    drop_generation(folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    write(folder / "config.json", {key: value for key, value in config.items() if key != "eos_token_id"})


def name_outside_the_text_part(folder: Path) -> None:
    drop_all(folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    write(folder / "config.json", {"model_type": "images", "text_config": config, "eos_token_id": [number("z")]})


def name_in_map(folder: Path) -> None:
    drop_all(folder)
    write(folder / "special_tokens_map.json", {"eos_token": {"content": "z"}, "bos_token": "<s>"})


def broken_generation(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{", "utf-8")


def other_generation(folder: Path) -> None:
    write(folder / "generation_config.json", {"eos_token_id": number("z"), "bos_token_id": None})


def nothing(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    "eos, change, described, expected",
    [
        ("z", drop_generation, {}, ["z"]),
        ("</s>", drop_generation, {"eos_token": {"content": "z", "lstrip": False}}, ["</s>", "z"]),
        ("</s>", drop_all, {"eos_token": "z"}, ["z"]),
        ("</s>", name_in_map, {}, ["z"]),
        ("</s>", name_outside_the_text_part, {}, ["z"]),
        ("z", broken_generation, {}, ["z"]),
        ("</s>", other_generation, {"eos_token": "q"}, ["z", "q"]),
        # there is none
        (-1, nothing, {}, []),
        ([], nothing, {}, []),
    ],
)
def test_where_the_end_of_a_text_is_named(
    chained: Callable[..., Path], eos: Any, change: Any, described: Any, expected: Any
) -> None:
    source = chained(number(eos) if isinstance(eos, str) else eos, change, **described)
    found = facts_of(source, open_codec(source)).eos
    assert found == [number(name) for name in expected]


@pytest.mark.parametrize(
    "eos, text",
    [
        # each of several ends the text and is not included in it, whether it is a special token or a word
        (["z", "</s>"], "xq"),
        (["</s>", "q"], "x"),
        (["</s>"], "xqzxqzx"),
        ([-1], "xqzxqzx"),
    ],
)
def test_what_ends_a_text(command: Command, chained: Callable[..., Path], eos: list[Any], text: str) -> None:
    made, found = answer(command, chained([one if isinstance(one, int) else number(one) for one in eos]))
    assert found == [number(name) for name in eos if isinstance(name, str)]
    assert (made["text"], made["finish"]) == (text, "eos" if len(text) < 7 else "length")
    assert made["tokens"] == [number(name) for name in "xqzxqzx"[: len(text) + 1]]


def test_an_eos_outside_the_vocabulary(command: Command, chained: Callable[..., Path], tmp_path: Path) -> None:
    wanted = ("export", chained(600), "-o", tmp_path / "o")
    for more in ((), ("--dry-run",)):
        command(*wanted, *more).refused(1, "eos_token_id 600, but the model has 600 tokens")
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    "described", [{"bos_token": "<s>"}, {"bos_token": None}, {}, {"bos_token": "<s>", "add_bos_token": True}]
)
def test_bos_of_a_tokenizer_that_adds_none(chained: Callable[..., Path], described: Any) -> None:
    """As of Qwen2: the configuration has a BOS, texts begin without.  What tokenizer.json says counts, as in
    transformers 5."""
    source = chained(number("z"), **described)
    codec = open_codec(source)
    assert codec.encode("so:") == codec.encode("so:", special=False)
    assert facts_of(source, codec).bos == 0


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_rows_that_no_token_has(command: Command, chained: Callable[..., Path]) -> None:
    """Vocabularies are padded: such rows have no text, and a model may write them all the same."""
    source = chained(number("</s>"), vocab=640)
    made, _ = answer(command, source)
    assert made["text"] == "xqzxqzx"
    engine = load(source.parent / "bundle", threads=1)
    for method in ("ar", "ngram"):
        result = engine.generate("so:", logit_bias={620: 1e4}, max_new_tokens=4, method=method)
        assert (result.text, result.tokens) == ("", [620] * 4)
    result = engine.generate([5, 639, number(":")], max_new_tokens=3)
    assert result.text == "xqz"


def test_a_tokenizer_larger_than_the_model(command: Command, chained: Callable[..., Path], tmp_path: Path) -> None:
    source = chained(number("z"), vocab=599)
    command("export", source, "-o", tmp_path / "o").refused(1, "as token 599, but the model has 599 tokens")
    assert not (tmp_path / "o").exists()


def add_to_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|turn|>"])
    tokenizer.add_tokens(["<think>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def add_to_configuration(folder: Path) -> None:
    decoder = {"600": {"content": "<|turn|>", "special": True}, "601": {"content": "<think>", "special": False}}
    write(folder / "tokenizer_config.json", {"added_tokens_decoder": decoder})


def add_apart(folder: Path) -> None:
    add_to_configuration(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    del config["added_tokens_decoder"]["601"]
    write(folder / "tokenizer_config.json", config)
    write(folder / "added_tokens.json", {"<think>": 601})


@pytest.mark.parametrize("add", [add_to_tokenizer, add_to_configuration, add_apart])
def test_added_tokens_beyond_the_base_vocabulary(command: Command, chained: Callable[..., Path], add: Any) -> None:
    source = chained(number("z"), add, vocab=640)
    codec = open_codec(source)
    if add is add_apart:
        assert answer(command, source)[0]["text"] == "xq"
        codec = TextCodec(source.parent / "bundle")
    assert codec.encode("a<|turn|><think>")[1:] == [600, 601]
    assert codec.decode([600, 601]) == "<think>"


def test_added_tokens_of_another_vocabulary_are_left_out(chained: Callable[..., Path]) -> None:
    source = chained(number("z"), added_tokens_decoder={"605": {"content": "<far>"}, "0": {"content": "<s>"}})
    codec = open_codec(source)
    assert codec.token_id("<far>") is None
    assert facts_of(source, codec).eos == [number("z")]


# -- chat --------------------------------------------------------------------------------------------------------------


def test_templates_of_every_place(command: Command, chained: Callable[..., Path], tmp_path: Path) -> None:
    def add(folder: Path) -> None:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | tojson }}:", "utf-8")
        (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}:", "utf-8")

    source = chained(number("z"), add)
    bundle = export(tmp_path / "bundle", str(source), *FP32)
    assert set(TextCodec(bundle).templates) == {"default", "tool_use"}
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "clock", "parameters": {}}}]', "utf-8")
    for more, count in (((), len(TextCodec(bundle).encode("hi:"))), (("--tools", tools), len(TextCodec(bundle).encode(
        tools.read_text("utf-8") + ":")))):  # fmt: skip
        made = chat(bundle, "--stats", *more)
        assert made.out == "xq\n"
        assert f"{count} tokens, 0 of them still in the cache" in made.err


def chat(bundle: Path, *arguments: object) -> Outcome:
    made = CliRunner().invoke(cli, ["run", str(bundle), "--chat", *map(str, arguments)], input="hi\n")
    return Outcome(made.exit_code, made.stdout, made.stderr)


OWN = {"do_sample": True, "temperature": 0.9, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
PARAMS = SamplingParams(temperature=0.9, top_p=0.8, top_k=20, repetition_penalty=1.05)
WORDS = "sampling as the model asks: temperature 0.9, top_p 0.8, top_k 20, repetition_penalty 1.05"
NEW = 24


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a bundle of the embedded model as if its card asked for sampling, with a chat template."""
    folder = tmp_path_factory.mktemp("sampled")
    shutil.copytree(resolve("builtin:shakespeare"), folder / "model")
    for name, more in ((GENERATION, OWN), ("tokenizer_config.json", {"chat_template": hf.CHAT_TEMPLATE})):
        file = folder / "model" / name
        file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | more), "utf-8")
    return export(folder / "bundle", str(folder / "model"))


@pytest.mark.parametrize(
    "given, expected",
    [
        (OWN, SamplingPart(temperature=0.9, top_p=0.8, top_k=20, repetition_penalty=1.05)),
        ({"do_sample": True}, SamplingPart(temperature=1.0)),
        ({"do_sample": True, "temperature": None, "min_p": 0.1}, SamplingPart(temperature=1.0, min_p=0.1)),
        # transformers ignores these where it does not sample, and applies the penalty all the same
        ({"temperature": 0.6, "top_k": 5}, None),
        ({"temperature": 0.6, "repetition_penalty": 1.2}, SamplingPart(repetition_penalty=1.2)),
        ({"do_sample": False, "top_p": 0.9}, SamplingPart(temperature=0.0)),
        ({"eos_token_id": 2}, None),
    ],
)
def test_what_a_model_asks_for(tmp_path: Path, given: dict[str, Any], expected: SamplingPart | None) -> None:
    (tmp_path / GENERATION).write_text(json.dumps(given), "utf-8")
    assert sampling_part(tmp_path) == expected


def test_without_the_file_nothing_is_asked_for(tmp_path: Path) -> None:
    assert sampling_part(tmp_path) is None


def test_older_models_ask_in_config_json(tmp_path: Path) -> None:
    """As transformers does, where there is no generation_config.json."""
    write(tmp_path / "config.json", {"do_sample": True, "temperature": 0.5, "suppress_tokens": [3]})
    assert sampling_part(tmp_path) == SamplingPart(temperature=0.5)
    rules = decoder_rules(tmp_path, {"suppress_tokens": [3]})
    assert rules is not None
    assert rules.suppress_tokens == [3]
    write(tmp_path / GENERATION, {"eos_token_id": 2})
    assert sampling_part(tmp_path) is None
    assert decoder_rules(tmp_path, {"suppress_tokens": [3]}) is None


def test_rules_of_a_decoder_bind_every_method(command: Command, tmp_path: Path) -> None:
    """Tokens that generation_config.json forbids never occur, and speculation still gives plain decoding's text."""
    source = tmp_path / "model"
    shutil.copytree(resolve("builtin:shakespeare-draft"), source)
    file = source / GENERATION
    given = json.loads(file.read_text("utf-8"))

    def greedy(rules: dict[str, Any], *methods: str, prompt: str = "ROMEO:") -> list[list[int]]:
        file.write_text(json.dumps(given | rules), "utf-8")
        bundle = export(tmp_path / "bundle", str(source), *FP32, "--quick", "--overwrite")
        with load(bundle, threads=1) as engine:
            return [engine.generate(prompt, method=name, max_new_tokens=30, temperature=0.0).tokens for name in methods]

    (plain,) = greedy({}, "ar")
    (ended,) = greedy({"eos_token_id": plain[4], "min_new_tokens": 9}, "ar")
    assert len(ended) >= 9
    rules = {
        "suppress_tokens": [plain[0], -1],
        "begin_suppress_tokens": [plain[1]],
        "bad_words_ids": [[plain[2]], [plain[3], plain[4]]],
        "no_repeat_ngram_size": 3,
    }
    text, guessed = greedy(rules, "ar", "ngram", prompt="ROMEO: the king the king the king")
    assert text == guessed
    assert not {plain[0], plain[2]} & {*text}
    assert (plain[3], plain[4]) not in {*pairwise(text)}
    assert len({*zip(text, text[1:], text[2:], strict=False)}) == len(text) - 2


@pytest.mark.parametrize("wrong", [{"top_p": 1.5}, {"temperature": -1}, {"top_k": "many"}, {"repetition_penalty": 0}])
def test_nonsense_is_named(tmp_path: Path, wrong: dict[str, Any]) -> None:
    (tmp_path / GENERATION).write_text(json.dumps(OWN | wrong), "utf-8")
    with pytest.raises(ExportError, match=rf"{GENERATION}: {next(iter(wrong))} is"):
        sampling_part(tmp_path)


def test_python_takes_them_where_nothing_else_is_said(sampled: Path) -> None:
    with load(sampled, threads=1) as engine:
        explicit = Settings(max_new_tokens=NEW, sampling=PARAMS)
        for changes in ({"seed": 3}, {"seed": 3, "temperature": 0.4}, {"seed": 3, "top_k": 0}):
            own = engine.generate("ROMEO:", max_new_tokens=NEW, method="ar", **changes)
            assert own.tokens == engine.generate("ROMEO:", explicit, method="ar", **changes).tokens
            assert own.model_sampling == {
                name: value for name, value in OWN.items() if name != "do_sample" and name not in changes
            }
        greedy = engine.generate("ROMEO:", Settings(method="ar", max_new_tokens=NEW))
        assert greedy.model_sampling == {}
        assert greedy.tokens != engine.generate("ROMEO:", method="ar", max_new_tokens=NEW, seed=3).tokens
        assert engine.generate_batch(["ROMEO:"], max_new_tokens=4, seed=3)[0].model_sampling
        assert engine.generate("ROMEO:", temperature=0, max_new_tokens=4).model_sampling == {"repetition_penalty": 1.05}


def test_run_and_chat_take_them_and_say_so(command: Command, sampled: Path) -> None:
    ask = ("run", sampled, "--prompt", "ROMEO:", "--max-new-tokens", NEW, "--seed", 3, "--method", "ar")
    said = command(*ask)
    assert WORDS in said.err
    explicit = ("--temperature", 0.9, "--top-p", 0.8, "--top-k", 20, "--repetition-penalty", 1.05)
    made = command(*ask, "--json").json
    assert made["text"] == command(*ask, *explicit, "--json").json["text"]
    assert made["model_sampling"] == {name: value for name, value in OWN.items() if name != "do_sample"}
    other = command(*ask, "--temperature", 0, "--repetition-penalty", 1)
    assert "as the model asks" not in other.err
    chat = command("run", sampled, "--chat", "--max-new-tokens", 8, stdin="Good night\n")
    assert WORDS in chat.err
    assert "temperature 0.9, top_k 20, top_p 0.8" in " ".join(command("info", sampled).out.split())


def test_proofs_and_measurements_stay_greedy(command: Command, sampled: Path) -> None:
    golden = read_manifest(sampled).golden
    assert golden
    assert make_golden(sampled, "\n".join(["My lord, the king is here"] * 3), 1) == make_golden(
        sampled, "\n".join(["My lord, the king is here"] * 3), 1
    )
    proof = command("verify", sampled, "--max-prompts", 2, "--max-new-tokens", 8, "--json").json
    assert (proof["passed"], proof["golden"]["same"]) == (True, len(golden))
    timed = command("bench", sampled, "--max-prompts", 1, "--repeats", 1, "--max-new-tokens", 8)
    assert timed.code == 0
    with load(sampled, threads=1) as engine:
        for vector in golden[:2]:
            greedy = Settings(method="ar", max_new_tokens=len(vector.tokens))
            assert engine.generate(vector.prompt, greedy).tokens == vector.tokens


@pytest.mark.parametrize("own", [True, False])
def test_the_server_takes_them_where_the_client_says_nothing(sampled: Path, demo: Path, own: bool) -> None:
    """A model that does not say whether to sample is decoded greedily."""
    bundle = sampled if own else demo
    ask = {"model": "it", "prompt": "ROMEO:", "max_tokens": NEW, "seed": 5, "edgespec": {"method": "ar"}}
    top_k, penalty = (20, 1.05) if own else (0, 1.0)
    said = {"temperature": 0.9, "top_p": 0.8} if own else {"temperature": 0.0, "top_p": 1.0}
    full = ask | said | {"edgespec": {"method": "ar", "top_k": top_k, "repetition_penalty": penalty}}
    with TestClient(make_app(Models({"it": bundle})), base_url="http://localhost") as client:

        def text(body: dict[str, Any]) -> str:
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            found = answer.json()["choices"][0]["text"]
            assert re.search(r"\w", found)
            return str(found)

        assert text(ask) == text(full) != text(full | {"temperature": 0.0 if own else 1.0})
        assert text(ask | {"temperature": 0.2}) == text(full | {"temperature": 0.2})
