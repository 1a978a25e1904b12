"""A draft with another tokenizer: compare the vocabularies, and write what a bundle needs of them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import IncompatibleDraft
from edgespec.export.tokenizers.facts import begin_and_ends
from edgespec.runtimes.files.manifest import Matching, ModelFacts, TokenizerFacts, TranslationPart
from edgespec.runtimes.text.codec import TOKENIZER_FILE, TextCodec
from edgespec.runtimes.text.translation import TranslatedText, Translation, translate

TARGET_TOKENS = "target_tokens.bin"


def translation_of(
    target: TextCodec,
    draft: TextCodec,
    facts: tuple[ModelFacts, ModelFacts],
    tokenizer: TokenizerFacts,
    folder: Path,
    config: Mapping[str, Any],
    why: str,
) -> Translation:
    """Compare the vocabularies of a target and a draft with another tokenizer.

    Args:
        target, draft: the tokenizers.
        facts: of both models.
        tokenizer: the target's BOS and EOS.
        folder, config: of the draft.
        why: what differs, for the message.

    Raises:
        IncompatibleDraft: the bytes of one's tokens are not known.
    """
    begin, named = tokenizer.bos, target.token_id(target.special("eos_token"))
    end = named if named in tokenizer.eos else next(reversed(tokenizer.eos), None)
    own, ends = draft.token_id(draft.special("eos_token")), begin_and_ends(folder, config, draft)[1]
    ends = ends if own is None else [own, *ends]
    found = translate(target, draft, (facts[0].vocab, facts[1].vocab), begin, end, ends)
    if not (found.target.known and found.draft.known):
        raise IncompatibleDraft(
            why, "use a draft with the same tokenizer, or where both tokenizers are byte-level or sentencepiece's"
        )
    return found


def own_tokens(translation: Translation, tokens: Sequence[int]) -> list[int]:
    """Translate a text of the target into tokens of the draft."""
    text = TranslatedText(translation)
    text.append(tokens)
    return text.tokens


def special_tokens(translation: Translation) -> list[int]:
    """List the special tokens of the draft that the target has too."""
    return [token for token in translation.draft.special if translation.targets[token] >= 0]


def write_translation(
    folder: Path, prefix: str, translation: Translation, matching: Matching, source: Path
) -> TranslationPart:
    """Write the draft's tokenizer and the tokens that both have into a bundle.

    Args:
        folder, prefix: of the bundle, and the draft's place in it, with a trailing slash.
        translation, matching: see ``TranslationPart``.
        source: the folder that the draft was read from.
    """
    codec, own = translation.draft.codec, folder / prefix
    if codec.converted:
        codec.tokenizer.save(str(own / TOKENIZER_FILE))
    else:
        shutil.copyfile(source / TOKENIZER_FILE, own / TOKENIZER_FILE)
    targets: NDArray[np.int64] = translation.targets
    targets.astype("<i4").tofile(own / TARGET_TOKENS)
    shared = int((targets >= 0).sum())
    return TranslationPart(
        matching=matching, tokens=prefix + TARGET_TOKENS, prefix=list(translation.prefix), shared=shared
    )
