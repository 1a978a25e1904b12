package dev.edgespec.drafters

import com.google.gson.*
import dev.edgespec.InvalidRequest
import dev.edgespec.decoding.SkipSet
import dev.edgespec.formulas.speedup
import java.io.File
import java.util.Random
import kotlin.math.*

/* Which sub-layers to leave out, searched while decoding: SWIFT (arXiv 2410.06916), changed as the Python side describes. */

private const val SEARCH_GAMMA = 8 // longest draft whose speed is predicted
private const val MODEL_EVERY = 3 // every third candidate is the model's
private const val UNIFORM = 0.3 // share of the other candidates that are sampled uniformly rather than mutated from the best
private const val CONFIRM = 2 // windows before a set may lead
private const val SCORE_AGAIN = 8 // candidates until the leading set is scored again: texts change
private const val PATIENCE = 100 // candidates without a better set
private const val SURE_PATIENCE = 24 // fewer above this acceptance
private const val SURE = 0.94
private const val IN_SIGHT = 1.01 // a search continues while some set may plausibly be this much faster
private const val MOST_CANDIDATES = 1000
private const val MEMORY = 256.0 // guesses a record remembers; older ones fade
private const val TRUST = 8.0 // guesses that the model's acceptance counts as
private const val KEPT = 64 // records that are kept
private const val ATTENTION_LOSS = 0.03 // prior loss of log acceptance: attention is about twice as skippable
private const val MLP_LOSS = 0.06
private const val SPREAD = 0.06 // of that loss
private const val HIGH_LOSS = 0.003 // the same for reading only the high plane
private const val HIGH_SPREAD = 0.01

/** Scores of a set: right draft tokens, all that were scored, and the number of windows. */
class SkipRecord(var matched: Double = 0.0, var seen: Double = 0.0, var windows: Int = 0) {
    fun add(matched: Int, seen: Int) {
        val keep = if (this.seen > 0) minOf(1.0, maxOf(MEMORY - seen, 0.0) / this.seen) else 1.0
        this.matched = keep * this.matched + matched
        this.seen = keep * this.seen + seen
        windows++
    }

    fun acceptance(prior: Double): Double = (matched + TRUST * prior) / (seen + TRUST)
}

/**
 * Proposes sets and keeps the one of the highest predicted speed; the first and the last layer are never left out.  Where [initial]
 * names high planes, they are a choice; those of the first and the last layer and of the head stay as they are in it.
 */
