package dev.edgespec.decoding

import java.util.BitSet

/** Token ids from here on name rows without a token's embedding, such as a picture's; they are never guessed or sampled. */
const val INSERTED = 1 shl 30

/** A growing list of token ids without an object for each; as a [List] it is read only. */
class Tokens(initial: IntArray = IntArray(0)) : AbstractList<Int>(), RandomAccess {
    private var data = initial.copyOf(maxOf(initial.size, 16))
    override var size = initial.size
        private set
    private val known = BitSet() // tokens among the first [read]
    private var ids = IntArray(0) // [at least as many]: the same, in the order of coming
    private var different = 0
    private var read = 0

    constructor(tokens: List<Int>) : this(IntArray(tokens.size) { tokens[it] })

    override fun get(index: Int): Int = at(index)

    /** Token [index], without boxing; negative counts from the end. */
    fun at(index: Int): Int {
        val place = if (index < 0) size + index else index
        if (place !in 0 until size) throw IndexOutOfBoundsException("$index of $size tokens")
        return data[place]
    }

    fun push(token: Int) {
        if (size == data.size) data = data.copyOf(2 * size)
        data[size++] = token
    }

    fun push(tokens: IntArray) = tokens.forEach(::push)

    fun crop(count: Int) {
        size = minOf(size, count)
        if (size < read) {
            known.clear()
            different = 0
            read = 0
        }
    }

    /** Do this with every different token once; only tokens appended since the last call are read. */
    inline fun eachDifferent(use: (Int) -> Unit) {
        val seen = seen()
        for (at in 0 until seen.second) use(seen.first[at])
    }

    /** Whether [token] is in it. */
    fun has(token: Int): Boolean {
        seen()
        return known.get(token)
    }

    /** (ids, how many of them): every different token once. */
    @PublishedApi
    internal fun seen(): Pair<IntArray, Int> {
        while (read < size) {
            val token = data[read++]
            if (token >= INSERTED || known.get(token)) continue
            known.set(token)
            if (different == ids.size) ids = ids.copyOf(maxOf(64, 2 * different))
            ids[different++] = token
        }
        return ids to different
    }

    fun slice(first: Int, last: Int = size): IntArray = data.copyOfRange(minOf(first, last), last) // [first, last) as an array
    fun toIntArray(): IntArray = slice(0)

    /** Length of the longest common prefix with [other], of which the first [known] are not looked at. */
    fun commonPrefix(other: Tokens, known: Int = 0): Int {
        val limit = minOf(size, other.size)
        for (at in minOf(known, limit) until limit) if (data[at] != other.data[at]) return at
        return limit
    }
}

/** The tokens before a row: a text and a [path] of guesses; neither is copied, so that both may grow. */
class Prefix(val text: Tokens, val path: List<Int>) : AbstractList<Int>() {
    override val size: Int get() = text.size + path.size

    override fun get(index: Int): Int = if (index < text.size) text[index] else path[index - text.size]
}

/** Do this with every different token of a prefix once; of [Tokens] only new ones are read. */
inline fun eachDifferent(prefix: List<Int>, use: (Int) -> Unit) {
    when (prefix) {
        is Tokens -> prefix.eachDifferent(use)
        is Prefix -> {
            prefix.text.eachDifferent(use)
            for (token in prefix.path.toSet()) if (!prefix.text.has(token)) use(token)
        }
        else -> for (token in prefix.toSet()) use(token)
    }
}
