"""A bundle as a model of transformers: ``generate`` and pipelines as there, passes and guesses of edgespec.

    from edgespec.transformers import EdgespecForCausalLM
    model = EdgespecForCausalLM.from_pretrained("my-bundle")
    model.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=64)

Needs torch and transformers (the extra ``transformers``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.decoding.settings import Settings
from edgespec.errors import InvalidRequest, install_hint, unknown_name
from edgespec.library import load
from edgespec.runtimes.files.manifest import Manifest

try:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
    from transformers.modeling_outputs import CausalLMOutput
except ImportError as error:
    raise ImportError(f"edgespec.transformers: {error}; {install_hint('transformers')}") from error

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from edgespec.engine.engine import Engine
    from edgespec.runtimes.options import LoadChanges

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_OURS = ("method", "gamma", "fallback", "adaptive")  # settings of edgespec
_KNOWN = {*_SAMPLING, "do_sample", "max_new_tokens", "max_length", "eos_token_id", "pad_token_id", "stop_strings"}
# these change no token, or are of passes that edgespec does in its own way
_INDIFFERENT = {"bos_token_id", "use_cache", "transformers_version", "cache_implementation", "tokenizer",
                "token_type_ids", "synced_gpus", "return_legacy_cache", "decoder_start_token_id",
                "disable_compile", "renormalize_logits", "early_stopping"}  # fmt: skip
_CHUNK = 128  # rows of a pass of ``forward``


class EdgespecConfig(PreTrainedConfig):  # type: ignore[misc] # transformers is not checked
    """Sizes and special tokens of a bundle, as transformers names them."""

    model_type = "edgespec"


class EdgespecForCausalLM:
    """A bundle, or a model that becomes one, with the interface of transformers' causal models.

    Attributes:
        engine: the loaded bundle.
        config: sizes and special tokens.
        generation_config: the model's own sampling, as the bundle has it.
    """

    config_class = EdgespecConfig
    main_input_name = "input_ids"
    base_model_prefix = "model"
    input_modalities = output_modalities = ("text",)
    dtype = torch.float32
    device = torch.device("cpu")
    training = False

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        manifest = engine.bundle.manifest
        self.config = _config(engine.bundle.path, manifest)
        self.generation_config = _generation(manifest)

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], **options: Unpack[LoadChanges]) -> EdgespecForCausalLM:
        """Load a bundle, or export a model first.

        Args:
            name: a bundle's folder or name, or a model: folder, .gguf file, hub id.
            **options: fields of ``LoadOptions``, such as ``threads`` and ``context``.

        Raises:
            EdgespecError: see ``edgespec.load``.
        """
        return cls(load(name, **options))

    # -- as pipelines and evaluations ask ------------------------------------------------------------------------------

    def can_generate(self) -> bool:
        """Return true: it generates."""
        return True

    def eval(self) -> EdgespecForCausalLM:
        """Return the model, which is never trained."""
        return self

    def tie_weights(self) -> None:
        """Do nothing: weights are those of the bundle."""

    def to(self, *where: Any, **options: Any) -> EdgespecForCausalLM:
        """Return the model.

        Raises:
            InvalidRequest: another device or type than the CPU and float32.
        """
        for one in (*where, *options.values()):
            named = getattr(one, "type", one)
            if named not in (None, "cpu", torch.float32):
                raise InvalidRequest(f"to({one}): the tensors of this model stay on the CPU in float32", "leave it out")
        return self

    def close(self) -> None:
        """Free the bundle's memory."""
        self.engine.close()

    def __call__(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **unused: Any
    ) -> CausalLMOutput:
        """Compute the logits of texts.

        Args:
            input_ids: int64 [batch, n].
            attention_mask: [batch, n]; 0 = padding.
            **unused: ignored, as far as it changes no logits.

        Returns:
            logits, float32 [batch, n, vocabulary]; those of padding are 0.
        """
        if names := sorted(name for name, value in unused.items() if value is not None and name not in _INDIFFERENT):
            raise InvalidRequest(f"forward: {', '.join(names)} cannot be given", "give input_ids and attention_mask")
        logits = torch.zeros((*input_ids.shape, self.config.vocab_size))
        for at, (ids, kept) in enumerate(zip(input_ids, _mask(input_ids, attention_mask), strict=True)):
            tokens = ids[kept].numpy()
            slot = self.engine.open_slot(len(tokens))
            rows = []
            for start in range(0, len(tokens), _CHUNK):
                piece = tokens[start : start + _CHUNK]
                rows.append(torch.from_numpy(slot.forward(piece).logits.copy()))
                slot.keep(range(len(piece)))
            slot.close()
            if rows:
                logits[at, kept] = torch.cat(rows)
        return CausalLMOutput(logits=logits)

    forward = __call__

    # -- generation ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        stopping_criteria: Sequence[Callable[[torch.Tensor, Any], torch.Tensor]] | None = None,
        streamer: Any = None,
        **changes: Any,
    ) -> torch.Tensor:
        """Continue texts.

        Args:
            inputs: tokens, int64 [batch, n]; also as ``input_ids``.
            generation_config: settings; those of ``changes`` override it.
            stopping_criteria: each is asked after every token, with the texts and no scores; of several texts, after
                all are written to their lengths.
            streamer: gets the prompt and then every token; for one text.
            **changes: fields of ``GenerationConfig`` (max_new_tokens, do_sample, temperature, top_k, top_p, min_p,
                repetition_penalty, eos_token_id, stop_strings), ``attention_mask``, and settings of edgespec
                (``method``, ``gamma``).

        Returns:
            prompts and new tokens, int64 [batch, m], padded on the right.

        Raises:
            InvalidRequest: an argument that this model cannot follow, by its name.
        """
        ids = changes.pop("input_ids", inputs) if inputs is None else inputs
        mask = changes.pop("attention_mask", None)
        if ids is None or ids.dim() != 2 or not ids.shape[1]:
            raise InvalidRequest(f"input_ids {None if ids is None else list(ids.shape)}: expected tokens [batch, n]")
        if streamer is not None and len(ids) > 1:
            raise InvalidRequest(f"streamer: expected one text, got {len(ids)}", "generate them one by one")
        ours = {name: changes.pop(name) for name in _OURS if name in changes}
        wanted = self._wanted(generation_config, changes)
        criteria = [*(stopping_criteria or ())]
        texts = []
        for row, kept in zip(ids, _mask(ids, mask), strict=True):
            alone = criteria if len(ids) == 1 else ()
            texts.append(self._continue(row, row[kept].tolist(), wanted, ours, alone, streamer))
        pad = wanted.get("pad_token_id")
        pad = self.config.pad_token_id if pad is None else pad
        if criteria and len(ids) > 1:
            _cut(texts, criteria, ids, pad or 0)
        return torch.cat([ids, _padded(texts, max(map(len, texts)), ids.dtype, pad or 0)], 1)

    def _wanted(self, given: GenerationConfig | None, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Merge the model's own settings, a configuration and changes; refuses what edgespec does not do."""
        usual = GenerationConfig().to_dict()
        own = self.generation_config.to_diff_dict()
        wanted = own | ({} if given is None else given.to_diff_dict()) | dict(changes)
        if unknown := [name for name in changes if name not in usual and name not in _KNOWN | _INDIFFERENT]:
            raise unknown_name("argument of generate", unknown[0], [*_KNOWN, *_OURS])
        odd = [
            name
            for name, value in wanted.items()
            if name not in _KNOWN | _INDIFFERENT
            and value is not None
            and value != usual.get(name)
            and value != _off(name)
        ]
        if odd:
            raise InvalidRequest(
                f"generate: {odd[0]}={wanted[odd[0]]!r} is not supported; there are: {', '.join(sorted(_KNOWN))}",
                _ADVICE.get(odd[0], "leave it out"),
            )
        return {name: value for name, value in wanted.items() if value is not None}

    def _continue(
        self,
        row: torch.Tensor,  # [n], with its padding: as criteria and streamers see it
        prompt: list[int],
        wanted: Mapping[str, Any],
        ours: Mapping[str, Any],
        criteria: Sequence[Callable[[torch.Tensor, Any], torch.Tensor]],
        streamer: Any,
    ) -> list[int]:
        """Continue one text -> its new tokens, with the end token if one came."""
        ends = _listed(wanted.get("eos_token_id", self.config.eos_token_id))
        settings = Settings().changed(ignore_eos=True, **_settings(wanted, len(row), self.engine.context), **ours)
        if streamer is not None:
            streamer.put(row[None])
        new: list[int] = []
        with self.engine.stream(prompt, settings) as stream:
            for chunk in stream:
                for token in chunk.round.tokens if chunk.round else ():
                    new.append(token)
                    if streamer is not None:
                        streamer.put(torch.tensor([token]))
                    if token in ends or (criteria and _stops(criteria, row, new)):
                        break
                else:
                    continue
                break
        if streamer is not None:
            streamer.end()
        return new


_ADVICE = {
    "assistant_model": "export the bundle with `--method speculative --draft MODEL`, and say method='speculative'",
    "prompt_lookup_num_tokens": "say method='ngram'",
    "num_beams": "beams change the text: they are not for a causal model here",
    "num_return_sequences": "repeat the prompt, with do_sample=True",
}


def _config(folder: Path, manifest: Manifest) -> EdgespecConfig:
    facts, ends = manifest.target.facts, manifest.tokenizer.eos
    config = EdgespecConfig(
        bos_token_id=manifest.tokenizer.bos,
        eos_token_id=ends[0] if len(ends) == 1 else list(ends) or None,
        pad_token_id=ends[0] if ends else None,
        name_or_path=str(folder),
        architectures=["EdgespecForCausalLM"],
    )
    for name, value in {
        "vocab_size": facts.vocab, "hidden_size": facts.hidden, "num_hidden_layers": facts.layers,
        "num_attention_heads": facts.heads, "max_position_embeddings": facts.context,
    }.items():  # fmt: skip
        setattr(config, name, value)
    return config


def _generation(manifest: Manifest) -> GenerationConfig:
    own, ends = manifest.sampling, manifest.tokenizer.eos
    given = {name: getattr(own, name, None) for name in _SAMPLING} if own is not None else {}
    known = {name: value for name, value in given.items() if value is not None}
    if "temperature" in known:
        known["do_sample"] = True
    return GenerationConfig(eos_token_id=list(ends) or None, pad_token_id=ends[0] if ends else None, **known)


def _settings(wanted: Mapping[str, Any], prompt: int, context: int) -> dict[str, Any]:
    """Name the same settings as edgespec does."""
    found: dict[str, Any] = {"temperature": 0.0}
    if (most := wanted.get("max_new_tokens")) is None:
        most = int(wanted.get("max_length", prompt + 20)) - prompt
    if most < 1:
        raise InvalidRequest(f"max_length {wanted.get('max_length')}: the prompt has {prompt} tokens", "allow more")
    found["max_new_tokens"] = min(int(most), max(1, context - prompt))
    if "repetition_penalty" in wanted:
        found["repetition_penalty"] = wanted["repetition_penalty"]
    if wanted.get("do_sample"):
        # what transformers' generate samples with by default
        usual = {"temperature": 1.0, "top_k": 50}
        found |= {name: wanted.get(name, usual.get(name)) for name in _SAMPLING if name in wanted or name in usual}
        found["seed"] = int(torch.randint(1 << 31, ()))  # so that torch.manual_seed decides
    if stops := wanted.get("stop_strings"):
        found["stop"] = (stops,) if isinstance(stops, str) else tuple(stops)
    return found


def _mask(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()


def _listed(tokens: int | Iterable[int] | None) -> list[int]:
    if tokens is None:
        return []
    return [tokens] if isinstance(tokens, int) else [int(token) for token in tokens]


def _stops(
    criteria: Sequence[Callable[[torch.Tensor, Any], torch.Tensor]], row: torch.Tensor, new: Sequence[int]
) -> bool:
    text = torch.cat([row, torch.tensor(new, dtype=row.dtype)])[None]
    return any(bool(torch.as_tensor(one(text, None)).any()) for one in criteria)


def _padded(texts: Sequence[Sequence[int]], width: int, dtype: torch.dtype, pad: int) -> torch.Tensor:
    new = torch.full((len(texts), width), pad, dtype=dtype)
    for at, text in enumerate(texts):
        new[at, : len(text)] = torch.tensor(text, dtype=dtype)
    return new


def _cut(
    texts: list[list[int]],
    criteria: Sequence[Callable[[torch.Tensor, Any], torch.Tensor]],
    ids: torch.Tensor,  # [batch, n]
    pad: int,
) -> None:
    """Cut each text where a criterion stops it: they see all texts after every token, finished ones padded."""
    width = 0
    while any(len(text) > width for text in texts):
        width += 1
        whole = torch.cat([ids, _padded([text[:width] for text in texts], width, ids.dtype, pad)], 1)
        stopped = torch.zeros(len(texts), dtype=torch.bool)
        for one in criteria:
            stopped |= torch.as_tensor(one(whole, None), dtype=torch.bool)  # of each text, or of all
        for at in range(len(texts)):
            if stopped[at]:
                del texts[at][width:]


def _off(name: str) -> Any:
    """Return the value that turns a setting off."""
    return {"num_beams": 1, "num_return_sequences": 1, "num_beam_groups": 1, "length_penalty": 1.0, "min_length": 0,
            "no_repeat_ngram_size": 0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
            "encoder_repetition_penalty": 1.0, "diversity_penalty": 0.0, "remove_invalid_values": False,
            "return_dict_in_generate": False, "output_scores": False, "output_logits": False}.get(name)  # fmt: skip


# pipelines accept the classes that are known for their task
AutoConfig.register(EdgespecConfig.model_type, EdgespecConfig, exist_ok=True)
AutoModelForCausalLM.register(EdgespecConfig, EdgespecForCausalLM, exist_ok=True)
