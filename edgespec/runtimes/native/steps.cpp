// Reads a step of a program, and checks it, as the table of steps says (steps.inl).
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <map>
#include <sstream>
#include <stdexcept>

#include "program.h"

namespace edgespec {
namespace program_text {
namespace {

struct Number {
  int Step::* at;
  int least, most;
};
struct Real {
  float Step::* at;
  float least;
};

const std::map<std::string, int Step::*> kWeights = {
#define WEIGHT(key) {#key, &Step::key},
#include "steps.inl"
};
const std::map<std::string, int Step::*> kBufferKeys = {
#define BUFFER(key) {#key, &Step::key},
#include "steps.inl"
};
const std::map<std::string, Number> kNumbers = {
#define NUMBER(key, without, least, most) {#key, {&Step::key, least, most}},
#include "steps.inl"
};
const std::map<std::string, Real> kReals = {
#define REAL(key, without, least) {#key, {&Step::key, least}},
#include "steps.inl"
};
const std::map<std::string, Fn> kFunctions = {
    {"silu", kSilu},   {"gelu", kGelu},       {"gelu_tanh", kGeluTanh},   {"relu", kRelu},  {"relu2", kRelu2},
    {"xielu", kXielu}, {"sigmoid", kSigmoid}, {"swiglu_oai", kSwigluOai}, {"clamp", kClamp}};

struct Field {
  std::string key, type, size, columns;  // type[size,columns]
  bool optional, written;
};

struct Row {
  Op op;
  std::vector<Field> fields;

  const Field* find(const std::string& key) const {
    const auto found = std::find_if(fields.begin(), fields.end(), [&](const Field& f) { return f.key == key; });
    return found == fields.end() ? nullptr : &*found;
  }
};

Row row(Op op, const char* text) {
  Row made{op, {}};
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const size_t end = std::min(word.find_first_of("?=>"), word.size()), kind = word.find_first_of("=>");
    Field field{word.substr(0, end), "", "", "", word[end] == '?', false};
    if (kind != std::string::npos) {
      const size_t open = std::min(word.find('['), word.size()), comma = std::min(word.find(','), word.size());
      field.written = word[kind] == '>';
      field.type = word.substr(kind + 1, open - kind - 1);
      if (open < word.size()) field.size = word.substr(open + 1, std::min(comma, word.size() - 1) - open - 1);
      if (comma < word.size()) field.columns = word.substr(comma + 1, word.size() - comma - 2);
    }
    made.fields.push_back(field);
  }
  return made;
}

const std::map<std::string, Row>& table() {
  static const std::map<std::string, Row> rows = {
      {"silu", row(Op::kActivate, "x>floats[k] k")},
#define STEP(name, Name, cut, fields, ...) {#name, row(Op::k##Name, fields)},
#include "steps.inl"
  };
  return rows;
}

void require(const std::string& line, bool good, const std::string& what) {
  if (!good) fail(line, what);
}

int64_t atom(const Step& s, const std::string& name) {
  if (name == "made") return s.made();
  if (name == "tiled") return round_up(s.dim, kTile);
  if (name == "seen") return 1;
  const auto found = kNumbers.find(name);
  return found == kNumbers.end() ? std::atoi(name.c_str()) : s.*found->second.at;
}

// A size of the table: sums of products of keys and numbers.
int64_t evaluate(const Step& s, const std::string& text) {
  int64_t sum = 0, product = 1;
  char before = '*', sign = '+';
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find_first_of("+-*/", at), text.size());
    const std::string factor = text.substr(at, end - at);
    const size_t bar = factor.find('|');
    int64_t value = atom(s, factor.substr(0, bar));
    if (bar != std::string::npos && !value) value = atom(s, factor.substr(bar + 1));
    product = before == '/' ? product / std::max<int64_t>(1, value) : product * value;
    before = end < text.size() ? text[end] : '+';
    if (before == '+' || before == '-') {
      sum += sign == '+' ? product : -product;
      product = 1;
      sign = before;
    }
    at = end + 1;
  }
  return sum;
}

void read(const std::string& line, const std::string& key, const std::string& value, const Field& field, Step& s) {
  if (key == "kind" || key == "downkind") {
    const auto found =
        std::find_if(std::begin(kKinds), std::end(kKinds), [&](const auto& k) { return k.name == value; });
    require(line, found != std::end(kKinds), "unknown kind of matrix");
    Kind& kind = key == "kind" ? s.kind : s.downkind;
    kind = static_cast<Kind>(found - kKinds);
    require(line, kind <= kF32 || field.type == "any", "rows can only be looked up");
  } else if (key == "fn") {
    const auto found = kFunctions.find(value);
    if (found == kFunctions.end())
      fail(line, "unknown fn " + value +
                     ": expected silu, gelu, gelu_tanh, relu, relu2, sigmoid, swiglu_oai, xielu or clamp");
    s.fn = found->second;
    require(line, s.fn < kFns || field.type == "any", "fn out of place");
  } else if (const auto weight = kWeights.find(key); weight != kWeights.end()) {
    s.*weight->second = integer(line, value);
  } else if (const auto buffer = kBufferKeys.find(key); buffer != kBufferKeys.end()) {
    s.*buffer->second = integer(line, value);
  } else if (const auto number = kNumbers.find(key); number != kNumbers.end()) {
    const auto [at, least, most] = number->second;
    s.*at = integer(line, value);
    if (s.*at < least || s.*at > most)
      fail(line, "expected " + key + " of " + std::to_string(least) + " to " + std::to_string(most));
  } else {
    const auto [at, least] = kReals.at(key);
    char* end = nullptr;
    s.*at = std::strtof(value.c_str(), &end);
    require(line, !*end, "expected a number");
    require(line, std::isfinite(s.*at) && s.*at >= least,
            "expected a finite " + key + (least == 0 ? " of at least 0" : ""));
  }
}

