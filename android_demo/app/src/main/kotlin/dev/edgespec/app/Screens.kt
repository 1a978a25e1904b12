package dev.edgespec.app

import android.content.*
import android.content.res.Configuration
import android.graphics.*
import android.text.*
import android.text.style.*
import android.view.View
import android.view.ViewGroup
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

private fun Context.edit(hint: String, text: String, changed: (String) -> Unit) = EditText(this).apply {
    this.hint = say(hint)
    setText(text)
    addTextChangedListener(object : TextWatcher {
        override fun beforeTextChanged(now: CharSequence?, start: Int, count: Int, after: Int) = Unit
        override fun onTextChanged(now: CharSequence?, start: Int, before: Int, count: Int) = Unit
        override fun afterTextChanged(now: Editable?) = changed(now.toString())
    })
}

/** A text that grows: what is there already is not set again. */
private class Written(context: Context) {
    private var shown: Transcript? = null
    private var refused = false
    private var count = 0
    val view = context.text().apply { setTextIsSelectable(true) }

    fun show(transcript: Transcript, refused: Boolean) {
        if (transcript !== shown || refused != this.refused || count > transcript.size) {
            view.text = ""
            count = 0
        }
        if (count < transcript.size) view.append(view.context.spanned(transcript.pieces(refused, count)))
        shown = transcript
        this.refused = refused
        count = transcript.size
    }
}

/** Chat: text as it is written, which method, how fast, and why. */
class ChatScreen(context: Context, private val state: AppState) : Screen {
    override val name = CHAT
    private val written = Written(context)
    private val scroll = ScrollView(context).apply { addView(written.view) }
    private val refused = context.switch("Show refused guesses", state.refused) {
        state.refused = it
        show()
    }
    private val prompt = context.edit("Your message", state.chat.typed) { state.chat.typed = it }
    private val methods = Choice(context, "Decoding method") { state.chat.method = it }
    private val send = context.button("Send") { if (state.busy) state.stop() else state.ask(prompt.text.toString()) }
    private val examples = Wrapping(context)
    override val view: View = context.column(scroll, examples, refused, prompt, context.row(methods.view, send))

    override fun show() {
        methods.show(state.methods, state.chat.method)
        written.show(state.chat.transcript, state.refused)
        if (prompt.text.toString() != state.chat.typed) prompt.setText(state.chat.typed)
        send.text = say(if (state.busy) "Stop" else "Send")
        send.isEnabled = state.busy || state.engine != null
        val offered = if (state.chat.transcript.size > 0 || state.busy) emptyList() else state.examples
        examples.removeAllViews()
        offered.forEach { one -> examples.addView(view.context.button(one) { state.ask(one) }) }
        if (state.busy) scroll.post { scroll.fullScroll(View.FOCUS_DOWN) }
    }
}

/** Translations, and whatever else models make of a text: line by line, as they are written. */
class TranslateScreen(context: Context, private val state: AppState) : Screen {
    override val name = TRANSLATE
    private val written = Written(context)
    private val source = context.edit("Text, a line at a time", state.source) { state.source = it }
    private val from = Choice(context, "From") { state.from = it }
    private val to = Choice(context, "To") { state.to = it }
    private val methods = Choice(context, "Decoding method") { state.chat.method = it }
    private val run = context.button("Translate") { if (state.busy) state.stop() else state.translate() }
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
    private val record = context.button("Record") { if (state.busy) state.stop() else microphone()?.let(state::listen) }
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

/** A screen of what a run found, and a report of it that can be shared. */
abstract class RunScreen(context: Context, protected val state: AppState, final override val name: String, private val says: String) : Screen {
    private val cards = Cards(context)
    private val run = context.button(says) { if (state.busy) state.stop() else begin() }
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

/** What of the bundle fits a budget; and the profile of this device, for plans elsewhere. */
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

fun Context.resource(type: String, name: String): Int = resources.getIdentifier(name, type, packageName)

/** A screen's name in the bar; see [choose]. */
fun Context.tab(name: String, click: (View) -> Unit) = Button(this, null, android.R.attr.borderlessButtonStyle).apply {
    text = say(name)
    tag = name
    setAllCaps(false)
    minWidth = 0
    minimumWidth = dp(48)
    setPadding(dp(10), 0, dp(10), 0)
    setOnClickListener { click(it) }
}

/** Let a tab be the one at hand: screen readers say so, too. */
fun Button.choose(on: Boolean) {
    isSelected = on
    setTypeface(null, if (on) Typeface.BOLD else Typeface.NORMAL)
    paintFlags = if (on) paintFlags or Paint.UNDERLINE_TEXT_FLAG else paintFlags and Paint.UNDERLINE_TEXT_FLAG.inv()
}

/** Views side by side, and in another line where there is no room. */
fun Context.row(vararg views: View): View = Wrapping(this).apply { views.forEach { addView(it) } }

/** Views one above the other, as wide as they are. */
fun Context.stack(views: List<View>): View = LinearLayout(this).apply {
    orientation = LinearLayout.VERTICAL
    views.forEach { addView(it) }
}

/** Lays its views out as words are: nothing is ever beyond the edge. */
class Wrapping(context: Context) : ViewGroup(context) {
    /** Place the views in lines of this width -> how high all are. */
    private fun lines(width: Int, place: (View, Int, Int) -> Unit): Int {
        var (x, y, high) = Triple(0, 0, 0)
        for (at in 0 until childCount) {
            val view = getChildAt(at)
            if (view.visibility == View.GONE) continue
            if (x > 0 && x + view.measuredWidth > width) {
                x = 0
                y += high
                high = 0
            }
            place(view, if (layoutDirection == View.LAYOUT_DIRECTION_RTL) width - x - view.measuredWidth else x, y)
            x += view.measuredWidth
            high = maxOf(high, view.measuredHeight)
        }
        return y + high
    }

