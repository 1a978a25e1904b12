#include "program.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

namespace edgespec {

using program_text::fail;

const char* KvLayers::add(int layer, int kv, int head_dim) {
  if (heads && heads != kv) return "layers with different numbers of KV heads";
  heads = kv;
  dim = std::max(dim, head_dim);
  count = std::max(count, layer + 1);
  dims.resize(count);
  if (dims[layer] && dims[layer] != head_dim) return "another size of heads";
  dims[layer] = head_dim;
  return nullptr;
}

void KvLayers::describe(KvLayout& layout) const {
  layout.layers = count;
  layout.heads = heads;
  layout.dim = round_up(dim, kTile);
  layout.dims.clear();
  bool same = true;
  for (const int own : dims) {  // a layer that the program leaves out is as large as the largest
    layout.dims.push_back(own ? round_up(own, kTile) : layout.dim);
    same &= layout.dims.back() == layout.dim;
  }
  if (same) layout.dims.clear();
}

Program Program::parse(const std::string& text) {
  Program program;
  bool lent = false, embeds = false;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string kind;
    if (!(words >> kind)) continue;
    if (kind == "floats" || kind == "acts") {
      auto& widths = kind == "floats" ? program.floats : program.acts;
      int id = -1, width = 0;
      if (!(words >> id >> width) || id < 0 || id >= kBuffers || width < 1 || width > kMaxWidth)
        fail(line, "expected an id and a width");
      widths.resize(std::max(widths.size(), size_t(id) + 1));
      if (widths[id]) fail(line, "declared twice");
      widths[id] = width;
      continue;
    }
    if (kind == "lent") {
      int layer = -1, dim = 0;
      if (!(words >> layer >> dim) || layer != program.kept.count || layer >= kMaxCount || dim < 1 || dim > kMaxHeadDim)
        fail(line, "expected the next layer and the size of its heads");
      program.kept.count = layer + 1;
      program.kept.dims.push_back(dim);
      program.kept.dim = std::max(program.kept.dim, dim);
      lent = true;
      continue;
    }
    Step step = program_text::read_step(line, program);
    if (step.op == Op::kSplit || step.op == Op::kLogits) step.rows = 2;
    program.most_heads = std::max(program.most_heads, step.heads);
    if (step.op == Op::kGate) program.gates = std::max({program.gates, step.index + 1, step.other + 1});
    program.gates = std::max(program.gates, step.plane + 1);
    if (step.op == Op::kLogits && !program.vocab) program.vocab = step.n;
    if (step.op == Op::kLoad) program.given = std::max(program.given, step.at + step.k);
    if (step.op == Op::kInsert) program.inserted = std::max(program.inserted, step.at + step.k);
    program.axes |= step.axes >= 0;
    // what a drafter begins with is as wide as its target, and an encoder with features; what they give as themselves
    embeds |= step.op == Op::kEmbed;
    if ((step.op == Op::kStore || (step.op == Op::kLoad && embeds && !lent)) && !step.at) {
      if (program.hidden && program.hidden != step.k) fail(line, "hidden states of different widths");
      program.hidden = step.k;
    }
    if (step.op == Op::kAttend) {  // reads what the step before left
      const Step* queries = program.steps.empty() ? nullptr : &program.steps.back();
      if (!queries || queries->op != Op::kHeads || queries->heads != step.heads || queries->kv != step.kv ||
          queries->dim != step.dim || queries->layer != step.layer || queries->memory != step.memory ||
          queries->fills())
        fail(line, "expected the heads of this layer just before");
    }
    if (step.op == Op::kExperts) {  // trusts what the step before chose
      const Step* routed = program.steps.empty() ? nullptr : &program.steps.back();
      if (!routed || routed->op != Op::kRoute || routed->out != step.x || routed->n != step.times ||
          routed->k != step.heads)
        fail(line, "expected its route just before");
      step.layer = program.mixtures++;
    }
    if (step.op == Op::kHeads) {
      const KvLayers& kept = program.kept;
      if (step.shared && !step.memory && (step.layer >= kept.count || !kept.dims[step.layer]))
        fail(line, "no such keys yet");
      if (const char* why = (step.memory ? program.memory : program.kept).add(step.layer, step.kv, step.dim))
        fail(line, why);
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
  kept.describe(layout);
  layout.states = states;
  layout.state_width = state_width;
  layout.state_matrix = static_cast<size_t>(state_matrix);
}

KvLayout Program::memory_layout(const KvLayout& own) const {
  KvLayout layout;
  layout.keys = std::min(own.keys, kKvInt8);  // of four bits a memory has none: nothing was learnt of its keys
  layout.values = own.values;
  memory.describe(layout);
  return layout;
}

Active Program::active(const bool* gates_on, int count) const {
  if (count < gates)
    throw std::invalid_argument("edgespec: expected " + std::to_string(gates) + " gates, got " + std::to_string(count));
  Active found;
  each(gates_on, [&](const Step& s) {
    found.embeds |= s.op == Op::kEmbed;
    found.loads |= s.op == Op::kLoad;
    found.attends |= (s.op == Op::kHeads && !s.memory) || s.op == Op::kConvolve || s.op == Op::kDelta;
    found.sees_memory |= s.op == Op::kAttend && s.memory;
    found.fills_memory |= s.op == Op::kHeads && s.fills();
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
