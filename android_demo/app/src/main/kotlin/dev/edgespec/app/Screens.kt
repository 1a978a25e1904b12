package dev.edgespec.app

import android.content.*
import android.content.res.Configuration
import android.graphics.*
import android.text.*
import android.text.style.*
import android.view.View
import android.view.ViewGroup.LayoutParams.MATCH_PARENT
import android.view.ViewGroup.LayoutParams.WRAP_CONTENT
import android.widget.*
import dev.edgespec.audio.SoundSource
import dev.edgespec.decoding.Settings
import dev.edgespec.planning.showBytes

/** A screen of the app: its view, and how it shows what the app is doing. */
interface Screen {
    val name: String
    val view: View

    fun show()
}

/** A choice among a few words; [chosen] is told each that is picked. */
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

private fun Context.switch(says: String, on: Boolean, turned: (Boolean) -> Unit) = Switch(this).apply {
    text = say(says)
    isChecked = on
    setOnCheckedChangeListener { _, now -> turned(now) }
}

private fun Context.share(report: String) {
    val send = Intent(Intent.ACTION_SEND).setType("application/json").putExtra(Intent.EXTRA_TEXT, report)
    startActivity(Intent.createChooser(send, say("Share the report")))
}

private fun Context.edit(hint: String, text: String, changed: (String) -> Unit) = EditText(this).apply {
    this.hint = say(hint)
    setText(text)
    addTextChangedListener(object : TextWatcher {
        override fun beforeTextChanged(now: CharSequence?, start: Int, count: Int, after: Int) = Unit
        override fun onTextChanged(now: CharSequence?, start: Int, before: Int, count: Int) = Unit
        override fun afterTextChanged(now: Editable?) = changed(now.toString())
    })
}

/** Chat: text as it is written, which method, how fast, and why. */
class ChatScreen(context: Context, private val state: AppState) : Screen {
    override val name = say("Chat")
    private val text = context.text().apply { setTextIsSelectable(true) }
    private val scroll = ScrollView(context).apply { addView(text) }
    private val refused = context.switch("Show refused guesses", state.refused) {
        state.refused = it
        show()
    }
    private val prompt = context.edit("Your message", state.chat.typed) { state.chat.typed = it }
    private val methods = Choice(context, "Decoding method") { state.chat.method = it }
    private val send = context.button("Send") {
        state.ask(prompt.text.toString())
        if (state.busy) prompt.setText("")
    }
    private val stop = context.button("Stop") { state.stop() }
    private val fresh = context.button("New chat") {
        state.chat.clear()
        show()
    }
    override val view: View = context.column(scroll, refused, prompt, context.row(methods.view, send, stop, fresh))

    override fun show() {
        methods.show(state.methods, state.chat.method)
        text.text = view.context.spanned(state.chat.transcript.pieces(state.refused))
        send.isEnabled = state.engine != null && !state.busy
        stop.isEnabled = state.busy
        fresh.isEnabled = !state.busy
        if (state.busy) scroll.post { scroll.fullScroll(View.FOCUS_DOWN) }
    }
}

/** Translations, and whatever else models make of a text: line by line, as they are written. */
class TranslateScreen(context: Context, private val state: AppState) : Screen {
    override val name = say("Translate")
    private val text = context.text().apply { setTextIsSelectable(true) }
    private val source = context.edit("Text, a line at a time", state.source) { state.source = it }
    private val from = Choice(context, "From") { state.from = it }
    private val to = Choice(context, "To") { state.to = it }
    private val methods = Choice(context, "Decoding method") { state.chat.method = it }
    private val run = context.button("Translate") { state.translate() }
    private val stop = context.button("Stop") { state.stop() }
    override val view: View =
        context.column(ScrollView(context).apply { addView(text) }, source, context.row(from.view, to.view, methods.view, run, stop))

    override fun show() {
        val made = state.engine
        val reads = made?.sources
        from.show(reads?.origins ?: emptyList(), state.from)
        to.show(reads?.targets ?: emptyList(), state.to)
        methods.show(state.methods, state.chat.method)
        val shown = view.context.spanned(state.translated.pieces(state.refused))
        text.text = if (made != null && reads == null) say("This bundle's model does not read texts to translate") else shown
        run.isEnabled = reads != null && !state.busy
        stop.isEnabled = state.busy
    }
}

/** Speech to text; [microphone] gives none where it may not be used. */
class ListenScreen(context: Context, private val state: AppState, private val microphone: () -> SoundSource?) : Screen {
    override val name = say("Listen")
    private val text = context.text().apply { setTextIsSelectable(true) }
    private val language = Choice(context, "Spoken language") { state.asked = state.asked.copy(language = it.ifEmpty { null }) }
    private val english = context.switch("Translate into English", state.asked.task == "translate") {
        state.asked = state.asked.copy(task = if (it) "translate" else "transcribe")
    }
    private val times = context.switch("Show times", state.asked.timestamps) { state.asked = state.asked.copy(timestamps = it) }
    private val record = context.button("Record") { microphone()?.let(state::listen) }
    private val stop = context.button("Stop") { state.stop() }
    override val view: View =
        context.column(ScrollView(context).apply { addView(text) }, context.row(english, times), context.row(language.view, record, stop))

    override fun show() {
        val made = state.engine
        val speech = made?.bundle?.manifest?.speech
        language.show(speech?.languages?.keys?.sorted()?.let { listOf("") + it } ?: emptyList(), state.asked.language ?: "")
        text.text = if (made != null && speech == null) say("This bundle's model does not hear") else state.transcript
        record.isEnabled = speech != null && !state.busy
        english.isEnabled = speech?.tasks?.contains("translate") == true
        stop.isEnabled = state.busy
    }
}

