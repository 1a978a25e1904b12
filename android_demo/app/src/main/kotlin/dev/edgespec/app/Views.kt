package dev.edgespec.app

import android.content.Context
import android.content.res.Configuration
import android.graphics.Color
import android.graphics.Typeface
import android.text.SpannableStringBuilder
import android.text.Spanned
import android.text.style.ForegroundColorSpan
import android.text.style.StrikethroughSpan
import android.text.style.StyleSpan
import android.view.View
import android.view.ViewGroup.LayoutParams.MATCH_PARENT
import android.view.ViewGroup.LayoutParams.WRAP_CONTENT
import android.widget.*

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

/** Pixels of so many dp. */
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

    init {
        addView(HorizontalScrollView(context).apply { addView(table) })
    }

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
