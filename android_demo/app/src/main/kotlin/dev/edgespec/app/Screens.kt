package dev.edgespec.app

import android.content.Context
import android.content.Intent
import android.text.Editable
import android.text.TextWatcher
import android.view.View
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

private fun EditText.changed(how: (String) -> Unit) = addTextChangedListener(object : TextWatcher {
    override fun beforeTextChanged(now: CharSequence?, start: Int, count: Int, after: Int) = Unit

    override fun onTextChanged(now: CharSequence?, start: Int, before: Int, count: Int) = Unit

    override fun afterTextChanged(now: Editable?) = how(now.toString())
})

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
    private val prompt = EditText(context).apply {
        hint = "Your message"
        setText(state.chat.typed)
        changed { state.chat.typed = it }
    }
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

/** Every method against plain decoding, on this phone. */
class BenchScreen(context: Context, private val state: AppState) : Screen {
    override val name = "Bench"
    private val table = Table(context)
    private val prompts = EditText(context).apply {
        hint = "Prompts, one a line"
        setText(state.prompts)
        changed { state.prompts = it }
    }
    private val run = context.button("Measure") {
        state.measure(prompts.text.lines().filter { it.isNotBlank() }, Settings(maxNewTokens = 64), repeats = 3)
    }
    private val stop = context.button("Stop") { state.stop() }
    private val share = context.button("Share") { context.share(state.report("bench")) }
    override val view: View = context.column(table, prompts, context.row(run, stop, share))

    override fun show() {
        table.show(if (state.benched.isEmpty()) emptyList() else state.benchTable())
        run.isEnabled = state.engine != null && !state.busy
        stop.isEnabled = state.busy
        share.isEnabled = state.benched.isNotEmpty()
    }
}

/** What of the bundle fits a memory budget. */
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

    private companion object {
        const val STEPS = 200
    }
}

/** Whether this phone writes what the exporting machine wrote. */
class ProofScreen(context: Context, private val state: AppState) : Screen {
    override val name = "Proof"
    private val table = Table(context)
    private val run = context.button("Compare") { state.prove() }
    private val stop = context.button("Stop") { state.stop() }
    private val share = context.button("Share") { context.share(state.report("proof")) }
    override val view: View = context.column(table, context.row(run, stop, share))

    override fun show() {
        val rows = state.proved.mapIndexed { at, one -> listOf("${at + 1}", one.method, "${one.expected.size}", if (one.equal) "equal" else "differs") }
        table.show(if (rows.isEmpty()) emptyList() else listOf(listOf("vector", "method", "tokens", "result")) + rows)
        run.isEnabled = state.engine != null && !state.busy
        stop.isEnabled = state.busy
        share.isEnabled = rows.isNotEmpty()
    }
}
