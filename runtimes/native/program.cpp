#include "program.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <sstream>
#include <stdexcept>

namespace edgespec {
namespace {

using program_text::fail;

const std::map<std::string, Op> kOps = {
    {"embed", Op::kEmbed},       {"load", Op::kLoad},         {"store", Op::kStore},   {"gate", Op::kGate},
    {"quantize", Op::kQuantize}, {"norm", Op::kNorm},         {"heads", Op::kHeads},   {"attend", Op::kAttend},
    {"linear", Op::kLinear},     {"glu", Op::kGlu},           {"silu", Op::kActivate}, {"activate", Op::kActivate},
    {"split", Op::kSplit},       {"logits", Op::kLogits},     {"blend", Op::kBlend},   {"route", Op::kRoute},
    {"experts", Op::kExperts},   {"convolve", Op::kConvolve}, {"delta", Op::kDelta},   {"multiply", Op::kMultiply}};
const std::map<std::string, Fn> kFunctions = {{"silu", kSilu},      {"gelu", kGelu},   {"gelu_tanh", kGeluTanh},
                                              {"relu", kRelu},      {"relu2", kRelu2}, {"xielu", kXielu},
                                              {"sigmoid", kSigmoid}};
const std::map<std::string, int Step::*> kWeights = {
    {"w", &Step::w},           {"bias", &Step::bias},   {"norm", &Step::norm},     {"cos", &Step::cos},
    {"sin", &Step::sin},       {"up", &Step::up},       {"upbias", &Step::upbias}, {"qnorm", &Step::qnorm},
    {"knorm", &Step::knorm},   {"gate", &Step::gate},   {"beta", &Step::beta},     {"positions", &Step::positions},
    {"growth", &Step::growth}, {"vnorm", &Step::vnorm}, {"rate", &Step::rate}};
const std::map<std::string, int Step::*> kNumbers = {
    {"n", &Step::n},         {"k", &Step::k},           {"add", &Step::add},       {"rows", &Step::rows},
    {"heads", &Step::heads}, {"kv", &Step::kv},         {"dim", &Step::dim},       {"rotary", &Step::rotary},
    {"layer", &Step::layer}, {"window", &Step::window}, {"index", &Step::index},   {"skip", &Step::skip},
    {"times", &Step::times}, {"first", &Step::first},   {"length", &Step::length}, {"center", &Step::center},
    {"late", &Step::late},   {"other", &Step::other},   {"shared", &Step::shared}, {"at", &Step::at}};
const std::map<std::string, int Step::*> kBufferKeys = {
    {"x", &Step::x},   {"base", &Step::base}, {"act", &Step::act}, {"out", &Step::out}, {"qx", &Step::qx},
    {"kx", &Step::kx}, {"vx", &Step::vx},     {"z", &Step::z},     {"a", &Step::a},     {"b", &Step::b}};
const std::map<std::string, float Step::*> kReals = {{"eps", &Step::eps}, {"scale", &Step::scale}, {"cap", &Step::cap}};

int integer(const std::string& line, const std::string& value) {
  char* end = nullptr;
  const long number = std::strtol(value.c_str(), &end, 10);
  if (value.empty() || *end || number < -1 || number > (1 << 30)) fail(line, "expected an integer");
  return static_cast<int>(number);
}

Step read_step(const std::string& line, Op op, std::istringstream& words, int& weights) {
  Step step;
  step.op = op;
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos) fail(line, "expected key=value");
    const std::string key = word.substr(0, equals), value = word.substr(equals + 1);
    if (key == "kind") {
      const auto found =
          std::find_if(std::begin(kKinds), std::end(kKinds), [&](const auto& k) { return k.name == value; });
      if (found == std::end(kKinds)) fail(line, "unknown kind of matrix");
      step.kind = static_cast<Kind>(found - kKinds);
    } else if (key == "fn") {
      const auto found = kFunctions.find(value);
      if (found == kFunctions.end())
        fail(line, "unknown fn " + value + ": expected silu, gelu, gelu_tanh, relu, relu2, sigmoid or xielu");
      step.fn = found->second;
    } else if (const auto weight = kWeights.find(key); weight != kWeights.end()) {
      step.*weight->second = integer(line, value);
      weights = std::max(weights, step.*weight->second + 1);
    } else if (const auto number = kNumbers.find(key); number != kNumbers.end()) {
      step.*number->second = integer(line, value);
      if (step.*number->second < 0) fail(line, "expected no negative number");
    } else if (const auto buffer = kBufferKeys.find(key); buffer != kBufferKeys.end()) {
      step.*buffer->second = integer(line, value);
    } else if (const auto real = kReals.find(key); real != kReals.end()) {
      char* end = nullptr;
      step.*real->second = std::strtof(value.c_str(), &end);
      if (*end) fail(line, "expected a number");
    } else {
      fail(line, "unknown key " + key);
    }
  }
  return step;
}

}  // namespace

