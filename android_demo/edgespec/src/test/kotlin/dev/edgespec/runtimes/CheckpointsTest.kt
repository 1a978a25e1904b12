package dev.edgespec.runtimes

import dev.edgespec.support.ints
import dev.edgespec.support.vectors
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Test

class CheckpointsTest {
    @Test
    fun `states are kept where the Python side keeps them`() {
        for (case in vectors("turns")) {
            assertEquals(case.ints("lengths").asList(), endsOfTurns(case.ints("tokens"), case.ints("eos").toSet()), "$case")
        }
    }
}
