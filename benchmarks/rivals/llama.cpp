// llama MODEL THREADS CONTEXT [STATES]: llama.cpp, or with -DIK ik_llama.cpp, as a process of benchmarks.rivals.
// Reads lines "DEPTH ROWS", answers with milliseconds.  All rows give logits.  Keys and values of a depth: llama.cpp
// computes those of 512 tokens and copies them to the places behind; ik_llama.cpp computes all of them once, and keeps
// them in files whose names begin with STATES.
#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

static llama_context* context;
static int held = 0;  // tokens whose keys and values are there

static void cut(int depth) {
#ifdef IK
  llama_kv_cache_seq_rm(context, 0, depth, -1);
#else
  llama_memory_seq_rm(llama_get_memory(context), 0, depth, -1);
#endif
  held = depth;
}

static double pass(int rows, bool all) {
  llama_batch batch = llama_batch_init(rows, 0, 1);
  batch.n_tokens = rows;
  for (int i = 0; i < rows; ++i) {
    batch.token[i] = 2 + rand() % 5000;
    batch.pos[i] = held + i;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = 0;
    batch.logits[i] = all || i == rows - 1;
  }
  auto start = std::chrono::steady_clock::now();
  if (llama_decode(context, batch)) exit(3);
  llama_synchronize(context);
  volatile float one = llama_get_logits_ith(context, rows - 1)[0];
  (void)one;
  double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  held += rows;
  llama_batch_free(batch);
  return ms;
}

#ifdef IK
static void fill(int depth, const char* states) {
  std::string file = states ? states + std::to_string(depth) : "";
  cut(0);
  llama_token tokens[8];
  size_t count;
  if (FILE* there = states ? fopen(file.c_str(), "rb") : nullptr) {
    fclose(there);
    if (!llama_state_load_file(context, file.c_str(), tokens, 8, &count)) exit(4);
    held = depth;
    return;
  }
  while (held < depth) pass(std::min(512, depth - held), false);
  if (states && depth > 1000) llama_state_save_file(context, file.c_str(), nullptr, 0);
}
#else
static void fill(int depth, const char*) {
  cut(0);
  if (depth) pass(std::min(512, depth), false);
  auto memory = llama_get_memory(context);
  std::vector<uint8_t> piece(llama_state_seq_get_size(context, 0));
  llama_state_seq_get_data(context, piece.data(), piece.size(), 0);
  for (; held < depth; held += 512) {
    if (!llama_state_seq_set_data(context, piece.data(), piece.size(), 1)) exit(4);
    llama_memory_seq_add(memory, 1, -1, -1, held);
    llama_memory_seq_cp(memory, 1, 0, -1, -1);
    llama_memory_seq_rm(memory, 1, -1, -1);
  }
}
#endif

int main(int count, char** words) {
  if (count < 4) return 1;
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  llama_backend_init();
  auto model_options = llama_model_default_params();
#ifdef IK
  model_options.repack_tensors = true;
#endif
  auto* model = llama_model_load_from_file(words[1], model_options);
  if (!model) return 2;
  auto options = llama_context_default_params();
  options.n_ctx = atoi(words[3]);
#ifndef IK
  options.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;  // the faster one (docs/measurements.md)
  options.n_seq_max = 2;
  options.kv_unified = true;
#endif
  options.n_batch = 2048;
  options.n_ubatch = 512;
  options.n_threads = options.n_threads_batch = atoi(words[2]);
  context = llama_init_from_model(model, options);
  if (!context) return 2;
  puts("ready");
  fflush(stdout);
  for (int depth, rows, filled = 0; scanf("%d %d", &depth, &rows) == 2;) {
    if (filled != depth) fill(depth, count > 4 ? words[4] : nullptr);
    filled = depth;
    cut(depth);
    printf("%.4f\n", pass(rows, rows <= 64));
    fflush(stdout);
  }
}
