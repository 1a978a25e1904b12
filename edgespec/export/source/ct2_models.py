"""Folders of CTranslate2: faster-whisper's models and translators, as the models that they were converted from.

A folder holds model.bin, CTranslate2's own config.json and vocabularies.  The variables tell what the converter left
out: only Marian's decoder starts from a zero embedding, T5 has relative position biases, BART and mBART have a norm
after their embeddings, and Pegasus and M2M-100 (so NLLB) have sinusoidal positions.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.source.ct2_files import FILE, LEVELS, Ct2File, Ct2Tensor, read_ct2, tensor_of
from edgespec.export.source.sinusoids import sinusoids
from edgespec.export.source.stored import LOSS, NONSENSE, TRUNCATED, Opened, Stored, Temporary, read_object
from edgespec.runtimes.files.json_file import read_json

Config = dict[str, Any]
ORIGIN = "export the model that it was converted from"
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "source.spm",
    "target.spm", "vocab.json", "target_vocab.json", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
PAIR = "source.spm", "target.spm"
BESIDE = ("calibration.txt",)
ACTIVATIONS = ("relu", "gelu_new", "swish", "gelu", "quick_gelu", "tanh", "sigmoid")  # by number
SPEECH, TRANSLATOR = "WhisperSpec", "TransformerSpec"
SEVERAL = 51_865  # tokens of the smallest Whisper that knows several languages
LATEST_FIRST = 50  # steps of 20 ms: a transcript begins within the first second, as Whisper's own configurations say
PADDING = "<pad>"  # what a Marian begins with, and its converter leaves out
LANGUAGE = re.compile(r"[a-z]{2}_[A-Z]{2}")  # mBART's
NEVER = -1e9  # logit of that token
INSIDE = {
    "self_attention/layer_norm": "self_attn_layer_norm",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "ffn/layer_norm": "final_layer_norm",
    "self_attention/linear_1": "self_attn.out_proj",
    "attention/linear_0": "encoder_attn.q_proj",
    "attention/linear_2": "encoder_attn.out_proj",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
}
FUSED = {
    "self_attention/linear_0": tuple(f"self_attn.{part}_proj" for part in "qkv"),
    "attention/linear_1": tuple(f"encoder_attn.{part}_proj" for part in "kv"),
}
OUTSIDE = {"layer_norm": "layer_norm", "layernorm_embedding": "layernorm_embedding"}
KINDS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}


def open_ct2(folder: Path, spec: str) -> Opened:
    """Open a folder of CTranslate2: its weights stay where they are, what else a model has goes to a temporary folder.

    Args:
        folder: with model.bin.
        spec: what that is, by ``ct2_files.spec_of``.

    Raises:
        ExportError: damaged, of another kind of model than Whisper and the translators that edgespec knows, quantized
            in a way that cannot be read, or without the files of its tokenizer.
    """
    if spec not in (SPEECH, TRANSLATOR):
        raise UnsupportedModel(
            f"{folder}: holds a {spec} of CTranslate2; expected {SPEECH} (Whisper) or {TRANSLATOR} (a translator)",
            ORIGIN,
        )
    try:
        told = read_object(folder / "config.json", "") if (folder / "config.json").is_file() else {}
        held = read_ct2(folder / FILE)
        return _opened(folder, told, held)
    except NONSENSE as error:
        raise ExportError(f"{folder}: its model cannot be understood: {error!r}", TRUNCATED) from error


def _opened(folder: Path, told: Config, held: Ct2File) -> Opened:
    packed = told.get("quantization_type")
    if packed or any(name.endswith("weight_zero") for name in held.variables):
        raise UnsupportedModel(f"{folder}: holds weights packed by AWQ in 4 bits, which are not supported", ORIGIN)
    model = _Whisper(folder, told, held) if held.spec == SPEECH else _translator(folder, told, held)
    config, tensors = model.config(), model.tensors()
    temporary = Temporary()
    made = temporary.path / folder.resolve().name
    made.mkdir()
    for name, value in {"config.json": config, "generation_config.json": model.generation()}.items():
        _write(made / name, value)
    for name in (*TOKENIZER, *BESIDE):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, made / name)
    model.complete(made)
    kinds = sorted({one.dtype for one in held.variables.values() if one.dtype in LEVELS and one.shape})
    named = " and ".join({"I8": "int8", "I16": "int16"}[kind] for kind in kinds)
    notes = [f"the file is quantized ({named}): {LOSS}"] if kinds else []
    return Opened(made, config, tensors, notes, temporary)


def _write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


class _Model:
    """Common parts of encoder-decoders."""

    bias_of_keys = True

    def __init__(self, folder: Path, told: Config, held: Ct2File) -> None:
        self.folder, self.told, self.held = folder, told, held
        self.encoder_layers, self.decoder_layers = (self._layers(side) for side in ("encoder", "decoder"))
        if self.number("decoder/layer_0/self_attention/num_heads_kv", 0):
            raise self.unknown("with fewer heads for keys and values than for queries")

    def unknown(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.folder}: a {self.held.spec} of CTranslate2 {what} is not supported", ORIGIN)

    def _layers(self, side: str) -> int:
        found = {int(match[1]) for name in self.held.variables if (match := re.match(rf"{side}/layer_(\d+)/", name))}
        if not found or found != set(range(len(found))):
            raise ExportError(f"{self.folder / FILE}: expected layers of a {side} from 0 on, got {sorted(found)}",
                              TRUNCATED)  # fmt: skip
        return len(found)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a variable that is one number."""
        found = self.held.variables.get(name)
        if found is None and default is not None:
            return default
        if found is None or found.shape not in ((), (1,)):
            raise ExportError(f"{self.folder / FILE}: expected one number, {name}", TRUNCATED)
        return float(found.raw().reshape(-1)[0].astype(np.float64))

    def shape(self, name: str) -> tuple[int, ...]:
        return tensor_of(self.held, name).shape

    def has(self, name: str) -> bool:
        return name in self.held.variables

    def embedding(self, side: str) -> str:
        """Name the embedding of a side, of which an encoder may have several."""
        if self.has("encoder/embeddings_1/weight"):
            raise self.unknown("with several embeddings for a token of its source")
        plain, listed = f"{side}/embeddings/weight", f"{side}/embeddings_0/weight"
        return listed if self.has(listed) else plain

    def heads(self, side: str, width: int) -> int:
        return int(self.number(f"{side}/num_heads", width // 64))

    @property
    def width(self) -> int:
        return self.shape(self.embedding("decoder"))[1]

    def activation(self) -> str:
        kind = int(self.number("decoder/activation", 0))
        if not 0 <= kind < len(ACTIVATIONS):
            raise self.unknown(f"with the activation {kind}")
        return ACTIVATIONS[kind]

    def vocabulary(self, *names: str) -> list[str]:
        """Read the first existing vocabulary of these names: a JSON list, or one token per line."""
        for name in names:
            if (file := self.folder / f"{name}.json").is_file():
                found = read_json(file, ExportError, "download it again")
                if not isinstance(found, list) or not all(isinstance(token, str) for token in found):
                    raise ExportError(f"{file}: expected a list of tokens", "download it again")
                return found
            if (file := self.folder / f"{name}.txt").is_file():
                return file.read_text("utf-8").removesuffix("\n").split("\n")
        listed = " or ".join(f"{name}.json" for name in names)
        raise ExportError(f"{self.folder}: has no {listed}", "download all files of the model")

    # -- what it becomes -----------------------------------------------------------------------------------------------

    def config(self) -> Config:
        """Make what config.json would say."""
        raise NotImplementedError

    def generation(self) -> Config:
        """Make what generation_config.json would say."""
        raise NotImplementedError

    def complete(self, made: Path) -> None:
        """Add missing files of the tokenizer; raises ExportError if they cannot be made."""

    def tensors(self) -> dict[str, Stored]:
        """Name the tensors as Hugging Face does."""
        found: dict[str, Stored] = {}
        for name in self.held.variables:
            side, _, inner = name.partition("/")
            scope, _, kind = inner.rpartition("/")
            if side not in ("encoder", "decoder") or kind not in KINDS:
                continue
            if match := re.fullmatch(r"layer_(\d+)/(.+)", scope):
                prefix = f"model.{side}.layers.{match[1]}."
                found |= {prefix + key: one for key, one in self._inside(name, match[2], KINDS[kind]).items()}
            elif scope in OUTSIDE:
                found[f"model.{side}.{OUTSIDE[scope]}.{KINDS[kind]}"] = tensor_of(self.held, name)
        return found | self.outside()

    def _inside(self, name: str, scope: str, kind: str) -> dict[str, Stored]:
        if scope in INSIDE:
            return {f"{INSIDE[scope]}.{kind}": tensor_of(self.held, name)}
        if scope not in FUSED:
            raise self.unknown(f"with {name}")
        parts, whole = FUSED[scope], tensor_of(self.held, name)
        rows, rest = divmod(whole.count, len(parts))
        if rest:
            raise ExportError(f"{self.folder / FILE}: {name} has {whole.count} rows, expected {len(parts)} times as "
                              "many as one projection", TRUNCATED)  # fmt: skip
        cut = {f"{part}.{kind}": replace(whole, first=at * rows, count=rows) for at, part in enumerate(parts)}
        return {key: one for key, one in cut.items() if self.bias_of_keys or not key.endswith("k_proj.bias")}

    def outside(self) -> dict[str, Stored]:
        """Name the tensors outside layers, without norms."""
        raise NotImplementedError


class _Whisper(_Model):
    """Models of faster-whisper."""

    bias_of_keys = False

    def config(self) -> Config:
        places = "position_encodings/encodings"
        hidden, bands, _ = self.shape("encoder/conv1/weight")
        vocab, width = self.shape(self.embedding("decoder"))
        if hidden != width:
            raise ExportError(f"{self.folder / FILE}: the encoder is {hidden} wide, the decoder {width}", TRUNCATED)
        end, start = (self._token(name) for name in ("endoftext", "startoftranscript"))
        return {
            "architectures": ["WhisperForConditionalGeneration"],
            "model_type": "whisper",
            "is_encoder_decoder": True,
            "vocab_size": vocab,
            "num_mel_bins": bands,
            "d_model": width,
            **{f"{side}_layers": layers for side, layers in (("encoder", self.encoder_layers),
                                                              ("decoder", self.decoder_layers))},
            **{f"{side}_attention_heads": self.heads(side, width) for side in ("encoder", "decoder")},
            **{f"{side}_ffn_dim": self.shape(f"{side}/layer_0/ffn/linear_0/weight")[0]
               for side in ("encoder", "decoder")},
            "max_source_positions": self.shape(f"encoder/{places}")[0],
            "max_target_positions": self.shape(f"decoder/{places}")[0],
            "activation_function": self.activation(),
            "scale_embedding": False,
            "bos_token_id": end,
            "eos_token_id": end,
            "pad_token_id": end,
            "decoder_start_token_id": start,
            "tie_word_embeddings": True,
        }  # fmt: skip

    def _token(self, name: str) -> int:
        if not hasattr(self, "_ids"):
            listed = self.vocabulary("vocabulary", "shared_vocabulary")
            self._ids = {token: number for number, token in enumerate(listed)}
        if (found := self._ids.get(f"<|{name}|>")) is None:
            raise ExportError(f"{self.folder}: its vocabulary has no <|{name}|>", "download it again")
        return found

    def generation(self) -> Config:
        end, start = (self._token(name) for name in ("endoftext", "startoftranscript"))
        several = self.shape(self.embedding("decoder"))[0] >= SEVERAL or len(self.told.get("lang_ids") or ()) > 1
        return {
            "eos_token_id": end,
            "bos_token_id": end,
            "pad_token_id": end,
            "decoder_start_token_id": start,
            "no_timestamps_token_id": self._token("notimestamps"),
            "suppress_tokens": self.told.get("suppress_ids") or [],
            "begin_suppress_tokens": self.told.get("suppress_ids_begin") or [],
            "is_multilingual": several,
            "max_initial_timestamp_index": LATEST_FIRST,
            **({"alignment_heads": heads} if (heads := self.told.get("alignment_heads")) else {}),
        }

    def complete(self, made: Path) -> None:
        if not (made / "tokenizer.json").is_file():
            several = self.shape(self.embedding("decoder"))[0] >= SEVERAL
            raise ExportError(
                f"{self.folder}: has no tokenizer.json",
                f"put that of openai/whisper-{'base' if several else 'base.en'} into the folder, as faster-whisper "
                "takes it from the hub",
            )

    def outside(self) -> dict[str, Stored]:
        found: dict[str, Stored] = {"model.decoder.embed_tokens.weight": self._take("decoder/embeddings/weight")}
        for side in ("encoder", "decoder"):
            places = self._take(f"{side}/position_encodings/encodings")
            found[f"model.{side}.embed_positions.weight"] = places
        for part in ("conv1", "conv2"):
            for kind in ("weight", "bias"):
                found[f"model.encoder.{part}.{kind}"] = self._take(f"encoder/{part}/{kind}")
        projection = "decoder/projection/weight"
        if self.has(projection) and self.held.aliases.get(projection) != "decoder/embeddings/weight":
            raise self.unknown("whose LM head is not its embedding")
        return found

    def _take(self, name: str) -> Ct2Tensor:
        return tensor_of(self.held, name)


def _translator(folder: Path, told: Config, held: Ct2File) -> _Model:
    """Identify the model of a translator by its variables."""
    if "decoder/layer_0/self_attention/relative_attention_bias" in held.variables:
        return _T5(folder, told, held)
    return _Bart(folder, told, held)


class _Bart(_Model):
    """Marian, BART, mBART, Pegasus, M2M-100 and NLLB."""

    def __init__(self, folder: Path, told: Config, held: Ct2File) -> None:
        super().__init__(folder, told, held)
        self.zero_start = bool(self.number("decoder/start_from_zero_embedding", 0))
        self.pre_norm = bool(self.number("decoder/pre_norm", 1))
        self.normed = self.has("decoder/layernorm_embedding/gamma")
        self.kind = self._kind()
        padded = self.kind == "marian" and not self._has_padding()
        self.behind = 1 if padded else 0

    def _has_padding(self) -> bool:
        return self.tokens("target")[-1] == PADDING

    def tokens(self, side: str) -> list[str]:
        return self.vocabulary("shared_vocabulary", f"{side}_vocabulary")

    def _kind(self) -> str:
        if self.zero_start:
            if self.pre_norm or self.normed:
                raise self.unknown("that starts from a zero embedding, with norms in front of its sub-layers or behind "
                                   "its embeddings,")  # fmt: skip
            return "marian"
        if self.normed:
            return "mbart" if self.pre_norm else "bart"
        places = "decoder/position_encodings/encodings"
        if self.pre_norm and self.has(places) and self.has("decoder/layer_0/self_attention/linear_0/bias"):
            given = tensor_of(self.held, places).read(slice(0, 64), None)
            numbers = np.arange(len(given), dtype=np.int64)
            for kind, first, far in (("m2m_100", 2, True), ("pegasus", 0, False)):
                if np.abs(given - sinusoids(numbers + first, self.width, far=far)).max() < 0.01:
                    return kind
        raise self.unknown("that is none of Marian, T5, BART, mBART, Pegasus, M2M-100 and NLLB (as OpenNMT's own are)")

    def config(self) -> Config:
        width, ids = self.width, self.ids()
        scales = {side: self.number(f"{side}/scale_embeddings", 1) for side in ("encoder", "decoder")}
        scaled = scales["decoder"] != 0 and not np.isclose(scales["decoder"], 1) if self.scale_is_number() else bool(
            scales["decoder"])  # fmt: skip
        places = {side: self.shape(f"{side}/position_encodings/encodings")[0] for side in ("encoder", "decoder")}
        source, target = (self.shape(self.embedding(side))[0] + self.behind for side in ("encoder", "decoder"))
        classes = {"marian": "MarianMTModel", "m2m_100": "M2M100ForConditionalGeneration",
                   "mbart": "MBartForConditionalGeneration", "bart": "BartForConditionalGeneration",
                   "pegasus": "PegasusForConditionalGeneration"}  # fmt: skip
        shared = self.shared()
        return {
            "architectures": [classes[self.kind]],
            "model_type": self.kind,
            "is_encoder_decoder": True,
            "vocab_size": source,
            **({} if shared else {"decoder_vocab_size": target, "share_encoder_decoder_embeddings": False}),
            "d_model": width,
            "encoder_layers": self.encoder_layers,
            "decoder_layers": self.decoder_layers,
            **{f"{side}_attention_heads": self.heads(side, width) for side in ("encoder", "decoder")},
            **{f"{side}_ffn_dim": self.shape(f"{side}/layer_0/ffn/linear_0/weight")[0]
               for side in ("encoder", "decoder")},
            "max_position_embeddings": min(places.values()),
            "activation_function": self.activation(),
            "scale_embedding": scaled,
            **ids,
            "tie_word_embeddings": not self.untied(),
        }  # fmt: skip

    def scale_is_number(self) -> bool:
        """Whether the scale of embeddings is written as a number; else as yes or no."""
        return self.held.variables["decoder/scale_embeddings"].dtype in ("F32", "F16", "BF16")

    def shared(self) -> bool:
        first, second = self.embedding("encoder"), self.embedding("decoder")
        return self.held.variables[first] == self.held.variables[second]

    def untied(self) -> bool:
        name = "decoder/projection/weight"
        return self.has(name) and self.held.variables[name] != self.held.variables[self.embedding("decoder")]

    def ids(self) -> dict[str, int]:
        """Numbers of the tokens that have a part to play."""
        known = {token: number for number, token in enumerate(self.tokens("target"))}
        if self.behind:
            known[PADDING] = len(known)

        def of(key: str, default: str | None) -> int | None:
            name = self.told.get(key, default)
            return known.get(name) if isinstance(name, str) else None

        found = {
            "eos_token_id": of("eos_token", "</s>"),
            "bos_token_id": of("bos_token", "<s>"),
            "pad_token_id": known.get(PADDING, known.get("<blank>")),
            "decoder_start_token_id": known.get(PADDING) if self.zero_start else of("decoder_start_token", "</s>"),
        }
        if self.kind == "mbart" and found["decoder_start_token_id"] is None:  # the first one begins with its language
            found["decoder_start_token_id"] = next(
                (at for token, at in known.items() if LANGUAGE.fullmatch(token)), None
            )
        if found["eos_token_id"] is None or found["decoder_start_token_id"] is None:
            raise ExportError(
                f"{self.folder}: its vocabulary has no token that ends a text, or none that begins one",
                "download config.json and the vocabularies again",
            )
        return {name: number for name, number in found.items() if number is not None}

    def generation(self) -> Config:
        ids = self.ids()
        if self.kind == "marian":
            ids.pop("bos_token_id", None)
            return {**ids, "bad_words_ids": [[ids["pad_token_id"]]], "max_length": 512}
        return {**ids, "max_length": 200}

    def complete(self, made: Path) -> None:
        if (made / "tokenizer.json").is_file():
            return
        wanted = {"marian": PAIR, "pegasus": ("spiece.model",), "bart": ("vocab.json", "merges.txt")}.get(
            self.kind, ("sentencepiece.bpe.model",)
        )
        if missing := [name for name in wanted if not (made / name).is_file()]:
            raise ExportError(
                f"{self.folder}: has no {' and no '.join(missing)}, and no tokenizer.json",
                "put the tokenizer's files of the model that it was converted from into the folder (they are what "
                "ct2-transformers-converter copies with --copy_files)",
            )
        if self.kind != "marian":
            return
        separate = not (self.folder / "shared_vocabulary.json").is_file() and self.tokens("source") != self.tokens(
            "target"
        )
        for side, name in (("source", "vocab.json"), *((("target", "target_vocab.json"),) if separate else ())):
            if not (made / name).is_file():
                tokens = self.tokens(side)
                tokens = tokens if tokens[-1] == PADDING else [*tokens, PADDING]
                _write(made / name, {token: number for number, token in enumerate(tokens)})
        if not (made / "tokenizer_config.json").is_file():
            _write(made / "tokenizer_config.json", {"tokenizer_class": "MarianTokenizer", "separate_vocabs": separate})

    def outside(self) -> dict[str, Stored]:
        found: dict[str, Stored] = {}
        sides = ("decoder",) if self.shared() else ("encoder", "decoder")
        for side in sides:
            name = "model.shared.weight" if len(sides) == 1 else f"model.{side}.embed_tokens.weight"
            found[name] = replace(tensor_of(self.held, self.embedding(side)), behind=self.behind)
        projection = "decoder/projection"
        if self.untied():
            found["lm_head.weight"] = replace(tensor_of(self.held, f"{projection}.weight"), behind=self.behind)
        if self.has(f"{projection}/bias") or self.behind:
            found["final_logits_bias"] = self._logits_bias()
        if self.kind in ("bart", "mbart"):
            for side in ("encoder", "decoder"):
                places = tensor_of(self.held, f"{side}/position_encodings/encodings")
                found[f"model.{side}.embed_positions.weight"] = replace(places, before=2)
        return found

    def _logits_bias(self) -> Stored:
        name = "decoder/projection/bias"
        if self.has(name):
            return replace(tensor_of(self.held, name), behind=self.behind, filled=NEVER, flat=True)
        assert self.behind
        rows = self.shape(self.embedding("decoder"))[0]
        zeros = replace(tensor_of(self.held, "decoder/layer_0/ffn/layer_norm/beta"), first=0, count=0)
        return replace(zeros, before=rows, behind=self.behind, filled=NEVER, flat=True)


class _T5(_Model):
    """T5, Flan-T5, MADLAD-400, mT5 and umT5."""

    def config(self) -> Config:
        vocab, width = self.shape(self.embedding("decoder"))
        bias = "self_attention/relative_attention_bias"
        buckets, heads = self.shape(f"decoder/layer_0/{bias}")
        scaled = self.has("decoder/scale_outputs")
        known = {
            token: number for number, token in enumerate(self.vocabulary("shared_vocabulary", "target_vocabulary"))
        }
        each = f"decoder/layer_1/{bias}"
        own = self.has(each) and self.held.variables[each] != self.held.variables[f"decoder/layer_0/{bias}"]
        start, end, pad = (known.get(str(self.told.get(key, default))) for key, default in (
            ("decoder_start_token", "<pad>"), ("eos_token", "</s>"), ("bos_token", "<pad>")))  # fmt: skip
        if start is None or end is None:
            raise ExportError(f"{self.folder}: its vocabulary has no token that begins or ends a text",
                              "download config.json and the vocabularies again")  # fmt: skip
        activation, gated = self.activation(), self.has("decoder/layer_0/ffn/linear_0_noact/weight")
        if (kind := f"{'gated-' if gated else ''}{activation.removesuffix('_new') if gated else activation}") not in (
            "relu", "gated-gelu", "gated-relu", "gated-silu"):  # fmt: skip
            raise self.unknown(f"with the activation {kind}")
        return {
            "architectures": ["UMT5ForConditionalGeneration" if own else "T5ForConditionalGeneration"],
            "model_type": "umt5" if own else "t5",
            "is_encoder_decoder": True,
            "vocab_size": vocab,
            "d_model": width,
            "d_kv": self.shape("decoder/layer_0/attention/linear_0/weight")[0] // heads,
            "d_ff": self.shape("decoder/layer_0/ffn/linear_0/weight")[0],
            "num_heads": heads,
            "num_layers": self.encoder_layers,
            "num_decoder_layers": self.decoder_layers,
            "relative_attention_num_buckets": buckets,
            "relative_attention_max_distance": int(
                self.number("decoder/layer_0/self_attention/relative_attention_max_distance", 128)),
            "feed_forward_proj": kind,
            "scale_decoder_outputs": scaled,
            "tie_word_embeddings": not self.has("decoder/projection/weight") or self.tied(),
            "pad_token_id": start if pad is None else pad,
            "eos_token_id": end,
            "decoder_start_token_id": start,
        }  # fmt: skip

    def tied(self) -> bool:
        return self.held.variables["decoder/projection/weight"] == self.held.variables[self.embedding("decoder")]

    def generation(self) -> Config:
        config = self.config()
        return {name: config[name] for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id")} | {
            "max_length": 512
        }

    def complete(self, made: Path) -> None:
        if not any((made / name).is_file() for name in ("tokenizer.json", "spiece.model")):
            raise ExportError(
                f"{self.folder}: has no tokenizer.json and no spiece.model",
                "put the one of the model that it was converted from into the folder",
            )

    def tensors(self) -> dict[str, Stored]:
        found: dict[str, Stored] = {"shared.weight": tensor_of(self.held, self.embedding("decoder"))}
        if self.held.variables[self.embedding("encoder")] != self.held.variables[self.embedding("decoder")]:
            raise self.unknown("of T5 with two embeddings")
        if self.has("decoder/projection/weight") and not self.tied():
            found["lm_head.weight"] = tensor_of(self.held, "decoder/projection/weight")
        for side, layers in (("encoder", self.encoder_layers), ("decoder", self.decoder_layers)):
            found[f"{side}.final_layer_norm.weight"] = tensor_of(self.held, f"{side}/layer_norm/gamma")
            for layer in range(layers):
                named = self._block(f"{side}/layer_{layer}/", last=1 if side == "encoder" else 2)
                found |= {f"{side}.block.{layer}.{name}.weight": one for name, one in named.items()}
        return found

    def _block(self, scope: str, last: int) -> dict[str, Stored]:
        own, crossed, dense = "layer.0.SelfAttention", "layer.1.EncDecAttention", f"layer.{last}.DenseReluDense"
        gated = self.has(f"{scope}ffn/linear_0_noact/weight")
        plain = {
            "self_attention/layer_norm/gamma": "layer.0.layer_norm",
            "self_attention/linear_1/weight": f"{own}.o",
            "self_attention/relative_attention_bias": f"{own}.relative_attention_bias",
            "attention/layer_norm/gamma": "layer.1.layer_norm",
            "attention/linear_0/weight": f"{crossed}.q",
            "attention/linear_2/weight": f"{crossed}.o",
            "ffn/layer_norm/gamma": f"layer.{last}.layer_norm",
            "ffn/linear_0/weight": f"{dense}.{'wi_0' if gated else 'wi'}",
            "ffn/linear_0_noact/weight": f"{dense}.wi_1",
            "ffn/linear_1/weight": f"{dense}.wo",
        }
        cut = {"self_attention/linear_0/weight": [f"{own}.{part}" for part in "qkv"],
               "attention/linear_1/weight": [f"{crossed}.{part}" for part in "kv"]}  # fmt: skip
        found: dict[str, Stored] = {
            theirs: tensor_of(self.held, scope + name) for name, theirs in plain.items() if self.has(scope + name)
        }
        for name, parts in cut.items():
            if self.has(scope + name):
                whole = tensor_of(self.held, scope + name)
                rows = whole.count // len(parts)
                found |= {part: replace(whole, first=at * rows, count=rows) for at, part in enumerate(parts)}
        return found