class OnlineSearch(
    val layers: Int, val initial: SkipSet, private val cost: (SkipSet) -> Double, private val verify: (Int) -> Double, seed: Long = 0,
) {
    var best = initial
        private set
    val records = LinkedHashMap<SkipSet, SkipRecord>()
    var candidates = 0
        private set

    /** Why the search has ended; "" = it continues. */
    var stopped = if (layers > 2) "" else "there is no layer between the first and the last"
    private val random = Random(seed)
    private var since = 0 // candidates since the lead changed
    private var sinceBest = 0 // candidates since the leading set was scored
    private var challenger: SkipSet? = null
    val planes = initial.highAttention.isNotEmpty() || initial.highMlp.isNotEmpty()
    private val inner = maxOf(0, layers - 2)
    private val skippable = 2 * inner // sub-layers that may be left out
    private val variables = if (planes) 2 * skippable else skippable
    private var precision = diagonal()

    // of log acceptance, by sub-layer that is left out, then by one that is read by its high plane
    private var loss = DoubleArray(variables) { prior(it) }

    private fun weight(at: Int) = (if (at < skippable) SPREAD else HIGH_SPREAD).let { 1 / (it * it) }
    private fun diagonal() = Array(variables) { i -> DoubleArray(variables) { if (it == i) weight(i) else 0.0 } }
    private fun prior(at: Int) = if (at < inner) ATTENTION_LOSS else if (at < skippable) MLP_LOSS else HIGH_LOSS
    fun acceptance(skip: SkipSet): Double = (records[skip] ?: SkipRecord()).acceptance(exp(-dot(loss, bits(skip))))

    fun speed(skip: SkipSet, acceptance: Double = acceptance(skip)): Double {
        val c = cost(skip)
        return (1..SEARCH_GAMMA).maxOf { speedup(acceptance, it, c, verify) }
    }

    fun ask(): SkipSet {
        for (first in listOf(initial, best)) if ((records[first]?.windows ?: 0) == 0) return first
        challenger?.let { return it }
        if (sinceBest >= SCORE_AGAIN) return best
        candidates++
        since++
        sinceBest++
        repeat(8) { // something new, if it can be found
            val found = when {
                candidates % MODEL_EVERY == 0 -> modelled()
                random.nextDouble() < UNIFORM -> uniform()
                else -> mutated()
            }
            if (found != SkipSet() && found !in records) return found
        }
        return uniform()
    }

    /** Record a scored window of [skip]: [matched] right draft tokens of [seen].  Returns whether the lead changed. */
    fun tell(skip: SkipSet, matched: Int, seen: Int): Boolean {
        val record = records.getOrPut(skip) { SkipRecord() }
        record.add(matched, seen)
        fit()
        if (skip == best) sinceBest = 0
        val before = best
        val lead = speed(best)
        challenger = null
        if (skip != best && speed(skip) > lead) {
            if (record.windows >= CONFIRM) best = skip else challenger = skip
        } else if (skip == best) { // it may have lost its lead to one that was confirmed before
            best = records.filterValues { it.windows >= CONFIRM }.keys.maxByOrNull(::speed) ?: best
            if (speed(best) <= lead) best = before
        }
        if (records.size > KEPT) records.remove(records.keys.filter { it != best && it != initial }.minBy(::speed))
        if (best != before) {
            since = 0
            return true
        }
        lookForTheEnd()
        return false
    }

    fun goOnFrom(known: Map<SkipSet, SkipRecord>) {
        for ((skip, record) in known) if (record.seen > (records[skip]?.seen ?: 0.0)) records[skip] = record
        fit()
        best = records.filter { (skip, record) -> record.windows >= CONFIRM || skip == initial }.keys.maxByOrNull(::speed) ?: best
        since = 0
        sinceBest = SCORE_AGAIN // the new text decides first whether it holds
        if (layers > 2) stopped = ""
    }

    private fun lookForTheEnd() {
        var patience = PATIENCE
        if ((records[best]?.windows ?: 0) >= CONFIRM && since >= SURE_PATIENCE && acceptance(best) >= SURE) {
            val lower = cholesky(precision)
            val hoped = DoubleArray(variables) { at ->
                val unit = DoubleArray(variables) { if (it == at) 1.0 else 0.0 }
                maxOf(loss[at] - sqrt(solve(lower, unit)[at]), 0.0)
            }
            val inSight = fastest(hoped)
            val promise = if (inSight != SkipSet()) speed(inSight, exp(-dot(hoped, bits(inSight)))) else 0.0
            if (promise <= IN_SIGHT * speed(best)) patience = SURE_PATIENCE
        }
        if (challenger == null && (since >= patience || candidates >= MOST_CANDIDATES)) {
            stopped = "no better set among the last $since candidates"
        }
    }

    private fun bits(skip: SkipSet): BooleanArray {
        val bits = BooleanArray(variables)
        val kinds = listOf(skip.attention, skip.mlp, skip.highAttention, skip.highMlp)
        kinds.take(if (planes) 4 else 2).forEachIndexed { kind, layers ->
            for (layer in layers) if (layer in 1..inner) bits[kind * inner + layer - 1] = true
        }
        return bits
    }

    /** The set of these choices; of what is left out, no plane is named. */
    private fun set(bits: BooleanArray): SkipSet {
        fun chosen(kind: Int) = (1..inner).filter { bits.getOrElse(kind * inner + it - 1) { false } }
        fun high(kind: Int, left: List<Int>, first: List<Int>) = (first.filter { it !in 1..inner } + chosen(kind) - left.toSet()).sorted()
        val (attention, mlp) = chosen(0) to chosen(1)
        return SkipSet(attention, mlp, high(2, attention, initial.highAttention), high(3, mlp, initial.highMlp), initial.highHead)
    }

    /** A random set; its size is sampled first, or nearly all would have half of the sub-layers. */
    private fun uniform(): SkipSet {
        val bits = bits(initial).also { it.fill(false, 0, skippable) }
        return switched(bits, 1 + random.nextInt(maxOf(1, (0.75 * skippable).toInt())), skippable)
    }

    private fun mutated(): SkipSet = switched(bits(best), minOf(1 + random.nextInt(3), skippable), variables)

    private fun switched(bits: BooleanArray, count: Int, among: Int): SkipSet {
        (0 until among).shuffled(random).take(count).forEach { bits[it] = !bits[it] }
        return set(bits)
    }

    /** Bayesian linear regression of the log acceptance on what is left out. */
    private fun fit() {
        val made = diagonal()
        val moment = DoubleArray(variables) { weight(it) * prior(it) }
        for ((skip, record) in records) {
            if (record.seen <= 0) continue
            val x = bits(skip)
            val rate = (record.matched + 0.5) / (record.seen + 0.5)
            val weight = record.seen * rate / (1.05 - rate) // one over the variance of the logarithm of a share
            for (i in 0 until variables) {
                if (!x[i]) continue
                for (j in 0 until variables) if (x[j]) made[i][j] += weight
                moment[i] -= weight * ln(rate)
            }
        }
        precision = made
        loss = solve(cholesky(made), moment).also { for (i in it.indices) it[i] = maxOf(it[i], 0.0) }
    }

    /** The fastest new set by a model sampled from the posterior (Thompson sampling). */
    private fun modelled(): SkipSet {
        val drawn = backward(cholesky(precision), DoubleArray(variables) { random.nextGaussian() })
        return fastest(DoubleArray(variables) { maxOf(loss[it] + drawn[it], 0.0) })
    }

    /** The fastest new set if sub-layers cost these losses: of every size the sub-layers of the least loss for the time. */
    private fun fastest(losses: DoubleArray): SkipSet {
        val one = listOf(1)
        val singles = listOf(SkipSet(one), SkipSet(mlp = one), SkipSet(highAttention = one), SkipSet(highMlp = one))
        val saved = singles.map { maxOf(1 - cost(it), 1e-3) }
        val order = losses.indices.sortedBy { losses[it] / saved[it / inner] }
        val bits = BooleanArray(variables)
        var found = SkipSet()
        var speed = 0.0
        for (at in order) {
            bits[at] = true
            val skip = set(bits)
            val here = speed(skip, exp(-dot(losses, bits(skip))))
            if (here > speed && skip !in records) {
                found = skip
                speed = here
            }
        }
        return found
    }
}

