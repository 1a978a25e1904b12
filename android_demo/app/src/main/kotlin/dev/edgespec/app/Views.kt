package dev.edgespec.app

import android.content.*
import android.content.res.Configuration
import android.graphics.*
import android.graphics.drawable.GradientDrawable
import android.text.*
import android.text.style.*
import android.util.TypedValue
import android.view.Gravity
import android.view.View
import android.view.ViewGroup
import android.view.ViewGroup.LayoutParams.MATCH_PARENT
import android.view.ViewGroup.LayoutParams.WRAP_CONTENT
import android.widget.*

/* Small views that the screens share.  Sizes are the system's own, so large fonts stay large. */

fun Context.button(says: String, main: Boolean = false, click: () -> Unit) =
    Button(this, null, if (main) 0 else android.R.attr.buttonStyle, if (main) android.R.style.Widget_Material_Button_Colored else 0).apply {
        text = say(says)
        setAllCaps(false)
        setOnClickListener { click() }
    }

fun Context.switch(says: String, on: Boolean, turned: (Boolean) -> Unit) = Switch(this).apply {
    text = say(says)
    isChecked = on
    minHeight = dp(48)
    setOnCheckedChangeListener { _, now -> turned(now) }
}

fun Context.edit(hint: String, text: String, changed: (String) -> Unit) = EditText(this).apply {
    this.hint = say(hint)
    setText(text)
    ground(faint(android.R.attr.textColorPrimary))
    addTextChangedListener(object : TextWatcher {
        override fun beforeTextChanged(now: CharSequence?, start: Int, count: Int, after: Int) = Unit
        override fun onTextChanged(now: CharSequence?, start: Int, before: Int, count: Int) = Unit
        override fun afterTextChanged(now: Editable?) = changed(now.toString())
    })
}

/** Text in the colour that reads best on its ground. */
fun Context.text() = TextView(this).apply { setTextColor(colour(android.R.attr.textColorPrimary)) }

private fun Context.colour(attribute: Int): Int =
    obtainStyledAttributes(intArrayOf(attribute)).run { getColor(0, Color.GRAY).also { recycle() } }

/** The colour of a ground: a little of the theme's. */
fun Context.faint(attribute: Int): Int = colour(attribute) and 0xFFFFFF or 0x1A000000

/** A background with round corners and padding. */
fun View.ground(colour: Int) {
    background = GradientDrawable().apply {
        setColor(colour)
        cornerRadius = context.dp(12).toFloat()
    }
    context.dp(12).let { setPadding(it, it * 2 / 3, it, it * 2 / 3) }
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
    setOnClickListener { click(it) }
}

/** Select a tab, also for screen readers. */
fun Button.choose(on: Boolean) {
    isSelected = on
    setTypeface(null, if (on) Typeface.BOLD else Typeface.NORMAL)
    ground(if (on) context.faint(android.R.attr.colorAccent) else Color.TRANSPARENT)
}

/** Views in a row, wrapped to further lines. */
fun Context.row(vararg views: View): View = Wrapping(this).apply { views.forEach { addView(it) } }

/** Stack views vertically at their own widths. */
fun Context.stack(views: List<View>) = LinearLayout(this).apply {
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

/** Stack views vertically; [wide] gets the remaining room. */
fun Context.column(wide: View, vararg below: View): LinearLayout = LinearLayout(this).apply {
    orientation = LinearLayout.VERTICAL
    addView(wide, LinearLayout.LayoutParams(MATCH_PARENT, 0, 1f))
    below.forEach { addView(it, LinearLayout.LayoutParams(MATCH_PARENT, WRAP_CONTENT)) }
}

/** Two views side by side, of which [wide] gets what room there is. */
fun Context.line(wide: View, other: View) = LinearLayout(this).apply {
    gravity = Gravity.CENTER_VERTICAL
    addView(wide, LinearLayout.LayoutParams(0, WRAP_CONTENT, 1f))
    addView(other)
}

/** A vertical list of entries: a name, its figure, a bar, and more text in as many lines as it needs. */
class Cards(context: Context) : ScrollView(context) {
    private val all = context.stack(emptyList())

    init { addView(all) }

    fun show(cards: List<Card>) {
        all.removeAllViews()
        for (card in cards) {
            val head = listOf(card.title, card.value).map { says ->
                context.text().apply {
                    text = says
                    setTypeface(null, Typeface.BOLD)
                    setTextSize(TypedValue.COMPLEX_UNIT_SP, 16f)
                }
            }
            val bar = card.share?.let { share ->
                ProgressBar(context, null, android.R.attr.progressBarStyleHorizontal).apply {
                    max = 1000
                    progress = (1000 * share).toInt()
                    importantForAccessibility = View.IMPORTANT_FOR_ACCESSIBILITY_NO
                }
            }
            val rest = card.details.joinToString("\u00a0\u00b7 ") { (name, value) -> "${say(name)} $value".replace(' ', '\u00a0').replace("/", "/\u2060") } // in one line each
            val below = context.text().apply { text = rest }
            val shown = context.stack(listOfNotNull(context.line(head[0], head[1]), bar, below))
            shown.ground(context.faint(android.R.attr.textColorPrimary))
            // a screen reader says an entry as one
            shown.isFocusable = true
            shown.contentDescription = "${card.title} ${card.value}. $rest"
            all.addView(shown, LinearLayout.LayoutParams(MATCH_PARENT, WRAP_CONTENT).apply { topMargin = context.dp(8) })
        }
    }
}

/** Pieces of a chat: the user's bold, accepted guesses green, rejected ones red and struck out. */
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
