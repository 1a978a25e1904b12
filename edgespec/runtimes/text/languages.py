"""Match the language names that users write with the codes of models.

NLLB calls Korean ``kor_Hang``, mBART ``ko_KR``, M2M-100 ``ko`` and Marian ``kor``: ``ko``, ``kor`` and ``Korean`` all
mean the same.  Codes are of ISO 639-1 and 639-3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from edgespec.errors import InvalidRequest

LISTED = """
af afr Afrikaans|am amh Amharic|ar ara Arabic|as asm Assamese|az aze Azerbaijani|ba bak Bashkir|be bel Belarusian
bg bul Bulgarian|bn ben Bengali|bo bod Tibetan|br bre Breton|bs bos Bosnian|ca cat Catalan|cs ces Czech|cy cym Welsh
da dan Danish|de deu German|el ell Greek|en eng English|eo epo Esperanto|es spa Spanish|et est Estonian|eu eus Basque
fa fas Persian|fi fin Finnish|fo fao Faroese|fr fra French|fy fry Frisian|ga gle Irish|gd gla Scottish Gaelic
gl glg Galician|gu guj Gujarati|ha hau Hausa|he heb Hebrew|hi hin Hindi|hr hrv Croatian|ht hat Haitian Creole
hu hun Hungarian|hy hye Armenian|id ind Indonesian|ig ibo Igbo|is isl Icelandic|it ita Italian|ja jpn Japanese
jv jav Javanese|ka kat Georgian|kk kaz Kazakh|km khm Khmer|kn kan Kannada|ko kor Korean|ky kir Kyrgyz|la lat Latin
lb ltz Luxembourgish|lo lao Lao|lt lit Lithuanian|lv lav Latvian|mg mlg Malagasy|mi mri Maori|mk mkd Macedonian
ml mal Malayalam|mn mon Mongolian|mr mar Marathi|ms msa Malay|mt mlt Maltese|my mya Burmese|ne nep Nepali|nl nld Dutch
nn nno Norwegian Nynorsk|no nor Norwegian|oc oci Occitan|or ori Odia|pa pan Punjabi|pl pol Polish|ps pus Pashto
pt por Portuguese|ro ron Romanian|ru rus Russian|sa san Sanskrit|sd snd Sindhi|si sin Sinhala|sk slk Slovak
sl slv Slovenian|sn sna Shona|so som Somali|sq sqi Albanian|sr srp Serbian|su sun Sundanese|sv swe Swedish
sw swa Swahili|ta tam Tamil|te tel Telugu|tg tgk Tajik|th tha Thai|tk tuk Turkmen|tl tgl Tagalog|tr tur Turkish
tt tat Tatar|ug uig Uyghur|uk ukr Ukrainian|ur urd Urdu|uz uzb Uzbek|vi vie Vietnamese|wo wol Wolof|xh xho Xhosa
yi yid Yiddish|yo yor Yoruba|zh zho Chinese|zu zul Zulu
"""
# macrolanguages of ISO 639-3: the member that a model with finer codes has in its place
MEMBERS = {
    "ara": "arb", "aze": "azj", "fas": "pes", "lav": "lvs", "mlg": "plt", "mon": "khk", "msa": "zsm", "nep": "npi",
    "nor": "nob", "ori": "ory", "pus": "pbt", "sqi": "als", "swa": "swh", "uzb": "uzn", "yid": "ydd",
}  # fmt: skip
_WRAPPED = re.compile(r"^(?:>>(.+)<<|__(.+)__|<2(.+)>|<\|(.+)\|>)$")


@lru_cache(maxsize=1)
def _aliases() -> Mapping[str, frozenset[str]]:
    """Map each name of a language to all of its names, in lower case."""
    found: dict[str, frozenset[str]] = {}
    for line in LISTED.strip().replace("\n", "|").split("|"):
        two, three, name = line.split(" ", 2)
        names = {two, three, name.lower(), MEMBERS.get(three, three)}
        found |= dict.fromkeys(names, frozenset(names))
    return found


def code_of(token: str) -> str:
    """Return the code in a token that names a language: ``>>fra<<``, ``__fr__``, ``<2fr>``, ``<|fr|>``, ``fra_Latn``.

    Any other token is returned unchanged.
    """
    found = _WRAPPED.match(token)
    return next(code for code in found.groups() if code) if found else token


def names_of(language: str) -> frozenset[str]:
    """Return all names of a language, in lower case, without script and country; or its own, if it is not listed."""
    base = re.split(r"[_-]", language.lower())[0]
    return _aliases().get(language.lower()) or _aliases().get(base) or frozenset({base})


def choose_language(wanted: str, known: Iterable[str]) -> str:
    """Find the code of a language that a model has.

    Args:
        wanted: its code as the model has it, of ISO 639-1 or 639-3, or its English name.
        known: the model's codes.

    Raises:
        InvalidRequest: it has none, or several (two scripts); the message lists what there is.
    """
    codes = list(known)
    for code in codes:
        if code.lower() == wanted.strip().lower():
            return code
    names = names_of(wanted.strip())
    found = [code for code in codes if code.lower() in names or re.split(r"[_-]", code.lower())[0] in names]
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidRequest(f"language {wanted!r} is several of this model's", f"say which: {', '.join(found)}")
    raise InvalidRequest(f"this model has no language {wanted!r}; it has: {', '.join(sorted(codes))}")
