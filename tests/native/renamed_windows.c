/* A bundle that is renamed while it is open goes on, on Windows: renamed_windows FOLDER (with model.native.onnx). */
#include <stdio.h>
#include <string.h>
#include <windows.h>

#include "edgespec.h"

static int failed(const char* what) {
  fprintf(stderr, "%s: %s (error %lu)\n", what, edgespec_error(), GetLastError());
  return 1;
}

int main(int count, char** words) {
  const wchar_t* names[] = {L"model.native.onnx", L"model.data"};
  wchar_t from[MAX_PATH], to[MAX_PATH];
  char path[4 * MAX_PATH];
  const int64_t tokens[] = {1, 5, 6};
  int64_t said[2] = {-1, -1};
  edgespec_model* model = NULL;
  if (count < 2 || !SetCurrentDirectoryA(words[1])) return failed("no such folder");
  if (!CreateDirectoryW(L"B\u00fcndel \ud55c", NULL)) return failed("folder");
  for (int i = 0; i < 2; ++i) { /* into a folder that only UTF-8 names */
    swprintf(to, MAX_PATH, L"B\u00fcndel \ud55c\\%ls", names[i]);
    if (!MoveFileExW(names[i], to, 0)) return failed("moving");
  }
  swprintf(to, MAX_PATH, L"B\u00fcndel \ud55c\\%ls", names[0]);
  WideCharToMultiByte(CP_UTF8, 0, to, -1, path, sizeof path, NULL, NULL);
  if (edgespec_open(path, 1, &model)) return failed("opening");
  for (int turn = 0; turn < 2; ++turn) {
    edgespec_cache* cache = NULL;
    edgespec_request request = EDGESPEC_INIT(edgespec_request);
    edgespec_result result = EDGESPEC_INIT(edgespec_result);
    request.rows = 3, request.tokens = tokens, request.logits = EDGESPEC_LAST_ROWS, request.top = 1;
    if (edgespec_cache_open(model, 1, 64, EDGESPEC_ATTENTION_EXACT, &cache)) return failed("cache");
    if (edgespec_pass(cache, &request, &result)) return failed("pass");
    said[turn] = result.ids[0];
    edgespec_cache_close(cache);
    for (int i = 0; i < 2 && !turn; ++i) { /* what is open is mapped alone: its files are not locked */
      swprintf(from, MAX_PATH, L"B\u00fcndel \ud55c\\%ls", names[i]);
      swprintf(to, MAX_PATH, L"%ls.old", names[i]);
      if (!MoveFileExW(from, to, 0)) return failed("renaming what is open");
    }
  }
  edgespec_close(model);
  if (!edgespec_open(path, 1, &model)) return failed("opened what is not there any more");
  printf("%lld %lld %s\n", (long long)said[0], (long long)said[1], strstr(edgespec_error(), "cannot be opened"));
  return 0;
}
