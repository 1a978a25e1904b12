package dev.edgespec.decoding

import dev.edgespec.InvalidRequest

/*
 * THE loop.  Every method decodes through it; with the empty proposal it is plain decoding.
 *
 * State: `tokens` is the truth; the target's slot holds all of them but the last, the pending token.  A round feeds the
 * pending token and a proposal, and commits the accepted guesses and one token more, recovered or bonus.
 */

/**
 * One round, as a caller that streams sees it: [tokens] emitted, of which the first [accepted] were guesses; all [drafted] guesses
 * in the proposal's order, and as [path] the indices of the accepted ones; [rejected]: those that would have followed, in a tree
 * the drafter's first choices; [finish]: why it is the last (eos, length or context), null = it is not.
 */
class Round(
    val tokens: IntArray, val drafted: IntArray, val accepted: Int, val path: IntArray, val rejected: IntArray,
    val logprobs: DoubleArray?, val finish: String?,
)

class Unread(val left: Int, val draft: Boolean)

internal fun since(start: Long): Double = (System.nanoTime() - start) / 1e6

/** The rounds of a request over [target]; [next] makes one.  To end early is to stop asking: the slot then holds a prefix. */
class Rounds(
    private val target: Target, drafter: Drafter, prompt: IntArray, private val settings: Settings, private val gamma: Int,
    private val eos: Set<Int> = emptySet(), private val stats: Stats = Stats(), private val source: IntArray = NONE,
) {
    private val tokens = Tokens(prompt)
    private val params = settings.sampling
    private val noise = Noise(params.seed)
    private val guard = Guard(drafter, stats, eos, target)
    private val shadow = settings.shadow ?: if (settings.accept.lossless) 0 else SHADOW_EVERY
    private var left = settings.length
    private var begun = false
    private var shown: LayeredTarget? = null // while the drafter is shown auxiliary hidden states of the prompt
    private val prompted = prompt.size - 1 // tokens of the prompt that are to be read
    private var held = 0 // and are
    private var draftLeft: Int? = null // tokens that the drafter reads before the next round; null = it was not asked yet

    /** Whether every token so far is the very one of plain decoding, where rows have the same bits in every pass. */
    var keepsText = true
        private set

    var most: Int? = null // guesses of a round that are allowed from now on, fewer than gamma; null = all

    /** Why the last round was the last; null = there is another. */
    var finish: String? = null
        private set

    // where greedy decoding looks at nothing else, the logits need not leave the LM head
    private val onlyBest = params.plainGreedy && !settings.logprobs && settings.accept.rule != "top-k"

    init {
        if (settings.length < 1 || gamma < 1) {
            val got = "got max_new_tokens ${settings.length} and gamma $gamma"
            throw InvalidRequest("expected max_new_tokens >= 1 and gamma >= 1, $got")
        }
        val known = "the vocabulary has ${target.vocabSize}"
        if (prompt.isEmpty()) {
            throw InvalidRequest("expected a prompt of at least one token, got none", "a bare request may start with BOS")
        }
        if (prompt.size >= target.context) throw InvalidRequest(
            "the prompt has ${prompt.size} tokens and the context ${target.context}: no room for a new one",
            "shorten the prompt or load the model with a larger context",
        )
        if (prompt.min() < 0 || prompt.any { it in target.vocabSize until INSERTED }) {
            throw InvalidRequest("the prompt has a token id outside the vocabulary ($known)", "check the tokenizer")
        }
        params.logitBias.keys.maxOrNull()?.let {
            if (it >= target.vocabSize) throw InvalidRequest("logit_bias names token $it; $known")
        }
    }

    private fun begin() {
        begun = true
        val start = System.nanoTime()
        val known = guard.begin(DraftRequest(tokens, params, noise, stats, source))
        val told = System.nanoTime()
        stats.draftMs += (told - start) / 1e6
        shown = if (known == null) null else target as LayeredTarget
        held = target.follow(Tokens(tokens.slice(0, minOf(tokens.size - 1, known ?: tokens.size))))
        stats.promptTokens += tokens.size
        stats.reusedTokens += held
        stats.prefillMs += since(told)
        stats.shadowEvery = shadow
    }

    // one of the `left` tokens is the recovered or bonus one, and so is one of the places left in the context
    private val budget: Int get() = minOf(minOf(gamma, most ?: gamma), left - 1, target.context - tokens.size - 1)

    /** Pending input before the next round: the prompt, then the draft model's; null = nothing. */
    fun unread(): Unread? {
        if (!begun) begin()
        if (held < prompted) return Unread(prompted - held, draft = false)
        val due = draftLeft ?: (if (budget > 0) guard.prefill(tokens, 0) else 0).also { draftLeft = it }
        return if (due > 0) Unread(due, draft = true) else null
    }

    /** Read at most [most] tokens of it; a drafter is shown auxiliary hidden states of all it does not know: it may be read again. */
    fun read(most: Int) {
        val asked = unread() ?: return
        val start = System.nanoTime()
        val count = minOf(asked.left, most)
        if (asked.draft) {
            val now = guard.prefill(tokens, count)
            draftLeft = if (now < asked.left) now else 0 // a drafter without progress is not asked again
            stats.draftMs += since(start)
            return
        }
        shown?.auxHiddenSink = guard::absorb
        try {
            target.prefill(tokens.slice(held, held + count))
        } finally {
            shown?.auxHiddenSink = null
        }
        held += count
        stats.prefillMs += since(start)
    }

    /** The next round; there must be one ([finish] is null).  Pending input is read at once. */
    fun next(): Round {
        check(finish == null) { "the request has ended: $finish" }
        while (unread() != null) read(Int.MAX_VALUE)
        draftLeft = null

        // propose: guesses that hang off the pending token; no guess is plain decoding
        val start = System.nanoTime()
        val proposal = guard.propose(tokens, budget)
        val draftMs = since(start)

        // pass: the pending token and all guesses at once
        val fed = System.nanoTime()
        val output = pass(proposal)
        val passed = System.nanoTime()
        val verifyMs = (passed - fed) / 1e6

        // verify: which guesses are accepted, and the token after them
        val sampler = RowSampler(output, tokens, proposal, params, noise)
        val verdict = verify(proposal, sampler, noise, settings.accept)
        keepsText = keepsText && keepsText(proposal, sampler, settings.accept, target.exactTrees)

        // commit: the slot keeps the row that each new token was chosen from and drops those of rejected guesses; the last
        // token is the new pending one, whose own row comes with the next pass
        val emitted = emitted(proposal, verdict)
        val rows = verdict.rows.copyOf(emitted.size)
        target.keep(rows)
        val logprobs = if (settings.logprobs) DoubleArray(rows.size) { sampler.logprob(rows[it], emitted[it]) } else null
        if (shadow > 0 && stats.rounds % shadow == 0) { // the rows of this very pass say it
            stats.compare(IntArray(rows.size) { sampler.choose(rows[it]) }, emitted)
        }
        tokens.push(emitted)
        left -= emitted.size
        if (finish == null) finish = if (left == 0) "length" else if (tokens.size >= target.context) "context" else null
        val accepted = minOf(verdict.path.size, emitted.size)
        val work = (1 + proposal.size) * (proposal.headStart?.left(target as LayeredTarget) ?: 1.0)
        val who = if (proposal.size > 0) guard.proposer else PLAIN
        val time = RoundTime(draftMs, verifyMs, 1 + proposal.size, who, emitted.size, proposal.size, accepted, work)
        stats.add(time, if (proposal.size > 0) proposal.tested(verdict.path) else 0)
        check(target.tokens.size == tokens.size - 1) { "the slot must hold all committed tokens but the pending one" }
        val verified = System.nanoTime()
        guard.observe(proposal, verdict, output)
        val observed = System.nanoTime()
        guard.timed(proposal, time)
        stats.draftMs += draftMs + (observed - verified) / 1e6
        stats.verifyMs += verifyMs
        stats.otherMs += since(observed) + (verified - passed) / 1e6
        val refused = if (proposal.size > 0) proposal.refused(verdict.path) else NONE
        return Round(emitted, proposal.tokens, time.accepted, verdict.path, refused, logprobs, finish)
    }

    private fun pass(proposal: Proposal): Pass {
        val pending = intArrayOf(tokens.at(-1))
        val rows = if (proposal.size > 0) pending + proposal.tokens else pending
        val above = proposal.parents?.let { parents -> IntArray(rows.size) { if (it == 0) -1 else parents[it - 1] + 1 } }
        return when {
            proposal.headStart != null -> proposal.headStart.forward(target as LayeredTarget, rows, onlyBest)
            onlyBest -> target.forwardBest(rows, above)
            else -> target.forward(rows, above)
        }
    }

    /** The accepted guesses and the token after them, cut after an EOS. */
    private fun emitted(proposal: Proposal, verdict: Verdict): IntArray {
        val path = verdict.path
        val found = IntArray(path.size + 1) { if (it < path.size) proposal.tokens[path[it]] else verdict.nextToken }
        val at = if (eos.isEmpty()) -1 else found.indexOfFirst { it in eos }
        if (at < 0) return found
        finish = "eos"
        return found.copyOf(at + 1)
    }
}