    override fun onMeasure(wide: Int, high: Int) {
        val width = MeasureSpec.getSize(wide)
        measureChildren(MeasureSpec.makeMeasureSpec(width, MeasureSpec.AT_MOST), MeasureSpec.makeMeasureSpec(0, MeasureSpec.UNSPECIFIED))
        setMeasuredDimension(width, resolveSize(lines(width) { _, _, _ -> }, high))
    }

    override fun onLayout(changed: Boolean, left: Int, top: Int, right: Int, bottom: Int) {
        lines(right - left) { view, x, y -> view.layout(x, y, x + view.measuredWidth, y + view.measuredHeight) }
    }
}

/** Views one above the other; [wide] gets what room is left. */
fun Context.column(wide: View, vararg below: View): LinearLayout = LinearLayout(this).apply {
    orientation = LinearLayout.VERTICAL
    addView(wide, LinearLayout.LayoutParams(MATCH_PARENT, 0, 1f))
    below.forEach { addView(it, LinearLayout.LayoutParams(MATCH_PARENT, WRAP_CONTENT)) }
}

/** Entries one below the other: a name, its figure, a bar, and what else there is, in as many lines as it needs. */
class Cards(context: Context) : ScrollView(context) {
    private val all = LinearLayout(context).apply { orientation = LinearLayout.VERTICAL }

    init { addView(all) }

    fun show(cards: List<Card>) {
        all.removeAllViews()
        for (card in cards) {
            val head = SpannableStringBuilder("${card.title}   ${card.value}").apply {
                setSpan(StyleSpan(Typeface.BOLD), 0, length, Spanned.SPAN_EXCLUSIVE_EXCLUSIVE)
                setSpan(RelativeSizeSpan(1.2f), 0, length, Spanned.SPAN_EXCLUSIVE_EXCLUSIVE)
            }
            val rest = card.details.joinToString(" \u00b7 ") { (name, value) -> "${say(name)}\u00a0${value.replace(' ', '\u00a0')}" }
            val shown = LinearLayout(context).apply {
                orientation = LinearLayout.VERTICAL
                setPadding(0, context.dp(6), 0, context.dp(6))
                addView(context.text().apply { text = head })
                card.share?.let { share ->
                    addView(ProgressBar(context, null, android.R.attr.progressBarStyleHorizontal).apply {
                        max = 1000
                        progress = (1000 * share).toInt()
                        importantForAccessibility = View.IMPORTANT_FOR_ACCESSIBILITY_NO
                    }, LinearLayout.LayoutParams(MATCH_PARENT, WRAP_CONTENT))
                }
                addView(context.text().apply { text = rest })
                // a screen reader says an entry as one
                isFocusable = true
                contentDescription = "$head. $rest"
            }
            all.addView(shown, LinearLayout.LayoutParams(MATCH_PARENT, WRAP_CONTENT))
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
