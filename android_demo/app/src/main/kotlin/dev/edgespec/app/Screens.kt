package dev.edgespec.app

import android.content.*
import android.view.Gravity
import android.view.View
import android.view.ViewGroup.LayoutParams.MATCH_PARENT
import android.view.ViewGroup.LayoutParams.WRAP_CONTENT
import android.widget.*
import dev.edgespec.decoding.Settings

/** A screen of the app: its view, and how it shows the state. */
interface Screen {
    val name: String
    val view: View

    fun show()
}

/** A choice among a few words; [chosen] receives each selection. */
private class Choice(context: Context, label: String, private val chosen: (String) -> Unit) {
    private var offered: List<String> = emptyList()
    val view = Spinner(context).apply {
        contentDescription = say(label)
        onItemSelectedListener = object : AdapterView.OnItemSelectedListener {
            override fun onItemSelected(parent: AdapterView<*>?, view: View?, position: Int, id: Long) = chosen(offered[position])
            override fun onNothingSelected(parent: AdapterView<*>?) = Unit
        }
    }

    /** Offer these, or nothing at all. */
    fun show(options: List<String>, now: String) {
        view.visibility = if (options.isEmpty()) View.GONE else View.VISIBLE
        if (offered == options) return
        offered = options
        view.adapter = ArrayAdapter(view.context, android.R.layout.simple_spinner_dropdown_item, options)
        view.setSelection(maxOf(0, options.indexOf(now)))
    }
}

/** A growing text: existing pieces are not set again.  In a chat, the user's messages are at the right. */
private class Written(private val context: Context) {
    private var shown: List<Any> = emptyList() // the transcript, and how it is shown
    private var count = 0
    private var last: Pair<Boolean, TextView>? = null // whether it is the user's
    val view = context.stack(emptyList())

    fun show(transcript: Transcript, refused: Boolean, talks: Boolean = false) {
        if (shown != listOf(transcript, refused, talks) || count > transcript.size) {
            shown = listOf(transcript, refused, talks)
            view.removeAllViews()
            last = null
            count = 0
        }
        var rest = transcript.pieces(refused, count)
        while (rest.isNotEmpty()) {
            val own = talks && rest[0].kind == Kind.USER
            val part = rest.takeWhile { (talks && it.kind == Kind.USER) == own }
            val text = last?.takeIf { it.first == own }?.second ?: add(own).also { last = own to it }
            text.append(context.spanned(if (own) part.map { it.copy(text = it.text.trim()) } else part))
            rest = rest.drop(part.size)
        }
        count = transcript.size
    }

    private fun add(own: Boolean) = context.text().apply {
        setTextIsSelectable(true)
        if (own) ground(context.faint(android.R.attr.colorAccent))
        view.addView(this, LinearLayout.LayoutParams(if (own) WRAP_CONTENT else MATCH_PARENT, WRAP_CONTENT).apply { gravity = if (own) Gravity.END else Gravity.START })
    }
}

/** Chat: text as it is written, which method, how fast, and why. */
class ChatScreen(context: Context, private val state: AppState) : Screen {
    override val name = CHAT
    private val written = Written(context)
    private val scroll = ScrollView(context).apply { addView(written.view) }
    private val refused = context.switch("Show rejected guesses", state.refused) {
        state.refused = it
        show()
    }
    private val prompt = context.edit("Your message", state.chat.typed) { state.chat.typed = it }
    private val methods = Choice(context, "Decoding method") { state.chat.method = it }
    private val send = context.button("Send", main = true) { if (state.busy) state.stop() else state.ask(prompt.text.toString()) }
    private val examples = Wrapping(context)
    override val view: View = context.column(scroll, examples, context.row(methods.view, refused), context.line(prompt, send))

    override fun show() {
        methods.show(state.methods, state.chat.method)
        written.show(state.chat.transcript, state.refused, state.engine?.let(state.chat::talks) == true)
        if (prompt.text.toString() != state.chat.typed) prompt.setText(state.chat.typed)
        send.text = say(if (state.busy) "Stop" else "Send")
        send.isEnabled = state.busy || state.engine != null
        val offered = if (state.chat.transcript.size > 0 || state.busy) emptyList() else state.examples
        examples.removeAllViews()
        offered.forEach { one -> examples.addView(view.context.button(one) { state.ask(one) }) }
        if (state.busy) scroll.post { scroll.fullScroll(View.FOCUS_DOWN) }
    }
}

/** A screen with the results of a run, and a report to share. */
abstract class RunScreen(context: Context, protected val state: AppState, final override val name: String, private val says: String) : Screen {
    private val cards = Cards(context)
    private val run = context.button(says, main = true) { if (state.busy) state.stop() else begin() }
    private val share = context.button("Share") {
        state.tryTo { SharedFiles.send(context, "edgespec-${name.lowercase()}.json", report!!) }
    }
    override val view: LinearLayout = context.column(cards, context.row(run, share))
    protected abstract val shown: List<Card>
    protected abstract val report: String?

    protected abstract fun begin()

    override fun show() {
        cards.show(shown)
        run.text = say(if (state.busy) "Stop" else says)
        run.isEnabled = state.engine != null
        share.visibility = if (report != null) View.VISIBLE else View.GONE
    }
}

class BenchScreen(context: Context, state: AppState) : RunScreen(context, state, BENCH, "Measure") {
    private val prompts = context.edit("Prompts, one a line", state.prompts) { state.prompts = it }
    override val shown get() = state.benchCards()
    override val report get() = if (state.benched.isEmpty()) null else state.report("bench")

    init { view.addView(prompts, 1, LinearLayout.LayoutParams(MATCH_PARENT, WRAP_CONTENT)) }

    override fun begin() =
        state.measure(prompts.text.lines().filter { it.isNotBlank() }, Settings(maxNewTokens = 64), repeats = 3)
}

class ProofScreen(context: Context, state: AppState) : RunScreen(context, state, PROOF, "Compare") {
    override val shown get() = state.proofCards()
    override val report get() = if (state.proved.isEmpty()) null else state.report("proof")

    override fun begin() = state.prove()
}
