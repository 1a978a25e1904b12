package dev.edgespec

/**
 * Base of all errors raised on purpose: what was expected and what came, and as [hint] what the reader can do about it.
 * The classes and their messages are those of the Python side.
 */
open class EdgespecError(val what: String, val hint: String? = null, cause: Throwable? = null) :
    RuntimeException(if (hint == null) what else "$what\nhint: $hint", cause)

/** A bundle is missing a part, was altered, or is newer than this program. */
class BundleError(what: String, hint: String? = null, cause: Throwable? = null) : EdgespecError(what, hint, cause)

/** Nothing fits the memory that there is, or what was asked for does not. */
class BudgetError(what: String, hint: String? = null) : EdgespecError(what, hint)

/** An n-gram store cannot be read: not a store, damaged, too new, or of another tokenizer. */
class StoreError(what: String, hint: String? = null, cause: Throwable? = null) : EdgespecError(what, hint, cause)

/** A generation request that cannot be served: empty prompt, too long, nonsense settings. */
class InvalidRequest(what: String, hint: String? = null, cause: Throwable? = null) : EdgespecError(what, hint, cause)

/** What a library's error says, in a line. */
fun firstLine(error: Throwable): String =
    (error.message ?: "").lineSequence().firstOrNull { it.isNotBlank() } ?: error.javaClass.simpleName
