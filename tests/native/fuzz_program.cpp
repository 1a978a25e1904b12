// The program of a native node from any bytes, and two passes if it can be parsed: it runs or fails with a message.
//
//   fuzz_program SEED COUNT FILE...    the files, then mutants of the kept programs
#include "fuzz.h"

namespace edgespec {
namespace {

void use(const std::string& given) {
  const std::string text = given.c_str();  // an attribute ends there too
  Operator node(text);
  if (!node.made()) return;
  const Program program = Program::parse(text);
  uint8_t chosen[64];
  Random random(text.size());
  for (uint8_t& byte : chosen) byte = static_cast<uint8_t>(random.next());
  Bytes bytes(chosen, sizeof chosen);
  Feeds feeds(program, bytes);
  if (feeds.too_large) return;
  node.run(feeds.context);
  feeds.go_on(bytes);
  node.run(feeds.context);
}

}  // namespace
}  // namespace edgespec

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  edgespec::use(std::string(reinterpret_cast<const char*>(data), size));
  return 0;
}

#ifndef EDGESPEC_LIBFUZZER
namespace {

using edgespec::Random;

std::string mutated(Random& random) {
  const char* numbers[] = {"-1",  "0",       "1",         "2",          "3",          "15",         "16",
                           "17",  "64",      "65",        "512",        "513",        "65536",      "16777216",
                           "999", "1048577", "536870911", "1073741824", "2147483647", "4294967297", "nan"};
  const auto& seeds = edgespec::programs();
  std::string text = seeds[static_cast<size_t>(random.below(static_cast<int>(seeds.size())))];
  for (int turns = random.between(1, 4); turns && !text.empty(); --turns) {
    const size_t at = random.next() % text.size();
    const size_t begin = text.rfind('\n', at) == std::string::npos ? 0 : text.rfind('\n', at) + 1;
    const size_t end = std::min(text.find('\n', at), text.size());
    switch (random.below(6)) {
      case 0: text[at] = static_cast<char>(random.below(256)); break;
      case 1: text.erase(begin, end - begin + 1); break;
      case 2: text.insert(begin, text.substr(begin, end - begin) + "\n"); break;
      default: {  // a number of the line
        const size_t equals = text.find_first_of("= ", at);
        if (equals == std::string::npos) break;
        const size_t stop = std::min(text.find_first_of(" \n", equals + 1), text.size());
        text.replace(equals + 1, stop - equals - 1, numbers[random.below(21)]);
      }
    }
  }
  return text;
}

}  // namespace

int main(int count, char** arguments) {
  for (const std::string& text : edgespec::programs()) {
    const long before = edgespec::ran;
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(text.data()), text.size());
    if (edgespec::ran == before) edgespec::fail("a kept program is refused:\n" + text);
  }
  return edgespec::run_files(count, arguments, mutated);
}
#endif
