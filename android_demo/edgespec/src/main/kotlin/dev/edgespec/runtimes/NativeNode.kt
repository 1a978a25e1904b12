package dev.edgespec.runtimes

import dev.edgespec.*
import java.io.File
import java.nio.ByteBuffer

/* Graphs of native operators without ONNX Runtime: the library maps their weights and runs their only node. */

/** The library's C interface (edgespec/runtimes/native/jni.cpp). */
internal object NativeNode {
    external fun version(): Int
    external fun open(path: ByteArray, threads: Int): Long
    external fun close(model: Long)
    external fun inputWidth(model: Long): Int
    external fun limit(model: Long, threads: Int)
    external fun run(model: Long, inputs: Array<ByteBuffer?>, shapes: LongArray, outputs: Array<ByteBuffer?>, room: LongArray): Int
    external fun error(): ByteArray
    external fun isa(): ByteArray

    fun said(): String = String(error(), Charsets.UTF_8).removePrefix("edgespec: ")
}

/** The instruction set of the kernels; their library must have been loaded. */
internal fun nativeIsa(): String = String(NativeNode.isa(), Charsets.UTF_8)

/** The node's inputs and outputs, in the order of edgespec.h. */
private val INPUTS = listOf(
    "plan", "rows", "gates", "moves", "kv", "control", "tables", "hidden_in", "memory", "sources", "inserted", "axes",
).withIndex().associate { it.value to it.index }
private val OUTPUTS = listOf("logits", "ids", "values", "hidden").withIndex().associate { it.value to it.index }
private const val INTERFACE = 2 // version of the C interface that runs nodes

/** A graph of native operators that only their [library] runs. */
internal class LibraryGraph(path: File, threads: Int, library: File) : Runner {
    private var model: Long

    init {
        load(library)
        model = NativeNode.open(path.absolutePath.toByteArray(Charsets.UTF_8), threads)
        if (model == 0L) throw BundleError("native operators cannot load this graph: ${NativeNode.said()}", "export the bundle again")
    }

    override val givenSize = NativeNode.inputWidth(model)

    override fun limit(threads: Int) = NativeNode.limit(model, threads)

    override fun binding() = object : Binding {
        private val inputs = arrayOfNulls<ByteBuffer>(INPUTS.size)
        private val shapes = LongArray(2 * INPUTS.size)
        private val outputs = arrayOfNulls<ByteBuffer>(OUTPUTS.size)
        private val room = LongArray(2 * OUTPUTS.size)
        private val given = arrayOfNulls<Bound>(OUTPUTS.size)

        override fun input(name: String, bound: Bound) = put(INPUTS.getValue(name), bound, inputs, shapes)

        override fun output(name: String, bound: Bound?) {
            given[OUTPUTS.getValue(name)] = bound
        }

        private fun put(at: Int, bound: Bound?, buffers: Array<ByteBuffer?>, sizes: LongArray) {
            buffers[at] = bound?.bytes
            sizes[2 * at] = if (bound == null) 0 else if (bound.shape.size > 1) bound.shape[0].toLong() else 1
            sizes[2 * at + 1] = bound?.shape?.last()?.toLong() ?: 0
        }

        override fun run() {
            for (at in given.indices) put(at, given[at], outputs, room) // the last pass has changed the room
            if (NativeNode.run(model, inputs, shapes, outputs, room) == 0) return
            throw EdgespecError("a pass failed: ${NativeNode.said()}", "the bundle may be damaged: check it with `edgespec verify`")
        }
    }

    override fun close() {
        NativeNode.close(model)
        model = 0
    }

    private companion object {
        private var loaded: File? = null

        /** Load the library, once: the first one stays. */
        @Synchronized
        fun load(library: File) {
            if (loaded != null) return
            if (!byName(library)) System.load(library.absolutePath) // by name, `whyNot` has loaded it
            if (NativeNode.version() < INTERFACE) throw BundleError("$library is older than this program", "build it again")
            loaded = library
        }
    }
}
