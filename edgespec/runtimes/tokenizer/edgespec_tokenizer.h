/* Text to tokens and back from C, and from any language that can call C: Hugging Face's tokenizers, by the
 * tokenizer.json of a bundle, and its chat template by minijinja.  This library (edgespec/runtimes/tokenizer, a Rust
 * crate) is separate from that of passes (edgespec.h), which loads it where edgespec_bundle_load_codec asks for it.
 *
 * Functions that can fail return 0, or 1 and `edgespec_tokenizer_error` returns the reason; no panic leaves the
 * library, and nothing is written to stdout or stderr.  A tokenizer may be used by several threads at once, a stream
 * by one.  Texts are UTF-8 with their sizes in bytes, and may hold zeros. */
#ifndef EDGESPEC_TOKENIZER_H
#define EDGESPEC_TOKENIZER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct edgespec_tokenizer edgespec_tokenizer;
typedef struct edgespec_stream edgespec_stream;

const char* edgespec_tokenizer_error(void); /* why the last call of this thread that failed did */

/* Opens a tokenizer.json by its path in UTF-8, or by its content.  Truncation and padding that it asks for are left
 * out. */
int edgespec_tokenizer_open(const char* file, edgespec_tokenizer** tokenizer);
int edgespec_tokenizer_parse(const char* json, size_t size, edgespec_tokenizer** tokenizer);
/* The same with the chat templates of the folder. */
int edgespec_tokenizer_open_folder(const char* folder, edgespec_tokenizer** tokenizer);
void edgespec_tokenizer_close(edgespec_tokenizer* tokenizer); /* after its streams; null is fine */
/* Tokens, those that were added included. */
size_t edgespec_tokenizer_size(const edgespec_tokenizer* tokenizer);

/* Writes at most `room` ids of a text; count: how many there are, so that a call may be repeated with more room.
 * special: with what the tokenizer puts around a text (BOS). */
int edgespec_tokenizer_encode(const edgespec_tokenizer* tokenizer, const char* text, size_t size, int32_t special,
                              int64_t* ids, size_t room, size_t* count);
/* The ids of a conversation by the model's chat template, ready for the answer.  Special tokens in messages are text.
 * conversation: JSON, a list of messages, {"role": ..., "content": ...}, or an object with `messages` and perhaps
 * `tools` (JSON schemas), `options` (variables of the template), `generation_prompt` (false: without it) and
 * `continue_final` (true: the text ends within the last message, which the answer continues). */
int edgespec_tokenizer_encode_chat(const edgespec_tokenizer* tokenizer, const char* conversation, size_t size,
                                   int64_t* ids, size_t room, size_t* count);
/* Writes at most `room` bytes of the text of ids, without a zero at its end; size: how many there are.  Special tokens
 * are left out, and bytes outside of characters are U+FFFD, as in Python. */
int edgespec_tokenizer_decode(const edgespec_tokenizer* tokenizer, const int64_t* ids, size_t count, char* text,
                              size_t room, size_t* size);

/* The text of tokens as they come, in whole characters, after those of a prompt. */
int edgespec_stream_open(const edgespec_tokenizer* tokenizer, const int64_t* prompt, size_t count,
                         edgespec_stream** stream);
void edgespec_stream_close(edgespec_stream* stream);
/* Gives what a token adds, perhaps nothing.  text stays until the next call with this stream. */
int edgespec_stream_push(edgespec_stream* stream, int64_t token, const char** text, size_t* size);
/* Gives what was held back of a character that is not whole. */
int edgespec_stream_finish(edgespec_stream* stream, const char** text, size_t* size);

#ifdef __cplusplus
}
#endif
#endif
