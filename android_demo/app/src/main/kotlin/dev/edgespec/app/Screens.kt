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
import dev.edgespec.decoding.Settings
import dev.edgespec.planning.showBytes

/** A screen of the app: its view, and how it shows what the app is doing. */
interface Screen {
    val name: String
    val view: View

    fun show()
}

private fun Context.share(report: String) {
    val send = Intent(Intent.ACTION_SEND).setType("application/json").putExtra(Intent.EXTRA_TEXT, report)
    startActivity(Intent.createChooser(send, "Share the report"))
}

private fun Context.edit(hint: String, text: String, changed: (String) -> Unit) = EditText(this).apply {
    this.hint = hint
    setText(text)
    addTextChangedListener(object : TextWatcher {
        override fun beforeTextChanged(now: CharSequence?, start: Int, count: Int, after: Int) = Unit
        override fun onTextChanged(now: CharSequence?, start: Int, before: Int, count: Int) = Unit
        override fun afterTextChanged(now: Editable?) = changed(now.toString())
    })
}

/** Chat: text as it is written, which method, how fast, and why. */
class ChatScreen(context: Context, private val state: AppState) : Screen {
    override val name = "Chat"
    private val text = context.text().apply { setTextIsSelectable(true) }
    private val scroll = ScrollView(context).apply { addView(text) }
    private val refused = Switch(context).apply {
        text = "Show refused guesses"
        isChecked = state.refused
        setOnCheckedChangeListener { _, on ->
            state.refused = on
            show()
        }
    }
    private val prompt = context.edit("Your message", state.chat.typed) { state.chat.typed = it }
    private val methods = Spinner(context).apply {
        contentDescription = "Decoding method"
        onItemSelectedListener = object : AdapterView.OnItemSelectedListener {
            override fun onItemSelected(parent: AdapterView<*>?, view: View?, position: Int, id: Long) {
                state.chat.method = state.methods[position]
            }

            override fun onNothingSelected(parent: AdapterView<*>?) = Unit
        }
    }
    private var offered: List<String> = emptyList()
    private val send = context.button("Send") {
        state.ask(prompt.text.toString())
        if (state.busy) prompt.setText("")
    }
    private val stop = context.button("Stop") { state.stop() }
    private val fresh = context.button("New chat") {
        state.chat.clear()
        show()
    }
    override val view: View = context.column(scroll, refused, prompt, context.row(methods, send, stop, fresh))

    override fun show() {
        if (offered != state.methods) {
            offered = state.methods
            methods.adapter = ArrayAdapter(view.context, android.R.layout.simple_spinner_dropdown_item, offered)
            methods.setSelection(maxOf(0, offered.indexOf(state.chat.method)))
        }
        text.text = view.context.spanned(state.chat.transcript.pieces(state.refused))
        send.isEnabled = state.engine != null && !state.busy
        stop.isEnabled = state.busy
        fresh.isEnabled = !state.busy
        if (state.busy) scroll.post { scroll.fullScroll(View.FOCUS_DOWN) }
    }
}

/** A screen whose table a run fills, and a report shares. */
abstract class RunScreen(context: Context, protected val state: AppState, override val name: String, says: String) : Screen {
    private val table = Table(context)
    private val run = context.button(says) { begin() }
    private val stop = context.button("Stop") { state.stop() }
    private val share = context.button("Share") { context.share(state.report(name.lowercase())) }
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
    override val name = "Plan"
    private val table = Table(context)
    private val says = context.text()
    private val slider = SeekBar(context).apply {
        max = STEPS
        progress = (state.budget * STEPS).toInt()
        contentDescription = "Memory budget"
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
    text = says
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
