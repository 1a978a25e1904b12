package dev.edgespec.drafters

import dev.edgespec.*
import dev.edgespec.decoding.*
import java.io.File
import java.io.IOException
import java.nio.*
import java.nio.channels.FileChannel
import java.security.MessageDigest

private const val LONGEST = 32 // a match is measured no further back
private const val EXTRA = 1 // guesses more than tokens matched
private val BUCKETS = intArrayOf(2, 3, 5, 10, 16) // match lengths at which the next bucket starts
private val STORED = BUCKETS.size + 1 // first bucket of guesses from a store
private const val SHORT = 2 // a match of the text no longer than this gives way to a longer one of a store

/** Guesses from the text itself, and from a store: what mostly followed the same tokens earlier will follow again. */
class NGram(
    private val nMin: Int = 1, private val nMax: Int = 4, private val share: Double = 0.6, private val store: NGramStore? = null,
) : Drafter {
    override val name = "ngram"
    override val cheap = true
    private var lead = NONE // source of an encoder-decoder, placed before the text
    private val text = Tokens() // the lead, followed by the text

    /**
     * Entry of an n-gram: the index [after] its latest occurrence, and how often the token there followed it; once a second token
     * followed, the [counts] of all, in the order in which they were first seen.
     */
    private class Entry(var after: Int) {
        var times = 1
        var counts: LinkedHashMap<Int, Int>? = null
    }

    private val known = HashMap<Long, Entry>() // by hashes: two that are alike cost a guess, never a text

    init {
        if (nMin < 1 || nMin > nMax || nMax > LONGEST || !(share > 0 && share <= 1)) throw InvalidRequest(
            "expected 1 <= n_min <= n_max <= $LONGEST and 0 < share <= 1, got n_min $nMin, n_max $nMax and share $share"
        )
    }

    private fun clear() {
        text.crop(0)
        known.clear()
    }

    /** The encoder's source comes first in the index: names, numbers and quotes recur in its translation or summary. */
    override fun begin(request: DraftRequest): Int? {
        if (!lead.contentEquals(request.source)) clear()
        lead = request.source
        follow(request.tokens)
        return null
    }

    /** Make the index one of [tokens]; if these are not a continuation, it is rebuilt. */
    private fun follow(tokens: Tokens) {
        val read = text.size - lead.size
        if (read > tokens.size || (0 until read).any { text.at(lead.size + it) != tokens.at(it) }) clear()
        for (at in text.size until lead.size) push(lead[at])
        for (at in text.size - lead.size until tokens.size) push(tokens.at(at))
    }

    private fun push(token: Int) {
        val keys = endsOf(text, nMax)
        for (n in nMin..keys.size) {
            val entry = known.putIfAbsent(keys[n - 1], Entry(text.size)) ?: continue
            val before = text.at(entry.after)
            if (entry.counts == null && before != token) entry.counts = linkedMapOf(before to entry.times)
            entry.counts?.merge(token, 1, Int::plus)
            entry.times++
            entry.after = text.size
        }
        text.push(token)
    }

    /** Entries of the suffixes of [tail], the longest one last: if a suffix is unknown, so are all longer ones. */
    private fun matches(tail: Tokens): List<Entry> {
        val keys = endsOf(tail, nMax)
        val found = ArrayList<Entry>()
        for (n in nMin..keys.size) found.add(known[keys[n - 1]] ?: break)
        return found
    }

    /** The token that mostly followed the end of [tail], by the longest one that is sure enough; -1 if none is. */
    private fun likely(tail: Tokens): Int {
        for (entry in matches(tail).reversed()) {
            val latest = text.at(entry.after)
            val counts = entry.counts ?: return latest
            val most = counts.values.max()
            if (most >= share * counts.values.sum()) {
                return if (counts[latest] == most) latest else counts.entries.first { it.value == most }.key
            }
        }
        return -1
    }

    override fun propose(tokens: Tokens, budget: Int): Proposal {
        follow(tokens)
        val (matched, guesses) = fromText(budget)
        if (store != null && (guesses.isEmpty() || matched <= SHORT)) {
            val stored = fromStore(store, if (guesses.isEmpty()) 0 else matched, budget)
            if (stored.size > 0) return stored
        }
        if (guesses.isEmpty()) return Proposal.EMPTY
        return Proposal(guesses, bucket = BUCKETS.count { it <= matched })
    }

    private fun fromText(budget: Int): Pair<Int, IntArray> {
        val tail = Tokens(text.slice(maxOf(0, text.size - nMax)))
        val found = matches(tail)
        if (found.isEmpty()) return 0 to NONE
        val start = found.last().after
        var matched = nMin + found.size - 1
        while (matched < minOf(LONGEST, start) && text.at(start - matched - 1) == text.at(text.size - matched - 1)) matched++
        val guesses = Tokens()
        while (guesses.size < minOf(budget, matched + EXTRA)) {
            val token = likely(tail)
            if (token !in 0 until INSERTED) break
            tail.push(token)
            guesses.push(token)
        }
        return matched to guesses.toIntArray()
    }

    /** Guesses of the store, if it knows more than the last [beyond] tokens: at most two a token matched. */
    private fun fromStore(store: NGramStore, beyond: Int, budget: Int): Proposal {
        val tail = Tokens(text.slice(maxOf(0, text.size - N_MAX)))
        var hit = store.likely(tail, share)
        if (hit == null || hit.n <= beyond) return Proposal.EMPTY
        // what was seen once is as sure as the text is close to the store's; else length and count are alike good
        val sure = if (hit.seen == 1) 0 else hit.n + (if (hit.seen >= 4) 1 else 0) + (if (hit.seen >= 16) 1 else 0)
        val most = minOf(budget, 2 * hit.n)
        val guesses = Tokens()
        while (hit != null && guesses.size < most) {
            guesses.push(hit.token)
            tail.push(hit.token)
            hit = store.likely(tail, share)
        }
        return Proposal(guesses.toIntArray(), bucket = STORED + sure)
    }
}

