/* Runs the passes of a model itself, as a program does whose model runs elsewhere, such as on ONNX Runtime.
 *
 *   cc -O2 -I RUNTIMES/native hosted.c -o hosted LIBRARY   (libedgespec.so, edgespec.dll or libedgespec.dylib)
 *   hosted FOLDER NEW TOKEN...
 *
 * FOLDER: with an edgespec.json that says context and vocabulary (edgespec_bundle_open_hosted).  The model here is a
 * rule, whose next token follows from the last one and its position; a real one also keeps keys and values. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "edgespec.h"

static int run(void* user, const edgespec_host_pass* pass) {
  const int32_t first = pass->rows - pass->scored; /* the last rows are scored */
  (void)user;                                      /* here a cache would be cut back to pass->kept places */
  if (pass->kept + pass->rows > 48) return 1;
  for (int32_t row = first; row < pass->rows; ++row) {
    float* logits = pass->logits + (row - first) * pass->columns;
    memset(logits, 0, (size_t)pass->columns * sizeof *logits);
    logits[(3 * pass->tokens[row] + pass->positions[row]) % pass->columns] = 1;
  }
  return 0;
}

static const char* why(void* user) { return (void)user, "there are 48 places"; }

static int show(void* user, const edgespec_round* round) {
  (void)user;
  for (int32_t i = 0; i < round->count; ++i) printf("%lld ", (long long)round->tokens[i]);
  return fflush(stdout);
}

int main(int count, char** words) {
  edgespec_bundle* bundle = NULL;
  edgespec_session* session = NULL;
  edgespec_host host = EDGESPEC_INIT(edgespec_host);
  edgespec_session_options options = EDGESPEC_INIT(edgespec_session_options);
  edgespec_settings settings = EDGESPEC_INIT(edgespec_settings);
  int64_t* prompt = malloc((size_t)count * sizeof *prompt);
  if (count < 4 || !prompt) return fprintf(stderr, "hosted FOLDER NEW TOKEN...\n"), 2;
  for (int i = 3; i < count; ++i) prompt[i - 3] = strtoll(words[i], NULL, 10);
  host.run = run;
  host.error = why;
  options.target = &host;
  settings.max_new_tokens = strtoll(words[2], NULL, 10);
  int failed = edgespec_bundle_open_hosted(words[1], &bundle);
  if (!failed) failed = edgespec_session_open(bundle, &options, &session);
  if (!failed) failed = edgespec_generate(session, prompt, count - 3, &settings, show, NULL);
  if (failed) fprintf(stderr, "hosted: %s\n", edgespec_error());
  edgespec_session_close(session);
  edgespec_bundle_close(bundle);
  free(prompt);
  puts("");
  return failed;
}