Program Program::parse(const std::string& text) {
  Program program;
  bool lent = false;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string kind;
    if (!(words >> kind)) continue;
    if (kind == "floats" || kind == "acts") {
      auto& widths = kind == "floats" ? program.floats : program.acts;
      int id = -1, width = 0;
      if (!(words >> id >> width) || id < 0 || id >= kBuffers || width < 1 || width > program_text::kMaxWidth)
        fail(line, "expected an id and a width");
      widths.resize(std::max(widths.size(), size_t(id) + 1));
      if (widths[id]) fail(line, "declared twice");
      widths[id] = width;
      continue;
    }
    if (kind == "lent") {
      int layer = -1, dim = 0;
      if (!(words >> layer >> dim) || layer != program.layers || layer >= program_text::kMaxCount || dim < 1 ||
          dim > kMaxHeadDim)
        fail(line, "expected the next layer and the size of its heads");
      program.layers = layer + 1;
      program.dims.push_back(dim);
      program.head_dim = std::max(program.head_dim, dim);
      lent = true;
      continue;
    }
    const auto found = kOps.find(kind);
    if (found == kOps.end()) fail(line, "unknown step");
    Step step = read_step(line, found->second, words, program.weights);
    program_text::check(line, program, step);
    if (kind == "silu") {
      if (step.rows || step.fn != kSilu) fail(line, step.rows ? "rows out of place" : "fn out of place");
      step.rows = 1;
    }
    if (step.op == Op::kSplit || step.op == Op::kLogits) step.rows = 2;
    if (step.op == Op::kGate) program.gates = std::max({program.gates, step.index + 1, step.other + 1});
    if (step.op == Op::kLogits && !program.vocab) program.vocab = step.n;
    if (step.op == Op::kLoad) program.given = std::max(program.given, step.at + step.k);
    // what a drafter begins with is as wide as its target, what it gives as itself
    if ((step.op == Op::kLoad || step.op == Op::kStore) && !step.at && !(lent && step.op == Op::kLoad)) {
      if (program.hidden && program.hidden != step.k) fail(line, "hidden states of different widths");
      program.hidden = step.k;
    }
    if (step.op == Op::kAttend) {  // reads what the step before left
      const Step* queries = program.steps.empty() ? nullptr : &program.steps.back();
      if (!queries || queries->op != Op::kHeads || queries->heads != step.heads || queries->kv != step.kv ||
          queries->dim != step.dim || queries->layer != step.layer)
        fail(line, "expected the heads of this layer just before");
    }
    if (step.op == Op::kExperts) {  // trusts what the step before chose
      const Step* routed = program.steps.empty() ? nullptr : &program.steps.back();
      if (!routed || routed->op != Op::kRoute || routed->out != step.x || routed->n != step.times ||
          routed->k != step.heads)
        fail(line, "expected its route just before");
    }
    if (step.op == Op::kHeads) {
      if (program.kv_heads && program.kv_heads != step.kv) fail(line, "layers with different numbers of KV heads");
      program.kv_heads = step.kv;
      program.head_dim = std::max(program.head_dim, step.dim);
      program.layers = std::max(program.layers, step.layer + 1);
      program.dims.resize(program.layers);
      int& dim = program.dims[step.layer];
      if (dim ? dim != step.dim : step.shared) fail(line, dim ? "another size of heads" : "no such keys yet");
      dim = step.dim;
    }
    if (step.op == Op::kConvolve || step.op == Op::kDelta) {
      const bool delta = step.op == Op::kDelta;
      const int width = step.k + (delta ? 2 * round_up(step.heads, kTile) : 0);
      const int matrix = delta ? step.heads * step.dim * step.n : 0;
      if (program.states &&
          (program.state_width != width || program.state_length != step.length || program.state_matrix != matrix))
        fail(line, "convolutions or delta rules of different sizes");
      program.state_width = width;
      program.state_length = step.length;
      program.state_matrix = matrix;
      program.states = std::max(program.states, step.layer + 1);
    }
    program.steps.push_back(step);
  }
  for (size_t i = 0; i < program.steps.size(); ++i) {
    const Step& gate = program.steps[i];
    if (gate.op != Op::kGate) continue;
    const size_t next = i + 1 + gate.skip;
    if (next > program.steps.size() || (next < program.steps.size() && (program.steps[next].op == Op::kAttend ||
                                                                        program.steps[next].op == Op::kExperts)))
      fail("gate skip=" + std::to_string(gate.skip), "skips to no step");
  }
  return program;
}

void Program::describe(KvLayout& layout) const {
  layout.layers = layers;
  layout.heads = kv_heads;
  layout.dim = round_up(head_dim, kTile);
  layout.dims.clear();
  bool same = true;
  for (const int dim : dims) {  // a layer that the program leaves out is as large as the largest
    layout.dims.push_back(dim ? round_up(dim, kTile) : layout.dim);
    same &= layout.dims.back() == layout.dim;
  }
  if (same) layout.dims.clear();
  layout.states = states;
  layout.state_width = state_width;
  layout.state_matrix = static_cast<size_t>(state_matrix);
}

Active Program::active(const bool* gates_on, int count) const {
  if (count < gates)
    throw std::invalid_argument("edgespec: expected " + std::to_string(gates) + " gates, got " + std::to_string(count));
  Active found;
  each(gates_on, [&](const Step& s) {
    found.embeds |= s.op == Op::kEmbed;
    found.loads |= s.op == Op::kLoad;
    found.attends |= s.op == Op::kHeads || s.op == Op::kConvolve || s.op == Op::kDelta;
    if (s.op == Op::kStore) found.hidden = std::max(found.hidden, s.at + s.k);
    if (s.rows == 2) found.times = std::max(found.times, s.first + s.times);
    if (s.op != Op::kLogits) return;
    // every row of the output is written, by one of them
    if (s.first != found.logits || (found.columns && found.columns != s.n))
      throw std::invalid_argument("edgespec: the gates switch on LM heads whose rows do not fit together");
    found.logits += s.times;
    found.columns = s.n;
  });
  if (!found.columns) found.columns = vocab;
  return found;
}

}  // namespace edgespec