void check_buffer(const std::string& line, const Program& p, const Step& s, const Field& field) {
  const bool floats = field.type == "floats" || (field.type == "next" && s.kind == kC8);
  const auto& widths = floats ? p.floats : p.acts;
  const int id = s.*kBufferKeys.at(field.key);
  if (id < 0 && field.optional) return;
  require(line, id >= 0 && id < int(widths.size()) && widths[id] >= evaluate(s, field.size),
          floats ? "no such buffer, or too narrow" : "no such activations, or too narrow");
}

// A buffer is not read where it is written, but by a norm in place.
void check_written(const std::string& line, const Step& s, const Row& row) {
  if (s.op == Op::kNorm && !s.add && !s.n && !s.rows) return;
  const auto kept = [&](const Field& f) { return f.type == "next" ? (s.kind == kC8 ? "floats" : "acts") : f.type; };
  for (const Field& out : row.fields)
    for (const Field& other : row.fields)
      if (out.written && &out != &other && kBufferKeys.count(other.key) && kept(out) == kept(other))
        require(line, s.*kBufferKeys.at(out.key) != s.*kBufferKeys.at(other.key),
                "expected " + out.key + " beside " + other.key);
}

Weight weight(const std::string& line, const Step& s, const Field& field) {
  const int64_t n = evaluate(s, field.size), k = evaluate(s, field.columns);
  const bool down = field.type == "down" || field.type == "downlow";
  const bool low = field.type == "low" || field.type == "downlow", matrix = down || low || field.type == "matrix";
  const Kind kind = down ? s.downkind : s.kind;
  require(line, n >= 0 && n <= INT32_MAX && (!matrix || kind > kF32 || (n <= kMaxWidth && k <= kMaxWidth)),
          "number out of range");
  require(line, !matrix || !is_ggml(kind) || k % ggml(kind).group == 0, "expected k of whole blocks");
  return {s.*kWeights.at(field.key), kind, static_cast<int>(n), matrix ? static_cast<int>(k) : 0,
          field.size == "seen",      low};
}

void check_needs(const std::string& line, const Step& s) {
#define NEED(good, what) \
  if (!(good)) fail(line, what);
#define NEED_PLANES_OF(kind, plane) NEED(((kind) == kP8) == ((plane) >= 0), "expected a low plane for p8 alone")
#define NEED_PLANES(plane) NEED_PLANES_OF(s.kind, plane)
  switch (s.op) {
#define STEP(name, Name, cut, fields, ...) \
  case Op::k##Name: __VA_ARGS__ break;
#include "steps.inl"
  }
#undef NEED
#undef NEED_PLANES
#undef NEED_PLANES_OF
}

}  // namespace

[[noreturn]] void fail(const std::string& line, const std::string& why) {
  constexpr size_t kShown = 300;
  throw std::invalid_argument("edgespec program: " + why + ": '" + line.substr(0, kShown) +
                              (line.size() > kShown ? "...'" : "'"));
}

int integer(const std::string& line, const std::string& value) {
  char* end = nullptr;
  const long number = std::strtol(value.c_str(), &end, 10);
  if (value.empty() || *end || number < -1 || number > (1 << 30)) fail(line, "expected an integer");
  return static_cast<int>(number);
}

Step read_step(const std::string& line, Program& program) {
  std::istringstream words(line);
  std::string word;
  words >> word;
  const auto found = table().find(word);
  if (found == table().end()) fail(line, "unknown step");
  const Row& row = found->second;
  Step s;
  s.op = row.op;
  if (word == "silu") s.rows = 1;
  bool own_down = false;
  while (words >> word) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos) fail(line, "expected key=value");
    const std::string key = word.substr(0, equals);
    const Field* field = row.find(key);
    if (!field) {
      const bool known = key == "kind" || key == "downkind" || key == "fn" || kWeights.count(key) ||
                         kBufferKeys.count(key) || kNumbers.count(key) || kReals.count(key);
      fail(line, known ? key + " out of place" : "unknown key " + key);
    }
    read(line, key, word.substr(equals + 1), *field, s);
    own_down |= key == "downkind";
  }
  if (!own_down) s.downkind = s.kind;
  for (const Field& field : row.fields) {
    const auto number = kNumbers.find(field.key);
    const auto named = kWeights.find(field.key);
    if (!field.optional && number != kNumbers.end()) require(line, s.*number->second.at > 0, "expected " + field.key);
    if (!field.optional && named != kWeights.end()) require(line, s.*named->second >= 0, "expected " + field.key);
  }
  check_needs(line, s);
  check_written(line, s, row);
  for (const Field& field : row.fields) {
    if (kBufferKeys.count(field.key)) {
      check_buffer(line, program, s, field);
    } else if (const auto named = kWeights.find(field.key); named != kWeights.end() && s.*named->second >= 0) {
      program.sizes.push_back(weight(line, s, field));
      program.weights = std::max(program.weights, s.*named->second + 1);
    }
  }
  return s;
}

}  // namespace program_text
}  // namespace edgespec
