/* Greedy decoding with n-gram guesses over the C interface of native bundles: the same tokens as plain greedy decoding,
 * in fewer passes where the text repeats itself.
 *
 *   cc -O2 -I RUNTIMES/native greedy.c -o greedy LIBRARY      (libedgespec.so, edgespec.dll or libedgespec.dylib)
 *   greedy model.native.onnx NEW EOS PROMPT...
 *
 * NEW: most tokens to write.  EOS: tokens that end a text, with commas between them, - for none.  PROMPT: tokens, at
 * least one.  Prints the tokens written; to stderr how many passes that took.
 *
 * With -DTOKENIZER, -I RUNTIMES/tokenizer and the tokenizer's library (RUNTIMES/tokenizer) it reads and writes text:
 *
 *   greedy model.native.onnx NEW EOS tokenizer.json TEXT
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef _WIN32
#include <windows.h>

#include <shellapi.h>
#endif

#include "edgespec.h"
#ifdef TOKENIZER
#include "edgespec_tokenizer.h"
#endif

enum { GUESSES = 7, LONGEST = 4, CONTEXT_LEFT = GUESSES + 1 };

typedef struct {
  int64_t* tokens;
  int64_t count;
#ifdef TOKENIZER
  edgespec_tokenizer* tokenizer;
  edgespec_stream* stream;
#endif
} text;

static int fail(const char* what) {
  fprintf(stderr, "greedy: %s\n", what);
  return 1;
}

static int refused(void) { return fail(edgespec_error()); }

static int is_end(const char* ends, int64_t token) {
  while (*ends) {
    char* after;
    const long long one = strtoll(ends, &after, 10);
    if (after == ends) return 0;
    if (one == token) return 1;
    ends = *after == ',' ? after + 1 : after;
  }
  return 0;
}

/* What followed the last time that the text ended as it does now: the longest ending first. */
static int guess(const text* t, int most, int64_t* guesses) {
  for (int64_t n = LONGEST; n > 0; --n)
    for (int64_t at = t->count - n - 1; at >= 0; --at) {
      if (memcmp(t->tokens + at, t->tokens + t->count - n, (size_t)n * sizeof *t->tokens)) continue;
      int found = 0;
      for (int64_t next = at + n; next < t->count && found < most; ++next) guesses[found++] = t->tokens[next];
      return found;
    }
  return 0;
}

/* One round: a pass over the last token and the guesses behind it; those that the model says itself are kept.  Adds the
 * tokens that are now known to the text.  Returns how many, 0: the library refused. */
static int run_round(edgespec_cache* cache, text* t, int most) {
  int64_t rows[GUESSES + 1];
  int32_t kept[GUESSES + 1];
  edgespec_request request = EDGESPEC_INIT(edgespec_request);
  edgespec_result result = EDGESPEC_INIT(edgespec_result);
  rows[0] = t->tokens[t->count - 1]; /* not in the cache yet */
  request.tokens = rows;
  request.rows = 1 + guess(t, most < GUESSES ? most : GUESSES, rows + 1);
  request.logits = EDGESPEC_ALL_ROWS;
  request.top = 1;
  if (edgespec_pass(cache, &request, &result)) return 0;
  int new_tokens = 0, right = 1;
  while (right) {
    const int64_t said = result.ids[new_tokens]; /* what follows row `new_tokens`, all rows before it being right */
    kept[new_tokens] = new_tokens;
    t->tokens[t->count++] = said;
    ++new_tokens;
    right = new_tokens < request.rows && rows[new_tokens] == said;
  }
  return edgespec_keep(cache, 0, kept, new_tokens) ? 0 : new_tokens;
}

#ifdef TOKENIZER
static int unreadable(void) { return fail(edgespec_tokenizer_error()); }

static int read_text(text* t, char** words, int count, int64_t room) {
  size_t known = 0;
  if (count != 2) return fail("expected a tokenizer.json and one text");
  if (edgespec_tokenizer_open(words[0], &t->tokenizer)) return unreadable();
  for (int again = 0; again < 2; ++again) { /* counted, then read */
    if (edgespec_tokenizer_encode(t->tokenizer, words[1], strlen(words[1]), 1, t->tokens, known, &known))
      return unreadable();
    if (!again && !(t->tokens = malloc((known + (size_t)room) * sizeof *t->tokens))) return fail("no memory");
  }
  t->count = (int64_t)known;
  if (!known) return fail("expected a text of at least one token");
  return edgespec_stream_open(t->tokenizer, t->tokens, known, &t->stream) ? unreadable() : 0;
}