private fun dot(values: DoubleArray, bits: BooleanArray) = values.indices.sumOf { if (bits[it]) values[it] else 0.0 }

/** L of a positive definite matrix L L^T. */
private fun cholesky(matrix: Array<DoubleArray>): Array<DoubleArray> {
    val lower = Array(matrix.size) { DoubleArray(matrix.size) }
    for (i in matrix.indices) for (j in 0..i) {
        var sum = matrix[i][j]
        for (k in 0 until j) sum -= lower[i][k] * lower[j][k]
        lower[i][j] = if (i == j) sqrt(sum) else sum / lower[j][j]
    }
    return lower
}

/** x of L L^T x = b. */
private fun solve(lower: Array<DoubleArray>, right: DoubleArray): DoubleArray {
    val x = right.copyOf()
    for (i in x.indices) {
        for (k in 0 until i) x[i] -= lower[i][k] * x[k]
        x[i] /= lower[i][i]
    }
    return backward(lower, x)
}

/** x of L^T x = b. */
private fun backward(lower: Array<DoubleArray>, right: DoubleArray): DoubleArray {
    val x = right.copyOf()
    for (i in x.indices.reversed()) {
        for (k in i + 1 until x.size) x[i] -= lower[k][i] * x[k]
        x[i] /= lower[i][i]
    }
    return x
}

