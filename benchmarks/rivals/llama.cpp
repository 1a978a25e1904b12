// llama MODEL THREADS CONTEXT: llama.cpp, or with -DIK ik_llama.cpp, as a process of benchmarks.rivals.
// Reads lines "DEPTH ROWS", answers with milliseconds.  All rows give logits.  Keys and values of 512 tokens are
// computed; those of a deeper text are copies of them at later places.
#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

static llama_context* context;
static int held = 0;  // tokens whose keys and values are in the cache

// the names of each
#ifdef IK
static void remove(int sequence, int from) { llama_kv_cache_seq_rm(context, sequence, from, -1); }
static void move(int sequence, int by) { llama_kv_cache_seq_add(context, sequence, -1, -1, by); }
static void copy(int from, int to) { llama_kv_cache_seq_cp(context, from, to, -1, -1); }
static std::vector<uint8_t> state(int sequence) {
  std::vector<uint8_t> found(llama_state_seq_get_size(context, sequence, 0));
  llama_state_seq_get_data(context, found.data(), found.size(), sequence, 0);
  return found;
}
static bool restore(int sequence, const std::vector<uint8_t>& state) {
  return llama_state_seq_set_data(context, state.data(), state.size(), sequence, 0) > 0;
}
#else
static void remove(int sequence, int from) { llama_memory_seq_rm(llama_get_memory(context), sequence, from, -1); }
static void move(int sequence, int by) { llama_memory_seq_add(llama_get_memory(context), sequence, -1, -1, by); }
static void copy(int from, int to) { llama_memory_seq_cp(llama_get_memory(context), from, to, -1, -1); }
static std::vector<uint8_t> state(int sequence) {
  std::vector<uint8_t> found(llama_state_seq_get_size(context, sequence));
  llama_state_seq_get_data(context, found.data(), found.size(), sequence);
  return found;
}
static bool restore(int sequence, const std::vector<uint8_t>& state) {
  return llama_state_seq_set_data(context, state.data(), state.size(), sequence) > 0;
}
#endif

static void cut(int depth) {
  remove(0, depth);
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

static void fill(int depth) {
  cut(0);
  if (depth) pass(std::min(512, depth), false);
  auto piece = state(0);
  for (; held < depth; held += 512) {
    if (!restore(1, piece)) exit(4);
    move(1, held);
    copy(1, 0);
    remove(1, -1);
  }
}

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
  options.n_seq_max = 2;
#ifndef IK
  options.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;  // the faster one (docs/dev/measurements.md)
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
    if (filled != depth) fill(depth);
    filled = depth;
    cut(depth);
    printf("%.4f\n", pass(rows, rows <= 64));
    fflush(stdout);
  }
}
