package dev.edgespec.drafters

private const val WALK = 32 // links along which a push notes where their strings last ended

/** Growing ints without an object for each. */
internal class Ints(vararg first: Int) {
    private var data = first.copyOf(maxOf(16, first.size))
    var size = first.size
        private set

    operator fun get(at: Int) = data[at]

    operator fun set(at: Int, value: Int) {
        data[at] = value
    }

    fun add(value: Int) {
        if (size == data.size) data = data.copyOf(2 * size)
        data[size++] = value
    }
}

/**
 * A suffix automaton of a growing text (Blumer et al. 1985; as a drafter SAM-Decoding, arXiv 2411.10666): the longest end
 * of the text that stood in it before, and what followed.  A push is O(1) amortised.
 */
class SuffixAutomaton {
    /** Tokens of the longest end of the text that occurred before; 0 = none did. */
    var matched = 0
        private set

    /** Index of the token after its most recent earlier occurrence. */
    var after = 0
        private set

    private var size = 0
    private var whole = 0 // state of the whole text

    // of each state: its longest string's length, its link, the index after its latest end, first transition
    private val length = Ints(0)
    private val link = Ints(-1)
    private val end = Ints(0)
    private val token = Ints(-1)
    private val to = Ints(0)
    private val head = Ints(-1) // the latest token among the other transitions
    private val others = HashMap<Long, Long>() // state, token -> target, 1 + next token of the chain

    private fun key(state: Int, token: Int) = (state.toLong() shl 32) or token.toLong()

    private fun entry(target: Int, next: Int) = (target.toLong() shl 32) or next.toLong()

    fun push(pushed: Int) {
        size++
        val fresh = new(size, 0, size)
        var state = whole
        whole = fresh
        var target = -1
        while (state >= 0) {
            if (token[state] == pushed) {
                target = to[state]
                break
            }
            if (token[state] < 0) {
                token[state] = pushed
                to[state] = fresh
            } else {
                val known = others[key(state, pushed)]
                if (known != null) {
                    target = (known shr 32).toInt()
                    break
                }
                others[key(state, pushed)] = entry(fresh, head[state] + 1)
                head[state] = pushed
            }
            state = link[state]
        }
        if (target >= 0 && length[target] != length[state] + 1) target = split(state, pushed, target)
        target = maxOf(target, 0)
        link[fresh] = target
        matched = length[target]
        after = end[target]
        for (step in 0 until WALK) {
            if (target <= 0) break
            end[target] = size
            target = link[target]
        }
    }

    private fun new(long: Int, linked: Int, ends: Int): Int {
        length.add(long)
        link.add(linked)
        end.add(ends)
        token.add(-1)
        to.add(0)
        head.add(-1)
        return length.size - 1
    }

    /** Part [target]'s strings up to [start]'s and [pushed] from its longer ones -> their new state. */
    private fun split(start: Int, pushed: Int, target: Int): Int {
        val copy = new(length[start] + 1, link[target], end[target])
        token[copy] = token[target]
        to[copy] = to[target]
        head[copy] = head[target]
        var other = head[target]
        while (other >= 0) {
            val known = others.getValue(key(target, other))
            others[key(copy, other)] = known
            other = known.toInt() - 1
        }
        link[target] = copy
        var state = start
        while (state >= 0) {
            if (token[state] == pushed) {
                if (to[state] != target) break
                to[state] = copy
            } else {
                val known = others.getValue(key(state, pushed)) // a shorter end goes on wherever a longer one does
                if ((known shr 32).toInt() != target) break
                others[key(state, pushed)] = entry(copy, known.toInt())
            }
            state = link[state]
        }
        return copy
    }
}
