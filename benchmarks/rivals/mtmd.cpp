// mtmd MODEL MMPROJ THREADS SIDE: llama.cpp's libmtmd as a process of benchmarks.seeing.
// Reads lines "NEW", answers with milliseconds of the encoder, of reading the prompt, of one of NEW steps, and of all
// that comes before the first token, and with the tokens of the prompt, as JSON.  The picture is SIDE x SIDE pixels of
// noise.
#include "llama.h"
#include "mtmd-helper.h"
#include "mtmd.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

using Clock = std::chrono::steady_clock;

static double since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

int main(int count, char** words) {
  if (count < 5) return 1;
  auto quiet = [](ggml_log_level, const char*, void*) {};
  llama_log_set(quiet, nullptr);
  mtmd_helper_log_set(quiet, nullptr);
  llama_backend_init();
  auto* model = llama_model_load_from_file(words[1], llama_model_default_params());
  if (!model) return 2;
  int threads = atoi(words[3]), side = atoi(words[4]);
  auto options = llama_context_default_params();
  options.n_ctx = 4096;
  options.n_batch = 2048;
  options.n_ubatch = 512;
  options.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;  // the faster one (docs/dev/measurements.md)
  options.n_threads = options.n_threads_batch = threads;
  auto* context = llama_init_from_model(model, options);
  auto seeing = mtmd_context_params_default();
  seeing.use_gpu = false;
  seeing.print_timings = false;
  seeing.warmup = false;
  seeing.n_threads = threads;
  seeing.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;  // by 10 to 20 %
  auto* sight = mtmd_init_from_file(words[2], model, seeing);
  if (!context || !sight) return 2;
  std::vector<unsigned char> pixels(3 * side * side);
  for (auto& one : pixels) one = rand();
  std::string text = std::string(mtmd_default_marker()) + "what is it";
  mtmd_input_text asked{text.c_str(), text.size(), true, true};
  puts("ready");
  fflush(stdout);
  for (int steps; scanf("%d", &steps) == 1;) {
    llama_memory_clear(llama_get_memory(context), true);
    auto start = Clock::now();
    auto* bitmap = mtmd_bitmap_init(side, side, pixels.data());
    auto* chunks = mtmd_input_chunks_init();
    const mtmd_bitmap* given = bitmap;
    if (mtmd_tokenize(sight, chunks, &asked, &given, 1)) return 3;
    double encoded = 0, read = 0;
    llama_pos at = 0;
    for (size_t i = 0; i < mtmd_input_chunks_size(chunks); ++i) {
      auto* chunk = mtmd_input_chunks_get(chunks, i);
      auto begin = Clock::now();
      int failed;
      if (mtmd_input_chunk_get_type(chunk) == MTMD_INPUT_CHUNK_TYPE_IMAGE) {
        if (mtmd_encode_chunk(sight, chunk)) return 4;
        encoded += since(begin);
        begin = Clock::now();
        float* rows = mtmd_get_output_embd(sight);
        failed = mtmd_helper_decode_image_chunk(sight, context, chunk, rows, at, 0, 2048, &at, nullptr, nullptr);
      } else {
        failed = mtmd_helper_eval_chunk_single(sight, context, chunk, at, 0, 2048, true, &at);
      }
      if (failed) return 5;
      llama_synchronize(context);
      read += since(begin);
    }
    double first = since(start);
    size_t tokens = mtmd_helper_get_n_tokens(chunks);
    auto begin = Clock::now();
    for (int i = 0; i < steps; ++i) {
      llama_token token = 100 + i;
      auto batch = llama_batch_get_one(&token, 1);
      if (llama_decode(context, batch)) return 6;
      llama_synchronize(context);
    }
    double step = since(begin) / steps;
    printf("{\"encode\": %.3f, \"prefill\": %.3f, \"step\": %.3f, ", encoded, read, step);
    printf("\"first\": %.3f, \"prompt\": %zu}\n", first, tokens);
    fflush(stdout);
    mtmd_input_chunks_free(chunks);
    mtmd_bitmap_free(bitmap);
  }
  return 0;
}