/* N-gram stores: what mostly followed one to four tokens in texts read earlier; the file is mapped, and Python's. */

private const val STORE_VERSION = 1
private const val N_MAX = 4
private const val HEADER_BYTES = 256
private const val ENTRY_BYTES = 16
private const val SIGNED = HEADER_BYTES - 32
private const val MULTIPLIER = -0x61c8864680b583ebL
private const val BUILD_AGAIN = "build it again: edgespec ngram build"
private val MAGIC = "EDGENGRM".toByteArray(Charsets.US_ASCII)

/** Entry of a store: the last [n] tokens were followed [seen] of [of] times by [token]. */
class Hit(val n: Int, val token: Int, val seen: Int, val of: Int)

/** An opened store: mapped, never changed, shared by all who use it; [check] compares the SHA-256 of all of it. */
class NGramStore(val path: File, check: Boolean = true) {
    val vocab: Int
    val vocabulary: String // SHA-256 of the tokenizer's vocabulary, hex digits
    private val entries: Int
    private val data: MappedByteBuffer

    init {
        val head = ByteArray(HEADER_BYTES)
        val size: Long
        try {
            path.inputStream().use { file ->
                val filled = maxOf(0, file.read(head)) // of a file at once
                val known = head.copyOf(8).contentEquals(MAGIC)
                if (!known) throw StoreError("$path: not an n-gram store", "make one with: edgespec ngram build")
                if (filled < HEADER_BYTES) {
                    throw StoreError("$path: truncated: expected $HEADER_BYTES bytes or more, got $filled", BUILD_AGAIN)
                }
            }
            size = path.length()
        } catch (error: IOException) {
            throw StoreError("$path: cannot read it: ${error.message}", "expected an n-gram store", error)
        }
        val fields = ByteBuffer.wrap(head).order(ByteOrder.LITTLE_ENDIAN)
        fields.position(8)
        val version = fields.int
        val nMax = fields.int
        vocab = fields.int
        fields.int // texts
        val count = fields.long
        fields.long // entries left out
        fields.long // tokens read
        val named = ByteArray(32).also { fields.get(it) }
        val body = ByteArray(32).also { fields.get(it) }
        val byLength = LongArray(4) { fields.long }
        if (version != STORE_VERSION) throw StoreError(
            "$path: a store of version $version; this edgespec reads version $STORE_VERSION",
            "use the edgespec that built it, or build it again",
        )
        val digest = MessageDigest.getInstance("SHA-256")
        val signed = digest.digest(head.copyOf(SIGNED)).contentEquals(head.copyOfRange(SIGNED, HEADER_BYTES))
        if (!signed || nMax != N_MAX || count != byLength.sum() || count <= 0) {
            throw StoreError("$path: altered: its header does not match its checksum", BUILD_AGAIN)
        }
        vocabulary = hex(named)
        val wanted = HEADER_BYTES + ENTRY_BYTES * count
        if (size != wanted) {
            throw StoreError("$path: ${if (size < wanted) "truncated" else "altered"}: expected $wanted bytes, got $size", BUILD_AGAIN)
        }
        if (size > Int.MAX_VALUE) throw StoreError("$path: $size bytes: expected less than 2 GiB here", "build a smaller store")
        entries = count.toInt()
        data = FileChannel.open(path.toPath()).use { it.map(FileChannel.MapMode.READ_ONLY, 0, size) }
        data.order(ByteOrder.LITTLE_ENDIAN)
        if (check) {
            val rest = data.duplicate()
            rest.position(HEADER_BYTES)
            digest.update(rest)
            val got = digest.digest()
            if (!got.contentEquals(body)) throw StoreError(
                "$path: altered: expected SHA-256 ${hex(body).take(12)}..., got ${hex(got).take(12)}...", "copy it again, or $BUILD_AGAIN",
            )
        }
    }

