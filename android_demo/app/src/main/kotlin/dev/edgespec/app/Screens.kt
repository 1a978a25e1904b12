package dev.edgespec.app

import android.content.*
import android.view.Gravity
import android.view.View
import android.view.ViewGroup.LayoutParams.MATCH_PARENT
import android.view.ViewGroup.LayoutParams.WRAP_CONTENT
import android.widget.*
import dev.edgespec.audio.SoundSource
import dev.edgespec.decoding.Settings
import dev.edgespec.images.Picture
import dev.edgespec.planning.showBytes

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

    /** Offer these, or nothing at all; the empty word is any language. */
    fun show(options: List<String>, now: String) {
        view.visibility = if (options.isEmpty()) View.GONE else View.VISIBLE
        if (offered == options) return
        offered = options
        view.adapter = ArrayAdapter(view.context, android.R.layout.simple_spinner_dropdown_item, options.map { it.ifEmpty { say("any language") } })
        view.setSelection(maxOf(0, options.indexOf(now)))
    }
}

/** A growing text: existing pieces are not set again.  In a chat, the user's messages are at the right. */
private class Written(private val context: Context, private val picture: (String) -> Picture? = { null }) {
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
            text.append(context.spanned(if (own) part.map { it.copy(text = it.text.trim()) } else part, picture))
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

/** Chat: text as it is written, which method, how fast, and why; [pick] asks for a picture. */
class ChatScreen(context: Context, private val state: AppState, private val pick: (View) -> Unit) : Screen {
    override val name = CHAT
    private val written = Written(context, state.chat.pictures::get)
    private val scroll = ScrollView(context).apply { addView(written.view) }
    private val refused = context.switch("Show rejected guesses", state.refused) {
        state.refused = it
        show()
    }
    private val prompt = context.edit("Your message", state.chat.typed) { state.chat.typed = it }
    private val methods = Choice(context, "Decoding method") { state.chat.method = it }
    private val send = context.button("Send", main = true) { if (state.busy) state.stop() else state.ask(prompt.text.toString()) }
    private val picture: Button = context.button("Picture") {
        if (state.chat.attached == null) return@button pick(view)
        state.chat.attached = null
        show()
    }
    private val examples = Wrapping(context)
    override val view: View = context.column(scroll, examples, context.row(methods.view, refused, picture), context.line(prompt, send))

    override fun show() {
        methods.show(state.methods, state.chat.method)
        picture.text = if (state.chat.attached != null) say("Remove the picture") else say("Picture")
        picture.visibility = if (state.engine?.let(state.chat::sees) == true) View.VISIBLE else View.GONE
        picture.isEnabled = !state.busy
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

/** Translations and other outputs for a text, line by line as they are generated. */
class TranslateScreen(context: Context, private val state: AppState) : Screen {
    override val name = TRANSLATE
    private val written = Written(context)
    private val source = context.edit("Text, a line at a time", state.source) { state.source = it }
    private val from = Choice(context, "From") { state.from = it }
    private val to = Choice(context, "To") { state.to = it }
    private val methods = Choice(context, "Decoding method") { state.chat.method = it }
    private val run = context.button("Translate", main = true) { if (state.busy) state.stop() else state.translate() }
    override val view: View =
        context.column(ScrollView(context).apply { addView(written.view) }, source, context.row(from.view, to.view, methods.view, run))

    override fun show() {
        val reads = state.engine?.sources
        from.show(reads?.origins ?: emptyList(), state.from)
        to.show(reads?.targets ?: emptyList(), state.to)
        methods.show(state.methods, state.chat.method)
        written.show(state.translated, state.refused)
        if (source.text.toString() != state.source) source.setText(state.source)
        run.text = say(if (state.busy) "Stop" else "Translate")
        run.isEnabled = state.busy || reads != null
    }
}

/** Speech to text; [microphone] gives none where it may not be used. */
class ListenScreen(context: Context, private val state: AppState, private val microphone: () -> SoundSource?) : Screen {
    override val name = LISTEN
    private val text = context.text().apply { setTextIsSelectable(true) }
    private val language = Choice(context, "Spoken language") { state.asked = state.asked.copy(language = it.ifEmpty { null }) }
    private val english = context.switch("Translate into English", state.asked.task == "translate") {
        state.asked = state.asked.copy(task = if (it) "translate" else "transcribe")
    }
    private val times = context.switch("Show times", state.asked.timestamps) { state.asked = state.asked.copy(timestamps = it) }
    private val record = context.button("Record", main = true) { if (state.busy) state.stop() else microphone()?.let(state::listen) }
    override val view: View =
        context.column(ScrollView(context).apply { addView(text) }, context.row(english, times), context.row(language.view, record))

    override fun show() {
        val made = state.engine
        val speech = made?.bundle?.manifest?.speech
        language.show(speech?.languages?.keys?.sorted()?.let { listOf("") + it } ?: emptyList(), state.asked.language ?: "")
        text.text = state.transcript
        record.text = say(if (state.busy) "Stop" else "Record")
        record.isEnabled = state.busy || speech != null
        english.isEnabled = speech?.tasks?.contains("translate") == true
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

private const val STEPS = 200

/** Memory within a budget; and the profile of this device, for plans elsewhere. */
class PlanScreen(context: Context, state: AppState) : RunScreen(context, state, PLAN, "Measure this device") {
    private val says = context.text()
    private val slider = SeekBar(context).apply {
        max = STEPS
        progress = (state.budget * STEPS).toInt()
        contentDescription = say("Memory budget")
        setOnSeekBarChangeListener(object : SeekBar.OnSeekBarChangeListener {
            override fun onProgressChanged(bar: SeekBar?, progress: Int, fromUser: Boolean) {
                state.budget = progress.toDouble() / STEPS
                show()
            }

            override fun onStartTrackingTouch(bar: SeekBar?) = Unit
            override fun onStopTrackingTouch(bar: SeekBar?) = Unit
        })
    }
    private val budget get() = state.free * slider.progress / STEPS
    override val shown get() = state.planCards(budget)
    override val report get() = state.profile

    init {
        view.addView(says, 1)
        view.addView(slider, 2, LinearLayout.LayoutParams(MATCH_PARENT, WRAP_CONTENT))
    }

    override fun begin() = state.calibrate()

    override fun show() {
        says.text = say("Budget: %s of the %s that are free").format(showBytes(budget), showBytes(state.free))
        super.show()
    }
}
