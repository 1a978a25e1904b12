/* Decodes a text from tokens to tokens over a bundle's folder: Python's tokens, by drafts where the bundle has them.
 *
 *   cc -O2 -I RUNTIMES/native generate.c -o generate LIBRARY   (libedgespec.so, edgespec.dll or libedgespec.dylib)
 *   generate BUNDLE NEW TOKEN...
 *
 * NEW: maximum number of new tokens.  TOKEN: the prompt, at least one.  Prints the new tokens as they come. */
#include <stdio.h>
#include <stdlib.h>

#include "edgespec.h"

static int show(void* user, const edgespec_round* round) {
  (void)user;
  for (int32_t i = 0; i < round->count; ++i) printf("%lld ", (long long)round->tokens[i]);
  return fflush(stdout); /* not 0 would cancel */
}

int main(int count, char** words) {
  edgespec_bundle* bundle = NULL;
  edgespec_session* session = NULL;
  int64_t* prompt = malloc((size_t)count * sizeof *prompt);
  edgespec_settings settings = EDGESPEC_INIT(edgespec_settings);
  if (count < 4 || !prompt) return fprintf(stderr, "generate BUNDLE NEW TOKEN...\n"), 2;
  for (int i = 3; i < count; ++i) prompt[i - 3] = strtoll(words[i], NULL, 10);
  settings.max_new_tokens = strtoll(words[2], NULL, 10);
  const int failed = edgespec_bundle_open(words[1], 0, &bundle) || edgespec_session_open(bundle, NULL, &session) ||
                     edgespec_generate(session, prompt, count - 3, &settings, show, NULL);
  if (failed) fprintf(stderr, "generate: %s\n", edgespec_error());
  edgespec_session_close(session);
  edgespec_bundle_close(bundle);
  free(prompt);
  puts("");
  return failed;
}
