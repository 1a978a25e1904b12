package dev.edgespec.decoding

/** A growing list of token ids without an object for each; as a [List] it is read only. */
class Tokens(initial: IntArray = IntArray(0)) : AbstractList<Int>(), RandomAccess {
    private var data = initial.copyOf(maxOf(initial.size, 16))
    override var size = initial.size
        private set

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

    /** Keep the first [count] tokens. */
    fun crop(count: Int) {
        size = minOf(size, count)
    }

    /** [first, last) as an array. */
    fun slice(first: Int, last: Int = size): IntArray = data.copyOfRange(minOf(first, last), last)

    fun toIntArray(): IntArray = slice(0)

    /** Length of the longest common prefix with [other]. */
    fun commonPrefix(other: Tokens): Int {
        val limit = minOf(size, other.size)
        for (at in 0 until limit) if (data[at] != other.data[at]) return at
        return limit
    }
}
