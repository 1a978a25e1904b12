/* Chats with a bundle's folder: a line of standard input is a message, and the answer comes as it is written.
 *
 *   cc -O2 -I RUNTIMES/native chat.c -o chat LIBRARY   (libedgespec.so, edgespec.dll or libedgespec.dylib)
 *   chat BUNDLE [TOKENIZER]
 *
 * TOKENIZER: the tokenizer's library (RUNTIMES/tokenizer), if the system does not find it by its name. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "edgespec.h"

enum { MESSAGES = 100, LINE = 4096 };
static char* answer; /* so far */
static size_t answered;

static int show(void* user, const edgespec_round* round) {
  (void)user;
  if (!(answer = realloc(answer, answered + round->text_size + 1))) return 1; /* cancels */
  memcpy(answer + answered, round->text, round->text_size + 1);
  answered += round->text_size;
  fwrite(round->text, 1, round->text_size, stdout);
  return fflush(stdout);
}

int main(int count, char** words) {
  edgespec_bundle* bundle = NULL;
  edgespec_session* session = NULL;
  edgespec_settings settings = EDGESPEC_INIT(edgespec_settings);
  edgespec_message messages[MESSAGES];
  static char lines[MESSAGES / 2][LINE];
  if (count < 2) return fprintf(stderr, "chat BUNDLE [TOKENIZER]\n"), 2;
  int failed = edgespec_bundle_open(words[1], 0, &bundle) ||
               edgespec_bundle_load_codec(bundle, count > 2 ? words[2] : NULL) ||
               edgespec_session_open(bundle, NULL, &session);
  for (int turn = 0; !failed && turn < MESSAGES / 2 && fgets(lines[turn], LINE, stdin); ++turn) {
    lines[turn][strcspn(lines[turn], "\n")] = 0;
    answer = NULL, answered = 0;
    messages[2 * turn] = (edgespec_message){"user", lines[turn]};
    failed = edgespec_chat(session, messages, 2 * turn + 1, NULL, &settings, show, NULL);
    messages[2 * turn + 1] = (edgespec_message){"assistant", answer};
    puts("");
  }
  if (failed) fprintf(stderr, "chat: %s\n", edgespec_error());
  edgespec_session_close(session);
  edgespec_bundle_close(bundle);
  return failed;
}