/** A screen whose table a run fills, and a report shares. */
abstract class RunScreen(context: Context, protected val state: AppState, private val kind: String, says: String) : Screen {
    override val name = say(kind)
    private val table = Table(context)
    private val run = context.button(says) { begin() }
    private val stop = context.button("Stop") { state.stop() }
    private val share = context.button("Share") { context.share(state.report(kind.lowercase())) }
    override val view: LinearLayout = context.column(table, context.row(run, stop, share))
    protected abstract val rows: List<List<String>> // headings first; empty before the first run

    protected abstract fun begin()

    override fun show() {
        table.show(rows)
        run.isEnabled = state.engine != null && !state.busy
        stop.isEnabled = state.busy
        share.isEnabled = rows.isNotEmpty()
    }
}

class BenchScreen(context: Context, state: AppState) : RunScreen(context, state, "Bench", "Measure") {
    private val prompts = context.edit("Prompts, one a line", state.prompts) { state.prompts = it }
    override val rows get() = if (state.benched.isEmpty()) emptyList() else state.benchTable()

    init { view.addView(prompts, 1, LinearLayout.LayoutParams(MATCH_PARENT, WRAP_CONTENT)) }

    override fun begin() =
        state.measure(prompts.text.lines().filter { it.isNotBlank() }, Settings(maxNewTokens = 64), repeats = 3)
}

class ProofScreen(context: Context, state: AppState) : RunScreen(context, state, "Proof", "Compare") {
    override val rows get() = if (state.proved.isEmpty()) emptyList() else state.proofTable()

    override fun begin() = state.prove()
}

private const val STEPS = 200

class PlanScreen(context: Context, private val state: AppState, private val available: Long) : Screen {
    override val name = say("Plan")
    private val table = Table(context)
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
    override val view: View = context.column(table, says, slider)

    override fun show() {
        val budget = available * slider.progress / STEPS
        says.text = "Budget: ${showBytes(budget)} of the ${showBytes(available)} that are free"
        table.show(state.planTable(budget))
    }
}

/* Small views that the screens share.  Sizes are the system's own, so large fonts stay large. */

fun Context.button(says: String, click: () -> Unit) = Button(this).apply {
    text = say(says)
    setAllCaps(false)
    setOnClickListener { click() }
}

/** Text in the colour that reads best on its ground. */
fun Context.text() = TextView(this).apply {
    val style = obtainStyledAttributes(intArrayOf(android.R.attr.textColorPrimary))
    style.getColorStateList(0)?.let { setTextColor(it) }
    style.recycle()
}

fun Context.dp(count: Int): Int = (count * resources.displayMetrics.density).toInt()

/** Views side by side; wider than the screen, they can be pushed. */
fun Context.row(vararg views: View): View = HorizontalScrollView(this).apply {
    addView(LinearLayout(context).apply { views.forEach { addView(it) } })
}

/** Views one above the other; [wide] gets what room is left. */
fun Context.column(wide: View, vararg below: View): LinearLayout = LinearLayout(this).apply {
    orientation = LinearLayout.VERTICAL
    addView(wide, LinearLayout.LayoutParams(MATCH_PARENT, 0, 1f))
    below.forEach { addView(it, LinearLayout.LayoutParams(MATCH_PARENT, WRAP_CONTENT)) }
}

/** A table that can be pushed in both directions; its first row is the headings. */
class Table(context: Context) : ScrollView(context) {
    private val table = TableLayout(context)

    init { addView(HorizontalScrollView(context).apply { addView(table) }) }

    fun show(rows: List<List<String>>) {
        table.removeAllViews()
        val headings = rows.firstOrNull() ?: return
        rows.forEachIndexed { at, cells ->
            val row = TableRow(context)
            for (cell in cells) {
                row.addView(context.text().apply {
                    text = cell
                    setPadding(0, context.dp(4), context.dp(16), context.dp(4))
                    if (at == 0) setTypeface(typeface, Typeface.BOLD)
                })
            }
            // a screen reader says a row with what its figures mean
            if (at > 0) row.contentDescription = headings.zip(cells).joinToString { (name, cell) -> "$name $cell" }
            table.addView(row)
        }
    }
}

/** Pieces of a chat: the user's bold, accepted guesses green, refused ones red and struck out. */
fun Context.spanned(pieces: List<Piece>): CharSequence {
    val night = resources.configuration.uiMode and Configuration.UI_MODE_NIGHT_MASK == Configuration.UI_MODE_NIGHT_YES
    val green = if (night) Color.rgb(0x81, 0xC7, 0x84) else Color.rgb(0x1B, 0x5E, 0x20) // 4.5 : 1 and more on their grounds
    val red = if (night) Color.rgb(0xEF, 0x9A, 0x9A) else Color.rgb(0xB7, 0x1C, 0x1C)
    val shown = SpannableStringBuilder()
    for (piece in pieces) {
        val start = shown.length
        shown.append(piece.text)
        val spans = when (piece.kind) {
            Kind.USER -> listOf(StyleSpan(Typeface.BOLD))
            Kind.MODEL -> emptyList()
            Kind.ACCEPTED -> listOf(ForegroundColorSpan(green))
            Kind.REFUSED -> listOf(ForegroundColorSpan(red), StrikethroughSpan())
        }
        spans.forEach { shown.setSpan(it, start, shown.length, Spanned.SPAN_EXCLUSIVE_EXCLUSIVE) }
    }
    return shown
}
