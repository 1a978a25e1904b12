package dev.edgespec.runtimes;

import java.nio.charset.StandardCharsets;
import java.nio.file.*;
import java.util.*;

/** Lines of text by JNI alone: LIBRARY TOKENIZER.JSON LINES prints each one's tokens, and its text in Base64. */
public class NativeTokenizer {
    static native long open(byte[] json);
    static native void close(long tokenizer);
    static native int[] encode(long tokenizer, byte[] text, int special);
    static native byte[] decode(long tokenizer, int[] tokens);
    static native byte[] error();

    static String said() { return new String(error(), StandardCharsets.UTF_8); }

    public static void main(String[] words) throws Exception {
        System.load(words[0]);
        if (open("{}".getBytes()) != 0 || !said().startsWith("not a readable tokenizer: ")) throw new Error(said());
        long tokenizer = open(Files.readAllBytes(Path.of(words[1])));
        if (tokenizer == 0) throw new Error(said());
        if (encode(tokenizer, new byte[] {-1}, 1) != null || !said().startsWith("expected a text in UTF-8")) throw new Error(said());
        for (String line : Files.readAllLines(Path.of(words[2]))) {
            int[] tokens = encode(tokenizer, line.getBytes(StandardCharsets.UTF_8), 1);
            System.out.println(Arrays.toString(tokens));
            System.out.println(Base64.getEncoder().encodeToString(decode(tokenizer, tokens)));
        }
        close(tokenizer);
    }
}
