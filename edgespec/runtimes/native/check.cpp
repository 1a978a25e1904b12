// Check the inputs of a node against its program, before the first number is read or written.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "adapters.h"
#include "pass.h"

namespace edgespec {
namespace {

[[noreturn]] void fail(const std::string& what) { throw std::invalid_argument("edgespec: " + what); }

constexpr int kMostRows = 1 << 23;  // what a phase can count

}  // namespace

void check_reach(const Program& program, const std::vector<Tensor>& weights, const bool* gates, const Reach& rows) {
  program.each(gates, [&](const Step& s) {
    const auto bytes = [&](int id) { return weights[static_cast<size_t>(id)].bytes; };
    if (s.positions >= 0 && static_cast<size_t>(rows.last) >= bytes(s.positions) / (size_t(s.k) * 4))
      fail("position " + std::to_string(rows.last) + " is beyond the table of positions");
    if (s.op == Op::kEmbed || s.op == Op::kBlend) {
      const int64_t least = program.inserted ? -rows.inserted : 0;
      for (int64_t r = 0; r < rows.count; ++r)
        if (rows.tokens[r] < least || rows.tokens[r] >= s.n)
          fail("token " + std::to_string(rows.tokens[r]) + " is outside the vocabulary");
    } else if (s.op == Op::kInsert) {
      for (int64_t r = 0; r < rows.count; ++r)
        if (rows.tokens[r] < -rows.inserted) fail("row " + std::to_string(-1 - rows.tokens[r]) + " was not inserted");
    } else if (s.op == Op::kHeads && s.rotary) {
      if (static_cast<size_t>(rows.furthest) >= std::min(bytes(s.cos), bytes(s.sin)) / (size_t(s.rotary) * 2))
        fail("position " + std::to_string(rows.furthest) + " is beyond the table of angles");
    }
  });
}

// Separates slots from adapters, and gathers the rows of each adapter.
void Pass::split_slots() {
  if (in_.rows > kMostRows) fail("a pass of too many rows");
  auto& slots = scratch_.slots;
  slots.assign(plan(2), plan(2) + in_.rows);
  for (int r = 0; r < in_.rows; ++r) {
    const int64_t adapter = slots[r] >> 32;
    if (adapter <= 0) continue;  // a slot below 0 is refused as it is
    if (adapter > (in_.adapters ? in_.adapters->count() : 0))
      fail("adapter " + std::to_string(adapter) + " does not exist");
    slots[r] &= UINT32_MAX;
    Adapted* last = adapted_.empty() ? nullptr : &adapted_.back();
    if (last && last->adapter == adapter && last->first + last->count == r && r % kRowGroup)
      ++last->count;
    else
      adapted_.push_back({static_cast<int>(adapter), r, 1, {}});
  }
}

void Pass::check() const {
  const int64_t *positions = plan(1), *slots = this->slots(), *visible = plan(3), *parents = plan(4), *places = plan(5);
  if (int64_t(in_.heads) * active_.times > kMostRows || int64_t(in_.rows) * in_.layout.heads > kMostRows)
    fail("a pass of too many rows");
  if (in_.rows && !active_.embeds && !active_.loads) fail("expected tokens or hidden states: neither gate is on");
  for (int r = 0; r < in_.rows; ++r) {
    if (slots[r] < 0 || slots[r] >= in_.slots) fail("slot " + std::to_string(slots[r]) + " does not exist");
    if (r && slots[r] < slots[r - 1]) fail("rows must be in order of their slots");
    if (places[r] < 0 || places[r] >= capacity_)
      fail("row " + std::to_string(r) + " goes to place " + std::to_string(places[r]) + " of a cache of " +
           std::to_string(capacity_) + " tokens");
    if (visible[r] < 0 || visible[r] > capacity_ || parents[r] >= r || parents[r] < -1 || positions[r] < 0)
      fail("row " + std::to_string(r) + " of the plan is out of range");
    if (parents[r] >= 0 && slots[parents[r]] != slots[r]) fail("a parent lies in another slot");
  }
  if (active_.attends && in_.layout.ring && in_.rows > in_.layout.ring - in_.layout.window + 1)
    fail("a pass of " + std::to_string(in_.rows) + " rows is longer than the exact recent window allows");
  if (program_.states && active_.attends) {
    int64_t first = 0, last = 0;  // places of one slot that the pass reads or writes
    for (int r = 0; r < in_.rows; ++r) {
      if (!r || slots[r] != slots[r - 1]) first = visible[r], last = places[r];
      first = std::min(first, parents[r] < 0 ? visible[r] : first);
      last = std::max(last, places[r]);
      if (last - first + program_.state_length > kStateRows)
        fail("rows lie further apart than states of tokens are kept");
    }
  }
  if (program_.state_matrix) check_states();
  check_sources();
  for (int r = 0; r < in_.heads; ++r)
    if (in_.head_rows[r] < 0 || in_.head_rows[r] >= in_.rows) fail("a row that reaches the LM head does not exist");
  for (int m = 0; m < in_.move_count; ++m) {
    const int64_t *move = in_.moves + m * 3, most = move[1] == kCommitted ? capacity_ : capacity_ - 1;
    if (move[0] < 0 || move[0] >= in_.slots || move[1] < kCommitted || move[2] < 0 || std::max(move[1], move[2]) > most)
      fail("a move is out of range");
    for (const int64_t place : {move[1], move[2]})
      if (move[1] != kCommitted) check_blocks(move[0], place, place + 1);
  }

  int64_t last = 0;
  for (int r = 0; r < in_.rows; ++r) last = std::max(last, positions[r]);
  const int64_t furthest = in_.axes ? check_axes() : last;  // that a row turns by
  if (int64_t(in_.rows) * program_.most_heads > kMostRows) fail("a pass of too many rows");
  for (const Weight& w : program_.sizes) {
    if (w.id >= static_cast<int>(in_.weights.size())) fail("weight " + std::to_string(w.id) + " is not an input");
    const Tensor& t = in_.weights[w.id];
    if (!w.k) {
      if (t.bytes / 4 < (w.by_seen ? static_cast<size_t>(last) + 1 : static_cast<size_t>(w.n)))
        fail("a vector of weights is too short");
      continue;
    }
    if (t.bytes != w.bytes())
      fail("packed weights of " + std::to_string(t.bytes) + " bytes: expected " + std::to_string(w.bytes()) + " for [" +
           std::to_string(w.n) + ", " + std::to_string(w.k) + "]");
    if (w.kind <= kF32 && (reinterpret_cast<uintptr_t>(t.data) & 63))
      fail("packed weights must be aligned to 64 bytes");
  }
  if (active_.loads && (in_.hidden_rows != in_.rows || in_.hidden_width != program_.given))
    fail("hidden states [" + std::to_string(in_.hidden_rows) + ", " + std::to_string(in_.hidden_width) +
         "]: expected [" + std::to_string(in_.rows) + ", " + std::to_string(program_.given) + "]");
  check_reach(program_, in_.weights, in_.gates, {plan(0), in_.rows, last, furthest, in_.inserted_rows});
}

// Cross-attention caches that rows see or fill must exist, with enough rows.
void Pass::check_sources() const {
  if (!active_.sees_memory && !active_.fills_memory) return;
  if (!in_.sources) fail("expected memories, and which of them rows see");
  if (active_.sees_memory && active_.fills_memory) fail("a pass that fills memories cannot read them");
  const int64_t room = in_.memory_layout.capacity(in_.memory_bytes);
  const int64_t least = active_.fills_memory ? 0 : 1, most = active_.fills_memory ? room - 1 : room;
  for (int r = 0; r < in_.rows; ++r) {
    const int64_t number = in_.sources[r], rows = in_.sources[in_.rows + r];
    if (number < 0 || number >= in_.memories) fail("memory " + std::to_string(number) + " does not exist");
    if (rows < least || rows > most)
      fail("row " + std::to_string(r) + (active_.fills_memory ? " goes to place " : " sees ") + std::to_string(rows) +
           (active_.fills_memory ? " of" : " rows of") + " a memory of " + std::to_string(room) + ": expected " +
           std::to_string(least) + " to " + std::to_string(most));
  }
}

// The furthest of the positions that rows turn by.
int64_t Pass::check_axes() const {
  int64_t furthest = 0;
  for (size_t i = 0; i < 3 * size_t(in_.rows); ++i) {
    if (in_.axes[i] < 0) fail("position " + std::to_string(in_.axes[i]) + " of a row is out of range");
    furthest = std::max(furthest, in_.axes[i]);
  }
  return furthest;
}

// Blocks of tokens [first, end) must be in the pool.
void Pass::check_blocks(int64_t slot, int64_t first, int64_t end) const {
  if (!in_.layout.table) return;
  for (int64_t block = first / kKvBlock; block * kKvBlock < end; ++block)
    if (const int32_t number = table(slot)[block]; number < 0 || number >= blocks_)
      fail("block " + std::to_string(block) + " of slot " + std::to_string(slot) + " is number " +
           std::to_string(number) + " of a pool of " + std::to_string(blocks_));
}

void Pass::see() {
  const int64_t *positions = plan(1), *slots = this->slots(), *visible = plan(3), *parents = plan(4), *places = plan(5);
  int64_t end = 0;  // of the tokens that the rows of a slot read or write
  auto& rows = scratch_.visible;
  rows.resize(in_.rows);
  for (int r = 0; r < in_.rows; ++r) {
    Visible& v = rows[r];
    v.position = positions[r];
    v.beyond.clear();
    if (parents[r] >= 0) {
      v.high = rows[parents[r]].high;
      v.beyond = rows[parents[r]].beyond;
    } else {
      v.high = visible[r];
    }
    if (v.beyond.empty() && places[r] == v.high && positions[r] == v.high)
      ++v.high;
    else if (places[r] >= v.high)  // else it is one of the tokens that are seen anyway
      v.beyond.push_back({places[r], positions[r], 0});
    if (v.end() > capacity_) fail("row " + std::to_string(r) + " sees more tokens than its cache holds");
    end = std::max({r && slots[r] == slots[r - 1] ? end : 0, v.end(), places[r] + 1});
    if (active_.attends && (r + 1 == in_.rows || slots[r + 1] != slots[r])) check_blocks(slots[r], 0, end);
  }
  auto& of_memory = scratch_.of_memory;
  of_memory.resize(active_.sees_memory ? in_.rows : 0);
  for (size_t r = 0; r < of_memory.size(); ++r) of_memory[r].high = in_.sources[in_.rows + r];
}

void Pass::apply_moves() const {
  for (int m = 0; m < in_.move_count; ++m) {
    const int64_t* move = in_.moves + m * 3;
    if (move[1] != kCommitted && move[1] != move[2]) cache(static_cast<int>(move[0])).move(move[1], move[2]);
  }
}

}  // namespace edgespec