/* What a token adds to the text; after the last one, what was held back. */
static int say(text* t, const int64_t* token) {
  const char* words;
  size_t size;
  if (token ? edgespec_stream_push(t->stream, *token, &words, &size) : edgespec_stream_finish(t->stream, &words, &size))
    return unreadable();
  fwrite(words, 1, size, stdout);
  return 0;
}

static void forget(text* t) {
  edgespec_stream_close(t->stream);
  edgespec_tokenizer_close(t->tokenizer);
  free(t->tokens);
}
#else
static int read_text(text* t, char** words, int count, int64_t room) {
  t->tokens = malloc((size_t)(count + room) * sizeof *t->tokens);
  if (!t->tokens) return fail("no memory");
  for (int i = 0; i < count; ++i) {
    char* after;
    t->tokens[t->count++] = strtoll(words[i], &after, 10);
    if (*after || after == words[i]) return fail("expected the tokens of the prompt as numbers");
  }
  return 0;
}

static int say(text* t, const int64_t* token) {
  (void)t;
  if (token) printf("%lld ", (long long)*token);
  return 0;
}

static void forget(text* t) { free(t->tokens); }
#endif

static int decode(edgespec_cache* cache, text* t, int64_t new_tokens, const char* ends) {
  const int64_t prompt = t->count;
  int passes = 0, ended = 0;
  if (edgespec_prefill(cache, 0, t->tokens, prompt - 1)) return refused();
  while (!ended && t->count - prompt < new_tokens) {
    const int64_t first = t->count, left = new_tokens - (t->count - prompt);
    if (!run_round(cache, t, (int)(left - 1 < GUESSES ? left - 1 : GUESSES))) return refused();
    ++passes;
    for (int64_t at = first; at < t->count && !ended; ++at) {
      if (say(t, t->tokens + at)) return 1;
      ended = is_end(ends, t->tokens[at]);
      if (ended) t->count = at + 1;
    }
    fflush(stdout);
  }
  if (say(t, NULL)) return 1;
  printf("\n");
  fprintf(stderr, "%lld tokens in %d passes, %s kernels\n", (long long)(t->count - prompt), passes, edgespec_isa());
  return 0;
}

#ifdef _WIN32
/* The words of the command line in UTF-8, as the library takes paths: those of main are in the system's code page. */
static char** utf8_words(int* count, char** of_main) {
  wchar_t** wide = CommandLineToArgvW(GetCommandLineW(), count);
  char** words = wide ? calloc((size_t)*count + 1, sizeof *words) : NULL;
  for (int i = 0; words && i < *count; ++i) {
    const int size = WideCharToMultiByte(CP_UTF8, 0, wide[i], -1, NULL, 0, NULL, NULL);
    if (size < 1 || !(words[i] = malloc((size_t)size))) return of_main;
    WideCharToMultiByte(CP_UTF8, 0, wide[i], -1, words[i], size, NULL, NULL);
  }
  return words ? words : of_main; /* they stay until the program ends */
}
#endif

int main(int count, char** words) {
#ifdef _WIN32
  words = utf8_words(&count, words);
#endif
  if (count < 5) return fail("expected: greedy model.native.onnx NEW EOS PROMPT...");
  const int64_t new_tokens = strtoll(words[2], NULL, 10);
  if (new_tokens < 1 || new_tokens > 1 << 24) return fail("expected NEW, how many tokens to write");
  if (edgespec_c_version() < EDGESPEC_C_VERSION) return fail("the library is older than its header");
  text t;
  memset(&t, 0, sizeof t);
  edgespec_model* model = NULL;
  edgespec_cache* cache = NULL;
  int code = read_text(&t, words + 4, count - 4, new_tokens + CONTEXT_LEFT);
  if (!code && edgespec_open(words[1], 0, &model)) code = refused();
  if (!code && edgespec_cache_open(model, 1, t.count + new_tokens + CONTEXT_LEFT, EDGESPEC_ATTENTION_EXACT, &cache))
    code = refused();
  if (!code) code = decode(cache, &t, new_tokens, words[3]);
  edgespec_cache_close(cache);
  edgespec_close(model);
  forget(&t);
  return code;
}