    fun require(vocabulary: String, vocab: Int) {
        if (this.vocabulary != vocabulary || this.vocab != vocab) throw StoreError(
            "$path: was built with another tokenizer: its vocabulary is ${this.vocabulary.take(12)}... (${this.vocab} " +
                "tokens), the model's ${vocabulary.take(12)}... ($vocab tokens)",
            "build one for this model: edgespec ngram build TEXT... --tokenizer BUNDLE",
        )
    }

    /** The token that followed the longest known suffix of [tail] in at least [share] of the cases; null: none. */
    fun likely(tail: Tokens, share: Double): Hit? {
        val keys = endsOf(tail, N_MAX)
        for (n in keys.size downTo 1) {
            val at = find(keys[n - 1])
            if (at < 0) continue
            val seen = data.getShort(HEADER_BYTES + 12 * entries + 2 * at).toInt() and 0xffff
            val of = data.getShort(HEADER_BYTES + 14 * entries + 2 * at).toInt() and 0xffff
            if (seen >= share * of) return Hit(n, data.getInt(HEADER_BYTES + 8 * entries + 4 * at), seen, of)
        }
        return null
    }

    private fun find(key: Long): Int {
        var low = 0
        var high = entries - 1
        while (low <= high) {
            val middle = (low + high) ushr 1
            val order = java.lang.Long.compareUnsigned(data.getLong(HEADER_BYTES + 8 * middle), key)
            if (order == 0) return middle
            if (order < 0) low = middle + 1 else high = middle - 1
        }
        return -1
    }
}

/** Hashes of the last token of a text, of the last two, and so on, [most] at most. */
private fun endsOf(text: Tokens, most: Int): LongArray {
    var key = 0L
    return LongArray(minOf(most, text.size)) { n ->
        key = (key xor (text.at(-1 - n) + 1L)) * MULTIPLIER
        key = key xor (key ushr 32)
        key
    }
}

internal fun hex(bytes: ByteArray): String = bytes.joinToString("") { "%02x".format(it) }