private val KIND = Regex("[a-z0-9][a-z0-9-]{0,31}")
private const val SKIP_VERSION = 1

/** Skip sets found while decoding, kept in [folder]: counts by set, nothing of any text.  The Python side's format. */
class SkipStore(folder: File, identity: String, operators: String, kind: String) {
    private val path: File
    private var read = 0L

    /** Why something could not be read or written; "" = nothing of the sort. */
    var note = ""
        private set

    init {
        if (!KIND.matches(kind)) {
            throw InvalidRequest("stream kind '$kind': expected up to 32 lower-case letters, digits or dashes", "for example: code")
        }
        path = File(folder, "$identity-$operators-$kind.json")
    }

    /** Let [search] continue from stored records; returns whether there were new ones. */
    fun load(search: OnlineSearch): Boolean {
        val time = path.lastModified()
        if (time == 0L || time == read) return false
        read = time
        try {
            require(path.length() <= 1 shl 20) { "it is too large" }
            val data = JsonParser.parseString(path.readText()).asJsonObject
            require(data["version"].asInt == SKIP_VERSION && data["layers"].asInt == search.layers) { "it is of another version or model" }
            search.goOnFrom(data["records"].asJsonArray.associate { record(it.asJsonObject, search.layers) })
            return true
        } catch (error: Exception) { // any defect
            note = "a stored skip set was ignored: ${error.message ?: error.javaClass.simpleName}"
            return false
        }
    }

    /** Replace the file by the records of [search]; a folder that cannot be written is ignored. */
    fun save(search: OnlineSearch) {
        val records = search.records.map { (skip, record) ->
            val layers = layersOf(skip).filter { (name, some) -> name in FEWEST || some.isNotEmpty() }
            val counts = mapOf("matched" to record.matched, "seen" to record.seen, "windows" to record.windows)
            layers + counts + if (skip.highHead) mapOf("high_head" to true) else emptyMap()
        }
        val data = Gson().toJson(mapOf("version" to SKIP_VERSION, "layers" to search.layers, "records" to records))
        try {
            path.parentFile.mkdirs()
            val partial = File.createTempFile(path.name, ".partial", path.parentFile)
            try {
                partial.writeText(data)
                if (!partial.renameTo(path)) note = "skip sets cannot be kept: $path cannot be replaced"
            } finally {
                partial.delete()
            }
            read = path.lastModified()
        } catch (error: java.io.IOException) {
            note = "skip sets cannot be kept: ${error.message}"
        }
    }

    private fun record(item: JsonObject, layers: Int): Pair<SkipSet, SkipRecord> {
        val found = layersOf(SkipSet()).keys.map { name ->
            val first = if (name in FEWEST) 1 else 0 // never left out, but read by its high plane
            (item[name]?.asJsonArray?.map { it.asInt } ?: emptyList()).also { some ->
                require(some == some.distinct().sorted() && some.all { it in first until layers - first }) { "it leaves out layers that cannot be" }
            }
        }
        val record = SkipRecord(item["matched"].asDouble, item["seen"].asDouble, item["windows"].asInt)
        require(record.matched in 0.0..record.seen && record.seen <= 1e6 && record.windows in 0..1_000_000) { "its counts make no sense" }
        return SkipSet(found[0], found[1], found[2], found[3], item["high_head"]?.asBoolean ?: false) to record
    }
}

private val FEWEST = setOf("attention", "mlp") // every record has these, of inner layers

private fun layersOf(skip: SkipSet): Map<String, List<Int>> =
    mapOf("attention" to skip.attention, "mlp" to skip.mlp, "high_attention" to skip.highAttention, "high_mlp" to skip.highMlp)
