// Written by `python -m tools.generate_constants` from Python's constants: not to be edited.
package dev.edgespec.runtimes

const val BLOCK = 32 // weights of a row that are stored together
const val TILE = 16
const val KV_BLOCK = 128 // tokens that are stored together
const val SINK_ROWS = 16
const val STATE_ROWS = 144 // tokens whose part in a convolution is kept
const val HELD_BYTES = 64 // of a delta rule's states: how many tokens they hold
const val CHECKPOINTS = 4 // of a slot's states, where memory allows
const val LONGEST_PASS = 128 // rows: what the ring must hold beyond its window
const val CENTROIDS = 16 // of a sub-vector of nomad's codes
const val EXACT_SINKS = 4 // first tokens whose keys are exact where others are coded
const val NO_KEYS = 6
const val GAMMA = 8 // maximum draft tokens per round of adaptive control
const val LEAST_GAMMA = 6 // of a method without its own
const val FIRST_ROWS = 3 // of a drafter's first step: the pending token and two guesses
const val MOST_IDLE = 4 // finished conversations whose KV is kept
const val PREFILL_CHUNK = 128
val VERIFY_SIZES = listOf(1, 2, 3, 5) // rows of the passes that are timed
val LEARNT = listOf("int4", "nomad1", "nomad2")
val DRAFT_ATTENTION = listOf("int4", "nomad", "nomad2")
val GAMMAS = mapOf("ar" to 1, "ngram" to 8)

/** A weight format: bytes of a level, of its scale, of both as ONNX Runtime packs them, of both [read]. */
class FormatSpec(val level: Double, val scale: Double, val packed: Double, val family: String,
    val read: Double)

val SPECS = mapOf(
    "int4" to FormatSpec(0.5, 0.125, 0.75, "blocks", 0.5625),
    "int4-64" to FormatSpec(0.5, 0.125, 0.75, "blocks", 0.53125),
    "int8" to FormatSpec(1.0, 0.125, 1.25, "blocks", 1.0625),
    "w8a8" to FormatSpec(1.0, 0.0, 1.0, "channels", 1.0009765625),
    "fp32" to FormatSpec(4.0, 0.0, 4.0, "floats", 4.0),
    "file" to FormatSpec(0.5, 0.0, 0.5, "blocks", 0.578125),
)
val FORMATS = SPECS.keys.toList()

/** A format of keys or values: its number, bytes of a channel of 128 tokens and of scales, its name. */
class KeySpec(val number: Long, val channel: Int, val scales: Int, val title: String)

val KEYS = mapOf(
    "f32" to KeySpec(0, 512, 0, "f32"),
    "f16" to KeySpec(1, 256, 0, "float16"),
    "int8" to KeySpec(2, 128, 512, "int8"),
    "int4" to KeySpec(3, 64, 0, "int4"),
    "nomad1" to KeySpec(4, 64, 0, "nomad (d_sub 1)"),
    "nomad2" to KeySpec(5, 32, 0, "nomad (d_sub 2)"),
)

val ATTENTION = mapOf(
    "f32" to KvFormat("f32", "f32", window = 0, sinks = 0),
    "f16" to KvFormat("f16", "f16", window = 0, sinks = 0),
    "int8" to KvFormat("int8", "int8", window = 0, sinks = 0),
    "int4" to KvFormat("int4", "int8", window = 64, sinks = 4),
    "nomad" to KvFormat("nomad1", "int8", window = 64, sinks = 4),
    "nomad2" to KvFormat("nomad2", "int8", window = 128, sinks = 4),
)

// keys of manifests up to schema 5 and their names since, by the place of their object
internal val RENAMED = mapOf(
    "model" to mapOf("fine" to "int8_fraction", "headroom" to "extra_rows", "kept" to "bytes_per_weight",
    "low_bytes" to "low_nibble_bytes", "tapped" to "aux_hidden_layers"),
    "model/graphs/*" to mapOf("least_length" to "min_length"),
    "model/source" to mapOf("most" to "max_rows"),
    "model/image" to mapOf("most" to "max_rows", "places" to "position_embedding", "taps" to "deepstack_layers",
    "words" to "prompt_template"),
    "model/image/processor" to mapOf("least" to "min_pixels", "most" to "max_pixels"),
    "model/sound" to mapOf("ask" to "transcript_prompt", "most" to "max_rows", "words" to "prompt_template"),
    "model/sound/front" to mapOf("least" to "min_samples"),
    "rules" to mapOf("suppressed" to "suppress_tokens", "begin_suppressed" to "begin_suppress_tokens",
    "bad_words" to "bad_words_ids", "no_repeat" to "no_repeat_ngram_size", "least" to "min_length",
    "least_new" to "min_new_tokens", "most" to "max_length", "forced_end" to "forced_eos_token_id"),
    "text" to mapOf("begin" to "prefix_tokens"),
    "text/rules" to mapOf("suppressed" to "suppress_tokens", "begin_suppressed" to "begin_suppress_tokens",
    "bad_words" to "bad_words_ids", "no_repeat" to "no_repeat_ngram_size", "least" to "min_length",
    "least_new" to "min_new_tokens", "most" to "max_length", "forced_end" to "forced_eos_token_id"),
    "speech" to mapOf("latest_first" to "max_initial_timestamp_index", "suppressed" to "suppress_tokens",
    "suppressed_first" to "begin_suppress_tokens"),
    "codes/image/caption" to mapOf("most" to "max_tokens", "nothing" to "unconditional"),
    "golden/*" to mapOf("begin" to "prefix_tokens"),
)

// languages by codes of ISO 639-1 and 639-3 and by name; members of macrolanguages that models have instead
internal const val LANGUAGES = """
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
internal val MEMBERS = mapOf(
    "ara" to "arb", "aze" to "azj", "fas" to "pes", "lav" to "lvs", "mlg" to "plt", "mon" to "khk", "msa" to "zsm",
    "nep" to "npi", "nor" to "nob", "ori" to "ory", "pus" to "pbt", "sqi" to "als", "swa" to "swh", "uzb" to "uzn",
    "yid" to "ydd",
)
